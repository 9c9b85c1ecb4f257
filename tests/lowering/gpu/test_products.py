"""Products on the GPU: every schedule of every layout against NumPy, in the interpreter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.targets import LARGE_GPU
from vkjit.errors import InternalError
from vkjit.lowering.gpu import choose, gemm_schedule, gemm_skinny
from vkjit.lowering.kernel.interpret import run
from vkjit.lowering.kernel.interpret_ops import DTYPES
from vkjit.lowering.kernel.nodes import Kernel
from vkjit.lowering.kernel.text import text
from vkjit.lowering.kernel.types import BF16, F16, F32, F64, I32, BinOp, ScalarType, UnOp
from vkjit.lowering.kernel.views import View, dense
from vkjit.lowering.legalize import legalize
from vkjit.lowering.plan.groups import (
    ArrayInfo,
    ContractGroup,
    LoadStep,
    ProductStep,
    ScalarStep,
    StoreStep,
)
from vkjit.lowering.plan.schedule import (
    CoopSchedule,
    GpuContract,
    NaiveSchedule,
    SkinnySchedule,
    TiledSchedule,
)
from vkjit.lowering.spirv.emit import emit
from vkjit.lowering.spirv.validate import validate
from vkjit.lowering.target import (
    MINIMAL_GPU,
    Addressing,
    CoopShape,
    Target,
)
from vkjit.lowering.templates.context import Lowered, TemplateContext

Array = np.ndarray[Any, Any]
GOLDEN = Path(__file__).parents[2] / "data/kernels/gemm_tiled.txt"

LARGE = replace(LARGE_GPU, subgroup_sizes=(8,), cores=132)
"""Subgroups of 8, as software drivers have, keep the interpreter quick."""

SCHEDULES: list[GpuContract] = [
    NaiveSchedule(4, 8),
    TiledSchedule(8, 8, 8, 1, 1),
    TiledSchedule(16, 16, 16, 1, 1, 2, slices=2),
    TiledSchedule(16, 32, 8, 4, 4),
    TiledSchedule(32, 16, 16, 4, 8, 2),
    TiledSchedule(32, 32, 8, 8, 8, 2, unroll=2),
    TiledSchedule(16, 16, 8, 4, 4, 2, 3),
    TiledSchedule(16, 16, 16, 4, 4, 1, 1, slices=4, unroll=2),
    TiledSchedule(16, 16, 16, 1, 1, 1, 2),
]
LAYOUTS = ["nn", "nt", "tn", "tt"]
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.text())


def matrices(
    sizes: tuple[int, int, int],
    layout: str = "nn",
    batch: tuple[int, ...] = (),
    elem: ScalarType = F32,
    accumulate: ScalarType = F32,
) -> ContractGroup:
    """Array 0 times array 1 into array 2; "t" says that an operand lies transposed."""
    m, n, k = sizes

    def operand(array: int, rows: int, columns: int, how: str) -> LoadStep:
        if how == "n":
            return LoadStep(array, dense((*batch, rows, columns)), elem)
        view = dense((*batch, columns, rows))
        axes = [*range(len(batch)), len(batch) + 1, len(batch)]
        return LoadStep(array, view.permuted(axes), elem)

    out = accumulate
    return ContractGroup(
        batch,
        m,
        n,
        k,
        operand(0, m, k, layout[0]),
        operand(1, k, n, layout[1]),
        accumulate,
        (ProductStep(out),),
        (StoreStep(0, 2, dense((*batch, m, n))),),
    )


def filled(group: ContractGroup, seed: int = 0) -> list[Array]:
    """Operands that fill their arrays, and an output of NaN or -1."""
    rng = np.random.default_rng(seed)
    count = math.prod(group.batch)
    arrays: list[Array] = []
    for operand, size in ((group.lhs, group.m * group.k), (group.rhs, group.k * group.n)):
        length = max(1, count * size)
        if operand.type.kind == "int":
            values = rng.integers(-9, 9, length)
        else:
            values = rng.standard_normal(length)
        arrays.append(values.astype(DTYPES[operand.type]))
    elem = group.body[-1].type
    fill = np.nan if elem.kind == "float" else -1
    arrays.append(np.full(count * group.m * group.n, fill, DTYPES[elem]))
    return arrays


def seen(array: Array, view: View) -> Array:
    """The elements of a flat array that a view shows, as float64 or int64."""
    index = np.full(view.shape, view.offset)
    for axis, (size, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
        along = [1] * len(view.shape)
        along[axis] = size
        index = index + (np.arange(size) * stride).reshape(along)
    is_float = array.dtype.kind not in "iub"
    return array[index].astype(np.float64 if is_float else np.int64)


def expected(group: ContractGroup, arrays: Sequence[Array]) -> tuple[Array, Array]:
    """The product, and the same of absolute values, which bounds its rounding errors."""
    x, y = seen(arrays[0], group.lhs.view), seen(arrays[1], group.rhs.view)
    return x @ y, np.abs(x) @ np.abs(y)


def tolerance(group: ContractGroup) -> float:
    """Relative to the sum of absolute products: the classic bound k * eps, and one conversion.

    Higham, Accuracy and Stability of Numerical Algorithms, section 3.1; for any order of adding.
    """
    elem = group.accumulate
    if elem.kind == "int":
        return 0.0
    eps = {F32: 2.0**-24, F64: 2.0**-53, F16: 2.0**-11}[elem]
    return (group.k + 2) * eps


def lowered(
    group: ContractGroup,
    schedule: GpuContract,
    infos: Sequence[ArrayInfo],
    target: Target = LARGE,
) -> tuple[list[Lowered], list[ArrayInfo]]:
    context = TemplateContext(target, list(infos))
    return choose.lower_contract(group, schedule, context), context.arrays


def infos_of(arrays: Sequence[Array], group: ContractGroup) -> list[ArrayInfo]:
    elems = (group.lhs.type, group.rhs.type, group.body[-1].type)
    return [ArrayInfo(e, a.size) for e, a in zip(elems, arrays, strict=False)]


def product(
    group: ContractGroup, schedule: GpuContract, arrays: Sequence[Array], target: Target = LARGE
) -> tuple[Array, list[Kernel]]:
    """The last array after the kernels ran, and the kernels."""
    kernels, infos = lowered(group, schedule, infos_of(arrays, group), target)
    memory = [*arrays]
    for info in infos[len(arrays) :]:
        memory.append(np.full(info.length, np.nan if info.elem.kind == "float" else 99))
        memory[-1] = memory[-1].astype(DTYPES[info.elem])
    for item in kernels:
        run(item.kernel, [memory[a] for a in item.arrays])
    return arrays[2], [item.kernel for item in kernels]


def check(group: ContractGroup, schedule: GpuContract, target: Target = LARGE) -> list[Kernel]:
    arrays = filled(group)
    got, kernels = product(group, schedule, arrays, target)
    want, scale = expected(group, arrays)
    error = np.abs(seen(got, group.stores[0].view) - want)
    assert np.all(error <= tolerance(group) * scale)
    return kernels


# -- values ---------------------------------------------------------------------------------------


@every_schedule
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_with_whole_tiles(schedule: GpuContract, layout: str) -> None:
    check(matrices((32, 32, 48), layout), schedule)


@every_schedule
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [(37, 45, 29), (36, 40, 28), (5, 68, 100)], ids=str)
def test_layouts_with_edges(
    schedule: GpuContract, layout: str, sizes: tuple[int, int, int]
) -> None:
    check(matrices(sizes, layout), schedule)


@every_schedule
@pytest.mark.parametrize("sizes", [(1, 1, 1), (9, 7, 1), (3, 20, 0), (1, 40, 33), (40, 1, 33)])
def test_small_sizes(schedule: GpuContract, sizes: tuple[int, int, int]) -> None:
    arrays = filled(matrices(sizes))
    got, _ = product(matrices(sizes), schedule, arrays)
    want, scale = expected(matrices(sizes), arrays)
    assert np.all(np.abs(got.reshape(want.shape) - want) <= tolerance(matrices(sizes)) * scale)


@every_schedule
def test_batches_that_repeat_an_operand(schedule: GpuContract) -> None:
    group = matrices((18, 20, 24), "nn", (2, 3))
    strides = (0, *group.rhs.view.strides[1:])
    check(
        replace(group, rhs=replace(group.rhs, view=replace(group.rhs.view, strides=strides))),
        schedule,
    )


@every_schedule
@pytest.mark.parametrize("elem", [BF16, F16], ids=repr)
def test_narrow_operands_are_summed_in_f32(schedule: GpuContract, elem: ScalarType) -> None:
    check(matrices((20, 36, 40), "nt", elem=elem), schedule)


@every_schedule
@pytest.mark.parametrize("elem", [I32, F64], ids=repr)
def test_other_sums(schedule: GpuContract, elem: ScalarType) -> None:
    check(matrices((20, 36, 40), "tn", elem=elem, accumulate=elem), schedule)


@every_schedule
def test_outputs_that_lie_transposed(schedule: GpuContract) -> None:
    group = matrices((24, 36, 20), "nt")
    view = dense((36, 24)).permuted((1, 0))
    check(replace(group, stores=(StoreStep(0, 2, view),)), schedule)


@every_schedule
def test_outputs_apart_in_memory(schedule: GpuContract) -> None:
    """Every second element of a larger array: nothing is stored as a vector."""
    group = matrices((18, 21, 20))
    arrays = filled(group)
    arrays[2] = np.zeros(18 * 42, np.float32)
    view = View((18, 21), (42, 2), 1)
    group = replace(group, stores=(StoreStep(0, 2, view),))
    got, _ = product(group, schedule, arrays)
    want, scale = expected(group, arrays)
    assert np.all(np.abs(seen(got, view) - want) <= tolerance(group) * scale)
    assert not got[::2].any()


@every_schedule
def test_nan_and_inf_go_where_they_belong(schedule: GpuContract) -> None:
    group = matrices((33, 34, 20))
    arrays = filled(group)
    arrays[0].reshape(33, 20)[32, 19] = np.nan
    arrays[0].reshape(33, 20)[3, 0] = np.inf
    got, _ = product(group, schedule, arrays)
    got = got.reshape(33, 34)
    assert np.isnan(got[32]).all()
    assert np.isinf(got[3]).all()
    assert np.isfinite(np.delete(got, [3, 32], axis=0)).all()


@every_schedule
def test_epilogues(schedule: GpuContract) -> None:
    """tanh(product + bias) in bfloat16, and the bare product in float32."""
    group = matrices((21, 36, 24))
    body = (
        ProductStep(F32),
        LoadStep(3, View((21, 36), (0, 1)), F32),
        ScalarStep(lambda b, x, y: b.unary(UnOp.TANH, b.binary(BinOp.ADD, x, y)), (0, 1), F32),
    )
    stores = (StoreStep(0, 2, dense((21, 36))), StoreStep(2, 4, dense((21, 36))))
    group = replace(group, body=body, stores=stores)
    x, y, out = filled(group)
    bias = np.linspace(-1, 1, 36, dtype=np.float32)
    second = np.zeros(21 * 36, np.float32)
    infos = [ArrayInfo(F32, a.size) for a in (x, y, out, bias, second)]
    kernels, infos = lowered(group, schedule, infos)
    memory = [x, y, out, bias, second]
    memory += [np.zeros(i.length, DTYPES[i.elem]) for i in infos[5:]]
    for item in kernels:
        run(item.kernel, [memory[a] for a in item.arrays])
    want, scale = expected(group, [x, y])
    assert np.all(np.abs(out.reshape(21, 36) - want) <= tolerance(group) * scale)
    error = np.abs(second.reshape(21, 36) - np.tanh(want + bias))
    # tanh is a contraction; 4 eps for its own value.
    assert np.all(error <= tolerance(group) * (scale + 1) + 4 * 2.0**-24)


# -- few rows ------------------------------------------------------------------------------------

SKINNY = [
    SkinnySchedule(8, 1),
    SkinnySchedule(16, 2),
    SkinnySchedule(4, 4),
    SkinnySchedule(8, 2, 1, split_k=3),
    SkinnySchedule(4, 4, 8, along_k=False),
    SkinnySchedule(2, 1, 4, along_k=False, split_k=2),
]
every_skinny = pytest.mark.parametrize("schedule", SKINNY, ids=lambda s: s.text())
NO_SHUFFLES = replace(LARGE, subgroup_ops=False)


@every_skinny
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [(1, 40, 72), (3, 37, 45), (30, 2, 130), (1, 1, 5)])
def test_few_rows(schedule: GpuContract, layout: str, sizes: tuple[int, int, int]) -> None:
    check(matrices(sizes, layout), schedule, LARGE if sizes[0] == 3 else NO_SHUFFLES)


@every_skinny
def test_few_rows_of_batches_of_narrow_numbers(schedule: GpuContract) -> None:
    check(matrices((2, 36, 64), "nt", (3,), BF16), schedule)
    check(matrices((2, 36, 64), "nn", (3,), I32, I32), schedule)


def test_few_rows_are_chosen_for_vectors() -> None:
    for sizes, layout in (((1, 4096, 4096), "nt"), ((4096, 1, 4096), "nn"), ((4, 576, 576), "nn")):
        group = matrices(sizes, layout)
        context = TemplateContext(LARGE, [ArrayInfo(F32, 1 << 24)] * 3)
        assert isinstance(choose.candidates(group, context)[0], SkinnySchedule)


# -- texts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("addressing", list(Addressing), ids=lambda mode: mode.value)
@pytest.mark.parametrize("schedule", [*SCHEDULES, *SKINNY], ids=lambda s: s.text())
def test_spirv_is_valid(schedule: GpuContract, addressing: Addressing) -> None:
    arithmetic = frozenset({F32, I32})
    target = replace(LARGE, addressing=addressing, arithmetic=arithmetic)
    few = isinstance(schedule, SkinnySchedule)
    for elem in (F32, BF16):
        group = matrices((3 if few else 40, 36, 52), "nt", (2,), elem)
        infos = [ArrayInfo(elem, 1 << 14), ArrayInfo(elem, 1 << 14), ArrayInfo(F32, 1 << 14)]
        for item in lowered(group, schedule, infos, target)[0]:
            validate(emit(legalize(item.kernel, target), target))


def test_the_text_of_a_kernel() -> None:
    """Two stages, a partial step first, no test of edges; lhs contiguous along k."""
    schedule = TiledSchedule(8, 8, 8, 4, 4, 2, unroll=1)
    infos = [ArrayInfo(F32, size) for size in (16 * 20, 20 * 8, 16 * 8)]
    ((item,), _) = lowered(matrices((16, 8, 20)), schedule, infos)
    assert text(item.kernel) == GOLDEN.read_text()


# -- structure ------------------------------------------------------------------------------------


def test_parts_of_a_sum_are_joined_in_a_second_kernel() -> None:
    schedule = TiledSchedule(16, 16, 16, 4, 4, 1, 4)
    assert [k.name for k in check(matrices((16, 16, 256)), schedule)] == ["gemm_tiled", "pointwise"]
    uneven = check(matrices((16, 16, 250)), schedule)
    assert [k.name for k in uneven] == ["gemm_tiled", "gemm_tiled", "pointwise"]
    assert [k.name for k in check(matrices((16, 16, 1)), schedule)] == ["gemm_tiled"]


@pytest.mark.parametrize(
    "change",
    [{"block_k": 12}, {"tile_m": 5}, {"slices": 3}, {"unroll": 3}, {"stages": 3}, {"split_k": 0}],
    ids=str,
)
def test_numbers_that_do_not_divide_each_other_are_refused(change: dict[str, int]) -> None:
    group = matrices((16, 16, 16))
    schedule = replace(TiledSchedule(16, 16, 8, 4, 4), **change)
    assert not gemm_schedule.fits(group, schedule, LARGE)
    with pytest.raises(InternalError, match="do not divide each other"):
        lowered(group, schedule, [ArrayInfo(F32, 256)] * 3)


SHAPES = [
    (1, 1, 1),
    (4096, 4096, 4096),
    (512, 576, 576),
    (512, 16, 49152),
    (512, 49152, 16),
    (1, 4096, 4096),
    (4096, 3, 4096),
    (7, 5, 0),
    (0, 4, 3),
    (40, 0, 3),
]


@pytest.mark.parametrize("target", [LARGE, MINIMAL_GPU], ids=lambda t: t.name)
@pytest.mark.parametrize("elem", [F32, F64], ids=repr)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_candidates_keep_to_the_limits(
    target: Target, elem: ScalarType, sizes: tuple[int, int, int]
) -> None:
    group = matrices(sizes, elem=elem, accumulate=elem)
    infos = [
        ArrayInfo(elem, max(1, size))
        for size in (sizes[0] * sizes[2], sizes[1] * sizes[2], sizes[0] * sizes[1])
    ]
    found = choose.candidates(group, TemplateContext(target, infos))
    assert len(found) == len(set(found))
    for schedule in [*found[:3], *{type(s): s for s in found}.values()]:
        for item in lowered(group, schedule, infos, target)[0]:
            workgroup = item.kernel.workgroup
            assert math.prod(workgroup) <= target.max_invocations
            assert all(n <= most for n, most in zip(workgroup, target.max_workgroup, strict=True))
            nbytes = sum(s.length * s.elem.bytes for s in item.kernel.scratch)
            assert nbytes <= target.shared_bytes


def test_nothing_without_rows_is_left_to_the_template_of_few_rows() -> None:
    for sizes in ((0, 4, 3), (40, 0, 3), (0, 0, 0)):
        assert gemm_skinny.costs(matrices(sizes), LARGE) == {}


def test_matrix_units_come_first_unless_an_axis_is_short() -> None:
    shapes = [CoopShape(F16, F16, F32, 16, 16, 16)]
    features = frozenset({"subgroup_shuffle", "vulkan_memory_model"})
    target = replace(LARGE, coop_shapes=tuple(shapes), features=features, subgroup_sizes=(32,))
    context = TemplateContext(target, [ArrayInfo(F16, 1 << 24)] * 2 + [ArrayInfo(F32, 1 << 24)])
    shapes_and_plain = (
        ((512, 576, 576), False), ((256, 16, 576), True), ((512, 576, 16), True),
        ((512, 16, 576), False),  # long: narrow tiles of matrices
    )  # fmt: skip
    for sizes, plain in shapes_and_plain:
        found = choose.candidates(matrices(sizes, elem=F16), context)
        assert any(isinstance(s, CoopSchedule) for s in found)
        assert isinstance(found[0], CoopSchedule) != plain


def test_large_products_use_large_tiles_and_small_ones_fill_the_device() -> None:
    context = TemplateContext(LARGE, [ArrayInfo(F32, 1 << 24)] * 3)
    large = choose.candidates(matrices((4096, 4096, 4096)), context)[0]
    assert isinstance(large, TiledSchedule)
    assert (large.block_m, large.block_n, large.split_k) == (128, 128, 1)
    group = matrices((512, 16, 576))
    small = choose.candidates(group, context)[0]
    assert isinstance(small, TiledSchedule)
    assert gemm_schedule.workgroups(group, small) >= 32
