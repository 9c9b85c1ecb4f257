"""Products of quantized blocks on the CPU: exact sums, and blocks read where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lowering.cpu import test_gemm as plain
from tests.lowering.cpu.test_gemm import DTYPES, LHS, OUT, RHS, operand_view, product, seen
from tests.quantized import golden_blocks
from vkjit import blocks
from vkjit.blocks import BLOCK_TYPES, BlockType
from vkjit.errors import InternalError
from vkjit.lowering.cpu import gemm_schedule
from vkjit.lowering.cpu.gemm import normalised
from vkjit.lowering.kernel.decode import unit_type
from vkjit.lowering.kernel.types import BF16, F16, F32, ScalarType
from vkjit.lowering.kernel.views import View, dense
from vkjit.lowering.plan.groups import ContractGroup
from vkjit.lowering.plan.schedule import ContractSchedule
from vkjit.lowering.target import REFERENCE
from vkjit.lowering.templates.context import TemplateContext

TYPES = list(BLOCK_TYPES.values())
AVX512 = replace(REFERENCE, vector_bytes=64, threads=2)


def whole_blocks(block_type: BlockType, count: int, factor: float) -> np.ndarray:
    """Blocks of few bits, so that sums are exact: any codes and scales of 6 bits."""
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 256, (count, block_type.nbytes), np.uint8)
    made = raw.view(block_type.dtype).reshape(count)
    made["d"] = factor
    for name in ("m", "dmin"):
        if name in (block_type.dtype.names or ()):
            made[name] = 2
    return made


def of_blocks(
    group: ContractGroup, block_type: BlockType, sides: Sequence[str] = ("rhs",)
) -> ContractGroup:
    """The group with operands of blocks."""
    for side in sides:
        step = replace(getattr(group, side), blocks=block_type)
        group = replace(group, **{side: step})
    return group


def data_of(group: ContractGroup) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Arrays of the group with units of blocks, and the same with their numbers."""
    numbers = plain.arrays_of(group)
    units = list(numbers)
    for step in (group.lhs, group.rhs):
        if step.blocks:
            count = -(-plain.extent(step.view) // step.blocks.size)
            made = whole_blocks(step.blocks, count, 2.0**-10 if step.type is F16 else 1)
            units[step.array] = made.view(DTYPES[unit_type(step.blocks)])
            numbers[step.array] = blocks.decode(step.blocks, made).astype(DTYPES[step.type])
    return units, numbers


def check(
    group: ContractGroup, wheres: Sequence[str], schedule: ContractSchedule | None = None
) -> None:
    units, numbers = data_of(group)
    want = plain.expected(group, numbers)
    for where in wheres:
        got = seen(plain.run(group, units, where, schedule)[OUT], group.stores[0].view)
        np.testing.assert_array_equal(got, want, err_msg=where)


def linear(
    block_type: BlockType,
    sizes: tuple[int, int, int],
    layout: str = "nt",
    elem: ScalarType = F32,
) -> ContractGroup:
    """Rows times a weight of blocks: (n, k) read along k in "nt", (k, n) read along n in "nn"."""
    m, n, k = sizes
    lhs, rhs = operand_view((), m, k, layout[0]), operand_view((), k, n, layout[1])
    return of_blocks(product(lhs, rhs, elem), block_type)


@pytest.mark.parametrize("block_type", TYPES, ids=str)
@pytest.mark.parametrize("layout", ["nt", "nn"])
def test_all_types_in_both_layouts(block_type: BlockType, layout: str) -> None:
    """A tile of rows, and several; n and k of one block and of two or three."""
    size = block_type.size
    more = 96 if size == 32 else size
    for sizes in ((2, size, 2 * size), (33, more, size)):
        check(linear(block_type, sizes, layout), ["cpu"])


@pytest.mark.parametrize("block_type", TYPES, ids=str)
@pytest.mark.parametrize("where", ["short", "avx512"])
def test_the_interpreter_agrees(block_type: BlockType, where: str) -> None:
    size = block_type.size
    for sizes, layout in (((1, 5, size), "nt"), ((15, 3, size), "nt"), ((2, size, 3), "nn")):
        check(linear(block_type, sizes, layout), [where])


@pytest.mark.parametrize("where", ["avx2", "avx512"])
@pytest.mark.parametrize("m", [2, 15])
def test_vectors_of_other_widths(m: int, where: str) -> None:
    check(linear(blocks.Q5_1, (m, 20, 64), "nt"), [where])
    check(linear(blocks.Q4_K, (m, 256, 5), "nn"), [where])


@pytest.mark.parametrize("n", [1, 5, 33])
@pytest.mark.parametrize("m", [1, 40])
def test_ragged_rows_of_weights(m: int, n: int) -> None:
    check(linear(blocks.Q8_0, (m, n, 64)), ["cpu"])
    check(linear(blocks.Q6_K, (m, n, 256)), ["cpu"])


@pytest.mark.parametrize("elem", [F16, BF16], ids=str)
@pytest.mark.parametrize("layout", ["nt", "nn"])
def test_numbers_are_rounded_to_the_type_of_the_product(elem: ScalarType, layout: str) -> None:
    for m in (3, 20):
        check(linear(blocks.Q6_K, (m, 256, 256), layout, elem), ["cpu"])
    check(linear(blocks.Q4_1, (3, 5, 32), "nt", elem), ["short"])


def test_long_sums_run_in_whole_blocks() -> None:
    group = linear(blocks.Q4_0, (40, 64, 3136))
    schedule = gemm_schedule.default_schedule(normalised(group), AVX512)
    assert schedule.block_k == 512
    check(group, ["cpu"])
    check(linear(blocks.Q4_0, (40, 64, 3136), "nn"), ["cpu"])


def test_blocks_on_the_left_on_both_sides_and_in_columns() -> None:
    m, n, k = 64, 20, 32
    group = of_blocks(product(dense((m, k)), dense((k, n))), blocks.Q5_0, ("lhs",))
    check(group, ["short", "cpu"])
    assert normalised(group).rhs.blocks is blocks.Q5_0
    both = product(dense((9, k)), operand_view((), k, 10, "t"))
    check(of_blocks(both, blocks.Q8_0, ("lhs", "rhs")), ["short", "cpu"])


def test_batches_share_or_stack_weights() -> None:
    shared = product(dense((2, 5, 32)), View((2, 32, 32), (0, 1, 32)))
    stacked = product(dense((2, 20, 32)), View((2, 32, 32), (32 * 32, 32, 1)))
    for group in (shared, stacked):
        check(of_blocks(group, blocks.Q4_1), ["short", "cpu"])


@pytest.mark.parametrize(
    "view",
    [
        View((40, 30), (1, 64), 3),  # part of each row, not from the start of a block
        View((64, 30), (-1, 64), 63),  # rows backwards
        View((32, 30), (2, 64)),  # every other number
        View((20, 40), (64, 1), 7),  # columns from the middle of a block
    ],
    ids=str,
)
def test_any_view_of_the_numbers(view: View) -> None:
    for m in (2, 17):
        check(of_blocks(product(dense((m, view.shape[0])), view), blocks.Q4_0), ["cpu"])


@st.composite
def block_products(draw: st.DrawFn) -> ContractGroup:
    block_type = draw(st.sampled_from(TYPES))
    size = block_type.size
    m, few = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    many = size * draw(st.integers(1, 2))
    layout = draw(st.sampled_from(["nn", "nt", "tn", "tt"]))
    elem = draw(st.sampled_from([F32, F32, BF16, F16]))
    n, k = (few, many) if layout[1] == "t" else (many, few)
    return linear(block_type, (m, n, k), layout, elem)


@settings(max_examples=20)
@given(block_products())
def test_random_products(group: ContractGroup) -> None:
    check(group, ["cpu"])


@pytest.mark.parametrize("block_type", TYPES, ids=str)
def test_fractions_and_small_scales_survive(block_type: BlockType) -> None:
    """Ones pick the numbers that ggml computes, bit by bit, on both paths of vectors along k."""
    raw, numbers = golden_blocks(block_type)
    units = raw.ravel().view(DTYPES[unit_type(block_type)])
    n, k = numbers.shape
    for m in (4, 40):
        group = linear(block_type, (m, n, k))
        data = [np.eye(m, k, 200, np.float32).ravel(), units, np.zeros(m * n, np.float32)]
        got = plain.run(group, data, "cpu")[OUT].reshape(m, n)
        np.testing.assert_array_equal(got, numbers[:, 200 : 200 + m].T)


@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize("m", [1, 64, 512])
def test_no_memory_of_the_size_of_the_weight(m: int, layout: str) -> None:
    """One kernel, no temporary array, scratch memory for one panel and for tiles of lhs."""
    group = linear(blocks.Q4_K, (m, 1536, 1280), layout)
    units, _ = data_of(group)
    elems = {np.dtype(d): e for e, d in DTYPES.items()}
    arrays = [plain.ArrayInfo(elems[a.dtype], a.size) for a in units]
    context = TemplateContext(AVX512, arrays, frozenset({RHS}))
    (lowered,) = plain.contract(group, None, context)
    assert len(context.arrays) == 3
    assert max(s.length for s in lowered.kernel.scratch) <= 48 * 1280
    assert set(lowered.arrays) == {LHS, RHS, OUT}


def test_schedules_that_do_not_fit_blocks() -> None:
    group = linear(blocks.Q4_K, (40, 64, 512))
    good = gemm_schedule.default_schedule(group, AVX512)
    gemm_schedule.validate(group, good, AVX512)
    with pytest.raises(InternalError, match="whole blocks of rhs"):
        gemm_schedule.validate(group, replace(good, block_k=128), AVX512)
    with pytest.raises(InternalError, match="rhs must be packed"):
        gemm_schedule.validate(group, replace(good, pack_rhs=False), AVX512)
