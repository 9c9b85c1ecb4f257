"""GPU kernels in the interpreter: no driver, races reported, on targets of different limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from tests.targets import LARGE_GPU
from vkjit.errors import MissingRuleError
from vkjit.ir.evaluate import evaluate
from vkjit.lowering.artifact import Launch
from vkjit.lowering.compile import compile_program
from vkjit.lowering.gpu.index import check_sizes
from vkjit.lowering.kernel.nodes import Kernel, Load, SubgroupShuffle
from vkjit.lowering.kernel.types import F32, I32, VecType
from vkjit.lowering.kernel.walk import all_nodes
from vkjit.lowering.plan.groups import (
    ArrayInfo,
)
from vkjit.lowering.target import MINIMAL_GPU, Target
from vkjit.lowering.templates.context import TemplateContext
from vkjit.runtime.reference import ReferenceDevice

Array = np.ndarray[Any, Any]

LARGE = LARGE_GPU
NARROW = replace(LARGE, name="narrow-gpu", max_grid=(7, 65535, 65535), subgroup_sizes=(8,))
"""Subgroups of 8, as in software drivers, and grids that soon need a second dimension."""
TARGETS = [LARGE, NARROW, MINIMAL_GPU]

every_target = pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)


def kernels_of(function: Callable[..., Any], arrays: tuple[Array, ...], target: Target):
    """The results of ``function`` by interpreted GPU kernels, those wanted, and the kernels."""
    program = vj.make_ir(function)(*arrays)
    plan = compile_program(program, target).plan
    device = ReferenceDevice(target)
    outs = device.load(plan).run([device.upload(a) for a in arrays])
    avals = program.out_avals
    got = [device.download(o, a.dtype, a.shape) for o, a in zip(outs, avals, strict=True)]
    kernels = [s.kernel for s in plan.steps if isinstance(s, Launch)]
    return got, evaluate(program, list(arrays)), kernels


def check(function: Callable[..., Any], *arrays: Array, target: Target) -> list[Kernel]:
    """Runs and compares; gives the kernels."""
    got, want, kernels = kernels_of(function, arrays, target)
    for g, w in zip(got, want, strict=True):
        scale = float(np.abs(w).max(initial=1.0))
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=4e-6 * scale)
    return kernels


def normal(*shape: int) -> Array:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def uses(kernels: list[Kernel], kind: type) -> bool:
    return any(isinstance(n, kind) for k in kernels for n in all_nodes(k.body))


def reads_vectors(kernel: Kernel) -> bool:
    loads = [n for n in all_nodes(kernel.body) if isinstance(n, Load) and n.memory.elem is F32]
    return any(isinstance(n.type, VecType) and n.index.type is I32 for n in loads)


# -- pointwise ------------------------------------------------------------------------------------


@every_target
@pytest.mark.parametrize("shape", [(1,), (7, 5), (300, 223), (64, 1028)], ids=str)
def test_pointwise(target: Target, shape: tuple[int, ...]) -> None:
    x, row = normal(*shape), normal(shape[-1])
    (kernel,) = check(lambda x, r: jnp.maximum(x * 2 + r, 0.5), x, row, target=target)
    assert reads_vectors(kernel) == (shape == (64, 1028))


def test_large_transposes_are_not_read_in_vectors() -> None:
    (kernel,) = check(lambda x: x.T + 1, normal(256, 260), target=LARGE)
    assert not reads_vectors(kernel)


def test_a_permuted_sum_walks_the_axis_that_most_arrays_share() -> None:
    x, y = normal(260, 256), normal(260, 256)
    check(lambda x, y: (x * y + x).T, x, y, target=LARGE)


def test_lookup_of_rows_reads_vectors() -> None:
    ids = np.random.default_rng(0).integers(0, 50, 300).astype(np.int32)
    table = normal(50, 256)
    (kernel,) = check(lambda t, i: jnp.take(t, i, axis=0) * 2, table, ids, target=LARGE)
    assert reads_vectors(kernel)


# -- reductions -----------------------------------------------------------------------------------

LENGTHS = [1, 31, 33, 255, 256, 1000, 5000]


@every_target
@pytest.mark.parametrize("length", LENGTHS)
def test_softmax_of_rows(target: Target, length: int) -> None:
    kernels = check(lambda x: vj.nn.softmax(x, axis=-1), normal(3, length), target=target)
    assert len(kernels) == 1 or length == 1
    assert uses(kernels, SubgroupShuffle) == (target.subgroup_ops and length > 1)


@every_target
@pytest.mark.parametrize("shape", [(100, 40), (33, 300), (1000, 32), (40, 100, 3)], ids=str)
def test_sums_of_columns(target: Target, shape: tuple[int, ...]) -> None:
    check(lambda x: (jnp.sum(x, axis=0), jnp.max(x, axis=0)), normal(*shape), target=target)


@every_target
@pytest.mark.parametrize("axis", [0, 1])
def test_positions_of_extrema_are_the_first(target: Target, axis: int) -> None:
    x = np.random.default_rng(0).integers(0, 5, (260, 512)).astype(np.float32)
    check(lambda x: jnp.argmax(x, axis=axis), x, target=target)


def test_columns_are_centred_and_their_mean_kept() -> None:
    """Row values and full values of rows that lie side by side, some workgroups half empty."""

    def centred(x: Any) -> Any:
        mean = jnp.mean(x, axis=0)
        return x - mean, mean

    check(centred, normal(90, 70), target=LARGE)


@every_target
@pytest.mark.parametrize("shape", [(70001,), (3, 40000), (40000, 40)], ids=str)
def test_few_long_rows_are_folded_in_parts(target: Target, shape: tuple[int, ...]) -> None:
    axis = 0 if len(shape) == 1 or shape[0] > shape[1] else 1
    x = normal(*shape)
    for function in (jnp.sum, jnp.argmax):
        kernels = check(lambda x, f=function: f(x * 2, axis=axis), x, target=target)
        kind = "columns" if shape[0] == 40000 else "rows"
        assert [k.name for k in kernels] == [f"{kind}_part", f"{kind}_join"]
        assert math.prod(kernels[0].grid) > 4


def test_long_rows_get_large_workgroups() -> None:
    (kernel,) = check(jnp.sum, normal(30000), target=LARGE)
    assert kernel.workgroup == (1024, 1, 1)
    assert kernel.subgroup == 32
    assert reads_vectors(kernel)


# -- products -------------------------------------------------------------------------------------

SIZES = [(1, 1, 1), (33, 45, 37), (64, 64, 64), (20, 36, 100), (100, 8, 16)]


@every_target
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("layout", ["mk,kn->mn", "km,kn->mn", "mk,nk->mn", "km,nk->mn"])
def test_products(target: Target, sizes: tuple[int, int, int], layout: str) -> None:
    size = dict(zip("mnk", sizes, strict=True))
    left, right = layout.split("->")[0].split(",")
    x, y = (normal(*[size[c] for c in side]) for side in (left, right))
    check(lambda x, y: jnp.einsum(layout, x, y), x, y, target=target)


def test_products_with_batches_prologues_and_epilogues() -> None:
    x, y, bias = normal(2, 3, 40, 20), normal(2, 3, 20, 36), normal(36)
    check(lambda x, y, c: jnp.tanh(x @ y + c) * 2, x, y, bias, target=LARGE)


# -- limits ---------------------------------------------------------------------------------------


def test_arrays_beyond_the_index_are_refused_by_name_and_size() -> None:
    context = TemplateContext(LARGE, [ArrayInfo(F32, 4), ArrayInfo(F32, 1 << 31)])
    with pytest.raises(MissingRuleError, match=rf"array 1 .* has {1 << 31} elements of f32"):
        check_sizes(context)
