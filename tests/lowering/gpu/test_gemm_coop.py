"""Products on subgroup matrix units: interpreted, validated as SPIR-V, and their schedules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from tests.products import DTYPES, LHS, OUT, RHS, Array, Case
from vkjit.errors import InternalError
from vkjit.ir.evaluate import evaluate
from vkjit.lowering.artifact import Launch
from vkjit.lowering.compile import compile_program
from vkjit.lowering.gpu import gemm_coop
from vkjit.lowering.gpu.choose import candidates as choices
from vkjit.lowering.gpu.choose import lower_contract
from vkjit.lowering.gpu.gemm_coop_schedule import candidates, narrow, scheme_of, shared_bytes
from vkjit.lowering.kernel.check import verify
from vkjit.lowering.kernel.interpret import run
from vkjit.lowering.kernel.nodes import Kernel, Load, MatStore, Store
from vkjit.lowering.kernel.parse import parse
from vkjit.lowering.kernel.specs import Precision
from vkjit.lowering.kernel.text import text
from vkjit.lowering.kernel.types import BF16, F16, F32, I32, Buffer, ScalarType, VecType
from vkjit.lowering.kernel.walk import all_nodes
from vkjit.lowering.legalize import legalize
from vkjit.lowering.plan.schedule import CoopSchedule, NaiveSchedule, parse_schedule
from vkjit.lowering.spirv.emit import emit
from vkjit.lowering.spirv.validate import validate
from vkjit.lowering.target import ALL_SCALARS, Addressing, CoopShape, Target, TargetKind
from vkjit.lowering.templates.context import TemplateContext
from vkjit.runtime.reference import ReferenceDevice


def shapes(m: int, n: int, k: int) -> tuple[CoopShape, ...]:
    """Fragments of one shape in all types that the template multiplies."""
    types = ((F16, F16), (F16, F32), (BF16, F32))
    return tuple(CoopShape(elem, elem, total, m, n, k) for elem, total in types)


EIGHT = Target(
    name="eight",
    kind=TargetKind.GPU,
    index_type=I32,
    storage=ALL_SCALARS,
    arithmetic=ALL_SCALARS - {BF16},
    max_workgroup=(1024, 1024, 64),
    max_invocations=1024,
    shared_bytes=49152,
    subgroup_sizes=(8,),
    subgroup_ops=True,
    coop_shapes=shapes(8, 8, 8),
)
"""Like lavapipe."""
LARGE = replace(EIGHT, name="large", subgroup_sizes=(32,), coop_shapes=shapes(16, 16, 16))
"""Like a GPU of NVIDIA."""

SMALL = CoopSchedule(16, 16, 16, 1, 2, 8, 8, 8, 8)


def lowered(case: Case, schedule: CoopSchedule, target: Target) -> tuple[list[Kernel], list[Array]]:
    """Runs the kernels of a product, as made and as legalized; gives them and the arrays."""
    context = TemplateContext(target, case.arrays())
    kernels = gemm_coop.contract(case.group(), schedule, context)
    data = case.data()
    for info in context.arrays[len(data) :]:
        data.append(np.full(info.length, np.nan, DTYPES[info.elem]))
    for item in kernels:
        verify(item.kernel, 4)
        run(item.kernel, [data[a] for a in item.arrays])
        legal = legalize(item.kernel, target)
        verify(legal, 4)
        for addressing in Addressing:
            validate(emit(legal, replace(target, addressing=addressing)))
    return [item.kernel for item in kernels], data


def check(case: Case, schedule: CoopSchedule = SMALL, target: Target = EIGHT) -> list[Kernel]:
    kernels, data = lowered(case, schedule, target)
    case.check(data)
    return kernels


# -- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layouts", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize(
    ("elem", "accumulate", "precision"),
    [
        (F16, F32, Precision.HIGHEST),
        (F16, F16, Precision.HIGHEST),
        (BF16, F32, Precision.HIGHEST),
        (F32, F32, Precision.BFLOAT16),
        (F32, F32, Precision.HIGH),
        (F32, F32, Precision.F16X3),
    ],
    ids=["f16", "f16 sums", "bf16", "one bf16", "three bf16", "three f16"],
)
def test_layouts_and_types(
    layouts: str, elem: ScalarType, accumulate: ScalarType, precision: Precision
) -> None:
    check(Case(32, 16, 32, layouts, elem=elem, accumulate=accumulate, precision=precision))
    check(Case(19, 21, 23, layouts, elem=elem, accumulate=accumulate, precision=precision))


@pytest.mark.parametrize(
    "case",
    [
        Case(17, 24, 40, out=F32),
        Case(16, 16, 0),
        Case(16, 16, 1),
        Case(8, 8, 8),
        Case(1, 1, 1),
        Case(33, 40, 24, "nt", extra=8),
        Case(33, 40, 24, "tn", extra=3),
        Case(20, 24, 32, "nn", batch=(3,)),
        Case(20, 24, 32, "nt", batch=(2, 2), shared_rhs=True),
        Case(40, 32, 24, "tt", epilogue="full"),
        Case(21, 19, 24, epilogue="full", out=F32),
        Case(21, 20, 17, batch=(2,), epilogue="full", elem=BF16),
        Case(21, 20, 17, epilogue="full", elem=F32, precision=Precision.F16X3),
    ],
    ids=str,
)
def test_sizes_and_epilogues(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("size", [8, 16, 32, 64])
@pytest.mark.parametrize("shape", [(8, 8, 8), (16, 8, 16), (16, 16, 16)])
def test_subgroups_and_fragments(size: int, shape: tuple[int, int, int]) -> None:
    target = replace(EIGHT, subgroup_sizes=(size,), coop_shapes=shapes(*shape))
    schedule = CoopSchedule(32, 32, 16, 2, 2, *shape, size)
    for case in (Case(40, 36, 24, "nt"), Case(32, 32, 32, out=F32, elem=F16)):
        (kernel,) = check(case, schedule, target)
        assert kernel.subgroup == size
        assert kernel.workgroup == (4 * size, 1, 1)


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_sums_in_parts(parts: int) -> None:
    kernels = check(Case(16, 24, 200, "tn", epilogue="full"), replace(SMALL, split_k=parts))
    assert len(kernels) > 1
    again = lowered(Case(16, 24, 200, "tn"), replace(SMALL, split_k=parts), EIGHT)[1][OUT]
    np.testing.assert_array_equal(
        again, lowered(Case(16, 24, 200, "tn"), replace(SMALL, split_k=parts), EIGHT)[1][OUT]
    )


@pytest.mark.parametrize("band", [1, 2, 3])
def test_every_tile_is_visited_in_any_band(band: int) -> None:
    check(Case(96, 48, 16), replace(SMALL, band=band))


@pytest.mark.parametrize("invocations", [(1, 1, 8), (1, 2, 32), (2, 2, 64)])
def test_more_invocations_than_units_and_fewer(invocations: tuple[int, int, int]) -> None:
    rows, columns, size = invocations
    target = replace(EIGHT, subgroup_sizes=(size,))
    check(Case(48, 48, 24, "nt"), CoopSchedule(48, 48, 24, rows, columns, 8, 8, 8, size), target)


@pytest.mark.parametrize(
    ("elem", "precision"),
    [(F16, Precision.HIGHEST), (F32, Precision.HIGH), (F32, Precision.F16X3)],
    ids=["f16", "three bf16", "three f16"],
)
def test_infinities_and_nan_come_out_where_they_should(
    elem: ScalarType, precision: Precision
) -> None:
    case = Case(16, 16, 16, elem=elem, precision=precision, out=F32)
    context = TemplateContext(EIGHT, case.arrays())
    (item,) = gemm_coop.contract(case.group(), SMALL, context)
    data = case.data()
    data[LHS][3 * 16 + 5] = np.inf
    data[LHS][7 * 16 + 2] = np.nan
    data[RHS][4 * 16 + 9] = -np.inf
    data[RHS][5 * 16 + 1] = 0
    run(item.kernel, [data[a] for a in item.arrays])
    want, got = case.expected(data).ravel(), data[OUT]
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(got[np.isinf(want)], want[np.isinf(want)])
    assert np.isfinite(got[np.isfinite(want)]).all()


@pytest.mark.parametrize(
    ("precision", "scale"), [(Precision.HIGH, 1e18), (Precision.HIGH, 1e-15)], ids=str
)
def test_bfloat_parts_have_the_range_of_float32(precision: Precision, scale: float) -> None:
    case = Case(16, 16, 32, elem=F32, precision=precision)
    context = TemplateContext(EIGHT, case.arrays())
    (item,) = gemm_coop.contract(case.group(), SMALL, context)
    data = case.data(scale)
    run(item.kernel, [data[a] for a in item.arrays])
    case.check(data)


def test_half_parts_are_as_good_as_float32() -> None:
    case = Case(64, 64, 64, elem=F32, precision=Precision.F16X3)
    _, data = lowered(case, SMALL, EIGHT)
    want, got = case.expected(data).ravel(), data[OUT].astype(np.float64)
    assert np.linalg.norm(got - want) < 1e-6 * np.linalg.norm(want)


def test_sums_of_16_bits_overflow_only_where_they_are_asked_for() -> None:
    case = Case(16, 16, 16)
    for accumulate, finite in ((F16, False), (F32, True)):
        made = replace(case, accumulate=accumulate, out=F32)
        context = TemplateContext(EIGHT, made.arrays())
        (item,) = gemm_coop.contract(made.group(), SMALL, context)
        data = made.data()
        data[LHS][:], data[RHS][:] = 100, 100
        run(item.kernel, [data[a] for a in item.arrays])
        assert np.isfinite(data[OUT]).all() == finite


# -- kernels --------------------------------------------------------------------------------------


def accesses(kernel: Kernel, array: str) -> list[Load | Store]:
    found = [n for n in all_nodes(kernel.body) if isinstance(n, Load | Store)]
    return [n for n in found if isinstance(n.memory, Buffer) and n.memory.name == array]


def test_operands_are_read_in_words_of_16_bytes() -> None:
    (kernel,) = check(Case(32, 32, 32))
    for array in ("a0", "a1"):
        assert {n.type for n in accesses(kernel, array) if isinstance(n, Load)} == {VecType(I32, 4)}
    (kernel,) = check(Case(32, 32, 32, elem=F32, precision=Precision.HIGH))
    assert {n.type for n in accesses(kernel, "a0") if isinstance(n, Load)} == {VecType(F32, 4)}


def test_whole_fragments_of_float32_go_straight_to_memory() -> None:
    (kernel,) = check(Case(32, 32, 32, out=F32))
    stores = [n for n in all_nodes(kernel.body) if isinstance(n, MatStore)]
    assert stores
    assert all(isinstance(n.memory, Buffer) for n in stores)
    assert not accesses(kernel, "a2")
    (kernel,) = check(Case(32, 30, 32, out=F32))
    assert accesses(kernel, "a2")


def test_narrow_results_are_written_in_vectors() -> None:
    (kernel,) = check(Case(32, 32, 32, epilogue="full"))
    written = [n for n in accesses(kernel, "a2") if isinstance(n, Store)]
    assert {n.value.type for n in written} == {VecType(F16, 4)}


GOLDEN = """\
kernel gemm_coop grid=(1,1,1) workgroup=(16,1,1) index=i32 subgroup=8 {
  buffer a0: f16[64] r
  buffer a1: f16[128] r
  buffer a2: f32[128] w
  scratch lhs: i32[64] shared
  scratch rhs: i32[128] shared
  %0: i32 = local_id 0
  %1: i32 = const 0
  %2: i32 = const 8
  %3: i32 = const 4
  %4: i32 = subgroup_id
  %5: i32 = const 2
  %6: i32 = const 64
  %7: i32 = workgroup_id 0
  %8: i32 = const 1
  %9: i32 = const 16
  %10: f32 = const 0.0
  %11: vec<i32,4> = const 0
  %12: i32 = mul %0, %2
  %13: i1 = cmp lt_u %0, %2
  %14: i32 = mul %0, %2
  %15: i32 = div_u %4, %5
  %16: i32 = mul %15, %5
  %17: i32 = sub %4, %16
  %18: i32 = mul %15, %6
  %19: i32 = mul %17, %6
  %20: mat<f32,subgroup,8,8,acc> = mat_fill %10
  %21: i32 = mul %0, %2
  %22: i1 = cmp lt_u %0, %2
  %23: i32 = select %22, %21, %1
  %24: vec<i32,4> = load a0[%23]
  %25: vec<i32,4> = select %22, %24, %11
  %26: i32 = mul %0, %2
  %27: vec<i32,4> = load a1[%26]
  if %13 {
    store lhs[%12], %25
  }
  store rhs[%14], %27
  barrier workgroup
  %28: mat<f16,subgroup,8,8,a> = mat_load lhs[%18] stride %2 row
  %29: mat<f16,subgroup,8,8,b> = mat_load rhs[%19] stride %2 column
  %30: mat<f32,subgroup,8,8,acc> = mat_mul_add %28, %29, %20
  %31: i32 = mul %15, %2
  %32: i32 = mul %17, %2
  %33: i32 = mul %31, %9
  %34: i32 = add %33, %32
  mat_store a2[%34] stride %9 row, %30
}
"""


def test_the_text_of_a_kernel() -> None:
    case = Case(8, 16, 8, "nt", out=F32)
    context = TemplateContext(EIGHT, case.arrays())
    schedule = CoopSchedule(8, 16, 8, 1, 2, 8, 8, 8, 8)
    (item,) = gemm_coop.contract(case.group(), schedule, context)
    assert text(item.kernel) == GOLDEN
    assert text(parse(GOLDEN)) == GOLDEN


# -- schedules ------------------------------------------------------------------------------------


def test_schedules_keep_to_the_limits() -> None:
    for target in (EIGHT, LARGE, replace(LARGE, shared_bytes=32768, max_invocations=256)):
        for case in (Case(4096, 4096, 4096), Case(64, 64, 64), Case(256, 256, 8192, "tn")):
            group = case.group()
            scheme = scheme_of(group)
            assert scheme is not None
            found = candidates(group, target)
            assert found
            for schedule in found:
                assert schedule.invocations <= target.max_invocations
                assert shared_bytes(group, scheme, schedule) <= target.shared_bytes
                assert parse_schedule(schedule.text()) == schedule
                kernels = gemm_coop.contract(
                    group, schedule, TemplateContext(target, case.arrays())
                )
                used = sum(s.length * 4 for s in kernels[0].kernel.scratch)
                assert used <= shared_bytes(group, scheme, schedule)


@pytest.mark.parametrize(
    ("case", "tile"),
    [
        (Case(8192, 8192, 8192), (128, 128, 64)),
        (Case(8192, 8192, 8192, accumulate=F16), (256, 256, 32)),
    ],
    ids=["large", "narrow sums"],
)
def test_tiles_suit_the_product(case: Case, tile: tuple[int, int, int]) -> None:
    first = candidates(case.group(), LARGE)[0]
    assert (first.block_m, first.block_n, first.block_k) == tile


def test_small_products_have_small_tiles() -> None:
    first = candidates(Case(512, 512, 512).group(), LARGE)[0]
    assert first.block_m * first.block_n <= 64 * 64


def test_long_sums_of_few_outputs_run_in_parts() -> None:
    assert candidates(Case(256, 256, 16384).group(), LARGE)[0].split_k > 1
    assert candidates(Case(4096, 4096, 16384).group(), LARGE)[0].split_k == 1


@pytest.mark.parametrize(
    "case",
    [
        Case(64, 64, 64, elem=F32),
        Case(64, 64, 64, elem=F32, accumulate=F32, precision=Precision.HIGHEST),
        Case(4, 64, 64),
        Case(64, 0, 64),
    ],
    ids=["float32", "highest", "few rows", "no columns"],
)
def test_other_products_are_left_to_other_templates(case: Case) -> None:
    assert candidates(case.group(), LARGE) == []


def test_no_schedule_without_matrix_units() -> None:
    assert candidates(Case(64, 64, 64).group(), replace(LARGE, coop_shapes=())) == []
    with pytest.raises(InternalError, match="expected types that gemm_coop_schedule"):
        gemm_coop.contract(
            Case(64, 64, 64, elem=F32).group(),
            SMALL,
            TemplateContext(LARGE, Case(64, 64, 64, elem=F32).arrays()),
        )


def test_matrix_units_come_first_where_they_serve() -> None:
    case = Case(64, 64, 64)
    context = TemplateContext(LARGE, case.arrays())
    found = choices(case.group(), context)
    assert isinstance(found[0], CoopSchedule)
    assert isinstance(found[-1], NaiveSchedule)
    (item,) = lower_contract(case.group(), found[0], context)
    assert item.kernel.name == "gemm_coop"


def test_a_traced_product_of_an_array_with_itself() -> None:
    x = np.random.default_rng(0).standard_normal((40, 40)).astype(np.float16)
    program = vj.make_ir(lambda x: jnp.tanh(x @ x[::-1].T))(x)
    plan = compile_program(program, LARGE).plan
    names = [s.kernel.name for s in plan.steps if isinstance(s, Launch)]
    assert names == ["gemm_coop"]
    device = ReferenceDevice(LARGE)
    (out,) = device.load(plan).run([device.upload(x)])
    got = device.download(out, np.float16, (40, 40))
    np.testing.assert_array_max_ulp(got, evaluate(program, [x])[0], 2)


@pytest.mark.parametrize(
    "case",
    [
        Case(512, 16, 512, "nt", elem=BF16),
        Case(16, 520, 512, "tn", elem=F16),
        Case(512, 9, 640, "tn", elem=F16),
    ],
    ids=str,
)
def test_products_with_one_short_side(case: Case) -> None:
    target = replace(EIGHT, cores=2)
    found = choices(case.group(), TemplateContext(target, case.arrays()))[0]
    assert isinstance(found, CoopSchedule)
    assert min(found.block_m, found.block_n) == 16
    check(case, found, target)


def test_short_sides_of_small_or_packed_products_stay_plain() -> None:
    for case in (Case(64, 16, 512), Case(512, 16, 64), Case(512, 16, 512, elem=F32)):
        assert narrow(case.group(), EIGHT) == []
