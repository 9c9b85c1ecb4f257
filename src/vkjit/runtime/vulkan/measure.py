"""The time of each leaf of a plan, by the device's clock.

Submissions are made one by one. What stands in no replayed loop has its own timestamps. A replayed
loop is timed as a whole, turns, arguments and all, and its time is shared among the leaves in it in
proportion to what they took in the last turns that were executed.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from vkjit.runtime.device import StepTime
from vkjit.runtime.vulkan.estimate import ORIGIN
from vkjit.runtime.vulkan.split import Piece, Run

if TYPE_CHECKING:
    from vkjit.runtime.vulkan.memory import Span
    from vkjit.runtime.vulkan.recording import Recording


@final
class LeafTimes:
    """Begin, seconds and runs of each leaf, summed over turns."""

    def __init__(self, count: int) -> None:
        self._begins: list[float | None] = [None] * count
        self._seconds = [0.0] * count
        self._runs = [0] * count

    def add(self, leaf: int | None, begin: float, seconds: float, runs: int) -> None:
        """Adds runs of a leaf that began at ``begin`` of the host's clock."""
        if leaf is None:
            return
        if self._begins[leaf] is None:
            self._begins[leaf] = begin
        self._seconds[leaf] += seconds
        self._runs[leaf] += runs

    def listed(self, started: float) -> list[StepTime]:
        """All of them; a leaf that never ran began at ``started``."""
        rows = zip(self._begins, self._seconds, self._runs, strict=True)
        return [StepTime(started if b is None else b, s, runs) for b, s, runs in rows]


def measure(
    recording: Recording, spans: list[Span], turns: Sequence[int], times: LeafTimes
) -> None:
    """Runs a recording with timestamps, as ``Recording.submit``, and waits for it."""
    recording.prepare(spans, turns)
    queue = recording.device.queue
    try:
        for number, count in recording.stretch.parts.order:
            for _ in range(count):
                queue.wait(queue.submitted)  # so that the part begins when it is submitted
                started = time.perf_counter()
                commands = recording.primaries[number]
                queue.wait(queue.submit(commands, recording.progress.describe))
                _add_part(recording, number, started, times)
    finally:
        recording.busy = queue.submitted


def _add_part(recording: Recording, number: int, started: float, times: LeafTimes) -> None:
    assert recording.times is not None
    measured = recording.times.of_part(number)
    for item, (begin, end) in zip(recording.stretch.parts.parts[number], measured, strict=True):
        at = started + begin - measured[0][0]
        if isinstance(item, Piece):
            times.add(item.work.leaf, at, end - begin, int(item.base == ORIGIN))
        elif isinstance(item, Run):
            _add_run(recording, item, (at, end - begin), times)


def _add_run(recording: Recording, run: Run, whole: tuple[float, float], times: LeafTimes) -> None:
    """Shares the time of executed segments among their leaves."""
    assert recording.times is not None
    spent: defaultdict[int | None, float] = defaultdict(float)
    runs: Counter[int | None] = Counter()
    for number, count in Counter(run.segments).items():
        pieces = recording.stretch.parts.segments[number].pieces
        measured = recording.times.of_segment(number)
        for piece, (begin, end) in zip(pieces, measured, strict=True):
            spent[piece.work.leaf] += count * (end - begin)
            runs[piece.work.leaf] += count * int(piece.base == ORIGIN)
    begin, seconds = whole
    total = sum(spent.values())
    for leaf, part in spent.items():
        share = part / total if total else 1 / len(spent)
        times.add(leaf, begin, seconds * share, runs[leaf])
