"""Which arrays of a plan are alive when: the peak, what makes it, and a table over time."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import TYPE_CHECKING, final

import numpy as np
from numpy.typing import NDArray

from vkjit.ir.program import Atom, Eqn, Program, Var
from vkjit.lowering.artifact import Role
from vkjit.lowering.compile import Compiled
from vkjit.lowering.kernel.elements import memory_type
from vkjit.lowering.plan.canonical import canonical
from vkjit.lowering.plan.groups import ControlGroup, Partition, Work
from vkjit.lowering.plan.partition import partition
from vkjit.passes.timeline import Storage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROWS = 24
"""Source lines in the text of a report."""
_INSTANTS = 12
"""Rows of its table over time."""
_LONG = 0.05
"""Part of all steps in which nobody uses an array that makes it a saved one."""
_AT_LEAST = 8


class HeldAs(Enum):
    """Why memory is taken."""

    ARGUMENT = "argument"
    CONSTANT = "constant"
    OUTPUT = "output"
    SAVED = "saved"  # for the backward pass, or unused for long for another reason
    RECOMPUTED = "recomputed"
    TEMPORARY = "temporary"


@final
@dataclass(frozen=True, slots=True)
class Held:
    """``nbytes`` at ``offset`` of the arena, or of a buffer, alive from step first to last.

    ``source`` is the line that asked for it, ``made`` the operation.
    """

    nbytes: int
    kind: HeldAs
    first: int
    last: int
    offset: int
    made: str
    source: str


@final
@dataclass(frozen=True, slots=True)
class Line:
    """All that one source line holds, of one kind."""

    nbytes: int
    count: int
    kind: HeldAs
    made: str
    source: str


@final
@dataclass(frozen=True)
class MemoryTimeline:
    """The memory of one call over its steps; print it, or save a picture of it.

    Steps are those of the plan in order; where a device runs several at once they count as one.

    Attributes:
        held: arguments, outputs, constants and temporaries.
        steps: how many there are.
        peak_bytes: what a call takes: all of them, temporaries by the size of their arena.
        arena_bytes: the arena, in which temporaries share memory.
    """

    held: tuple[Held, ...]
    steps: int
    peak_bytes: int
    arena_bytes: int

    def over_time(self, kind: HeldAs | None = None) -> NDArray[np.int64]:
        """Bytes alive at each step, of one kind or of all."""
        change = np.zeros(self.steps + 1, np.int64)
        for item in self.held:
            if kind is None or item.kind is kind:
                change[item.first] += item.nbytes
                change[item.last + 1] -= item.nbytes
        return np.cumsum(change)[:-1]

    @property
    def peak_step(self) -> int:
        """The first step at which most bytes are alive."""
        return int(self.over_time().argmax())

    def at(self, step: int) -> tuple[Held, ...]:
        """What is alive at a step, the largest first."""
        found = [h for h in self.held if h.first <= step <= h.last]
        return tuple(sorted(found, key=lambda h: -h.nbytes))

    def by_line(self, step: int | None = None) -> tuple[Line, ...]:
        """What is alive at a step, by default the peak, by source line and kind; largest first."""
        found: dict[tuple[HeldAs, str, str], list[int]] = {}
        for item in self.at(self.peak_step if step is None else step):
            found.setdefault((item.kind, item.made, item.source), []).append(item.nbytes)
        lines = [Line(sum(sizes), len(sizes), *key) for key, sizes in found.items()]
        return tuple(sorted(lines, key=lambda line: (-line.nbytes, line.source)))

    def __str__(self) -> str:
        return "\n".join((*self._summary(), "", *self._lines(), "", *self._table()))

    def _summary(self) -> list[str]:
        step = self.peak_step
        live = int(self.over_time().max(initial=0))
        return [
            f"peak {_bytes(self.peak_bytes)}, temporaries in an arena of "
            f"{_bytes(self.arena_bytes)}",
            f"most alive: {_bytes(live)} at step {step} of {self.steps}",
        ]

    def _lines(self) -> list[str]:
        lines = self.by_line()
        shown = [
            f"{line.nbytes:>15,}  {line.count:>5}  {line.kind.value:<10}  {line.made}"
            f"{' at ' if line.source else ''}{line.source}"
            for line in lines[:_ROWS]
        ]
        if len(lines) > _ROWS:
            rest = sum(line.nbytes for line in lines[_ROWS:])
            shown.append(f"{rest:>15,}  on {len(lines) - _ROWS} more lines")
        return ["alive then:", f"{'bytes':>15}  count  {'kind':<10}  line", *shown]

    def _table(self) -> list[str]:
        kinds = [k for k in HeldAs if any(h.kind is k for h in self.held)]
        columns = [self.over_time(k) for k in kinds]
        steps = {*np.linspace(0, self.steps - 1, _INSTANTS).astype(int).tolist(), self.peak_step}
        head = f"{'step':>8}" + "".join(f"{k.value:>16}" for k in kinds)
        rows = [
            f"{step:>8}" + "".join(f"{int(c[step]):>16,}" for c in columns)
            for step in sorted(steps)
        ]
        return ["over time:", head, *rows]

    def plot(self) -> Figure:
        """A figure: bytes alive over time by kind, the peak marked, and arrays in the arena."""
        from vkjit.api.memory_picture import draw  # noqa: PLC0415  needs matplotlib, which is slow

        return draw(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Saves ``plot()``; the file's suffix says how: ``.png``, ``.svg`` or another."""
        self.plot().savefig(path)  # pyright: ignore[reportUnknownMemberType]  matplotlib's


def _bytes(count: int) -> str:
    return f"{count:,} bytes ({count / 2**20:.1f} MiB)"


def memory_timeline(program: Program, compiled: Compiled) -> MemoryTimeline:
    """What a plan holds when.

    Args:
        program: what was lowered.
        compiled: its plan.
    """
    live = compiled.arena.live
    steps = max([item.last + 1 for item in live], default=1)
    describe = _Describer(program)
    held = [*_outside(program, compiled, steps)]
    for item in live:
        kind, made, source = describe(item.array)
        offset = compiled.arena.offsets[item.array]
        held.append(Held(item.size, kind, item.first, item.last, offset, made, source))
    return MemoryTimeline(tuple(held), steps, compiled.plan.peak_bytes, compiled.plan.arena_bytes)


def _outside(program: Program, compiled: Compiled, steps: int) -> Iterable[Held]:
    """Arguments, constants and outputs: there all the time."""
    makers = {v: eqn for eqn in program.eqns for v in eqn.outs}
    kinds = {
        Role.INPUT: HeldAs.ARGUMENT,
        Role.CONSTANT: HeldAs.CONSTANT,
        Role.OUTPUT: HeldAs.OUTPUT,
    }
    for buffer in compiled.plan.buffers:
        kind = kinds.get(buffer.role)
        if kind is None or buffer.donated is not None or not buffer.size:
            continue
        made, source = kind.value, ""
        if kind is HeldAs.OUTPUT:
            result = program.results[buffer.position]
            if isinstance(result, Var) and result in makers:
                made, source = _where(makers[result])
        yield Held(buffer.size, kind, 0, steps - 1, 0, made, source)


def _where(eqn: Eqn) -> tuple[str, str]:
    return eqn.prim.name, str(eqn.source) if eqn.source is not None else ""


@final
class _Describer:
    """Kind, operation and source line of the arrays of a program."""

    def __init__(self, program: Program) -> None:
        parts = partition(program)
        self._stored = parts.stored
        uses = storage(parts).uses
        long = max(_AT_LEAST, len(parts.groups) * _LONG)
        self._long = [any(b - a > long for a, b in pairwise(steps)) for steps in uses]
        self._makers: dict[int, Eqn] = {}
        for eqn in program.eqns:
            for out in eqn.outs:
                array = parts.stored.get(out, -1)
                if array >= 0:
                    self._makers.setdefault(array, eqn)
        self._read_backward = self._arrays_read_backward(program)

    def _arrays_read_backward(self, program: Program) -> set[int]:
        """Arrays from which cotangents are computed."""
        makers = {v: eqn for eqn in program.eqns for v in eqn.outs}
        todo = [a for eqn in program.eqns if _is_backward(eqn) for a in eqn.args]
        found: set[int] = set()
        seen: set[Atom] = set()
        while todo:
            atom = todo.pop()
            if not isinstance(atom, Var) or atom in seen:
                continue
            seen.add(atom)
            if atom in self._stored:
                found.add(self._stored[atom])
            elif atom in makers:
                todo.extend(makers[atom].args)
        return found

    def __call__(self, array: int) -> tuple[HeldAs, str, str]:
        """What an array of the plan is."""
        eqn = self._makers.get(array)
        if eqn is None:
            return HeldAs.TEMPORARY, "workspace", ""
        kind = HeldAs.TEMPORARY
        if eqn.region and not self._long[array]:
            kind = HeldAs.RECOMPUTED
        elif self._long[array] or (array in self._read_backward and not _is_backward(eqn)):
            kind = HeldAs.SAVED
        return (kind, *_where(eqn))


def _is_backward(eqn: Eqn) -> bool:
    return eqn.source is not None and eqn.source.backward


def storage(parts: Partition) -> Storage:
    """Where and when the groups of a partition use its arrays."""
    uses: list[list[int]] = [[] for _ in parts.arrays]
    for step, work in enumerate(parts.groups):
        for array in _arrays(work):
            if array >= 0:
                uses[array].append(step)
    return Storage(
        stored=parts.stored,
        made=parts.made,
        sizes=[info.length * memory_type(info.elem).bytes for info in parts.arrays],
        uses=uses,
        fixed=frozenset((*range(parts.inputs), *parts.results)),
        steps=len(parts.groups),
    )


def _arrays(work: Work) -> Iterable[int]:
    """The arrays that a group uses, each once."""
    if isinstance(work, ControlGroup):
        return dict.fromkeys((*work.operands, *work.results))
    return canonical(work)[1]
