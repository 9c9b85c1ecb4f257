"""Maps over the elements of cooperative matrices: functions that one instruction calls.

A function sees nothing of the entry point's values: what the body reads from outside is passed
after the elements, and the addresses of buffers are read again.
"""

from __future__ import annotations

from collections.abc import Callable

from vkjit.lowering.kernel.nodes import Const, Load, MatMap, Region, Value
from vkjit.lowering.kernel.types import Buffer, MatType
from vkjit.lowering.kernel.walk import operands
from vkjit.lowering.spirv.context import COOPERATIVE_MATRIX_2, Context
from vkjit.lowering.spirv.grammar import Capability, Op
from vkjit.lowering.spirv.memory import Memories

FUNCTION_CONTROL = 1
"""Inline: a call for each element of a matrix would be slow."""


def emit_map(ctx: Context, memories: Memories, node: MatMap, emit: Callable[[Region], None]) -> int:
    """The matrix of what the body yields; ``emit`` appends the nodes of a region."""
    module = ctx.module
    module.require(Capability.CooperativeMatrixPerElementOperationsNV, COOPERATIVE_MATRIX_2)
    assert isinstance(node.type, MatType)
    outer = captured(node)
    arguments = (node.row, node.column, *node.elements, *outer)
    first, *rest = [ctx.use(value) for value in (*node.sources, *outer)]
    result = ctx.type(node.type.elem)
    types = [ctx.type(value.type) for value in arguments]
    signature = module.unique(Op.TypeFunction, result, *types)
    function = module.new_id()
    with ctx.function():
        module.body.extend((5 << 16 | Op.Function, result, function, FUNCTION_CONTROL, signature))
        for value, type_ in zip(arguments, types, strict=True):
            ctx.bind(value, module.value(Op.FunctionParameter, type_))
        ctx.block = module.new_id()
        module.effect(Op.Label, ctx.block)
        with memories.function(_buffers(node)):
            emit(node.body)
        module.effect(Op.ReturnValue, ctx.use(node.body.yields[0]))
        module.effect(Op.FunctionEnd)
    module.name(function, "map")
    op = Op.CooperativeMatrixPerElementOpNV
    return module.value(op, ctx.type(node.type), first, function, *rest)


def captured(node: MatMap) -> list[Value]:
    """Values from outside that the body reads, constants apart, in order of their use."""
    inside: set[Value] = {node.row, node.column, *node.elements}
    found: dict[Value, None] = {}
    for inner in node.body.nodes:
        found.update(dict.fromkeys(operands(inner)))
        if isinstance(inner, Value):
            inside.add(inner)
    found.update(dict.fromkeys(node.body.yields))
    return [v for v in found if v not in inside and not isinstance(v, Const)]


def _buffers(node: MatMap) -> list[Buffer]:
    """The buffers that the body loads from."""
    loads = [n.memory for n in node.body.nodes if isinstance(n, Load)]
    return list(dict.fromkeys(m for m in loads if isinstance(m, Buffer)))
