"""docs/differences.md tells the truth about vkjit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from vkjit.errors import DTypeError, IndexingError, TracerError

Function = Callable[..., Any]
ZERO = np.float32(0)


def _branch(x: Any) -> Any:
    return x if x > 0 else -x


@pytest.mark.parametrize("transform", [vj.grad, vj.vmap, vj.jit])
def test_transformations_stage_the_function(transform: Function) -> None:
    x = np.ones(3, np.float32) if transform is vj.vmap else np.float32(1.5)
    with pytest.raises(TracerError, match="where"):
        transform(_branch)(x)


def test_eager_results_stay_on_the_device_of_their_operands(device: str) -> None:
    x: Any = vj.device_put(np.ones(2, np.float32), device)
    assert (x + 1).device == device
    np.testing.assert_array_equal(np.asarray(x + 1), [2, 2])


def test_a_jit_inside_a_trace_is_inlined() -> None:
    program = vj.make_ir(vj.jit(lambda x: x + 1))(ZERO)
    assert "= add %0, 1.0" in str(program)


def test_cheap_residuals_are_recomputed_in_a_region() -> None:
    program = vj.make_ir(vj.grad(lambda x: jnp.sum(jnp.exp(jnp.tanh(x)))))(np.ones(3, np.float32))
    assert "= tanh %0" in str(program)
    assert "= tanh@1 %0" in str(program)


def test_64_bits_exist_inside_the_block_alone() -> None:
    double = np.ones(2)
    assert jnp.asarray(double).dtype == np.float32
    assert jnp.zeros(2, dtype=np.int64).dtype == np.int32
    with vj.enable_x64():
        assert jnp.asarray(double).dtype == np.float64
    assert jnp.asarray(double).dtype == np.float32


def test_a_cast_is_never_weak() -> None:
    outs = vj.eval_shape(lambda x: (x * 2.0, (x * 2.0).astype(jnp.float32)), 1.0)
    assert [out.weak_type for out in outs] == [True, False]


def test_no_complex_numbers() -> None:
    with pytest.raises(DTypeError, match="complex64 is not supported"):
        jnp.asarray(np.complex64(1))


def test_half_products_say_what_they_sum_in() -> None:
    halves = jnp.ones((2, 2), jnp.bfloat16)
    assert "accumulate=f32" in str(vj.make_ir(jnp.matmul)(halves, halves))


@pytest.mark.parametrize("read", [lambda x: x[5], lambda x: x.at[5].set(1.0)], ids=["get", "set"])
def test_static_indices_out_of_range_are_errors(read: Function) -> None:
    with pytest.raises(IndexingError, match="5 is out of range for axis 0"):
        read(jnp.arange(3.0))


def test_indices_in_arrays_clamp_fill_or_drop() -> None:
    x, i = jnp.arange(3.0), np.array([5, -7])
    np.testing.assert_array_equal(np.asarray(x[i]), [2, 0])
    np.testing.assert_array_equal(np.asarray(vj.jit(lambda x, i: x[i])(x, np.int32(5))), 2)
    np.testing.assert_array_equal(np.asarray(jnp.take(x, i)), [np.nan] * 2)
    np.testing.assert_array_equal(np.asarray(jnp.take_along_axis(x, i, 0)), [np.nan] * 2)
    np.testing.assert_array_equal(np.asarray(jnp.take(x, i, mode="wrap")), [2, 2])
    np.testing.assert_array_equal(np.asarray(jnp.take(x, i, mode="clip")), [2, 0])
    np.testing.assert_array_equal(np.asarray(x.at[i].set(9.0)), [0, 1, 2])


def test_set_keeps_the_last_value(device: str) -> None:
    def put(x: Any, i: Any, v: Any) -> Any:
        return x.at[i].set(v), x.at[i].add(v)

    x = vj.device_put(np.arange(3, dtype=np.float32), device)
    last, total = vj.jit(put)(x, np.array([1, 1]), np.array([7, 9], np.float32))
    np.testing.assert_array_equal(np.asarray(last), [0, 9, 2])
    np.testing.assert_array_equal(np.asarray(total), [0, 17, 2])
    assert not hasattr(x.at[0], "apply")


def test_values_take_the_dtype_of_the_array() -> None:
    np.testing.assert_array_equal(np.asarray(jnp.arange(3).at[0].set(2.7)), [2, 1, 2])


@pytest.mark.parametrize(
    ("fn", "x", "slope"),
    [
        pytest.param(jnp.abs, ZERO, 0.0, id="abs"),
        pytest.param(lambda x: x**0.0, ZERO, 0.0, id="power-0"),
        pytest.param(lambda y: jnp.power(ZERO, y), np.float32(2), 0.0, id="power-of-0"),
        pytest.param(lambda y: jnp.power(ZERO, y), ZERO, 0.0, id="power-of-0-at-0"),
        pytest.param(jnp.max, np.ones(2, np.float32), [0.5, 0.5], id="max"),
        pytest.param(lambda x: jnp.maximum(x, 0.0), ZERO, 0.5, id="maximum"),
        pytest.param(vj.nn.relu, ZERO, 0.0, id="relu"),
    ],
)
def test_conventional_derivatives(fn: Function, x: Any, slope: Any, device: str) -> None:
    given = vj.device_put(x, device)
    np.testing.assert_array_equal(np.asarray(vj.jit(vj.grad(fn))(given)), slope)


def test_softmax_of_nothing_is_nan(device: str) -> None:
    row = vj.device_put(np.full(3, -np.inf, np.float32), device)
    assert np.isnan(np.asarray(vj.jit(vj.nn.softmax)(row))).all()


def test_a_jitted_function_writes_the_ref_that_it_is_given(device: str) -> None:
    def write(ref: vj.Ref, x: Any) -> Any:
        ref[0] = x
        return ref[...] * 2

    with vj.default_device(device):
        ref = vj.Ref(jnp.zeros(3))
        twice = vj.jit(write)(ref, np.float32(4))
    np.testing.assert_array_equal(np.asarray(twice), [8, 0, 0])
    np.testing.assert_array_equal(np.asarray(ref[...]), [4, 0, 0])


def test_a_ref_from_outside_is_not_written_inside() -> None:
    ref = vj.Ref(jnp.zeros(3))
    with pytest.raises(TracerError, match="pass the Ref"):
        vj.jit(lambda x: ref.__setitem__(0, x))(np.float32(1))


def test_keys_are_plain_arrays() -> None:
    key = vj.random.key(3)
    assert (key.shape, key.dtype) == ((2,), np.uint32)
    np.testing.assert_array_equal(np.asarray(key), np.asarray(vj.random.PRNGKey(3)))


@pytest.mark.parametrize("name", ["pmap"])
def test_what_is_not_there(name: str) -> None:
    assert not hasattr(vj, name)


@pytest.mark.parametrize("name", ["fft", "conv"])
def test_what_lax_has_not(name: str) -> None:
    assert not hasattr(vj.lax, name)


def test_what_every_branch_passes_through_is_no_result_of_the_choice() -> None:
    def fn(p: Any, x: Any, y: Any) -> Any:
        return vj.lax.cond(p, lambda: (x, y + 1), lambda: (x, y))

    text = str(vj.make_ir(fn)(True, np.zeros(3, np.float32), 1.0))
    (line,) = [line for line in text.splitlines() if "= cond" in line]
    assert line.count(": ") == 1


def test_a_named_mode_takes_static_integers_out_of_range() -> None:
    x = jnp.arange(3.0)
    assert x.at[5].set(1, mode="drop").tolist() == [0, 1, 2]
    assert float(x.at[5].get(mode="clip")) == 2
    assert x.at[np.array([4])].get(mode="wrap").tolist() == [1]


def test_sorts_are_stable_with_nan_last_and_zeros_equal(device: str) -> None:
    x = vj.device_put(np.array([np.nan, 1, 0, -0.0, -np.nan, 1], np.float32), device)
    assert np.asarray(jnp.argsort(x)).tolist() == [2, 3, 1, 5, 0, 4]
    assert np.asarray(jnp.argsort(x, descending=True)).tolist() == [0, 4, 1, 5, 2, 3]
    assert np.asarray(vj.lax.top_k(x, 5)[1]).tolist() == [0, 4, 1, 5, 2]
    for name in ("argpartition", "searchsorted", "percentile"):
        assert not hasattr(jnp, name)
