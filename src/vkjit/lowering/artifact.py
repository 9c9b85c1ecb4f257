"""What the compiler hands to a device: planned buffers, ordered steps and the barriers between.

Everything here is plain data that can be printed and checked without a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, assert_never, final

import numpy as np

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
    over the memory of the input at that position instead of being allocated. One of the arena with
    ``host`` lies in memory of the host, where only copies reach it.
    """

    role: Role
    size: int
    position: int = 0
    donated: int | None = None
    host: bool = False


@final
@dataclass(frozen=True, slots=True)
class Move:
    """How a range moves with the turns of a counted loop around it.

    In turn t of the ``Loop`` that is the ``depth``-th around the step (0 is the outermost; other
    kinds of steps do not count) the range lies ``stride * ((first + step * t) % ring)`` bytes
    further on. ``step`` is 1 or -1. A ring of 2 is a carry: turn t reads slot t % 2 and writes the
    other.
    """

    depth: int
    stride: int
    ring: int
    first: int = 0
    step: int = 1

    def at(self, turn: int) -> int:
        """Bytes that the move adds in one turn."""
        return self.stride * ((self.first + self.step * turn) % self.ring)


@final
@dataclass(frozen=True, slots=True)
class Range:
    """``size`` bytes from ``offset`` of the buffer at index ``buffer`` of the plan.

    Inside loops it lies further on, by the sum of its ``moves``, at most one for each depth.
    """

    buffer: int
    offset: int
    size: int
    moves: tuple[Move, ...] = ()

    def overlaps(self, other: Range) -> bool:
        """Whether both ranges may share a byte in one turn of the loops around both.

        Both stand in the same loops.
        """
        if self.buffer != other.buffer:
            return False
        if self.moves == other.moves:
            return self._meets(other)
        return self.cover()._meets(other.cover()) and not self._keeps_off(other)

    def _meets(self, other: Range) -> bool:
        return self.offset < other.offset + other.size and other.offset < self.offset + self.size

    def _keeps_off(self, other: Range) -> bool:
        """Whether the two are different slots of one ring, and move alike otherwise."""
        if self.offset != other.offset or len(self.moves) != len(other.moves):
            return False
        pairs = [(a, b) for a, b in zip(self.moves, other.moves, strict=True) if a != b]
        if len(pairs) != 1:
            return False
        a, b = pairs[0]
        alike = (a.depth, a.stride, a.ring, a.step) == (b.depth, b.stride, b.ring, b.step)
        slots = alike and (a.first - b.first) % a.ring != 0
        return slots and max(self.size, other.size) <= a.stride

    def cover(self, depth: int = 0) -> Range:
        """All bytes of all turns of the loops at ``depth`` and inside; other moves are kept."""
        inner = [m for m in self.moves if m.depth >= depth]
        if not inner:
            return self
        outer = tuple([m for m in self.moves if m.depth < depth])
        reach = sum(m.stride * (m.ring - 1) for m in inner)
        return Range(self.buffer, self.offset, self.size + reach, outer)

    def at(self, turns: Sequence[int]) -> Range:
        """Where it lies in these turns of the loops around it, outermost first."""
        moved = sum(m.at(turns[m.depth]) for m in self.moves)
        return Range(self.buffer, self.offset + moved, self.size)


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


@final
@dataclass(frozen=True, slots=True)
class Block:
    """Steps inside another step.

    Barriers are as in a ``Plan``. When a block begins, all steps before it have finished and their
    writes are visible; when it has ended, so are its own.
    """

    steps: tuple[Step, ...]
    barriers: frozenset[int] = frozenset()


@final
@dataclass(frozen=True, slots=True)
class Loop:
    """``length`` turns of ``body``, one after another; ranges inside may move with the turns."""

    body: Block
    length: int
    origin: tuple[str, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class While:
    """Runs ``condition``, which writes ``predicate``, then ``body``, and again while it is not 0.

    ``predicate`` is one element; any byte of it that is not zero means true.
    """

    condition: Block
    predicate: Range
    body: Block
    origin: tuple[str, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Branch:
    """Runs the block with the number at ``index``, an ``i32``, clamped to those there are."""

    index: Range
    branches: tuple[Block, ...]
    origin: tuple[str, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class HostCall:
    """Calls ``function`` with copies of the arguments as NumPy arrays of ``types``.

    All steps before it have finished. What the function raises ends the run and reaches the caller;
    outputs that were taken over from donated inputs are lost then.
    """

    function: Callable[..., object]
    arguments: tuple[Range, ...]
    types: tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]
    origin: tuple[str, ...] = ()


Step = Launch | Copy | Loop | While | Branch | HostCall


def blocks(step: Step) -> tuple[Block, ...]:
    """The blocks inside a step."""
    match step:
        case Loop():
            return (step.body,)
        case While():
            return (step.condition, step.body)
        case Branch():
            return step.branches
        case Launch() | Copy() | HostCall():
            return ()
        case _:
            assert_never(step)


Leaf = Launch | Copy | HostCall
"""A step without steps inside."""


def leaves(steps: Sequence[Step]) -> Iterator[Leaf]:
    """The steps that do something, those inside others too, in the order of the text of a plan."""
    for step in steps:
        match step:
            case Launch() | Copy() | HostCall():
                yield step
            case _:
                for block in blocks(step):
                    yield from leaves(block.steps)


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """The whole executable.

    Steps may overlap in time unless a barrier stands between them: ``i in barriers`` means that
    every step before ``i`` has finished, and its writes are visible, when step ``i`` starts.
    ``arena_bytes`` is the size of all ARENA buffers; ``peak_bytes`` adds inputs, outputs and
    constants. What lies in memory of the host is in neither.
    """

    name: str
    buffers: tuple[PlannedBuffer, ...]
    steps: tuple[Step, ...]
    barriers: frozenset[int]
    peak_bytes: int
    arena_bytes: int = 0

    @property
    def host_bytes(self) -> int:
        """Bytes of the buffers in memory of the host."""
        return sum(b.size for b in self.buffers if b.host)
