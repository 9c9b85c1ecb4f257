"""Scans, scatters, transposes, columns and kept rows on interpreted GPUs of different limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from tests.targets import LARGE_GPU
from vkjit import blocks, quant
from vkjit.errors import MissingRuleError
from vkjit.lowering.artifact import Launch
from vkjit.lowering.compile import compile_program
from vkjit.lowering.gpu import index
from vkjit.lowering.gpu.loop_nests import candidates, lower_loop
from vkjit.lowering.kernel.check import verify
from vkjit.lowering.kernel.interpret import run
from vkjit.lowering.kernel.interpret_ops import DTYPES
from vkjit.lowering.kernel.nodes import Kernel, Load, Node, Store
from vkjit.lowering.kernel.types import F32, I32, I64, Buffer, VecType
from vkjit.lowering.kernel.walk import all_nodes
from vkjit.lowering.plan.groups import ArrayInfo, LoopGroup
from vkjit.lowering.plan.partition import partition
from vkjit.lowering.spirv.emit import emit
from vkjit.lowering.spirv.validate import validate
from vkjit.lowering.target import MINIMAL_GPU, Addressing, Target
from vkjit.lowering.templates.context import TemplateContext
from vkjit.ops.indexing import scatter_add
from vkjit.runtime.reference import ReferenceDevice

Array = np.ndarray[Any, Any]

LARGE = LARGE_GPU
FOURS = replace(LARGE, name="fours", subgroup_sizes=(4,), max_grid=(7, 5, 65535))
WIDE = replace(LARGE, name="wide", subgroup_sizes=(64,))
PLAIN = replace(LARGE, name="plain", subgroup_ops=False, features=frozenset())
TARGETS = [LARGE, FOURS, WIDE, PLAIN, MINIMAL_GPU]

every_target = pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)


def results(
    function: Callable[..., Any], arrays: tuple[Array, ...], target: Target
) -> tuple[list[Array], list[Kernel]]:
    """What ``function`` gives by interpreted GPU kernels, twice the same; and the kernels."""
    program = vj.make_ir(function)(*arrays)
    plan = compile_program(program, target).plan
    device = ReferenceDevice(target)
    loaded = device.load(plan)
    runs: list[list[Array]] = []
    for _ in range(2):
        outs = loaded.run([device.upload(a) for a in arrays])
        pairs = zip(outs, program.out_avals, strict=True)
        runs.append([device.download(o, a.dtype, a.shape) for o, a in pairs])
    for one, other in zip(*runs, strict=True):
        assert one.tobytes() == other.tobytes()
    return runs[0], [s.kernel for s in plan.steps if isinstance(s, Launch)]


def normal(*shape: int) -> Array:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def names(kernels: list[Kernel]) -> list[str]:
    return [k.name for k in kernels]


def accesses(kernel: Kernel, kind: type[Load] | type[Store]) -> list[Load | Store]:
    """Reads or writes of buffers."""

    def is_access(node: Node) -> bool:
        return isinstance(node, kind) and isinstance(node.memory, Buffer)

    return [n for n in all_nodes(kernel.body) if is_access(n)]  # type: ignore[misc]


# -- pointwise ------------------------------------------------------------------------------------


@every_target
@pytest.mark.parametrize("count", [1 << 16, (1 << 16) + 3])
def test_ragged_arrays_are_read_in_vectors(target: Target, count: int) -> None:
    x = normal(count)
    (got,), (kernel,) = results(lambda x: x * 2 + 1, (x,), target)
    np.testing.assert_array_equal(got, x * 2 + 1)
    assert any(isinstance(n.type, VecType) for n in accesses(kernel, Load) if isinstance(n, Load))


@pytest.mark.parametrize("count", [1 << 16, (1 << 16) + 5000])
def test_narrow_types_take_two_vectors_each(count: int) -> None:
    x = normal(count).astype(ml_dtypes.bfloat16)
    (got,), (kernel,) = results(lambda x: x + 1, (x,), LARGE)
    np.testing.assert_array_equal(got, (x.astype(np.float32) + 1).astype(x.dtype))
    assert len(accesses(kernel, Load)) == 2


def test_several_results_of_several_types() -> None:
    x = normal(300, 256)

    def function(x: Any) -> Any:
        y = jnp.sqrt(jnp.abs(x)) * 3 - jnp.maximum(x, 1) * x + 2
        return y.astype(jnp.bfloat16), y + 1, y > 0

    got, (kernel,) = results(function, (x,), LARGE)
    y = got[1] - 1
    np.testing.assert_allclose(y, np.sqrt(abs(x)) * 3 - np.maximum(x, 1) * x + 2, atol=1e-5)
    np.testing.assert_allclose(got[0].astype(np.float32), y, rtol=1e-2, atol=1e-5)
    np.testing.assert_array_equal(got[2], got[1] > 1)
    assert len(accesses(kernel, Load)) == 1


# -- transposes -----------------------------------------------------------------------------------


@every_target
@pytest.mark.parametrize("shape", [(256, 256), (300, 223), (3, 160, 150)], ids=str)
def test_transposes_go_through_shared_memory(target: Target, shape: tuple[int, ...]) -> None:
    x, y = normal(*shape), normal(*shape[:-2], shape[-1], shape[-2])
    (got,), kernels = results(lambda x, y: jnp.swapaxes(x, -1, -2) * 2 + y, (x, y), target)
    np.testing.assert_allclose(got, np.swapaxes(x, -1, -2) * 2 + y, rtol=1e-6)
    turns = target is not MINIMAL_GPU
    assert names(kernels) == ["transpose" if turns else "pointwise"]


@pytest.mark.parametrize("shape", [(256, 320), (162, 250)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "bool", "float64"])
def test_transposes_of_all_widths(dtype: str, shape: tuple[int, ...]) -> None:
    x = (normal(*shape) * 9).astype(dtype)
    with vj.enable_x64():
        (got,), (kernel,) = results(lambda x: x.T, (x,), LARGE)
    np.testing.assert_array_equal(got, x.T)
    assert kernel.name == "transpose"


# -- rows -----------------------------------------------------------------------------------------


@every_target
@pytest.mark.parametrize("length", [3, 16, 64, 100, 576, 1001, 2048])
def test_normalized_rows_are_read_once(target: Target, length: int) -> None:
    x, w = normal(5, length), normal(length)
    (got,), (kernel,) = results(lambda x, w: vj.nn.rms_norm(x, w), (x, w), target)
    wide = x.astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * w
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
    if target is LARGE:
        whole = math.prod(x.shape)
        reads = [n for n in accesses(kernel, Load) if n.memory.length == whole]
        assert len(reads) == len(accesses(kernel, Store))


@pytest.mark.parametrize("rows", [1, 7, 700])
def test_many_short_rows_share_a_workgroup(rows: int) -> None:
    x = normal(rows, 16)
    (got,), (kernel,) = results(lambda x: vj.nn.softmax(x), (x,), LARGE)
    want = np.exp(x - x.max(-1, keepdims=True))
    np.testing.assert_allclose(got, want / want.sum(-1, keepdims=True), rtol=2e-6)
    assert kernel.workgroup[0] >= 32
    assert math.prod(kernel.grid) * kernel.workgroup[0] <= max(64, 8 * rows)


def test_results_of_rows_do_not_make_columns_of_them() -> None:
    def function(x: Any) -> Any:
        mean = jnp.mean(x, axis=1)
        return mean, mean * 2, mean + 1

    _, kernels = results(function, (normal(40, 300),), LARGE)
    assert names(kernels) == ["rows"]


@every_target
@pytest.mark.parametrize("shape", [(700, 40), (512, 132), (64, 33), (3000, 8)], ids=str)
def test_sums_and_positions_of_columns(target: Target, shape: tuple[int, ...]) -> None:
    x = np.round(normal(*shape) * 4)

    def function(x: Any) -> Any:
        return jnp.sum(x, axis=0), jnp.argmax(x, axis=0), jnp.mean(x * x, axis=0)

    got, kernels = results(function, (x,), target)
    np.testing.assert_array_equal(got[0], x.sum(0))
    np.testing.assert_array_equal(got[1], x.argmax(0))
    np.testing.assert_allclose(got[2], (x * x).mean(0), rtol=1e-5)
    assert all(k.name.startswith("columns") for k in kernels)


def test_sums_of_bfloat16_columns_are_float32() -> None:
    x = normal(3000, 64).astype(ml_dtypes.bfloat16)
    (got,), _ = results(lambda x: jnp.sum(x, axis=0), (x,), LARGE)
    want = x.astype(np.float64).sum(0).astype(ml_dtypes.bfloat16)
    np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=1e-2)


# -- scans ----------------------------------------------------------------------------------------

SCANS = [(1, 1), (4, 5), (3, 257), (70, 16), (2, 2600), (1, 17000), (3, 64, 5), (1, 300, 260)]


@every_target
@pytest.mark.parametrize("shape", SCANS, ids=str)
@pytest.mark.parametrize("reverse", [False, True], ids=["up", "down"])
def test_scans(target: Target, shape: tuple[int, ...], reverse: bool) -> None:  # noqa: FBT001
    x = np.round(normal(*shape) * 4)
    axis = 1
    (sums, most), _ = results(
        lambda x: (
            vj.lax.cumsum(x, axis, reverse=reverse),
            vj.lax.cummax(x, axis, reverse=reverse),
        ),
        (x,),
        target,
    )
    turned = np.flip(x, axis) if reverse else x
    for got, function in ((sums, np.add), (most, np.maximum)):
        want = function.accumulate(turned, axis=axis)
        np.testing.assert_array_equal(got, np.flip(want, axis) if reverse else want)


@every_target
def test_scans_spread_what_is_no_number(target: Target) -> None:
    x = normal(2, 3000)
    x[0, 1234] = np.nan
    (got,), _ = results(lambda x: jnp.cumsum(x, axis=1), (x,), target)
    assert np.isfinite(got[0, :1234]).all()
    assert np.isnan(got[0, 1234:]).all()
    assert np.isfinite(got[1]).all()


def test_long_scans_are_cut_into_parts() -> None:
    x = normal(50001)
    (got,), kernels = results(jnp.cumsum, (x,), LARGE)
    np.testing.assert_allclose(got, np.cumsum(x.astype(np.float64)), rtol=1e-4, atol=1e-3)
    assert names(kernels) == ["scan_part", "scan"]
    assert math.prod(kernels[1].grid) > 1


# -- gather and scatter ---------------------------------------------------------------------------


def scattered(target: Array, ids: Array, updates: Array) -> Array:
    """Updates added one after the other, in float32."""
    out = target.copy()
    for i, update in zip(ids, updates, strict=True):
        if 0 <= i < len(out):
            out[i] += update
    return out


@every_target
@pytest.mark.parametrize("count", [1, 5, 64, 101])
@pytest.mark.parametrize("inner", [1, 6, 8])
def test_scatters_add_in_order(target: Target, count: int, inner: int) -> None:
    rng = np.random.default_rng(count)
    ids = rng.integers(-2, 12, count).astype(np.int32)
    base, updates = normal(9, inner), rng.standard_normal((count, inner)).astype(np.float32)
    (got,), kernels = results(_scatter, (base, ids, updates), target)
    np.testing.assert_array_equal(got, scattered(base, ids, updates))
    assert names(kernels)[-1:] == ["scatter_add"]


@every_target
def test_many_updates_are_ranked_first(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vkjit.lowering.gpu.scatter._ONE_KERNEL", 100)
    rng = np.random.default_rng(0)
    ids = rng.integers(-3, 40, 203).astype(np.int32)
    base, updates = normal(37, 4), rng.standard_normal((203, 4)).astype(np.float32)
    (got,), kernels = results(_scatter, (base, ids, updates), target)
    np.testing.assert_array_equal(got, scattered(base, ids, updates))
    assert names(kernels)[-2:] == ["scatter_order", "scatter_add"]


def test_very_many_updates_are_added_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vkjit.lowering.gpu.scatter._ONE_KERNEL", 100)
    monkeypatch.setattr("vkjit.lowering.gpu.scatter._CHUNK", 64)
    rng = np.random.default_rng(0)
    for count in (128, 203, 1100):
        ids = rng.integers(-3, 40, count).astype(np.int32)
        base, updates = normal(37, 4), rng.standard_normal((count, 4)).astype(np.float32)
        (got,), kernels = results(_scatter, (base, ids, updates), LARGE)
        np.testing.assert_array_equal(got, scattered(base, ids, updates))
        assert names(kernels).count("scatter_add") == {128: 2, 203: 4, 1100: 9}[count]


def _scatter(base: Any, ids: Any, updates: Any) -> Any:
    return scatter_add(base, ids, updates, 0)


# -- limits ---------------------------------------------------------------------------------------


def test_large_arrays_are_indexed_in_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MAX_ELEMENTS", 1000)
    x, ids = normal(70, 64), np.arange(0, 70, 3).astype(np.int32)

    def function(x: Any, ids: Any) -> Any:
        taken = jnp.take(x, ids, axis=0)
        out = scatter_add(x, ids, taken, 0)
        return (
            vj.nn.softmax(x),
            jnp.sum(x, 0),
            jnp.sum(x),
            jnp.argmax(x, axis=1),
            jnp.cumsum(x, axis=1),
            jnp.cumsum(x, axis=0),
            x.T + 1,
            out,
        )

    got, kernels = results(function, (x, ids), LARGE)
    assert all(k.index_type is I64 for k in kernels if any(b.length > 999 for b in k.buffers))
    monkeypatch.undo()
    want, short = results(function, (x, ids), LARGE)
    assert all(k.index_type is I32 for k in short)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w)


def test_numbers_in_blocks_are_counted_where_arrays_are_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A block of 144 bytes, 36 elements of its array, has 256 numbers."""
    packed = blocks.drawn(blocks.Q4_K, (6, 1), np.random.default_rng(0))
    ids, x = np.array([5, 0, 5], np.int32), normal(2, 256)

    def function(w: Any, ids: Any) -> Any:
        w = quant.QuantizedArray(w)
        return jnp.take(w, ids, axis=0), jnp.max(w, axis=1), w.T.dequantize() * 2

    want, short = results(function, (packed, ids), LARGE)
    assert all(k.index_type is I32 for k in short)
    monkeypatch.setattr(index, "MAX_ELEMENTS", 1000)
    got, kernels = results(function, (packed, ids), LARGE)
    assert all(k.index_type is I64 for k in kernels)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w)
    with pytest.raises(MissingRuleError, match="reads blocks of 1536 numbers"):
        results(lambda w, x: x @ quant.QuantizedArray(w).T, (packed, x), LARGE)


@pytest.mark.parametrize("axis", [None, 0, 1], ids=str)
def test_reductions_of_what_small_arrays_are_broadcast_to(
    monkeypatch: pytest.MonkeyPatch, axis: int | None
) -> None:
    """2^16 by 2^16 products are more than 32 bits count, though no array is large."""

    def function(x: Any, y: Any) -> Any:
        return jnp.sum(x[:, None] * y, axis)

    x, y = normal(70), normal(64)
    _, kernels = results(function, (x, y), LARGE)
    assert all(k.index_type is I32 for k in kernels)
    monkeypatch.setattr(index, "MAX_ELEMENTS", 65)
    (got,), kernels = results(function, (x, y), LARGE)
    assert kernels[0].index_type is I64
    np.testing.assert_allclose(got, np.sum(x[:, None] * y, axis), rtol=1e-4, atol=1e-4)


def test_grids_use_three_dimensions() -> None:
    small = replace(LARGE, max_grid=(3, 2, 65535))
    x = normal(100, 300)
    (got,), (kernel,) = results(lambda x: x + 1, (x,), small)
    np.testing.assert_array_equal(got, x + 1)
    assert kernel.grid[2] > 1
    assert kernel.buffers[0].elem is F32


# -- schedules ------------------------------------------------------------------------------------

TUNABLE: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "pointwise": (lambda x: x * 2 + 1, (65539,)),
    "transpose": (lambda x: x.T + 1, (260, 256)),
    "rows": (lambda x: x - jnp.max(x, axis=1, keepdims=True), (9, 1500)),
    "short rows": (lambda x: x - jnp.max(x, axis=1, keepdims=True), (9, 100)),
    "long rows": (lambda x: jnp.max(x, axis=1), (2, 40000)),
    "columns": (lambda x: jnp.max(x, axis=0), (1500, 40)),
}


@pytest.mark.parametrize("case", TUNABLE)
def test_every_schedule_gives_the_same(case: str) -> None:
    function, shape = TUNABLE[case]
    x = normal(*shape)
    program = vj.make_ir(function)(x)
    (group,) = partition(program).groups
    assert isinstance(group, LoopGroup)
    infos = [ArrayInfo(F32, x.size), ArrayInfo(F32, program.out_avals[0].size)]
    options = candidates(group, TemplateContext(LARGE, list(infos)))
    assert len(set(options)) == len(options) > 1
    want = np.asarray(function(x)).ravel()
    for schedule in options:
        context = TemplateContext(LARGE, list(infos))
        memory = [x.ravel(), np.empty_like(want)]
        for lowered in lower_loop(group, context, schedule):
            for info in context.arrays[len(memory) :]:
                memory.append(np.empty(info.length, DTYPES[info.elem]))
            verify(lowered.kernel, 4)
            run(lowered.kernel, [memory[a] for a in lowered.arrays])
        np.testing.assert_array_equal(memory[1], want, err_msg=str(schedule))


HUGE: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "pointwise": (lambda x: x * 2 + 1, (1 << 32,)),
    "transpose": (lambda x: x.T + 1, (1 << 16, 1 << 16)),
    "rows": (lambda x: vj.nn.softmax(x), (1 << 21, 1 << 11)),
    "columns": (lambda x: jnp.sum(x, axis=0), (1 << 22, 1 << 10)),
    "sum and position": (lambda x: (jnp.sum(x), jnp.max(x)), (1 << 32,)),
    "scan of lines": (lambda x: jnp.cumsum(x, axis=1), (1 << 10, 1 << 22)),
    "scan of columns": (lambda x: jnp.cumsum(x, axis=0), (1 << 16, 1 << 16)),
    "scatter": (lambda x: scatter_add(x, jnp.arange(9), x[:9] * 2, 0), (1 << 22, 1 << 10)),
}


@pytest.mark.parametrize("addressing", list(Addressing), ids=lambda a: a.value)
@pytest.mark.parametrize("case", HUGE)
def test_kernels_of_huge_arrays_are_valid(case: str, addressing: Addressing) -> None:
    function, shape = HUGE[case]
    program = vj.make_ir(function)(vj.ShapeDtypeStruct(shape, np.float32))
    target = replace(LARGE, addressing=addressing)
    steps = compile_program(program, target).plan.steps
    kernels = [s.kernel for s in steps if isinstance(s, Launch)]
    assert any(k.index_type is I64 for k in kernels)
    for kernel in kernels:
        validate(emit(kernel, target))
    narrow = replace(target, arithmetic=target.arithmetic - {I64})
    with pytest.raises(MissingRuleError, match=f"{1 << 32} elements of f32"):
        compile_program(program, narrow)
