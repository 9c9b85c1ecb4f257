"""Keys of groups, and small variants of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from tests.quantized_products import Case as Quantized
from tests.tuning.fakes import DEFAULT, GPU, FakeGpu, product
from vkjit.blocks import Q4_K, Q8_0, BlockType
from vkjit.lowering.compile import compile_program
from vkjit.lowering.kernel.specs import Precision
from vkjit.lowering.kernel.types import F16, F32
from vkjit.lowering.kernel.views import View
from vkjit.tuning.admission import Admission
from vkjit.tuning.case import Case, block, case_of, reach, trial, twin
from vkjit.tuning.records import group_key
from vkjit.tuning.reference import Values, excess, inputs, strided, wanted
from vkjit.tuning.rig import Rig

S = vj.ShapeDtypeStruct


def cases(function: Any, *shapes: tuple[int, ...], dtype: str = "float32") -> list[Case]:
    """The products of a function."""
    seen: list[Case] = []

    def choose(group: Any, infos: Any, target: Any) -> None:
        case = case_of(group, infos)
        assert case is not None
        seen.append(case)

    program = vj.make_ir(function)(*[S(shape, dtype) for shape in shapes])
    compile_program(program, GPU, choose=choose)
    return seen


def key(function: Any, *shapes: tuple[int, ...], dtype: str = "float32") -> str:
    (case,) = cases(function, *shapes, dtype=dtype)
    return group_key(case)


def test_keys_differ_by_shape_type_layout_and_epilogue() -> None:
    shapes = ((64, 32), (32, 48))
    keys = [
        key(jnp.matmul, *shapes),
        key(jnp.matmul, (64, 36), (36, 48)),
        key(jnp.matmul, *shapes, dtype="float16"),
        key(jnp.matmul, *shapes, dtype="bfloat16"),
        key(lambda a, b: a.T @ b, (32, 64), (32, 48)),
        key(lambda a, b: a @ b.T, (64, 32), (48, 32)),
        key(lambda a, b: jnp.tanh(a @ b), *shapes),
        key(lambda a, b: jnp.exp(a @ b), *shapes),
        key(lambda a, b: a @ b * 2, *shapes),
        key(lambda a, b: a @ b * 3, *shapes),
        key(jnp.matmul, (2, 64, 32), (2, 32, 48)),
    ]
    high = product()
    high = replace(high, group=replace(high.group, precision=Precision.HIGH))
    keys += [group_key(product()), group_key(high)]
    assert len(set(keys)) == len(keys)
    assert keys[0] == "contract 64x48x32 f32[8,1] * f32[8,1] in f32 to f32[8,1] epilogue none"
    assert key(lambda x, y: x @ y, *shapes) == keys[0]


def test_keys_are_the_same_in_every_process() -> None:
    """No addresses and no numbers of arrays in them."""
    shapes = ((8, 8), (8, 8), (8,))
    for _ in range(2):
        (case,) = cases(lambda a, b, c: jnp.tanh(a @ b + c) * 2, *shapes)
        assert group_key(case).endswith("epilogue 6595a61204")


def test_arrays_that_are_read_and_written_are_left_alone() -> None:
    case = product()
    stores = (replace(case.group.stores[0], array=0),)
    assert case_of(replace(case.group, stores=stores), case.infos) is None


LAYOUTS = {
    "nn": lambda a, b: a @ b,
    "nt and epilogue": lambda a, b: jnp.tanh(a @ b.T + a[:, :1]),
    "tn, turned": lambda a, b: (a.T @ b).T * 2,
    "reversed": lambda a, b: a[:, ::-1] @ b,
    "heads": lambda a, b: jnp.einsum("thd,shd->hts", a.reshape(32, 4, 8), b.reshape(32, 4, 8)),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("sizes", [(17, 19, 33), (1, 1, 1), (16, 8, 0), (3, 40, 1)], ids=str)
def test_small_variants_are_right_by_the_default_templates(
    name: str, sizes: tuple[int, int, int], gpu: FakeGpu
) -> None:
    for case in cases(LAYOUTS[name], (32, 32), (32, 32)):
        small = twin(case, sizes)
        assert (small.group.m, small.group.n, small.group.k) == sizes
        # The layout, hence what a template reads in vectors, is the same.
        assert group_key(small).split("f32", 1)[1] == group_key(case).split("f32", 1)[1]
        rig, schedule = Rig(gpu, gpu.clock), DEFAULT
        for kind in Values:
            arrays = inputs(small, kind, 1)
            got = rig.results(small, schedule, rig.upload(small, arrays))
            for store, want in zip(small.group.stores, wanted(small, arrays), strict=True):
                assert excess(strided(got[store.array], store.view), want) <= 1


@pytest.mark.parametrize("block_type", [Q4_K, Q8_0], ids=str)
@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
def test_small_variants_out_of_blocks_are_right(
    block_type: BlockType,
    forward: bool,  # noqa: FBT001  a table
    gpu: FakeGpu,
) -> None:
    whole = Quantized(block_type, 24, 256, 512, forward, F16)
    case = case_of(whole.group(), whole.arrays())
    assert case is not None
    assert f"{block_type}:f16[" in group_key(case)
    rig = Rig(gpu, gpu.clock)
    for sizes in ((17, 64, 32), (8, 19, 33)):
        small = twin(case, sizes)
        assert group_key(small).split("f16", 1)[1] == group_key(case).split("f16", 1)[1]
        for kind in Values:
            arrays = inputs(small, kind, 1)
            got = rig.results(small, DEFAULT, rig.upload(small, arrays))
            (want,), (store,) = wanted(small, arrays), small.group.stores
            assert excess(strided(got[store.array], store.view), want) <= 1
    assert rig.filled(case)[1].nbytes == case.nbytes(1)


def test_views_stay_inside_their_arrays() -> None:
    case = product(100, 60, 40)
    for part in (twin(case, (7, 9, 11)), block(case, (), range(96, 100), range(50, 60))):
        for step in part.loads:
            assert reach(step.view) <= part.infos[step.array].length
    assert reach(View((3, 4), (-8, 1), 16)) == 20


def test_a_block_is_part_of_the_whole() -> None:
    case = product(20, 30, 10)
    arrays = inputs(case, Values.RANDOM, 3)
    (whole,) = wanted(case, arrays)
    (part,) = wanted(block(case, (), range(4, 9), range(25, 30)), arrays)
    np.testing.assert_allclose(part.values, whole.values[4:9, 25:30], rtol=1e-12)


@pytest.mark.parametrize(
    ("got", "allowed"),
    [
        ([1.0, np.nan, np.inf, -np.inf], True),
        ([1.0, 0.0, np.inf, -np.inf], False),
        ([1.0, np.nan, np.nan, -np.inf], False),
        ([1.0, np.nan, 3e38, -np.inf], False),
        ([1.0, np.nan, np.inf, np.inf], False),
        ([np.nan, np.nan, np.inf, -np.inf], False),
        ([1.001, np.nan, np.inf, -np.inf], False),
    ],
)
def test_nan_and_infinities_are_met_exactly(got: list[float], allowed: bool) -> None:  # noqa: FBT001  a table
    case = product(4, 1, 1)
    arrays = {0: np.array([1, np.nan, np.inf, -np.inf], np.float32), 1: np.ones(1, np.float32)}
    (want,) = wanted(case, arrays)
    assert (excess(np.array(got, np.float32).reshape(4, 1), want) <= 1) is allowed


def test_an_overflow_of_the_result_may_round_either_way_and_no_further() -> None:
    case = product(2, 1, 1, F16, F16)
    arrays = {0: np.array([255.9, 400], np.float16), 1: np.array([256], np.float16)}
    (want,) = wanted(case, arrays)
    assert excess(np.array([[65504], [np.inf]], np.float16), want) <= 1
    assert excess(np.array([[65504], [65504]], np.float16), want) > 1


@pytest.mark.parametrize(
    ("precision", "bits"),
    [(Precision.HIGHEST, 21), (Precision.F16X3, 18), (Precision.HIGH, 14), (Precision.BFLOAT16, 6)],
)
def test_operands_may_lose_what_the_precision_says(precision: Precision, bits: int) -> None:
    """Operands cut to ``bits`` bits are too coarse for it, four bits more are good enough."""
    case = product(40, 30, 20)
    case = replace(case, group=replace(case.group, precision=precision))
    arrays = inputs(case, Values.RANDOM, 5)
    (want,) = wanted(case, arrays)

    def cut(x: np.ndarray[Any, Any], kept: int) -> np.ndarray[Any, Any]:
        fraction, exponent = np.frexp(x.astype(np.float64))
        return np.ldexp(np.round(fraction * 2.0**kept) / 2.0**kept, exponent)

    for kept, right in ((bits - 4, False), (bits + 4, True)):
        x, y = (cut(arrays[a], kept).reshape(s) for a, s in ((0, (40, 20)), (1, (20, 30))))
        assert (excess(x @ y, want) <= 1) is right


def test_twins_are_checked_once_for_all_groups_of_a_layout(gpu: FakeGpu) -> None:
    admission = Admission(Rig(gpu, gpu.clock))
    first = admission.twins(product(64, 64, 64), DEFAULT)
    second = admission.twins(product(256, 64, 128), DEFAULT)
    assert [id(c) for c in first] == [id(c) for c in second]
    assert len(trial(product(elem=F32), DEFAULT, GPU).kernels) == 1
