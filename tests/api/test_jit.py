"""jit: what makes a new version, static arguments, donation, constants, and what is refused."""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import Any

import numpy as np
import pytest

import vkjit as vj
from vkjit import numpy as vnp
from vkjit.errors import (
    ArgumentError,
    DonatedBufferError,
    StaticArgumentError,
    TracerError,
    UserError,
)

X = np.arange(6, dtype=np.float32)


def here() -> int:
    return sys._getframe(1).f_lineno


def line_in(error: UserError) -> int:
    found = re.search(rf"{re.escape(__file__)}:(\d+)$", str(error))
    assert found, str(error)
    return int(found.group(1))


# -- the cache -------------------------------------------------------------------------------------


def test_equal_avals_share_a_version() -> None:
    fn = vj.jit(lambda x: x * 2)
    fn(X)
    fn(X + 1)
    fn(vnp.asarray(X))
    assert fn.cache_size() == 1
    fn(X[:3])
    fn(X.astype(np.float16))
    assert fn.cache_size() == 3
    fn.clear_cache()
    assert fn.cache_size() == 0


def test_compiling_ahead_runs_nothing_and_serves_the_next_call() -> None:
    fn = vj.jit(lambda x: x * 2.0, donate_argnums=0)
    x = vnp.ones((3,))
    memory = fn.compile(x).memory()
    assert (memory.inputs, memory.outputs, memory.donated) == (12, 0, 12)
    assert fn.cache_size() == 1
    np.testing.assert_array_equal(fn(x), [2.0, 2.0, 2.0])
    assert fn.cache_size() == 1


def test_weak_types_have_their_own_version() -> None:
    fn = vj.jit(lambda x, s: x * s)
    half = np.zeros(3, np.float16)
    assert fn(half, 2.0).dtype == np.float16
    assert fn(half, np.float32(2.0)).dtype == np.float32
    assert fn(half, 2.0).dtype == np.float16
    assert fn.cache_size() == 2


def test_static_values_are_compared_by_value_and_type() -> None:
    seen: list[object] = []

    def fn(x: Any, n: Any) -> Any:
        seen.append(n)
        return x * n

    jitted = vj.jit(fn, static_argnums=1)
    for n in (1, 1.0, True, 1, 1.0, (2), 2):
        jitted(X, n)
    assert seen == [1, 1.0, True, 2]
    assert [type(n) for n in seen] == [int, float, bool, int]


def test_structures_and_keywords_are_part_of_the_key() -> None:
    fn = vj.jit(lambda tree, scale=1.0: vj.tree.map(lambda v: v * scale, tree))
    one = fn({"a": X, "b": (X,)})
    fn({"a": X, "b": [X]})
    fn({"a": X, "b": (X,)}, scale=2.0)
    fn({"b": (X,), "a": X}, scale=3.0)
    assert fn.cache_size() == 3
    assert isinstance(one["b"], tuple)
    np.testing.assert_array_equal(np.asarray(one["b"][0]), X)


def test_wide_mode_is_part_of_the_key() -> None:
    fn = vj.jit(lambda x: x * 2)
    wide = np.arange(3.0)
    assert fn(wide).dtype == np.float32
    with vj.enable_x64(), vj.default_device("cpu"):
        assert fn(wide).dtype == np.float64
    assert fn(wide).dtype == np.float32
    assert fn.cache_size() == 2


def test_the_device_is_part_of_the_key() -> None:
    fn = vj.jit(lambda x: x * 2)
    for name in ("cpu", "reference"):
        with vj.default_device(name):
            assert fn(X).device == name
    assert fn.cache_size() == 2


def test_static_names_and_numbers_mean_the_same_argument() -> None:
    def fn(x: Any, shape: Any = (6,), *, flip: bool = False) -> Any:
        return x.reshape(shape)[::-1] if flip else x.reshape(shape)

    by_name = vj.jit(fn, static_argnames=("shape", "flip"))
    assert by_name(X, (2, 3)).shape == (2, 3)
    assert by_name(X, shape=(3, 2)).shape == (3, 2)
    np.testing.assert_array_equal(np.asarray(by_name(X, flip=True)), X[::-1])
    by_number = vj.jit(fn, static_argnums=(1,))
    assert by_number(X, shape=(3, 2)).shape == (3, 2)
    assert vj.jit(fn, static_argnums=-1)(X, (2, 3)).shape == (2, 3)


def test_methods_compile_once_for_each_instance() -> None:
    @dataclasses.dataclass(frozen=True)
    class Layer:
        scale: float

        @vj.jit
        def __call__(self, x: Any) -> Any:
            return x * self.scale

    np.testing.assert_array_equal(np.asarray(Layer(2.0)(X)), 2 * X)
    np.testing.assert_array_equal(np.asarray(Layer(3.0)(X)), 3 * X)


def test_nested_jit_becomes_one_program() -> None:
    inner = vj.jit(lambda x: x + 1)
    outer = vj.jit(lambda x: inner(x) * inner(x))
    np.testing.assert_array_equal(np.asarray(outer(X)), (X + 1) ** 2)
    assert inner.cache_size() == 0


def test_decorator_with_options_and_wrapped_names() -> None:
    @vj.jit(static_argnums=1)
    def power(x: Any, n: int) -> Any:
        """Integer power."""
        return x**n

    assert power.__name__ == "power"  # type: ignore[attr-defined]
    assert power.__doc__ == "Integer power."
    np.testing.assert_array_equal(np.asarray(power(X, 2)), X**2)


# -- values that are closed over -------------------------------------------------------------------


def test_closures_are_constants_of_the_executable() -> None:
    table = vnp.asarray(X)
    fn = vj.jit(lambda x: x + table)
    np.testing.assert_array_equal(np.asarray(fn(X)), 2 * X)
    plan = fn.lower(X).plan
    assert [b.size for b in plan.buffers if b.role.value == "constant"] == [24]


def test_numpy_constants_are_read_once() -> None:
    table = X.copy()
    fn = vj.jit(lambda x: x + table)
    fn(X)
    table[:] = 100
    np.testing.assert_array_equal(np.asarray(fn(X)), 2 * X)


# -- donation --------------------------------------------------------------------------------------


def test_a_donated_array_is_gone(device: str) -> None:
    with vj.default_device(device):
        x = vnp.asarray(X)
        fn = vj.jit(lambda v: v + 1, donate_argnums=0)
        y = fn(x)
        np.testing.assert_array_equal(np.asarray(y), X + 1)
        assert x.is_deleted()
        with pytest.raises(DonatedBufferError, match=r"f32\[6\] was donated"):
            np.asarray(x)
        with pytest.raises(DonatedBufferError):
            fn(x)
        np.testing.assert_array_equal(np.asarray(fn(y)), X + 2)


def test_one_array_donated_and_passed_again_is_refused() -> None:
    x = vnp.asarray(X)
    fn = vj.jit(lambda a, b: (a + 1, b), donate_argnums=0)
    with pytest.raises(DonatedBufferError, match="passed twice, once donated"):
        fn(x, x)
    assert not x.is_deleted()


def test_host_arrays_may_be_donated_again() -> None:
    fn = vj.jit(lambda v: v + 1, donate_argnums=0)
    for _ in range(2):
        np.testing.assert_array_equal(np.asarray(fn(X)), X + 1)


def test_a_donated_pytree_is_gone_as_a_whole() -> None:
    params = {"a": vnp.asarray(X), "b": vnp.asarray(X[:2])}
    fn = vj.jit(lambda p, s: vj.tree.map(lambda v: v * s, p), donate_argnums=(0,))
    out = fn(params, np.float32(2.0))
    assert params["a"].is_deleted()
    assert params["b"].is_deleted()
    np.testing.assert_array_equal(np.asarray(out["b"]), 2 * X[:2])


# -- refusals --------------------------------------------------------------------------------------


def test_a_branch_on_a_traced_value_names_line_and_remedy() -> None:
    lines: list[int] = []

    def fn(x: Any) -> Any:
        lines.append(here() + 1)
        if x[0] > 0:
            return x
        return -x

    with pytest.raises(TracerError, match="bool: a traced value") as caught:
        vj.jit(fn)(X)
    assert line_in(caught.value) == lines[0]
    assert re.search(r"where|select|cond|static", str(caught.value))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: float(x[0]),
        lambda x: int(x[0]),
        lambda x: list(range(x[0])),
        lambda x: np.asarray(x),
        lambda x: x.tolist(),
    ],
    ids=["float", "int", "index", "array", "tolist"],
)
def test_reading_a_traced_value_is_refused(read: Any) -> None:
    with pytest.raises(TypeError, match=r"traced value|integer array of rank 0"):
        vj.jit(read)(X)


def test_a_leaked_tracer_is_named_with_its_origin() -> None:
    kept: list[Any] = []
    lines: list[int] = []

    def fn(x: Any) -> Any:
        lines.append(here() + 1)
        kept.append(x * 2)
        return x

    vj.jit(fn)(X)
    message = rf"finished trace.*made at .*test_jit\.py:{lines[0]}"
    with pytest.raises(TracerError, match=message):
        _ = kept[0] + 1
    with pytest.raises(TracerError, match=message):
        vj.jit(lambda x: x + kept[0])(X)


def test_unhashable_static_arguments_are_named() -> None:
    fn = vj.jit(lambda x, shape: x.reshape(shape), static_argnames="shape")
    with pytest.raises(StaticArgumentError, match=r"'shape' is a list, which is not hashable"):
        fn(X, shape=[2, 3])
    with pytest.raises(StaticArgumentError, match=r"1 is a list"):
        fn(X, [2, 3])


def test_only_functions_can_be_jitted() -> None:
    with pytest.raises(ArgumentError, match="jit: given int, expected a function"):
        vj.jit(3)  # type: ignore[call-overload]


def test_results_that_are_no_arrays_are_refused() -> None:
    with pytest.raises(UserError, match="str"):
        vj.jit(lambda x: (x, "text"))(X)


def test_an_error_while_tracing_leaves_no_state() -> None:
    fn = vj.jit(lambda x: x @ x[:2])
    for _ in range(2):
        with pytest.raises(UserError, match=r"f32\[6\].*f32\[2\]"):
            fn(X)
    assert fn.cache_size() == 0
    np.testing.assert_array_equal(np.asarray(vj.jit(lambda x: x + 1)(X)), X + 1)


# -- results ---------------------------------------------------------------------------------------


def test_results_that_are_inputs_constants_or_twice_the_same(device: str) -> None:
    def fn(x: Any, y: Any) -> Any:
        z = x + y
        return x, z, z, 3.0, {"y": y}

    with vj.default_device(device):
        x, z, again, three, rest = vj.jit(fn)(X, 2 * X)
        for got, want in ((x, X), (z, 3 * X), (again, 3 * X), (three, 3.0), (rest["y"], 2 * X)):
            np.testing.assert_array_equal(np.asarray(got), want)


def test_no_arguments_and_no_results() -> None:
    np.testing.assert_array_equal(np.asarray(vj.jit(lambda: vnp.arange(3))()), [0, 1, 2])
    assert vj.jit(lambda x: None)(X) is None
    assert vj.jit(dict)() == {}


def test_two_calls_give_the_same_bits(device: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(33, 65)).astype(np.float32)
    w = rng.normal(size=(65, 17)).astype(np.float32)
    fn = vj.jit(lambda a, b: (vj.nn.softmax(a @ b), vnp.sum(a), vnp.cumsum(b, 0)))
    with vj.default_device(device):
        first, second = fn(x, w), fn(x, w)
        for a, b in zip(first, second, strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_jit_around_a_transformation_of_jit_compiles_the_transformation() -> None:
    def cube(x: Any) -> Any:
        return x**3

    assert float(vj.jit(vj.grad(vj.jit(cube)))(2.0)) == 12.0
    got = vj.jit(vj.vmap(vj.jit(vnp.sum)))(np.ones((2, 3), np.float32))
    np.testing.assert_array_equal(np.asarray(got), [3.0, 3.0])


def test_what_a_function_closes_over_is_not_read_after_its_donation(device: str) -> None:
    with vj.default_device(device):
        kept = vj.device_put(np.ones_like(X))
        plus = vj.jit(lambda x: x + kept, donate_argnums=0)
        with pytest.raises(DonatedBufferError, match="donated that the function closes over"):
            plus(kept)
        np.testing.assert_array_equal(np.asarray(plus(vj.device_put(X))), X + 1)
        vj.jit(lambda x: x * 0 - 7, donate_argnums=0)(kept)
        for reading in (plus, vj.jit(lambda x: x - kept)):
            with pytest.raises(DonatedBufferError, match="closes over was donated to another"):
                reading(vj.device_put(X))


def test_kernels_are_not_shared_by_zeros_of_two_signs(device: str) -> None:
    """0.0 == -0.0, but they are two constants."""

    def f(x: Any) -> Any:
        return tuple(vnp.where(x > 0, x, zero) for zero in (0.0, -0.0, 0.0, -0.0))

    x = vj.device_put(np.array([-1.0, 2.0, -3.0], np.float32), device)
    signs = [np.signbit(np.asarray(r)).tolist() for r in vj.jit(f)(x)]
    assert signs == [[False] * 3, [True, False, True]] * 2
