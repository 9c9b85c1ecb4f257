"""What runs without the host, in several submissions and in segments of loops.

Operating systems reset a GPU that is busy with one submission for too long: 2 s on Windows, 10 s or
so elsewhere. So a submission ends where the work in it is estimated to pass a limit, between turns
of loops or inside them, and a dispatch longer than that is made in slices. The estimate is meant
for slow GPUs: a fast one pays some ten microseconds per submission for work that takes it
milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from vkjit.lowering.kernel.nodes import Kernel
from vkjit.runtime.vulkan.estimate import Estimate, Grid
from vkjit.runtime.vulkan.outline import Item, Replay, Work

_MARK_EVERY = 16  # barriers between marks of progress; a mark costs 1.6 us on an H200
_EXECUTED = 8192  # segments in one submission: what drivers keep of each adds up


@final
@dataclass(frozen=True, slots=True)
class Piece:
    """``grid`` workgroups, from ``base`` on, of ``work``; all zero for a copy.

    With ``barrier`` a barrier must stand before it; every submission begins with one. With ``mark``
    it is worth noting there that everything before is finished. ``is_slice`` tells of a launch
    that is made in several pieces.
    """

    work: Work
    base: Grid
    grid: Grid
    barrier: bool = False
    mark: bool = False
    is_slice: bool = False


@final
@dataclass(frozen=True, slots=True)
class Segment:
    """Pieces of the even or odd turns of a loop, recorded once and executed many times.

    The first segment of a turn ``advances``: after a barrier it also computes the arguments of the
    next turn, and those of the first turn of the loops ``begins``.
    """

    loop: Replay
    parity: int
    pieces: tuple[Piece, ...]
    advances: bool
    begins: tuple[Replay, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Begin:
    """Computes the arguments of the first turn of ``loops``."""

    loops: tuple[Replay, ...]


@final
@dataclass(frozen=True, slots=True)
class Run:
    """Segments, by their numbers, that are executed one after another."""

    segments: tuple[int, ...]


Part = tuple[Piece | Run | Begin, ...]
"""What one submission does."""


@final
@dataclass(frozen=True, slots=True)
class Parts:
    """A call, or what of it stands between two decisions of the host.

    ``order`` are numbers of ``parts``, and how often each is submitted before the next.
    """

    parts: tuple[Part, ...]
    order: tuple[tuple[int, int], ...]
    segments: tuple[Segment, ...]

    @property
    def submissions(self) -> int:
        """How many there are in one call."""
        return sum(times for _, times in self.order)


def split(items: Sequence[Item], kernels: Mapping[Work, Kernel], seconds: float) -> Parts:
    """Submissions of at most about ``seconds`` of estimated work that do ``items`` in order."""
    cutter = _Cutter(kernels, seconds)
    packer = _Packer(seconds)
    loops = tuple([item for item in items if isinstance(item, Replay)])
    if loops:
        packer.add(_Bit(Begin(loops), 0.0))
    for bit in cutter.outside(items):
        packer.add(bit)
    return packer.finish(tuple(cutter.segments))


@final
@dataclass(frozen=True, slots=True)
class _Bit:
    """A piece, or the number of a segment, with its seconds."""

    what: Piece | Begin | int
    seconds: float


@final
@dataclass(frozen=True, slots=True)
class _Cycle:
    """``times`` rounds of ``round``; the sums are those of one round."""

    round: tuple[_Flow, ...]
    times: int
    seconds: float
    executed: int


_Flow = _Bit | _Cycle


def _cycle(round_: tuple[_Flow, ...], times: int) -> _Cycle:
    seconds, executed = 0.0, 0
    for flow in round_:
        if isinstance(flow, _Bit):
            seconds, executed = seconds + flow.seconds, executed + 1
        else:
            seconds += flow.seconds * flow.times
            executed += flow.executed * flow.times
    return _Cycle(round_, times, seconds, executed)


@final
class _Cutter:
    """Cuts works into pieces and turns of loops into segments."""

    def __init__(self, kernels: Mapping[Work, Kernel], seconds: float) -> None:
        self.segments: list[Segment] = []
        self._estimate = Estimate(kernels, seconds)
        self._seconds = seconds
        self._barriers = 0
        self._flows: dict[Replay, tuple[_Flow, ...]] = {}

    def outside(self, items: Sequence[Item]) -> list[_Flow]:
        """Items that stand in no replayed loop."""
        found: list[_Flow] = []
        after_loop = False
        for item in items:
            if isinstance(item, Replay):
                found += self._loop(item)
            else:
                found += self._pieces(item, mark=after_loop)
            after_loop = isinstance(item, Replay)
        return found

    def _pieces(self, work: Work, *, mark: bool = False) -> list[_Bit]:
        boxes, seconds = self._estimate.boxes(work)
        barrier = work.barrier
        self._barriers += barrier
        mark = mark or (barrier and self._barriers % _MARK_EVERY == 0)
        found: list[_Bit] = []
        for base, grid in boxes:
            piece = Piece(work, base, grid, barrier, mark, len(boxes) > 1)
            found.append(_Bit(piece, seconds))
            barrier, mark = False, False
        return found

    def _loop(self, loop: Replay) -> tuple[_Flow, ...]:
        """Even and odd turns in alternation."""
        known = self._flows.get(loop)
        if known is None:
            even, odd = self._turn(loop, 0), self._turn(loop, 1)
            last = even if loop.length % 2 else ()
            both = _cycle((*even, *odd), loop.length // 2)
            known = self._flows[loop] = (both, *last)
        return known

    def _turn(self, loop: Replay, parity: int) -> tuple[_Flow, ...]:
        found: list[_Flow] = []
        pieces: list[Piece] = []
        spent, advances = 0.0, True
        begins = tuple([item for item in loop.body if isinstance(item, Replay)])

        def close() -> None:
            nonlocal spent, advances
            if pieces or advances:
                made = Segment(loop, parity, tuple(pieces), advances, begins if advances else ())
                found.append(_Bit(len(self.segments), spent))
                self.segments.append(made)
            pieces.clear()
            spent, advances = 0.0, False

        for item in loop.body:
            if isinstance(item, Replay):
                close()
                found.extend(self._loop(item))
                continue
            for bit in self._pieces(item, mark=not pieces):
                assert isinstance(bit.what, Piece)
                if pieces and spent + bit.seconds > self._seconds:
                    close()
                pieces.append(bit.what)
                spent += bit.seconds
        close()
        return tuple(found)


@final
class _Packer:
    """Fills submissions up to a limit of seconds and of segments."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._numbers: dict[Part, int] = {}
        self._order: list[tuple[int, int]] = []
        self._part: list[Piece | Run | Begin] = []
        self._run: list[int] = []
        self._spent = 0.0
        self._executed = 0

    def add(self, flow: _Flow) -> None:
        """Appends to the last submission, or to new ones."""
        if isinstance(flow, _Cycle):
            self._add_cycle(flow)
            return
        is_segment = isinstance(flow.what, int)
        if not self._fits(flow.seconds, int(is_segment)):
            self._close()
        self._spent += flow.seconds
        if isinstance(flow.what, int):
            self._run.append(flow.what)
            self._executed += 1
            return
        self._end_run()
        piece = flow.what
        if isinstance(piece, Piece) and not self._part and self._order:
            piece = replace(piece, barrier=False, mark=True)
        self._part.append(piece)

    def _add_cycle(self, cycle: _Cycle) -> None:
        if not cycle.times:
            return
        if self._fits(cycle.seconds * cycle.times, cycle.executed * cycle.times):
            self._extend(cycle, cycle.times)
            return
        together = min(_EXECUTED // cycle.executed, cycle.times)
        if math.isfinite(self._seconds) and cycle.seconds:
            together = min(together, int(self._seconds / cycle.seconds))
        if not together:
            for _ in range(cycle.times):
                for flow in cycle.round:
                    self.add(flow)
            return
        self._close()
        full, rest = divmod(cycle.times, together)
        self._extend(cycle, together)
        self._close(full)
        self._extend(cycle, rest)

    def _fits(self, seconds: float, executed: int) -> bool:
        """Whether so much may come on top; one thing always may."""
        if not self._part and not self._run and executed <= 1:
            return True
        room = self._executed + executed <= _EXECUTED
        return room and self._spent + seconds <= self._seconds

    def _extend(self, cycle: _Cycle, times: int) -> None:
        self._run += _flat(cycle.round) * times
        self._spent += cycle.seconds * times
        self._executed += cycle.executed * times

    def _end_run(self) -> None:
        if self._run:
            self._part.append(Run(tuple(self._run)))
            self._run.clear()

    def _close(self, times: int = 1) -> None:
        """Ends a submission, which is made ``times`` times."""
        self._end_run()
        if self._part:
            number = self._numbers.setdefault(tuple(self._part), len(self._numbers))
            self._order.append((number, times))
            self._part.clear()
        self._spent, self._executed = 0.0, 0

    def finish(self, segments: tuple[Segment, ...]) -> Parts:
        """All submissions; at least one, so that each call has a number."""
        self._close()
        if not self._order:
            return Parts(((),), ((0, 1),), segments)
        return Parts(tuple(self._numbers), tuple(self._order), segments)


def _flat(flows: Sequence[_Flow]) -> list[int]:
    """The segments of flows inside a loop, in order."""
    found: list[int] = []
    for flow in flows:
        if isinstance(flow, _Cycle):
            found += _flat(flow.round) * flow.times
        elif isinstance(flow.what, int):
            found.append(flow.what)
    return found
