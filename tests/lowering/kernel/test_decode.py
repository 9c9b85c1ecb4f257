"""Decoders of blocks against the NumPy definition, and that against ggml's numbers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.quantized import GOLDEN, golden_blocks
from vkjit import blocks
from vkjit.blocks import BLOCK_TYPES, BlockType
from vkjit.errors import DTypeError, InternalError, ShapeError
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.decode import decode, decode_at, longest, unit_type
from vkjit.lowering.kernel.interpret import run
from vkjit.lowering.kernel.interpret_ops import DTYPES
from vkjit.lowering.kernel.types import F32, I32, I64, Access, ScalarType

TYPES = list(BLOCK_TYPES.values())


@pytest.mark.parametrize("block_type", TYPES, ids=str)
@pytest.mark.parametrize("part", ["", "random_"])
def test_the_definition_is_ggmls(block_type: BlockType, part: str) -> None:
    raw, wanted = golden_blocks(block_type, part)
    got = blocks.decode(block_type, raw)
    np.testing.assert_array_equal(
        got.view(np.int32)[~np.isnan(wanted)], wanted.view(np.int32)[~np.isnan(wanted)]
    )
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))


@pytest.mark.parametrize("block_type", TYPES, ids=str)
def test_encoders_give_ggmls_bytes(block_type: BlockType) -> None:
    raw, _ = golden_blocks(block_type, "")
    got = blocks.encode(block_type, GOLDEN["source"])
    assert got.tobytes() == raw.tobytes()


@pytest.mark.parametrize("block_type", TYPES, ids=str)
def test_zeros_are_encoded_as_zeros(block_type: BlockType) -> None:
    made = blocks.encode(block_type, np.zeros((2, 256)))
    np.testing.assert_array_equal(blocks.decode(block_type, made), np.zeros((2, 256)))


@pytest.mark.parametrize("block_type", TYPES, ids=str)
def test_rows_of_one_number_and_of_tiny_ones_keep_their_size(block_type: BlockType) -> None:
    """Searches over grids must not divide by a range of nothing."""
    for rows in (np.full((1, 256), -0.75), np.full((1, 256), 0.5), np.full((1, 256), 1e-30)):
        back = blocks.decode(block_type, blocks.encode(block_type, rows))
        np.testing.assert_allclose(back, rows, rtol=0.05, atol=1e-7)


def test_bad_operands_are_refused() -> None:
    with pytest.raises(ShapeError, match="multiple of 32"):
        blocks.encode(blocks.Q8_0, np.zeros(33))
    with pytest.raises(DTypeError, match="expected an array of q8_0"):
        blocks.decode(blocks.Q8_0, np.zeros(34, np.uint8))
    b = Builder("bad", I32)
    memory = b.buffer("w", I32, 5, Access.READ)
    with pytest.raises(InternalError, match="3 lanes"):
        decode(b, memory, blocks.Q4_1, b.index(0), 3)


def decoded(
    block_type: BlockType, raw: np.ndarray, lanes: int, index_type: ScalarType
) -> np.ndarray:
    """All numbers by kernels of runs of ``lanes``; of gathers in reverse order where negative."""
    count = raw.size * block_type.size
    units = raw.view(DTYPES[unit_type(block_type)]).ravel()
    b = Builder("decode", index_type)
    memory = b.buffer("w", unit_type(block_type), units.size, Access.READ)
    out = b.buffer("out", F32, count, Access.WRITE)
    width = abs(lanes)
    where = b.scaled(b.workgroup_id(), width)
    if lanes > 0:
        b.store(out, where, decode(b, memory, block_type, where, lanes))
    else:
        if width > 1:
            step = count // width
            where = b.add(b.splat(b.workgroup_id(), width), b.iota(width, step))
        b.store(out, where, decode_at(b, memory, block_type, where))
    made = np.zeros(count, np.float32)
    run(b.finish(grid=(count // width, 1, 1)), [units, made])
    return made


@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16, 32, -1, -4])
@pytest.mark.parametrize("block_type", TYPES, ids=str)
def test_kernels_decode_what_the_definition_does(block_type: BlockType, lanes: int) -> None:
    lanes = min(lanes, longest(block_type))
    for part in ("", "random_"):
        raw, _ = golden_blocks(block_type, part)
        wanted = blocks.decode(block_type, raw).ravel()
        index_type = I64 if lanes in (4, -4) else I32
        got = decoded(block_type, raw, lanes, index_type)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
        fine = ~np.isnan(wanted)
        np.testing.assert_array_equal(got.view(np.int32)[fine], wanted.view(np.int32)[fine])
