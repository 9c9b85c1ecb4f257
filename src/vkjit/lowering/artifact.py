"""What the compiler hands to a device: planned buffers, ordered steps and the barriers between.

Everything here is plain data that can be printed and checked without a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import final

from vkjit.lowering.kernel.nodes import Kernel


class Role(Enum):
    """Who owns a planned buffer."""

    INPUT = "input"  # the caller's, read only unless donated
    OUTPUT = "output"  # allocated for each call, handed to the caller
    CONSTANT = "constant"  # uploaded once, when the executable is loaded
    ARENA = "arena"  # temporaries of one call


@final
@dataclass(frozen=True, slots=True)
class PlannedBuffer:
    """A buffer of ``size`` bytes.

    ``position`` counts inputs, outputs and constants each from 0. An output with ``donated`` takes
    over the memory of the input at that position instead of being allocated.
    """

    role: Role
    size: int
    position: int = 0
    donated: int | None = None


@final
@dataclass(frozen=True, slots=True)
class Range:
    """``size`` bytes from ``offset`` of the buffer at index ``buffer`` of the plan."""

    buffer: int
    offset: int
    size: int

    def overlaps(self, other: Range) -> bool:
        """Whether both ranges share a byte."""
        return (
            self.buffer == other.buffer
            and self.offset < other.offset + other.size
            and other.offset < self.offset + self.size
        )


@final
@dataclass(frozen=True, slots=True)
class Launch:
    """Runs a kernel; ``arguments`` stand in the order of ``kernel.buffers``.

    ``origin`` names the operations and source lines that this launch computes: equal kernels are
    shared by launches of different origin.
    """

    kernel: Kernel
    arguments: tuple[Range, ...]
    origin: tuple[str, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Copy:
    """Copies bytes between two ranges of equal size."""

    source: Range
    target: Range


Step = Launch | Copy


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """The whole executable.

    Steps may overlap in time unless a barrier stands between them: ``i in barriers`` means that
    every step before ``i`` has finished, and its writes are visible, when step ``i`` starts.
    ``arena_bytes`` is the size of all ARENA buffers; ``peak_bytes`` adds inputs, outputs and
    constants.
    """

    name: str
    buffers: tuple[PlannedBuffer, ...]
    steps: tuple[Step, ...]
    barriers: frozenset[int]
    peak_bytes: int
    arena_bytes: int = 0
