"""What a body step costs, for choices between computing again and keeping."""

from __future__ import annotations

from collections.abc import Sequence

from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Binary, Unary, Value
from vkjit.lowering.kernel.types import I1, BinOp, ScalarType, UnOp
from vkjit.lowering.plan.groups import BodyStep, ScalarStep
from vkjit.lowering.templates.body import arguments

_CHEAP_UNARY = {UnOp.NEG, UnOp.NOT, UnOp.ABS, UnOp.FLOOR, UnOp.CEIL, UnOp.ROUND_EVEN, UnOp.TRUNC}
_DEAR_BINARY = {BinOp.POW: 40, BinOp.ATAN2: 40, BinOp.DIV: 6, BinOp.DIV_S: 20, BinOp.DIV_U: 20}


def step_cost(step: BodyStep, types: tuple[ScalarType, ...]) -> int:
    """Cost of one element in units of an addition; loads and constants count 1 and 0.

    ``types`` are the element types of the step's arguments.
    """
    if not isinstance(step, ScalarStep):
        return 1
    b = Builder("cost")
    step.fn(b, *[_zero(b, t) for t in types])
    total = 0
    for node in b.kernel.body.nodes:
        if isinstance(node, Unary):
            total += 1 if node.op in _CHEAP_UNARY else 16
        elif isinstance(node, Binary):
            total += _DEAR_BINARY.get(node.op, 1)
        else:
            total += 1
    return total


def _zero(b: Builder, elem: ScalarType) -> Value:
    return b.const(elem, False if elem is I1 else 0 if elem.kind == "int" else 0.0)


def body_costs(body: Sequence[BodyStep]) -> list[int]:
    """Cost of each step of a body."""
    return [step_cost(s, tuple(body[a].type for a in arguments(s))) for s in body]
