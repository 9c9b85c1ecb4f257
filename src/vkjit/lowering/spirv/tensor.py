"""Tensor loads and stores of cooperative matrices: SPV_NV_tensor_addressing.

The state of a layout is built in the order dimension, stride, slice, because setting dimensions
resets the rest. What does not change is built once, at the start of the entry block.
"""

from __future__ import annotations

from typing import final

from vkjit.lowering.kernel.nodes import Tensor, TensorLoad, TensorStore
from vkjit.lowering.kernel.types import I1, MatType
from vkjit.lowering.kernel.walk import all_nodes
from vkjit.lowering.spirv.context import COOPERATIVE_MATRIX_2, Context
from vkjit.lowering.spirv.grammar import (
    Capability,
    Op,
    TensorAddressingOperands,
    TensorClampMode,
)
from vkjit.lowering.spirv.memory import Memories

_RANK = 2
_ALIGNMENT = 16  # bytes, of the first element of a tensor


@final
class Tensors:
    """The tensor layouts and views of one kernel."""

    def __init__(self, ctx: Context, memories: Memories) -> None:
        self._ctx = ctx
        self._memories = memories
        self._layouts: dict[tuple[object, ...], int] = {}
        self._turned = 0

    def declare(self) -> None:
        """Builds all layouts and views; stands in the entry block."""
        for node in all_nodes(self._ctx.kernel.body):
            if isinstance(node, TensorLoad | TensorStore):
                self._require()
                self._layout(node.tensor)
                if node.tensor.turned and not self._turned:
                    self._turned = self._view()

    def load(self, node: TensorLoad) -> int:
        """A matrix from memory."""
        ctx = self._ctx
        type_ = ctx.type(node.type)
        pointer, layout, *operands = self._place(node, node.type)
        # What a load would leave as it was: nothing, as no view here clips.
        before = ctx.module.constant(Op.Undef, type_)
        op = Op.CooperativeMatrixLoadTensorNV
        return ctx.module.value(op, type_, pointer, before, layout, *operands)

    def store(self, node: TensorStore) -> None:
        """A matrix to memory."""
        pointer, *operands = self._place(node, node.value.type)
        value = self._ctx.use(node.value)
        self._ctx.module.effect(Op.CooperativeMatrixStoreTensorNV, pointer, value, *operands)

    def _require(self) -> None:
        module = self._ctx.module
        module.require(Capability.CooperativeMatrixTensorAddressingNV, COOPERATIVE_MATRIX_2)
        module.require(Capability.TensorAddressingNV, "SPV_NV_tensor_addressing")

    def _type(self, tensor: Tensor) -> int:
        module = self._ctx.module
        clamp = TensorClampMode.Constant if tensor.clamped else TensorClampMode.Undefined
        return module.unique(Op.TypeTensorLayoutNV, module.uint(_RANK), module.uint(clamp))

    def _layout(self, tensor: Tensor) -> int:
        key = (tensor.shape, tensor.strides, tensor.clamped)
        found = self._layouts.get(key)
        if found is None:
            module, type_ = self._ctx.module, self._type(tensor)
            found = module.value(Op.CreateTensorLayoutNV, type_)
            sizes, strides = map(module.uint, tensor.shape), map(module.uint, tensor.strides)
            found = module.value(Op.TensorLayoutSetDimensionNV, type_, found, *sizes)
            found = module.value(Op.TensorLayoutSetStrideNV, type_, found, *strides)
            self._layouts[key] = found
        return found

    def _view_type(self) -> int:
        module = self._ctx.module
        no_dimensions = self._ctx.scalar_constant(I1, False)
        permutation = (module.uint(1), module.uint(0))
        return module.unique(Op.TypeTensorViewNV, module.uint(_RANK), no_dimensions, *permutation)

    def _view(self) -> int:
        return self._ctx.module.value(Op.CreateTensorViewNV, self._view_type())

    def _place(self, node: TensorLoad | TensorStore, type_: object) -> list[int]:
        """Pointer, layout, memory and tensor operands, as both instructions want them."""
        assert isinstance(type_, MatType)
        ctx, memories, tensor = self._ctx, self._memories, node.tensor
        spans = (type_.cols, type_.rows) if tensor.turned else (type_.rows, type_.cols)
        slices: list[int] = []
        for at, span in zip(node.at, spans, strict=True):
            slices += [ctx.use(at), ctx.module.uint(span)]
        base = self._layout(tensor)
        layout = ctx.module.value(Op.TensorLayoutSliceNV, self._type(tensor), base, *slices)
        pointer = memories.pointer(node.memory, ctx.use(node.index))
        alignment = memories.alignment(node.memory, node.index, _ALIGNMENT)
        access = memories.operands(node.memory, alignment) or (0,)
        turned = (TensorAddressingOperands.TensorView, self._turned) if tensor.turned else (0,)
        return [pointer, layout, *access, *turned]
