"""Products on matrices of flexible dimensions: kernels against NumPy, their SPIR-V validated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.lowering.gpu.matrix_cases import Case, expected, group_of, values_of
from vkjit.lowering.gpu.gemm_tensor import contract, unrolled
from vkjit.lowering.gpu.gemm_tensor_schedule import candidates, of_subgroups
from vkjit.lowering.kernel.check import verify
from vkjit.lowering.kernel.interpret import run
from vkjit.lowering.kernel.text import text
from vkjit.lowering.kernel.types import (
    BF16,
    F16,
    F32,
    I16,
    I32,
    MatScope,
    ScalarType,
)
from vkjit.lowering.legalize import INEXACT_DIVISION, legalize
from vkjit.lowering.plan.groups import (
    ArrayInfo,
)
from vkjit.lowering.plan.schedule import TensorSchedule, parse_schedule
from vkjit.lowering.spirv.emit import emit
from vkjit.lowering.spirv.validate import validate
from vkjit.lowering.target import ALL_SCALARS, Addressing, Quirk, Target, TargetKind, TensorShape
from vkjit.lowering.templates.context import Lowered, TemplateContext

GOLDEN = Path(__file__).parents[2] / "data/kernels/gemm_tensor.txt"
SMALL = TensorSchedule(32, 32, 16, 128, 2)
SUBGROUP = TensorSchedule(32, 16, 16, 8, 2, whole_workgroup=False)

_TYPES = ((F16, F32), (F16, F16), (BF16, F32))
_SHAPES = [
    *(TensorShape(a, a, c, 16, 16, 16, MatScope.SUBGROUP) for a, c in _TYPES),
    *(TensorShape(a, a, c, 32, 16, 16, MatScope.WORKGROUP, 128) for a, c in _TYPES),
    *(TensorShape(a, a, c, 32, 32, 16, MatScope.WORKGROUP, 256) for a, c in _TYPES),
]
TARGET = Target(
    name="flexible",
    kind=TargetKind.GPU,
    index_type=I32,
    storage=frozenset(ALL_SCALARS),
    arithmetic=frozenset(ALL_SCALARS) - {BF16},
    max_invocations=1024,
    max_workgroup=(1024, 1024, 64),
    subgroup_sizes=(8,),
    tensor_shapes=tuple(_SHAPES),
    tensor_dimension=1024,
    features=frozenset({"tensor_maps", "tensor_addressing"}),
    # As on GPUs: division is corrected, elsewhere with a branch, which maps do not allow.
    quirks=(Quirk(INEXACT_DIVISION, "https://example.com", "never"),),
)


def lowered(case: Case, schedule: TensorSchedule) -> tuple[list[Lowered], list[ArrayInfo]]:
    """Checked kernels, and the arrays with their temporaries."""
    group, arrays = group_of(case)
    context = TemplateContext(TARGET, arrays)
    kernels = contract(group, schedule, context)
    for item in kernels:
        verify(item.kernel, 4)
    return kernels, context.arrays


def check(case: Case, schedule: TensorSchedule) -> None:
    """Runs the kernels in the interpreter, before and after legalization; validates SPIR-V."""
    kernels, arrays = lowered(case, schedule)
    legal = [Lowered(legalize(item.kernel, TARGET), item.arrays) for item in kernels]
    for items in (kernels, legal):
        data = values_of(case, arrays)
        for item in items:
            verify(item.kernel, 4)
            # Where bf16 is emulated, buffers of it hold its bits.
            given = [
                data[a].view(np.int16) if buffer.elem is I16 else data[a]
                for a, buffer in zip(item.arrays, item.kernel.buffers, strict=True)
            ]
            run(item.kernel, given, subgroup=8)
        want, bound = expected(case, data)
        error = np.abs(data[4].astype(np.float64) - want)
        assert (error <= bound).all(), f"{case} {schedule}: {np.nanmax(error - bound)} too much"
    for item in legal:
        for addressing in Addressing:
            validate(emit(item.kernel, with_addressing(addressing)))


def with_addressing(addressing: Addressing) -> Target:
    """The target of these tests with another way to reach buffers."""
    return Target(
        **{n: getattr(TARGET, n) for n in Target.__slots__ if n != "addressing"},
        addressing=addressing,
    )


@pytest.mark.parametrize("types", _TYPES, ids=str)
@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
def test_every_layout_and_type(layout: str, types: tuple[ScalarType, ScalarType]) -> None:
    elem, accumulate = types
    check(Case(layout=layout, elem=elem, accumulate=accumulate), SMALL)
    check(Case(layout=layout, elem=elem, accumulate=accumulate), SUBGROUP)


@pytest.mark.parametrize("epilogue", ["none", "float32", "logistic", "all"])
@pytest.mark.parametrize("types", _TYPES, ids=str)
@pytest.mark.parametrize("layout", ["NN", "TT"])
def test_ragged_batches_with_epilogues(
    layout: str, types: tuple[ScalarType, ScalarType], epilogue: str
) -> None:
    elem, accumulate = types
    case = Case(40, 72, 56, (2,), layout, elem, accumulate, epilogue)
    check(case, SMALL)


@pytest.mark.parametrize("sizes", [(32, 32, 16), (33, 64, 32), (64, 31, 40), (20, 20, 20)])
def test_tiles_at_edges(sizes: tuple[int, int, int]) -> None:
    check(Case(*sizes), SMALL)


@pytest.mark.parametrize("epilogue", ["none", "all"])
def test_subgroups_run_epilogues(epilogue: str) -> None:
    check(Case(64, 32, 32, (3,), "NT", epilogue=epilogue), SUBGROUP)


def test_parts_of_a_sum_are_joined() -> None:
    check(Case(40, 32, 256, (2,), epilogue="all"), TensorSchedule(32, 32, 16, 128, 4, 4))


def test_the_loop_is_written_out() -> None:
    assert [unrolled(steps, 8) for steps in (1, 5, 8, 12, 30, 64, 7 * 11)] == [1, 5, 8, 6, 6, 8, 7]
    case = Case(32, 32, 16 * 11)
    check(case, TensorSchedule(32, 32, 16, 128, 4))


def test_candidates_fit_the_device() -> None:
    for elem, accumulate in _TYPES:
        group, _ = group_of(Case(4096, 4096, 4096, elem=elem, accumulate=accumulate))
        found = candidates(group, TARGET) + of_subgroups(group, TARGET)
        first = found[0]
        most = 256 * 256 if accumulate is F16 else 128 * 256
        assert first.block_m * first.block_n == most
        assert first.invocations == 256
        assert len({s.text() for s in found}) == len(found)
        assert all(parse_schedule(s.text()) == s for s in found)
        words = [s.block_m * s.block_n * accumulate.bytes // 4 / s.invocations for s in found]
        assert max(w for w, s in zip(words, found, strict=True) if s.whole_workgroup) <= 128
    small, _ = group_of(Case(256, 256, 256))
    assert candidates(small, TARGET)[0].block_m <= 64
    long, _ = group_of(Case(256, 256, 16384))
    assert candidates(long, TARGET)[0].split_k > 1
    ragged, _ = group_of(Case(1000, 1000, 1000, epilogue="all"))
    assert candidates(ragged, TARGET) == []
    tiny, _ = group_of(Case(8, 64, 64))
    assert candidates(tiny, TARGET) == []


@pytest.mark.parametrize("types", _TYPES, ids=str)
def test_every_candidate_is_a_valid_module(types: tuple[ScalarType, ScalarType]) -> None:
    elem, accumulate = types
    for sizes, epilogue in (((4096, 4096, 4096), "all"), ((1000, 1032, 4104), "none")):
        case = Case(*sizes, layout="TN", elem=elem, accumulate=accumulate, epilogue=epilogue)
        for schedule in candidates(group_of(case)[0], TARGET):
            for item in lowered(case, schedule)[0]:
                legal = legalize(item.kernel, TARGET)
                verify(legal, 4)
                validate(emit(legal, TARGET))


def test_the_first_candidate_multiplies() -> None:
    case = Case(256, 512, 520, layout="NT", epilogue="all")
    check(case, candidates(group_of(case)[0], TARGET)[0])


def test_unaligned_planes_are_left_to_others() -> None:
    group, _ = group_of(Case(63, 65, 31, (2,)))
    assert candidates(group, TARGET) == []


def test_the_text_of_a_kernel() -> None:
    kernels, _ = lowered(Case(32, 32, 64, epilogue="all"), SMALL)
    assert text(kernels[0].kernel) == GOLDEN.read_text()
