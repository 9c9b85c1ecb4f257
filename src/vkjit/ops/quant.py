"""Numbers and blocks: reading numbers out of blocks, and naming packed units as blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from vkjit import blocks, dtypes
from vkjit.blocks import BLOCK_TYPES, BlockType
from vkjit.dtypes import DType
from vkjit.errors import DTypeError, ShapeError
from vkjit.ir.avals import Aval, aval
from vkjit.ir.primitive import Array, Kind, Op, Primitive, Remat, Sample, Tangent, Traits, Value
from vkjit.lowering.kernel.specs import DecodeSpec, KernelSpec, ViewSpec
from vkjit.lowering.kernel.views import View
from vkjit.trace import bind

_FLOATS = (dtypes.float32, dtypes.float16, dtypes.bfloat16)


@final
@dataclass(frozen=True)
class Dequantize(Op):
    """The numbers of an array of blocks, rounded once to ``dtype``.

    ``q4_k[..., n]`` gives ``[..., n * 256]``. It is a view: whoever reads the result decodes the
    blocks, and the numbers are in memory nowhere else.
    """

    dtype: DType

    traits: ClassVar[Traits] = Traits(Kind.VIEW, Remat.CHEAP, differentiable=False)

    def infer(self, *avals: Aval) -> Aval:
        """An array of blocks, of at least one axis, as floats of at most 32 bits."""
        (x,) = avals
        if x.block is None or not x.ndim:
            raise DTypeError(f"dequantize: operand {x}; expected an array of blocks")
        if self.dtype not in _FLOATS:
            raise DTypeError(
                f"dequantize: {x} as {self.dtype}; expected float32, float16 or bfloat16"
            )
        return aval((*x.shape[:-1], x.shape[-1] * x.block.size), self.dtype)

    def evaluate(self, *arrays: Array) -> Array:
        """The definition: ``vkjit.blocks.decode``."""
        (x,) = arrays
        with np.errstate(over="ignore", invalid="ignore"):
            return blocks.decode(_block_of(x.dtype), x).astype(self.dtype, copy=False)

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """Blocks are constant to derivatives."""
        return bind(self, primals[0]), None

    def batch(self, args: Sequence[Value], batched: Sequence[bool]) -> Value:
        """The batch axis stays in front."""
        return bind(self, args[0])

    def kernel_spec(self, avals: Sequence[Aval], out: Aval) -> KernelSpec:
        """The numbers, where the blocks are."""
        return DecodeSpec(_block_of(avals[0].dtype))

    def rounded_to(self, dtype: DType) -> Primitive | None:
        """Float32 numbers rounded as they are read: then a product has no copy of them to read."""
        return Dequantize(dtype) if self.dtype == dtypes.float32 and dtype in _FLOATS else None

    def flops(self, avals: Sequence[Aval], outs: Sequence[Aval]) -> float:
        """None: it is work of the reader, as a load is."""
        return 0.0

    @classmethod
    def samples(cls) -> list[Sample]:
        """Every block type; every dtype of one of them."""
        made = [
            Sample(cls(dtypes.float32), (aval((2, 512 // block.size), block.dtype),), smooth=False)
            for block in BLOCK_TYPES.values()
        ]
        q8_0 = aval((3, 2), blocks.Q8_0.dtype)
        return made + [Sample(cls(d), (q8_0,), smooth=False) for d in _FLOATS[1:]]


@final
@dataclass(frozen=True)
class AsBlocks(Op):
    """Units, int16 or int32 by the block type, along the last axis as one block each."""

    dtype: DType

    traits: ClassVar[Traits] = Traits(Kind.VIEW, Remat.CHEAP, differentiable=False)

    def infer(self, *avals: Aval) -> Aval:
        """The last axis has the units of one block."""
        (x,) = avals
        block = _block_of(self.dtype)
        unit, count = unit_dtype(block), block.nbytes // block.unit
        if x.dtype != unit or not x.ndim or x.shape[-1] != count:
            raise ShapeError(
                f"as_blocks: operand {x}; expected {unit} with {count} units along the last axis "
                f"for {block}"
            )
        return aval(x.shape[:-1], self.dtype)

    def evaluate(self, *arrays: Array) -> Array:
        """The same bytes."""
        return np.ascontiguousarray(arrays[0]).view(self.dtype)[..., 0]

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """Blocks have no tangents."""
        return bind(self, primals[0]), None

    def batch(self, args: Sequence[Value], batched: Sequence[bool]) -> Value:
        """The batch axis stays in front."""
        return bind(self, args[0])

    def kernel_spec(self, avals: Sequence[Aval], out: Aval) -> KernelSpec:
        """Kernels see the units of blocks in any case."""
        return ViewSpec(_same)

    @classmethod
    def samples(cls) -> list[Sample]:
        """A block type of each unit."""
        return [
            Sample(cls(block.dtype), (aval((2, 3, block.nbytes // block.unit), unit_dtype(block)),))
            for block in (blocks.Q8_0, blocks.Q4_1)
        ]


def _same(view: View) -> View:
    return view


def _block_of(dtype: DType) -> BlockType:
    found = blocks.block_of(dtype)
    if found is None:
        raise DTypeError(f"blocks: {dtype} is not the dtype of a block type")
    return found


def unit_dtype(block: BlockType) -> DType:
    """The integer dtype of the units of a block."""
    return dtypes.int32 if block.unit == 4 else dtypes.int16


def dequantize(x: Value, dtype: DType = dtypes.float32) -> Value:
    """The numbers of an array of blocks, as ``dtype``."""
    return bind(Dequantize(dtype), x)


def as_blocks(units: Value, block: BlockType) -> Value:
    """Units along the last axis as blocks."""
    return bind(AsBlocks(block.dtype), units)
