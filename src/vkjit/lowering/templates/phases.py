"""The passes that a group with reductions makes over its reduced axes."""

from __future__ import annotations

from vkjit.lowering.plan.groups import GatherStep, LoadStep, LoopGroup, ReduceStep
from vkjit.lowering.templates.body import arguments


def phases(group: LoopGroup) -> dict[int, int]:
    """For each reduction, the pass that folds it: one after those it depends on."""
    depth: dict[int, int] = {}
    for number, step in enumerate(group.body):
        below = max([depth[a] for a in arguments(step)], default=0)
        depth[number] = below + 1 if isinstance(step, ReduceStep) else below
    return {n: depth[n] for n, s in enumerate(group.body) if isinstance(s, ReduceStep)}


def full_values(group: LoopGroup) -> set[int]:
    """Values that vary along a reduced axis, or are stored for each element of one."""
    split = len(group.shape) - group.reduced
    full = {s.value for s in group.stores if any(s.view.strides[split:])}
    for number, step in enumerate(group.body):
        if isinstance(step, ReduceStep):
            continue
        varies = isinstance(step, (LoadStep, GatherStep)) and any(step.view.strides[split:])
        if varies or any(a in full for a in arguments(step)):
            full.add(number)
    return full
