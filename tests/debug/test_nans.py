"""debug.nans: the first operation that makes a NaN, on each device."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest

import vkjit as vj
from vkjit import debug, lax
from vkjit import numpy as vnp
from vkjit.debug.nans import WatchedLoaded
from vkjit.errors import NonFiniteError

X = np.linspace(1, 2, 6, dtype=np.float32)


@pytest.fixture(autouse=True)
def on_device(device: str) -> Generator[None]:
    with vj.default_device(device):
        yield


def blamed(fn: Callable[..., Any], *args: Any, infs: bool = False) -> str:
    with debug.nans(infs=infs), pytest.raises(NonFiniteError) as caught:
        vj.jit(fn)(*args)
    return str(caught.value)


def line(fn: Callable[..., Any], offset: int) -> str:
    return f"{__file__}:{fn.__code__.co_firstlineno + offset}"


def test_forward_names_operation_index_operands_and_line() -> None:
    def f(x: Any) -> Any:
        y = x.reshape(2, 3) - 1.5
        z = vnp.log(y)
        return vnp.tanh(z).sum() * 2

    text = blamed(f, X)
    assert text.startswith("nan: log gave nan at [0, 0] of f32[2,3] (3 of 6 elements)")
    assert f"forward: the line {line(f, 2)}" in text
    assert "operand 0 f32[2,3]: -0.5 there" in text
    assert np.isnan(vj.jit(f)(X))  # outside the block nothing is watched


def test_backward_is_told_from_forward() -> None:
    def f(x: Any) -> Any:
        squares = (x * x).sum()
        return vnp.sqrt(squares)

    assert float(vj.jit(f)(0 * X)) == 0
    text = blamed(vj.grad(f), 0 * X)
    assert text.startswith("nan: mul gave nan at [0] of f32[6]")
    assert f"backward: in the cotangent of the line {line(f, 1)}" in text
    assert "inf there" in text


def test_a_scan_names_the_turn_forward_and_backward() -> None:
    def f(xs: Any) -> Any:
        def body(c: Any, x: Any) -> Any:
            y = vnp.sqrt(c - x)
            return y, y * 2

        c, ys = lax.scan(body, np.float32(5), xs)
        return c + ys.sum()

    text = blamed(f, X)
    assert "nan: sqrt gave nan at [] of f32[]" in text
    assert "in turn 2 of 6 of the scan at" in text
    assert f"forward: the line {line(f, 2)}" in text
    exact = np.array([1, -2, 2, -1, 0, 0], np.float32)  # sqrt(0) in turn 2: a derivative of inf
    text = blamed(vj.grad(lambda xs: 0 * f(xs)), exact)
    assert "backward" in text
    assert "slice 2, it runs backwards" in text


def test_loops_and_branches_inside_loops() -> None:
    def f(x: Any) -> Any:
        def body(state: Any) -> Any:
            i, v = state
            v = lax.cond(i > 2, lambda v: vnp.log(v - 10), lambda v: v + 1, v)
            return i + 1, v

        return lax.while_loop(lambda s: s[0] < 6, body, (0, x))[1]

    text = blamed(f, X)
    assert "nan: log gave nan" in text
    assert "in turn 3 of the while_loop at" in text


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_inputs_that_are_nan_are_named_as_inputs() -> None:
    with (
        debug.nans(),
        pytest.raises(NonFiniteError, match=r"array 1 of the call, f32\[6\], is nan"),
    ):
        vj.jit(lambda x, y: x * y)(X, np.where(X > 1.5, np.float32(np.nan), X))
    held = vnp.asarray(np.full(3, np.nan, np.float32))
    with debug.nans(), pytest.raises(NonFiniteError, match="a captured array"):
        vj.jit(lambda x: x + held.sum())(X)


def test_infinities_are_errors_where_asked() -> None:
    def f(x: Any) -> Any:
        return vnp.exp(100 * x)

    with debug.nans():
        assert np.isinf(np.asarray(vj.jit(f)(X))).all()
    text = blamed(f, X, infs=True)
    assert text.startswith("nan or infinity: exp gave inf at [0]")
    assert "operand 0 f32[6]: 100.0 there" in text


@pytest.mark.parametrize("dtype", [vnp.float16, vnp.bfloat16])
def test_narrow_floats_are_watched(dtype: Any) -> None:
    text = blamed(lambda x: vnp.log(-x), vnp.asarray(X).astype(dtype))
    assert "log gave nan at [0]" in text


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_reduced_operands_are_summed_up() -> None:
    x = np.array([[np.inf, 1, 2], [3, 4, 5]], np.float32)
    w = np.array([[0, 1], [1, 1], [1, 1]], np.float32)
    text = blamed(lambda x, w: x @ w, x, w)
    assert "at [0, 0] of f32[2,2] (1 of 4 elements)" in text
    assert "from 1.0 to 5.0, 1 of 6 elements not finite" in text


def loss(params: Any, x: Any, y: Any) -> Any:
    hidden = vnp.tanh(x @ params["a"])
    mask = vnp.where(vnp.tril(vnp.ones((8, 8))) > 0, 0.0, -vnp.inf)
    scores = vj.nn.softmax(hidden @ hidden.T + mask)

    def body(c: Any, row: Any) -> Any:
        return 0.5 * c + row, c.sum()

    _, sums = lax.scan(body, vnp.zeros(5), scores @ hidden)
    out = vnp.concatenate([sums, vnp.sort(sums)[:2], vnp.zeros(1)])
    return ((out.sum() - y) ** 2).mean()


def test_a_training_step_without_nans_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def alarmed(*_: object) -> None:
        pytest.fail("a launch was said to have made a NaN")

    monkeypatch.setattr(WatchedLoaded, "_blame", alarmed)
    generator = np.random.default_rng(3)
    params = {"a": generator.normal(size=(4, 5)).astype(np.float32)}
    x = generator.normal(size=(8, 4)).astype(np.float32)
    step = vj.jit(vj.value_and_grad(loss))
    want = step(params, x, np.float32(1))
    with debug.nans():
        got = step(params, x, np.float32(1))
    for a, b in zip(vj.tree.leaves(got), vj.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_donated_arrays_are_gone_when_the_call_has_succeeded() -> None:
    step = vj.jit(lambda x, low: vnp.sqrt(x - low), donate_argnums=0)
    x = vnp.asarray(X)
    with debug.nans():
        with pytest.raises(NonFiniteError):
            step(x, np.float32(1.5))
        assert not x.is_deleted()
        step(x, np.float32(1))
        assert x.is_deleted()


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_what_only_a_kernel_gives_is_told_or_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WatchedLoaded, "_again", lambda *_, **__: None)
    text = blamed(lambda x: vnp.log(-x), X)
    assert "no operation gives one when run on its own: " in text
    assert "log at" in text

    def masked(x: Any) -> Any:
        y = vnp.cumsum(vnp.log(-x))
        return vnp.where(y == y, y, 0)

    with debug.nans():
        np.testing.assert_array_equal(vj.jit(masked)(X), 0 * X)


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_calls_of_the_host_are_not_repeated(capsys: Any) -> None:
    def f(x: Any) -> Any:
        debug.print("x {}", x[0])
        return vnp.log(-x)

    blamed(f, X)
    assert capsys.readouterr().out == "x 1.0\n"


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_eager_operations_are_looked_at_one_by_one() -> None:
    x = vnp.asarray(X)
    with debug.nans(), pytest.raises(NonFiniteError, match=r"log gave nan at .0. of f32") as caught:
        vnp.log(-x)
    assert f"forward: the line {__file__}" in str(caught.value)
    with debug.nans(), pytest.raises(NonFiniteError, match="backward: in the cotangent of"):
        vj.grad(lambda x: vnp.sqrt((x * x).sum()))(0 * x)
    with debug.nans(), pytest.raises(NonFiniteError, match="in turn 1 of 6 of the scan"):
        lax.scan(lambda c, t: (vnp.log(c) - t, None), np.float32(1), x)
    assert np.isnan(np.asarray(vnp.log(-x))).all()


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_modes_are_those_of_a_thread_and_nest() -> None:
    f = vj.jit(vnp.exp)
    with debug.nans(infs=True):
        with debug.nans():
            f(100 * X)
        with pytest.raises(NonFiniteError):
            f(100 * X)
    assert np.isinf(np.asarray(f(100 * X))).all()
