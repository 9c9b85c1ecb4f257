"""Order from the plan: barriers where steps touch the same bytes, and the check that all stand.

Two steps conflict when their ranges share a byte and at least one writes it: read after write,
write after read, write after write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never, final

from vkjit.errors import InternalError
from vkjit.lowering.artifact import (
    Block,
    Branch,
    Copy,
    HostCall,
    Launch,
    Loop,
    Plan,
    Range,
    Step,
    While,
    blocks,
)
from vkjit.lowering.kernel.types import Access


@final
@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a step reads and writes."""

    reads: tuple[Range, ...]
    writes: tuple[Range, ...]


def footprint(step: Step, depth: int = 0) -> Footprint:
    """What ``step``, which stands inside ``depth`` loops, touches, by the access kernels declare.

    What a step inside of it touches counts in all turns of the loops between.
    """
    match step:
        case Launch():
            pairs = list(zip(step.kernel.buffers, step.arguments, strict=True))
            reads = [r for b, r in pairs if b.access is not Access.WRITE]
            writes = [r for b, r in pairs if b.access is not Access.READ]
        case Copy():
            reads, writes = [step.source], [step.target]
        case HostCall():
            reads, writes = list(step.arguments), list[Range]()
        case Loop() | While() | Branch():
            inner = depth + isinstance(step, Loop)
            parts = [footprint(s, inner) for block in blocks(step) for s in block.steps]
            reads = [r.cover(depth) for part in parts for r in part.reads]
            writes = [r.cover(depth) for part in parts for r in part.writes]
            if not isinstance(step, Loop):
                reads.append(step.predicate if isinstance(step, While) else step.index)
        case _:
            assert_never(step)
    return Footprint(tuple(dict.fromkeys(reads)), tuple(dict.fromkeys(writes)))


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
    """The steps before which a barrier must stand: no later than needed, no more than needed.

    Blocks and calls of the host begin when all before them is done, and end with what they did.
    """
    found: set[int] = set()
    window = _Window()
    for position, step in enumerate(steps):
        if not isinstance(step, (Launch, Copy)):
            window = _Window()
            continue
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
    _check_block(plan.name, Block(plan.steps, plan.barriers), ())


def _check_block(name: str, block: Block, at: tuple[int, ...]) -> None:
    """Checks the steps of a block inside the steps with these positions, outermost first."""
    window = _Window()
    for position, step in enumerate(block.steps):
        if position in block.barriers or not isinstance(step, (Launch, Copy)):
            window = _Window()
        for inner in blocks(step):
            _check_block(name, inner, (*at, position))
        if not isinstance(step, (Launch, Copy)):
            continue
        touched = footprint(step)
        hazard = window.conflict(touched)
        if hazard:
            kernel = step.kernel.name if isinstance(step, Launch) else "copy"
            origin = "; ".join(step.origin) if isinstance(step, Launch) else ""
            where = ".".join(map(str, (*at, position)))
            raise InternalError(
                f"plan {name}: {hazard} at step {where} ({kernel} {origin}) is not ordered "
                "by a barrier"
            )
        window.add(touched)
