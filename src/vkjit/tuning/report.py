"""What tuning a function did, group by group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from vkjit.tuning.records import Result

Progress = Callable[[str, int, int], None]
"""Told the group, the candidates timed so far, and their number."""


@final
@dataclass(frozen=True, slots=True)
class TunedGroup:
    """One distinct group, which a call runs ``count`` times.

    ``result`` is None where there was no time, or where the default schedule failed. ``is_new``
    tells whether it was measured now or found.
    """

    group: str
    count: int
    result: Result | None
    is_new: bool


@final
@dataclass(frozen=True, slots=True)
class TuneReport:
    """The groups of a function for which there is something to choose, longest first."""

    device: str
    groups: tuple[TunedGroup, ...]
    seconds: float

    @property
    def gain(self) -> float:
        """Time of all groups with default schedules by the time with the chosen ones."""
        found = [(g.count, g.result) for g in self.groups if g.result is not None]
        known = [(count, r) for count, r in found if r.default_seconds]
        before = sum(count * r.default_seconds for count, r in known)
        after = sum(count * r.seconds for count, r in known)
        return before / after if after else 1.0

    def __str__(self) -> str:
        new = sum(g.is_new for g in self.groups)
        head = f"{self.device}: {len(self.groups)} groups, {new} tuned in {self.seconds:.1f} s"
        if not self.groups:
            return f"{head}; nothing to choose"
        rows = [("count", "default ms", "best ms", "gain", "schedule", "group")]
        rows += [_row(g) for g in self.groups]
        return "\n".join((f"{head}, products {self.gain:.2f} times faster", *_aligned(rows)))


def _row(g: TunedGroup) -> tuple[str, ...]:
    if g.result is None:
        return (str(g.count), "-", "-", "-", "default", g.group)
    r = g.result
    default = f"{r.default_seconds * 1e3:.3f}" if r.default_seconds else "failed"
    times = (default, f"{r.seconds * 1e3:.3f}", f"{r.gain:.2f}")
    return (str(g.count), *times, r.schedule, g.group)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
