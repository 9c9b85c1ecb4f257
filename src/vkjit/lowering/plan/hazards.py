"""Order from the plan: barriers where steps touch the same bytes, and the check that all stand.

Two steps conflict when their ranges share a byte and at least one writes it: read after write,
write after read, write after write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from vkjit.errors import InternalError
from vkjit.lowering.artifact import Copy, Launch, Plan, Range, Step
from vkjit.lowering.kernel.types import Access


@final
@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a step reads and writes."""

    reads: tuple[Range, ...]
    writes: tuple[Range, ...]


def footprint(step: Step) -> Footprint:
    """What ``step`` touches, by the access its kernel declares."""
    if isinstance(step, Copy):
        return Footprint((step.source,), (step.target,))
    pairs = list(zip(step.kernel.buffers, step.arguments, strict=True))
    return Footprint(
        tuple(r for b, r in pairs if b.access is not Access.WRITE),
        tuple(r for b, r in pairs if b.access is not Access.READ),
    )


@final
class _Window:
    """Ranges touched since the last barrier, by buffer."""

    __slots__ = ("_reads", "_writes")

    def __init__(self) -> None:
        self._reads: dict[int, list[Range]] = {}
        self._writes: dict[int, list[Range]] = {}

    def conflict(self, step: Footprint) -> str | None:
        """The hazard between ``step`` and an earlier one of the window, if any."""
        for r in step.reads:
            if _hit(self._writes, r):
                return "read after write"
        for r in step.writes:
            if _hit(self._writes, r):
                return "write after write"
            if _hit(self._reads, r):
                return "write after read"
        return None

    def add(self, step: Footprint) -> None:
        """Remembers what ``step`` touches."""
        for r in step.reads:
            self._reads.setdefault(r.buffer, []).append(r)
        for r in step.writes:
            self._writes.setdefault(r.buffer, []).append(r)


def _hit(ranges: dict[int, list[Range]], r: Range) -> bool:
    return any(r.overlaps(other) for other in ranges.get(r.buffer, ()))


def barriers(steps: Sequence[Step]) -> frozenset[int]:
    """The steps before which a barrier must stand: no later than needed, no more than needed."""
    found: set[int] = set()
    window = _Window()
    for position, step in enumerate(steps):
        touched = footprint(step)
        if window.conflict(touched):
            found.add(position)
            window = _Window()
        window.add(touched)
    return frozenset(found)


def check_order(plan: Plan) -> None:
    """Checks that every pair of conflicting steps has a barrier between them.

    Independent of ``barriers``: it looks at the plan that will run.

    Raises:
        InternalError: a hazard is not ordered; the message names both the kind and the step.
    """
    window = _Window()
    for position, step in enumerate(plan.steps):
        if position in plan.barriers:
            window = _Window()
        touched = footprint(step)
        hazard = window.conflict(touched)
        if hazard:
            name = step.kernel.name if isinstance(step, Launch) else "copy"
            origin = "; ".join(step.origin) if isinstance(step, Launch) else ""
            raise InternalError(
                f"plan {plan.name}: {hazard} at step {position} ({name} {origin}) is not ordered "
                "by a barrier"
            )
        window.add(touched)
