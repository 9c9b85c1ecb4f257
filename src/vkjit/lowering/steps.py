"""Steps between groups and plan: kernels, copies and control, over numbered arrays.

Arrays of a program and of those that run inside it share one numbering. An array may be *put* into
another, at a place that moves with the turns of a loop: the parameters and results of an inner
program lie in the arrays of the equation that runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from vkjit.lowering.artifact import Move, Range
from vkjit.lowering.kernel.elements import memory_type
from vkjit.lowering.kernel.nodes import Kernel
from vkjit.lowering.kernel.types import I8, Access, ScalarType
from vkjit.lowering.plan.groups import ArrayInfo
from vkjit.lowering.plan.order import Use
from vkjit.lowering.plan.rebase import Part

Pairs = frozenset[tuple[int, int]]
_HOST = -2
"""An array that no kernel knows and every call of the host writes: it keeps them in order."""


@final
@dataclass(frozen=True, slots=True)
class KernelStep:
    """A legalized kernel, the arrays behind its buffers, and what it computes.

    ``in_place`` are pairs (read, written) of arrays that may share their memory; a step that
    ``copies`` does nothing where they do. One that ``decodes`` blocks runs in every call: to keep
    what it makes would be to keep the numbers that are packed.
    """

    kernel: Kernel
    arrays: tuple[int, ...]
    origin: tuple[str, ...]
    in_place: Pairs = frozenset()
    copies: bool = False
    decodes: bool = False

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.kernel.name

    def written(self) -> list[int]:
        """Arrays that the kernel writes."""
        return [a for a, b in self._pairs() if b is not Access.READ]

    def read(self) -> list[int]:
        """Arrays that the kernel reads."""
        return [a for a, b in self._pairs() if b is not Access.WRITE]

    def _pairs(self) -> list[tuple[int, Access]]:
        return [(a, b.access) for a, b in zip(self.arrays, self.kernel.buffers, strict=True)]


@final
@dataclass(frozen=True, slots=True)
class CopyStep:
    """All bytes of one array into another of its size; nothing where they are one memory.

    One that ``moves`` them between memories has two.
    """

    source: int
    target: int
    origin: tuple[str, ...] = ()
    moves: bool = False
    name = "copy"
    copies = True

    @property
    def arrays(self) -> tuple[int, ...]:
        """Source and target."""
        return (self.source, self.target)

    @property
    def in_place(self) -> Pairs:
        """Source and target may be one memory."""
        return frozenset() if self.moves else frozenset({(self.source, self.target)})

    def written(self) -> list[int]:
        """The target."""
        return [self.target]

    def read(self) -> list[int]:
        """The source."""
        return [self.source]


@final
@dataclass(frozen=True, slots=True)
class Turns:
    """``length`` turns of ``body``."""

    body: Levels
    length: int
    name = "loop"


@final
@dataclass(frozen=True, slots=True)
class Repeat:
    """``body`` as long as ``condition`` leaves something other than 0 in ``predicate``."""

    condition: Levels
    predicate: int
    body: Levels
    name = "while"


@final
@dataclass(frozen=True, slots=True)
class Choose:
    """The branch that ``index`` names."""

    index: int
    branches: tuple[Levels, ...]
    name = "branch"


@final
@dataclass(frozen=True, slots=True)
class Tell:
    """``function`` of ``arguments``, on the host."""

    function: Callable[..., object]
    arguments: tuple[int, ...]
    types: tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]
    name = "call"


@final
@dataclass(frozen=True, slots=True)
class ControlStep:
    """Steps inside a step, or a call of the host.

    ``reads`` and ``writes`` are the arrays around the step that those inside touch; an array that
    is written need not be written in whole. ``in_place`` is as in a ``KernelStep``.
    """

    form: Turns | Repeat | Choose | Tell
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    origin: tuple[str, ...] = ()
    in_place: Pairs = frozenset()
    copies = False

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.form.name

    @property
    def arrays(self) -> tuple[int, ...]:
        """Arrays around the step that it touches."""
        return tuple(dict.fromkeys((*self.reads, *self.writes)))

    def written(self) -> list[int]:
        """Arrays around the step that it writes."""
        return list(self.writes)

    def read(self) -> list[int]:
        """Arrays around the step that it reads."""
        return list(self.reads)


AnyStep = KernelStep | CopyStep | ControlStep
Levels = tuple[tuple[AnyStep, ...], ...]
"""Steps in order, in levels of independent ones."""


def inside(step: AnyStep) -> tuple[Levels, ...]:
    """The blocks inside a step."""
    match step:
        case ControlStep(form=Turns(body=body)):
            return (body,)
        case ControlStep(form=Repeat(condition=condition, body=body)):
            return (condition, body)
        case ControlStep(form=Choose(branches=branches)):
            return branches
        case _:
            return ()


def acts(step: AnyStep) -> bool:
    """Whether it calls the host."""
    if isinstance(step, ControlStep) and isinstance(step.form, Tell):
        return True
    return any(acts(s) for levels in inside(step) for level in levels for s in level)


@final
@dataclass(frozen=True, slots=True)
class _Part:
    """Where an array lies in another one."""

    base: int
    offset: int
    moves: tuple[Move, ...]


@final
class Arrays:
    """All arrays so far, and which of them lie in others."""

    def __init__(self) -> None:
        self.infos: list[ArrayInfo] = []
        self._parts: dict[int, _Part] = {}
        self._host: set[int] = set()
        self._known_parts: dict[tuple[int, Part], int] = {}

    def add(self, infos: Iterable[ArrayInfo]) -> int:
        """Adds arrays; returns the number of the first."""
        first = len(self.infos)
        self.infos.extend(infos)
        return first

    def new(self, elem: ScalarType, length: int) -> int:
        """A fresh array."""
        return self.add([ArrayInfo(elem, length)])

    def like(self, array: int) -> int:
        """A fresh array of the same elements."""
        return self.add([self.infos[array]])

    def new_bytes(self, size: int) -> int:
        """A fresh array of ``size`` bytes."""
        return self.new(I8, size)

    def part(self, array: int, part: Part) -> int:
        """The array that is this part of another; itself if that is the whole."""
        info = self.infos[array]
        if part == Part(0, info.length):
            return array
        found = self._known_parts.get((array, part))
        if found is None:
            found = self._known_parts[array, part] = self.new(info.elem, part.length)
            self.put(found, array, part.start * memory_type(info.elem).bytes)
        return found

    def size(self, array: int) -> int:
        """Bytes of an array."""
        info = self.infos[array]
        return info.length * memory_type(info.elem).bytes

    def to_host(self, array: int) -> None:
        """Has ``array`` lie in memory of the host."""
        self._host.add(array)

    def hosts(self) -> set[int]:
        """The arrays in memory of the host, those whole that have a part there."""
        return {self.root(array) for array in self._host}

    def put(self, array: int, base: int, offset: int = 0, moves: tuple[Move, ...] = ()) -> None:
        """Has ``array`` lie in ``base``."""
        self._parts[array] = _Part(base, offset, moves)

    def is_put(self, array: int) -> bool:
        """Whether the array lies in another."""
        return array in self._parts

    def base(self, array: int) -> int | None:
        """The array that this one was put into."""
        part = self._parts.get(array)
        return None if part is None else part.base

    def memory(self, array: int) -> int:
        """The array that stands for the memory of this one in one turn of the loops around it."""
        part = self._parts.get(array)
        while part is not None and not part.moves:
            array = part.base
            part = self._parts.get(array)
        return array

    def root(self, array: int) -> int:
        """The array that this one lies in, which lies in none."""
        part = self._parts.get(array)
        while part is not None:
            array = part.base
            part = self._parts.get(array)
        return array

    def place(self, array: int, roots: Mapping[int, Range]) -> Range:
        """Where the array is, given where those are that lie in none."""
        offset, moves, base = 0, tuple[Move, ...](), array
        while (part := self._parts.get(base)) is not None:
            base, offset, moves = part.base, offset + part.offset, (*part.moves, *moves)
        root = roots[base]
        return Range(root.buffer, root.offset + offset, self.size(array), (*root.moves, *moves))

    def is_array(self, number: int) -> bool:
        """Whether the number is that of an array with memory of its own."""
        return number >= 0 and number not in self._parts

    def use(self, step: AnyStep, memory: Callable[[int], int] | None = None) -> Use:
        """The memory that a step reads and writes, for the order of the steps around it."""
        memory = memory or self.memory
        written = [memory(a) for a in step.written()]
        if acts(step):
            written.append(_HOST)
        return Use(tuple([memory(a) for a in step.read()]), tuple(written))
