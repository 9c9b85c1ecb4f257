"""Reads of a product's operands, which lie as plain numbers or in quantized blocks.

Blocks stay packed in memory: every template decodes the numbers that it is about to use, in
float32, and rounds them to the operand's type.
"""

from __future__ import annotations

from vkjit.blocks import BlockType
from vkjit.errors import InternalError
from vkjit.lowering.gpu.gemm_epilogue import widened
from vkjit.lowering.gpu.short_vectors import Made, in_short_vectors, reads
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.decode import decode, decode_at, longest, unit_type
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import (
    F16,
    F32,
    I16,
    I32,
    Access,
    ConvertOp,
    Type,
    VecType,
    with_elem,
)
from vkjit.lowering.plan.groups import ContractGroup, LoadStep
from vkjit.lowering.target import Target
from vkjit.lowering.templates.context import Buffers

LONGEST = 16
"""Numbers that are decoded at once where the type does not matter."""


def run_of(blocks: BlockType) -> int:
    """Numbers that an invocation decodes at once at most: units of 16 bits fill a register each."""
    return min(longest(blocks), 32 if blocks.unit == I32.bytes else 16)


def is_packed(group: ContractGroup) -> bool:
    """Whether an operand lies in blocks."""
    return group.lhs.blocks is not None or group.rhs.blocks is not None


def nbytes_of(operand: LoadStep) -> float:
    """Bytes of memory that one number takes."""
    blocks = operand.blocks
    return operand.type.bytes if blocks is None else blocks.nbytes / blocks.size


def decoding(buffers: Buffers, operand: LoadStep, start: Value, lanes: int) -> Made:
    """What builds ``lanes`` consecutive numbers out of blocks, in float32.

    Args:
        buffers: of the kernel.
        operand: lies in blocks.
        start: index of a number, a multiple of ``lanes``.
        lanes: as ``decode`` takes them.
    """
    memory, blocks = buffers.of(operand.array), operand.blocks
    if blocks is None:
        raise InternalError(f"gemm: array {operand.array} holds numbers, expected blocks")
    half = _native_half if _keeps_subnormals(buffers.target) else None
    return lambda b: decode(b, memory, blocks, start, lanes, half)


def _keeps_subnormals(target: Target) -> bool:
    """Whether a conversion of float16 gives every number."""
    return F16 in target.arithmetic and "denorm_preserve_f16" in target.features


def _native_half(b: Builder, bits: Value) -> Value:
    """``decode.from_half`` by the device's own conversion (H200: products 4 % faster)."""
    half = b.bitcast(b.convert(ConvertOp.TRUNC, bits, with_elem(bits.type, I16)), F16)
    return b.convert(ConvertOp.FLOAT, half, F32)


def read_types(operand: LoadStep, lanes: int) -> list[Type]:
    """Types of what ``decoding`` reads."""
    aside, blocks = Builder("types"), operand.blocks
    assert blocks is not None
    memory = aside.buffer("w", unit_type(blocks), blocks.nbytes // blocks.unit, Access.READ)
    found = reads(aside, lambda b: decode(b, memory, blocks, aside.index(0), lanes))
    return [value.type for value in found]


def read_run(
    b: Builder, buffers: Buffers, operand: LoadStep, start: Value, lanes: int
) -> list[Value]:
    """A run of numbers out of blocks in the operand's type: vectors of four, or a single one."""
    found = in_short_vectors(b, decoding(buffers, operand, start, lanes))
    return [widened(b, value, operand.type) for value in found]


def read(b: Builder, buffers: Buffers, operand: LoadStep, start: Value, lanes: int) -> Value:
    """A number of the operand's type, or a vector of four, from number ``start``.

    In blocks ``start`` is a multiple of ``lanes``.
    """
    if operand.blocks is None:
        return b.load(buffers.of(operand.array), start, lanes)
    (value,) = read_run(b, buffers, operand, start, lanes)
    return value


def read_at(
    b: Builder, buffers: Buffers, operand: LoadStep, where: Value, mask: Value | None = None
) -> Value:
    """The numbers at a vector of indices; 0 where ``mask`` does not hold."""
    memory, blocks = buffers.of(operand.array), operand.blocks
    if blocks is None:
        assert isinstance(where.type, VecType)
        return b.load(memory, where, where.type.lanes, mask)
    if mask is not None:
        where = b.select(mask, where, b.const(where.type, 0))
    value = widened(b, decode_at(b, memory, blocks, where), operand.type)
    return value if mask is None else b.select(mask, value, b.const(value.type, 0.0))
