"""Plans for the step loop of the CPU runtime: flat rows, with jumps in the place of blocks.

A row is ``{ function or code, n, first, used }``. Its ``used`` entries from ``first`` on give the
addresses of its ranges: ``{ buffer, offset }`` begins one, ``{ ~cursor, stride }`` moves the one
before it. Cursors are counters that a loop advances in each turn, around a ring; the first cursor
of a loop counts its turns.

| row    | n              | ranges              | entries behind the ranges |
|--------|----------------|---------------------|---------------------------|
| launch | tasks          | arguments           |                           |
| COPY   | bytes          | source, target      |                           |
| LOOP   | cursors        | none: first cursor in the place of the first entry |
| END    | row of LOOP    | none                |                           |
| TEST   | row if false   | predicate           | { bytes, 0 }              |
| JUMP   | row            | none                |                           |
| SWITCH | branches       | index               | { row, 0 } of each branch |
| CALL   | number         | arguments, callback |                           |
| AGAIN  | row            | callback            |                           |

The callback is the address behind those of the buffers. It takes ``{ number, addresses of the
arguments }`` and gives 0 to end the run. AGAIN jumps, and calls it with the number -1 about ten
times a second: nobody else could end a while loop that does not end itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import assert_never, final

from vkjit.lowering.artifact import (
    Block,
    Branch,
    Copy,
    HostCall,
    Launch,
    Loop,
    Move,
    Plan,
    Range,
    Step,
    While,
    blocks,
)


class Code(IntEnum):
    """What a row without a function does; no function lies at such an address."""

    COPY = 0
    LOOP = 1
    END = 2
    TEST = 3
    JUMP = 4
    SWITCH = 5
    CALL = 6
    AGAIN = 7


@final
@dataclass(frozen=True, slots=True)
class Row:
    """One row; ``code`` is the name of a function or a code."""

    code: str | Code
    n: int = 0
    first: int = 0
    used: int = 0

    @property
    def is_leaf(self) -> bool:
        """Whether it is a leaf of the plan."""
        return isinstance(self.code, str) or self.code in (Code.COPY, Code.CALL)


Entry = tuple[int, int]
Cursor = tuple[int, int, int]
"""First value, step and ring; the first cursor of a loop: 0, 1 and the number of turns."""


@final
class Rows:
    """The tables of a plan; ``name`` gives the function of a launch."""

    def __init__(self, plan: Plan, name: Callable[[Launch], str]) -> None:
        self.rows: list[Row] = []
        self.entries: list[Entry] = []
        self.cursors: list[Cursor] = []
        self.slots = 3
        """The most addresses of one row, and what a copy needs."""
        self._callback = Range(len(plan.buffers), 0, 0)
        self._calls = 0
        self._name = name
        self._around: list[dict[Cursor, int]] = []  # cursors of the loops around, outermost first
        for step in plan.steps:
            self._add(step)

    def _add(self, step: Step) -> None:
        match step:
            case Launch():
                x, y, z = step.kernel.grid
                self._row(self._name(step), x * y * z, step.arguments)
            case Copy():
                self._row(Code.COPY, step.target.size, (step.source, step.target))
            case Loop():
                self._loop(step)
            case While():
                self._while(step)
            case Branch():
                self._branch(step)
            case HostCall():
                self._row(Code.CALL, self._calls, (*step.arguments, self._callback))
                self._calls += 1
            case _:
                assert_never(step)

    def _block(self, block: Block) -> None:
        for step in block.steps:
            self._add(step)

    def _loop(self, step: Loop) -> None:
        if step.length == 0:
            self._skipped(step.body)
            return
        depth = len(self._around)
        turns: Cursor = (0, 1, step.length)
        wanted = {turns: 0, **{_cursor(m): 0 for m in _moves(step.body, depth)}}
        begin = len(self.cursors)
        self._around.append({cursor: begin + i for i, cursor in enumerate(wanted)})
        self.cursors += wanted
        top = len(self.rows)
        self.rows.append(Row(Code.LOOP, len(wanted), begin))
        self._block(step.body)
        self.rows.append(Row(Code.END, top))
        self._around.pop()

    def _skipped(self, block: Block) -> None:
        """Rows that never run, so that each leaf has one."""
        gap = self._gap()
        self._around.append({_cursor(m): 0 for m in _moves(block, len(self._around))})
        self._block(block)
        self._around.pop()
        self.rows[gap] = Row(Code.JUMP, len(self.rows))

    def _while(self, step: While) -> None:
        top = len(self.rows)
        self._block(step.condition)
        test = self._gap()
        self._block(step.body)
        self._row(Code.AGAIN, top, (self._callback,))
        first, used = self._ranges((step.predicate,))
        self.entries.append((step.predicate.size, 0))
        self.rows[test] = Row(Code.TEST, len(self.rows), first, used)

    def _branch(self, step: Branch) -> None:
        switch = self._gap()
        tops: list[int] = []
        gaps: list[int] = []
        for block in step.branches:
            tops.append(len(self.rows))
            self._block(block)
            gaps.append(self._gap())
        for gap in gaps:
            self.rows[gap] = Row(Code.JUMP, len(self.rows))
        first, used = self._ranges((step.index,))
        self.entries += [(top, 0) for top in tops]
        self.rows[switch] = Row(Code.SWITCH, len(tops), first, used)

    def _gap(self) -> int:
        """The place of a row that is written later."""
        self.rows.append(Row(Code.JUMP))
        return len(self.rows) - 1

    def _row(self, code: str | Code, n: int, ranges: Sequence[Range]) -> None:
        first, used = self._ranges(ranges)
        self.slots = max(self.slots, len(ranges))
        self.rows.append(Row(code, n, first, used))

    def _ranges(self, ranges: Sequence[Range]) -> tuple[int, int]:
        """Adds the entries of ranges: the first and their number."""
        first = len(self.entries)
        for place in ranges:
            self.entries.append((place.buffer, place.offset))
            for move in place.moves:
                cursor = self._around[move.depth][_cursor(move)]
                self.entries.append((~cursor, move.stride))
        return first, len(self.entries) - first


def _cursor(move: Move) -> Cursor:
    return move.first % move.ring, move.step, move.ring


def _moves(block: Block, depth: int) -> list[Move]:
    """The moves of one depth of all ranges inside."""
    found: list[Move] = []
    for step in block.steps:
        match step:
            case Launch() | HostCall():
                ranges = step.arguments
            case Copy():
                ranges = (step.source, step.target)
            case While():
                ranges = (step.predicate,)
            case Branch():
                ranges = (step.index,)
            case Loop():
                ranges = ()
            case _:
                assert_never(step)
        found += [move for place in ranges for move in place.moves if move.depth == depth]
        for inner in blocks(step):
            found += _moves(inner, depth)
    return found
