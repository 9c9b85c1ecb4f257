"""Operands of products out of their blocks: for templates that read numbers only."""

from __future__ import annotations

import math
from dataclasses import replace

from vkjit.lowering.kernel.views import View, dense
from vkjit.lowering.plan.groups import ContractGroup, LoadStep, LoopGroup, StoreStep
from vkjit.lowering.templates.context import TemplateContext


def without_blocks(
    group: ContractGroup, context: TemplateContext, *, lhs: bool = True, rhs: bool = True
) -> tuple[tuple[LoopGroup, ...], ContractGroup]:
    """Loops that store the operands that are in blocks as numbers, and the product of these.

    A template that reads an operand's blocks itself passes False for it. The numbers are a
    temporary of the group, in the order of the operand's view without its repetitions.
    """
    loops: list[LoopGroup] = []

    def stored(step: LoadStep) -> LoadStep:
        if step.blocks is None:
            return step
        loop, plain = _stored(step, context)
        loops.append(loop)
        return plain

    left = stored(group.lhs) if lhs else group.lhs
    right = stored(group.rhs) if rhs else group.rhs
    return tuple(loops), replace(group, lhs=left, rhs=right)


def _stored(step: LoadStep, context: TemplateContext) -> tuple[LoopGroup, LoadStep]:
    """Each number once, axes in the order of their strides."""
    view = step.view
    axes = [a for a, s in enumerate(view.strides) if s]
    axes.sort(key=lambda a: -abs(view.strides[a]))
    source = View(
        tuple(view.shape[a] for a in axes), tuple(view.strides[a] for a in axes), view.offset
    )
    array = context.new_array(step.type, math.prod(source.shape))
    target = dense(source.shape)
    loop = LoopGroup(
        source.shape,
        0,
        (replace(step, view=source),),
        (StoreStep(0, array, target),),
        ("decoded operand",),
    )
    strides = [0] * len(view.shape)
    for axis, stride in zip(axes, target.strides, strict=True):
        strides[axis] = stride
    return loop, LoadStep(array, View(view.shape, tuple(strides)), step.type)
