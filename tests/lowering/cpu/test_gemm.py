"""Products on the CPU: exact sums of small integers, through the interpreter and the CPU device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vkjit.errors import InternalError
from vkjit.lowering.artifact import Launch, Plan, PlannedBuffer, Range, Role
from vkjit.lowering.cpu import gemm_schedule
from vkjit.lowering.cpu.gemm import contract, normalised
from vkjit.lowering.kernel import interpret
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Fma, Value
from vkjit.lowering.kernel.types import BF16, F16, F32, F64, I16, I32, BinOp, ScalarType
from vkjit.lowering.kernel.views import View, dense
from vkjit.lowering.kernel.walk import all_nodes
from vkjit.lowering.legalize import legalize
from vkjit.lowering.plan.groups import (
    ArrayInfo,
    ConstStep,
    ContractGroup,
    LoadStep,
    ProductStep,
    ScalarStep,
    StoreStep,
)
from vkjit.lowering.plan.schedule import ContractSchedule
from vkjit.lowering.target import REFERENCE, Target
from vkjit.lowering.templates.context import Lowered, TemplateContext
from vkjit.runtime import get_device

DTYPES = {
    F16: np.float16,
    BF16: ml_dtypes.bfloat16,
    F32: np.float32,
    F64: np.float64,
    I16: np.int16,
    I32: np.int32,
}
TARGETS = {
    "short": REFERENCE,
    "avx2": replace(REFERENCE, vector_bytes=32, threads=4),
    "avx512": replace(REFERENCE, vector_bytes=64, threads=2),
}
LHS, RHS, OUT, EXTRA = 0, 1, 2, 3


def operand_view(batch: Sequence[int], rows: int, columns: int, order: str) -> View:
    """A dense matrix per batch item, stored by rows ("n") or by columns ("t")."""
    rank = len(batch)
    if order == "n":
        return dense((*batch, rows, columns))
    return dense((*batch, columns, rows)).permuted((*range(rank), rank + 1, rank))


def product(
    lhs: View, rhs: View, elem: ScalarType = F32, accumulate: ScalarType = F32
) -> ContractGroup:
    """A plain product with a dense output."""
    *batch, m, k = lhs.shape
    n = rhs.shape[-1]
    return ContractGroup(
        tuple(batch), m, n, k,
        LoadStep(LHS, lhs, elem),
        LoadStep(RHS, rhs, elem),
        accumulate,
        (ProductStep(elem),),
        (StoreStep(0, OUT, dense((*batch, m, n))),),
    )  # fmt: skip


def matrices(
    m: int, n: int, k: int, layout: str = "nn", batch: Sequence[int] = ()
) -> ContractGroup:
    """A plain f32 product of dense operands in a layout such as "nt"."""
    return product(operand_view(batch, m, k, layout[0]), operand_view(batch, k, n, layout[1]))


def extent(view: View) -> int:
    """Length of the smallest array that ``view`` fits into."""
    if view.size == 0:
        return 1
    axes = zip(view.shape, view.strides, strict=True)
    return 1 + view.offset + sum((n - 1) * s for n, s in axes if s > 0)


def arrays_of(group: ContractGroup) -> list[np.ndarray]:
    """Small random integers for each array of the group; outputs start as a pattern."""
    steps = [group.lhs, group.rhs, *(s for s in group.body if isinstance(s, LoadStep))]
    lengths: dict[int, tuple[int, ScalarType]] = {}
    for array, view, elem in (
        *((s.array, s.view, s.type) for s in steps),
        *((s.array, s.view, group.body[s.value].type) for s in group.stores),
    ):
        lengths[array] = (max(extent(view), lengths.get(array, (0, elem))[0]), elem)
    rng = np.random.default_rng(7)
    return [
        rng.integers(-3, 4, lengths[i][0]).astype(DTYPES[lengths[i][1]])
        for i in range(len(lengths))
    ]


def seen(array: np.ndarray, view: View) -> np.ndarray:
    """The array as ``view`` reads it."""
    strides = [s * array.itemsize for s in view.strides]
    return np.lib.stride_tricks.as_strided(array[view.offset :], view.shape, strides)


def expected(group: ContractGroup, data: Sequence[np.ndarray]) -> np.ndarray:
    """The plain product in the output's type."""
    wide = DTYPES[group.accumulate]
    lhs = seen(data[group.lhs.array], group.lhs.view).astype(wide)
    rhs = seen(data[group.rhs.array], group.rhs.view).astype(wide)
    return np.matmul(lhs, rhs).astype(DTYPES[group.body[0].type])


def lower(
    group: ContractGroup,
    data: Sequence[np.ndarray],
    target: Target,
    schedule: ContractSchedule | None = None,
) -> tuple[list[Lowered], list[ArrayInfo]]:
    elems = {np.dtype(d): e for e, d in DTYPES.items()}
    context = TemplateContext(target, [ArrayInfo(elems[a.dtype], a.size) for a in data])
    return contract(group, schedule, context), context.arrays


def interpreted(
    group: ContractGroup,
    data: Sequence[np.ndarray],
    target: Target,
    schedule: ContractSchedule | None = None,
) -> list[np.ndarray]:
    """All arrays after the kernels ran in the interpreter."""
    kernels, arrays = lower(group, data, target, schedule)
    memory = [a.copy() for a in data]
    memory += [np.full(a.length, -77).astype(DTYPES[a.elem]) for a in arrays[len(data) :]]
    for lowered in kernels:
        interpret.run(lowered.kernel, [memory[i] for i in lowered.arrays])
    return memory


def on_cpu(
    group: ContractGroup, data: Sequence[np.ndarray], schedule: ContractSchedule | None = None
) -> list[np.ndarray]:
    """All given arrays after the kernels ran on the CPU device; written ones are donated."""
    device = get_device("cpu")
    kernels, arrays = lower(group, data, device.target, schedule)
    written = sorted({s.array for s in group.stores})
    buffers = [PlannedBuffer(Role.INPUT, a.nbytes, i) for i, a in enumerate(data)]
    places = [Range(i, 0, a.nbytes) for i, a in enumerate(data)]
    for position, array in enumerate(written):
        size = data[array].nbytes
        places[array] = Range(len(buffers), 0, size)
        buffers.append(PlannedBuffer(Role.OUTPUT, size, position, donated=array))
    arena = 0
    for info in arrays[len(data) :]:
        size = info.length * info.elem.bytes
        places.append(Range(len(buffers), arena, size))
        arena += size + -size % 64
    if arena:
        buffers.append(PlannedBuffer(Role.ARENA, arena))
    steps = tuple(
        Launch(legalize(k.kernel, device.target), tuple(places[i] for i in k.arrays))
        for k in kernels
    )
    barriers = frozenset(range(1, len(steps)))
    loaded = device.load(Plan("gemm", tuple(buffers), steps, barriers, 0, arena))
    results = loaded.run([device.upload(a) for a in data], donated=written)
    memory = [a.copy() for a in data]
    for array, result in zip(written, results, strict=True):
        memory[array] = np.array(device.download(result, data[array].dtype, data[array].shape))
    return memory


def run(
    group: ContractGroup,
    data: Sequence[np.ndarray],
    where: str,
    schedule: ContractSchedule | None = None,
) -> list[np.ndarray]:
    if where == "cpu":
        return on_cpu(group, data, schedule)
    return interpreted(group, data, TARGETS[where], schedule)


def check(group: ContractGroup, wheres: Sequence[str] = (*TARGETS, "cpu")) -> None:
    """The plain product is exact everywhere."""
    data = arrays_of(group)
    want = expected(group, data)
    for where in wheres:
        got = seen(run(group, data, where)[OUT], group.stores[0].view)
        np.testing.assert_array_equal(got, want, err_msg=where)


SHAPES = [
    (1, 1, 1), (1, 40, 9), (40, 1, 9), (1, 1, 33), (2, 3, 40), (7, 19, 12), (14, 32, 16),
    (15, 35, 19), (24, 16, 20), (16, 24, 20), (20, 32, 8),
]  # fmt: skip


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layouts_and_ragged_edges(shape: tuple[int, int, int], layout: str) -> None:
    check(matrices(*shape, layout), ["short", "avx512", "cpu"])


@pytest.mark.parametrize("where", [*TARGETS, "cpu"])
def test_empty_sum_is_zero(where: str) -> None:
    for m, n in ((5, 9), (1, 9), (9, 1)):
        group = matrices(m, n, 0)
        data = arrays_of(group)
        got = run(group, data, where)[OUT]
        np.testing.assert_array_equal(got, np.zeros(m * n, np.float32))
        kernels, _ = lower(group, data, REFERENCE)
        assert [len(k.arrays) for k in kernels] == [1], "operands without elements are not touched"


@pytest.mark.parametrize("shape", [(0, 4, 3), (4, 0, 3)], ids=str)
def test_empty_output_takes_no_kernel(shape: tuple[int, int, int]) -> None:
    group = matrices(*shape)
    assert lower(group, [np.zeros(16, np.float32)] * 3, REFERENCE)[0] == []


@pytest.mark.parametrize(
    ("elem", "accumulate"),
    [(F16, F32), (BF16, F32), (F16, F16), (F64, F64), (F32, F64), (I32, I32)],
    ids=str,
)
@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
def test_element_types(elem: ScalarType, accumulate: ScalarType, layout: str) -> None:
    for m, n, k in ((3, 12, 21), (9, 21, 20)):
        lhs, rhs = operand_view((), m, k, layout[0]), operand_view((), k, n, layout[1])
        check(product(lhs, rhs, elem, accumulate), ["short", "cpu"])


def test_batch_axes_repeat_and_interleave() -> None:
    """Grouped-query attention: 2 x 3 heads of lhs share 2 of rhs; heads lie between positions."""
    lhs = View((2, 3, 17, 8), (3 * 8, 8, 6 * 8, 1))
    rhs = View((2, 3, 8, 21), (8, 0, 1, 2 * 8))
    check(product(lhs, rhs))
    check(product(lhs.permuted((1, 0, 2, 3)), rhs.permuted((1, 0, 2, 3))))


def test_packed_operand_shared_by_the_batch_is_packed_once() -> None:
    """Stride 0 along a batch axis: the packed copy has one item."""
    rhs = View((4, 40, 64), (0, 1, 40))
    group = product(dense((4, 64, 40)), rhs)
    schedule = ContractSchedule(6, 8, block_m=30, pack_rhs=True)
    data = arrays_of(group)
    kernels, arrays = lower(group, data, REFERENCE, schedule)
    assert [k.kernel.name for k in kernels] == ["pack", "gemm"]
    assert arrays[-1].length == 40 * 64
    got = interpreted(group, data, REFERENCE, schedule)[OUT]
    np.testing.assert_array_equal(got.reshape(4, 64, 64), expected(group, data))


@st.composite
def strided(draw: st.DrawFn, shape: tuple[int, ...]) -> View:
    """A view of ``shape``: axes in any order, gaps, repeated or reversed axes."""
    strides = [0] * len(shape)
    step, offset = 1, draw(st.integers(0, 3))
    for axis in draw(st.permutations(range(len(shape)))):
        kind = draw(st.sampled_from(["plain", "plain", "plain", "repeat", "back"]))
        strides[axis] = {"plain": step, "repeat": 0, "back": -step}[kind]
        if kind == "back":
            offset += step * (shape[axis] - 1)
        if kind != "repeat":
            step *= shape[axis] + draw(st.sampled_from([0, 0, 1, 3]))
    return View(shape, tuple(strides), offset)


@st.composite
def products(draw: st.DrawFn) -> ContractGroup:
    batch = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    m, n, k = (draw(st.integers(1, 24)) for _ in range(3))
    elem, accumulate = draw(st.sampled_from([(F32, F32), (F32, F32), (BF16, F32), (I32, I32)]))
    lhs, rhs = draw(strided((*batch, m, k))), draw(strided((*batch, k, n)))
    return product(lhs, rhs, elem, accumulate)


@given(products(), st.sampled_from(list(TARGETS)))
def test_any_strides(group: ContractGroup, where: str) -> None:
    check(group, [where])


@given(products())
def test_any_strides_on_the_cpu(group: ContractGroup) -> None:
    check(group, ["cpu"])


@st.composite
def scheduled(draw: st.DrawFn) -> tuple[ContractGroup, ContractSchedule]:
    """A product and any schedule that its operands allow."""
    group = normalised(draw(products()))
    lanes = gemm_schedule.vector_lanes(group, REFERENCE)
    vectors = draw(st.integers(1, 3))
    most = (15 - vectors) // vectors
    pack_lhs = draw(st.booleans())
    rows = draw(st.integers(1, most if pack_lhs else min(most, group.m)))
    pack_rhs = not gemm_schedule.reads_along_n(group) or draw(st.booleans())
    block_k = draw(st.sampled_from([0, 4, 8, 20]))
    if block_k and (group.k % block_k or block_k) < lanes:
        block_k = 0
    schedule = ContractSchedule(
        tile_m=rows,
        tile_n=vectors * lanes,
        tile_k=draw(st.integers(1, 4)),
        block_m=rows * draw(st.integers(0, 3)),
        block_n=vectors * lanes * draw(st.integers(0, 3)),
        block_k=block_k,
        pack_lhs=pack_lhs,
        pack_rhs=pack_rhs,
    )
    return group, schedule


@given(scheduled())
def test_any_schedule(case: tuple[ContractGroup, ContractSchedule]) -> None:
    group, schedule = case
    data = arrays_of(group)
    if gemm_schedule.is_dot(group, schedule):
        schedule = replace(schedule, pack_rhs=True)
    got = seen(interpreted(group, data, REFERENCE, schedule)[OUT], group.stores[0].view)
    np.testing.assert_array_equal(got, expected(group, data))


@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
def test_long_sums_run_in_blocks(layout: str) -> None:
    group = matrices(33, 70, 5000, layout)
    device = get_device("cpu")
    assert gemm_schedule.default_schedule(normalised(group), device.target).block_k
    check(group, ["cpu"])


@given(
    st.tuples(*(st.integers(1, 3000) for _ in range(3))),
    st.sampled_from(["nn", "nt", "tn", "tt"]),
    st.sampled_from(list(TARGETS)),
    st.integers(1, 20),
)
def test_default_schedules_fit(
    shape: tuple[int, int, int], layout: str, where: str, items: int
) -> None:
    group = normalised(matrices(*shape, layout, (items,)))
    schedule = gemm_schedule.default_schedule(group, TARGETS[where])
    gemm_schedule.validate(group, schedule, TARGETS[where])


def relu(b: Builder, x: Value) -> Value:
    return b.binary(BinOp.MAX, x, b.const(x.type, 0.0))


def with_epilogue(group: ContractGroup, store: View, bias: View, residual: View) -> ContractGroup:
    """Stores ``relu(product * 2 + bias) + residual`` and the product itself."""
    body = (
        ProductStep(F32),
        ConstStep(2.0, F32),
        LoadStep(EXTRA, bias, F32),
        LoadStep(OUT, residual, F32),
        ScalarStep(Builder.mul, (0, 1), F32),
        ScalarStep(Builder.add, (4, 2), F32),
        ScalarStep(relu, (5,), F32),
        ScalarStep(Builder.add, (6, 3), F32),
    )
    stores = (StoreStep(7, OUT, store), StoreStep(0, EXTRA + 1, store))
    return replace(group, body=body, stores=stores)


@pytest.mark.parametrize("where", [*TARGETS, "cpu"])
@pytest.mark.parametrize("order", ["nt", "tn"], ids=["output by rows", "output by columns"])
@pytest.mark.parametrize("shape", [(2, 33, 50, 20), (1, 5, 33, 9), (2, 33, 4, 70)], ids=str)
def test_epilogue_in_place(shape: tuple[int, int, int, int], order: str, where: str) -> None:
    """The residual is read from the array that the result overwrites, each element once."""
    batch, m, n, k = shape
    store = operand_view((batch,), m, n, order[0])
    bias = View((batch, m, n), (0, 0, 1))
    group = with_epilogue(matrices(m, n, k, order, (batch,)), store, bias, store)
    data = arrays_of(group)
    plain = expected(group, data)
    want = np.maximum(plain * 2 + data[EXTRA][:n], 0) + seen(data[OUT], store)
    memory = run(group, data, where)
    np.testing.assert_array_equal(seen(memory[OUT], store), want)
    np.testing.assert_array_equal(seen(memory[EXTRA + 1], store), plain)


def test_skinny_products_are_not_packed() -> None:
    """Adapters of rank 16, forward and backward: one kernel, operands where they lie."""
    target = replace(REFERENCE, vector_bytes=64, threads=2)
    for m, n, k, layout in (
        (512, 16, 576, "nn"),
        (512, 576, 16, "nn"),
        (16, 576, 512, "tn"),
        (576, 16, 512, "tn"),
    ):
        schedule = gemm_schedule.default_schedule(normalised(matrices(m, n, k, layout)), target)
        assert not schedule.pack_rhs, (m, n, k)


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_kernels_stay_small(layout: str) -> None:
    """Compile time is in the text: one register tile for all edges, four steps and a rest."""
    target = replace(REFERENCE, vector_bytes=64, threads=2)
    group = matrices(509, 575, 577, layout)
    kernels, _ = lower(group, arrays_of(group), target)
    for lowered in kernels:
        nodes = list(all_nodes(lowered.kernel.body))
        assert len(nodes) < 900
        assert sum(isinstance(n, Fma) for n in nodes) <= 5 * 28


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile_n": 6}, "tile_n must be a multiple of 4 lanes"),
        ({"tile_m": 20}, "must fit 16 vector registers"),
        ({"tile_m": 6, "pack_lhs": False, "block_m": 10}, "blocks must be whole tiles"),
        ({"pack_rhs": False}, "rhs must be packed"),
        ({"block_k": 18}, "each block of k must have at least 4 steps"),
    ],
)
def test_schedules_that_do_not_fit(change: dict[str, int], message: str) -> None:
    group = matrices(40, 40, 20, "tt")
    good = ContractSchedule(6, 8, pack_lhs=True, pack_rhs=True)
    gemm_schedule.validate(group, good, REFERENCE)
    with pytest.raises(InternalError, match=message):
        gemm_schedule.validate(group, replace(good, **change), REFERENCE)
