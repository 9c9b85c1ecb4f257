"""What a call will cost: operations and bytes, counted before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from vkjit.ir.primitive import program_flops
from vkjit.ir.program import Program
from vkjit.lowering.artifact import Launch, Loop, Plan, Step, blocks


@final
@dataclass(frozen=True)
class CostAnalysis:
    """Counts of one call.

    ``flops`` are floating-point operations of the program: two for each term of a product, one for
    each element of a function or reduction. ``bytes_accessed`` is what the launches of the plan may
    read and write, each argument once. A body of a counted loop counts once per turn, that of a
    ``while_loop`` once, and of a ``cond`` every branch.
    """

    flops: float
    bytes_accessed: int
    launches: int
    kernels: int

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / max(self.bytes_accessed, 1)

    def __str__(self) -> str:
        return (
            f"{self.flops:,.0f} floating-point operations, {self.bytes_accessed:,} bytes "
            f"({self.intensity:.2f} per byte) in {self.launches:,} launches of {self.kernels:,} "
            "kernels"
        )


def cost_analysis(program: Program, plan: Plan) -> CostAnalysis:
    """The costs of one run of ``program`` by ``plan``."""
    touched, launches = 0, 0
    kernels: set[int] = set()
    for step, runs in _launches(plan.steps, 1):
        kernels.add(id(step.kernel))
        touched += sum(place.size for place in step.arguments) * runs
        launches += runs
    return CostAnalysis(program_flops(program), touched, launches, len(kernels))


def _launches(steps: Sequence[Step], runs: int) -> Iterator[tuple[Launch, int]]:
    """The launches of a plan, and how often each runs."""
    for step in steps:
        if isinstance(step, Launch):
            yield step, runs
        turns = step.length if isinstance(step, Loop) else 1
        for block in blocks(step):
            yield from _launches(block.steps, runs * turns)
