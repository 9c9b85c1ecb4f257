"""What a call will cost: operations and bytes, counted from the plan before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from vkjit.lowering.artifact import Launch, Loop, Plan, Step, blocks
from vkjit.lowering.kernel.cost import flops


@final
@dataclass(frozen=True)
class CostAnalysis:
    """Counts of one call.

    ``flops`` counts floating-point operations of all kernels, padding included, and ``bytes
    accessed`` what they may read and write, each argument of a launch once. A body of a counted
    loop counts once per turn, that of a ``while_loop`` once, and of a ``cond`` every branch.
    ``unknown`` is the number of launches whose operations cannot be counted.
    """

    flops: float
    bytes_accessed: int
    launches: int
    kernels: int
    unknown: int = 0

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / max(self.bytes_accessed, 1)

    def __str__(self) -> str:
        text = (
            f"{self.flops:,.0f} floating-point operations, {self.bytes_accessed:,} bytes "
            f"({self.intensity:.2f} per byte) in {self.launches:,} launches of {self.kernels:,} "
            "kernels"
        )
        return f"{text}; {self.unknown:,} launches not counted" if self.unknown else text


def cost_analysis(plan: Plan) -> CostAnalysis:
    """The costs of one run of ``plan``."""
    known: dict[int, float | None] = {}
    total, touched, launches, unknown = 0.0, 0, 0, 0
    for step, runs in _launches(plan.steps, 1):
        key = id(step.kernel)
        if key not in known:
            known[key] = flops(step.kernel)
        each = known[key]
        unknown += runs if each is None else 0
        total += (each or 0.0) * runs
        touched += sum(place.size for place in step.arguments) * runs
        launches += runs
    return CostAnalysis(total, touched, launches, len(known), unknown)


def _launches(steps: Sequence[Step], runs: int) -> Iterator[tuple[Launch, int]]:
    """The launches of a plan, and how often each runs."""
    for step in steps:
        if isinstance(step, Launch):
            yield step, runs
        turns = step.length if isinstance(step, Loop) else 1
        for block in blocks(step):
            yield from _launches(block.steps, runs * turns)
