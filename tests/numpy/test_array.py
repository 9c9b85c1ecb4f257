"""The array type: operators, conversions, and what a traced value refuses."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest

import vkjit.numpy as jnp
from vkjit.array import Array
from vkjit.errors import TracerError
from vkjit.trace import aval_of, trace

X = np.array([[-3, 2, 7], [1, -4, 5]], np.int32)
Y = np.array([2, -1, 3], np.int32)
OPERATORS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "or_", "xor", "eq", "ne", "lt",
    "le", "gt", "ge",
)  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_from_both_sides(name: str, run: Any, same: Any) -> None:
    function = getattr(operator, name)
    want = function(X, Y)
    want = want.astype(np.float32) if name == "truediv" else want
    same(run(function, jnp.asarray(X), jnp.asarray(Y)), want)
    same(run(lambda y: function(X, y), jnp.asarray(Y)), want)
    scalar = np.asarray(function(3, Y))
    scalar = scalar.astype(np.float32) if name == "truediv" else scalar
    same(run(lambda y: function(3, y), jnp.asarray(Y)), scalar)


def test_powers_shifts_and_products_from_both_sides(run: Any, same: Any) -> None:
    y = jnp.asarray(np.array([2, 1, 3], np.int32))
    plain = np.array([2, 1, 3], np.int32)
    same(run(lambda v: 2**v, y), 2**plain)
    same(run(lambda v: v**3, y), plain**3)
    same(run(lambda v: 1 << v, y), 1 << plain)
    same(run(lambda v: v >> 1, y), plain >> 1)
    same(run(lambda v: X @ v, y), X @ plain)
    same(run(lambda v: divmod(7, v), y), divmod(7, plain))
    same(run(lambda v: [-v, +v, ~v, abs(v - 2)], y), [-plain, plain, ~plain, abs(plain - 2)])


def test_methods_are_the_functions(run: Any, same: Any) -> None:
    x = X.astype(np.float32)
    calls: list[Any] = [
        lambda a: a.T,
        lambda a: a.reshape(3, 2),
        lambda a: a.reshape((-1,)),
        lambda a: a.transpose(1, 0),
        lambda a: a.transpose((1, 0)),
        lambda a: a.sum(0),
        lambda a: a.mean(axis=1, keepdims=True),
        lambda a: a.var(ddof=1),
        lambda a: a.std(0),
        lambda a: a.prod(),
        lambda a: a.cumsum(1),
        lambda a: a.clip(-1, 3),
        lambda a: a.swapaxes(0, 1),
        lambda a: a.ravel(),
        lambda a: a.flatten(),
        lambda a: a.repeat(2, 0),
        lambda a: a.take(np.array([0, 2]), 1),
        lambda a: a.trace(),
        lambda a: a.diagonal(1),
        lambda a: a.round(),
        lambda a: a.dot(np.float32(2)),
        lambda a: a.astype("int32"),
        lambda a: a[:, :1].squeeze(1),
        lambda a: a.argmax(1).astype("int32"),
        lambda a: (a > 0).any(0),
        lambda a: (a > 0).all(),
        lambda a: a.max(1) - a.min(1),
        lambda a: a.conj().real.copy(),
    ]
    for call in calls:
        same(run(call, jnp.asarray(x)), call(x), rtol=1e-5)


def test_what_an_array_says_of_itself() -> None:
    x = jnp.asarray(X)
    assert isinstance(x, Array)
    assert (x.shape, x.ndim, x.size, x.nbytes, x.itemsize, len(x)) == ((2, 3), 2, 6, 24, 4, 2)
    assert x.dtype == jnp.int32
    assert x.__array_namespace__() is jnp
    assert x.tolist() == X.tolist()
    assert [row.tolist() for row in x] == X.tolist()
    assert x.block_until_ready() is x
    assert x.item(1, 2) == 5
    assert 7 in x
    assert (x == None) is False  # noqa: E711  what falls back to identity
    with pytest.raises(TypeError, match="unhashable"):
        hash(x)
    with pytest.raises(TypeError, match="rank 0"):
        len(jnp.asarray(1))


def test_scalars_convert_and_longer_arrays_do_not() -> None:
    assert bool(jnp.asarray(2))
    assert int(jnp.asarray([3])) == 3
    assert float(jnp.asarray(2.5)) == 2.5
    assert [10, 11, 12][jnp.asarray(1)] == 11
    assert f"{jnp.asarray(2.5):.2f}" == "2.50"
    with pytest.raises(ValueError, match=r"2 elements; expected one; use \.any\(\)"):
        bool(jnp.asarray([1, 2]))
    with pytest.raises(TypeError, match="integer array of rank 0"):
        operator.index(jnp.asarray(1.0))


CONVERSIONS: dict[str, tuple[Any, str]] = {
    "bool": (bool, r"vkjit\.numpy\.where"),
    "int": (int, "static_argnums"),
    "float": (float, "return the value"),
    "index": (operator.index, r"dynamic_slice"),
    "array": (np.asarray, r"use vkjit\.numpy instead of numpy"),
}


@pytest.mark.parametrize("kind", CONVERSIONS)
def test_a_traced_value_has_no_concrete_one(kind: str) -> None:
    convert, advice = CONVERSIONS[kind]

    def fn(x: Any) -> Any:
        y = x + 1
        return [convert(y)]

    of = aval_of(np.int32(1))
    with pytest.raises(TracerError, match=rf"^{kind}: a traced value i32\[\].*{advice}") as caught:
        trace(fn, [of])
    assert f"{__file__}" in str(caught.value)


def test_an_if_on_a_traced_value_names_the_line() -> None:
    def fn(x: Any) -> Any:
        return [x if x > 0 else -x]

    with pytest.raises(TracerError, match=r"numpy\.where") as caught:
        trace(fn, [aval_of(np.float32(1))])
    line = int(str(caught.value).rsplit(":", 1)[1])
    assert line == fn.__code__.co_firstlineno + 1
