"""Elementwise functions against NumPy, special values and dtypes included."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import vkjit.numpy as jnp
from vkjit.errors import ArgumentError, DTypeError, ShapeError

INF, NAN = math.inf, math.nan
F = np.array([-3.5, -1.0, -0.25, -0.0, 0.0, 0.3, 1.0, 2.75], np.float32)
G = np.array([2.0, -1.5, 0.5, 1.0, -2.0, 3.0, 1.0, -0.75], np.float32)
SPECIAL = np.array([NAN, INF, -INF, 0.0, -0.0, 1.5], np.float32)
INTS = np.array([-7, -2, -1, 0, 1, 3, 100], np.int32)
OTHER = np.array([2, 3, -2, 1, -1, 7, 9], np.int32)

UNARY = {
    "exp": F, "exp2": F, "expm1": F, "sin": F, "cos": F, "tan": F, "sinh": F, "cosh": F, "tanh": F,
    "arctan": F, "arcsinh": F, "cbrt": F, "floor": F, "ceil": F, "trunc": F, "rint": F, "sign": F,
    "abs": F, "fabs": F, "negative": F, "positive": F, "square": F, "deg2rad": F, "rad2deg": F,
    "isnan": SPECIAL, "isinf": SPECIAL, "isfinite": SPECIAL, "isposinf": SPECIAL, "sinc": F,
    "isneginf": SPECIAL, "signbit": SPECIAL, "nan_to_num": SPECIAL, "logical_not": SPECIAL,
    "log": abs(F) + 0.1, "log2": abs(F) + 0.1, "log10": abs(F) + 0.1, "log1p": abs(F),
    "sqrt": abs(F), "reciprocal": G, "arcsin": F / 4, "arccos": F / 4, "arctanh": F / 4,
    "arccosh": abs(F) + 1, "modf": F,
}  # fmt: skip
BINARY = {
    "add": (F, G), "subtract": (F, G), "multiply": (F, G), "true_divide": (F, G),
    "floor_divide": (F, G), "remainder": (F, G), "fmod": (F, G), "divmod": (F, G),
    "maximum": (SPECIAL, SPECIAL[::-1].copy()), "minimum": (SPECIAL, SPECIAL[::-1].copy()),
    "fmax": (SPECIAL, SPECIAL[::-1].copy()), "fmin": (SPECIAL, SPECIAL[::-1].copy()),
    "power": (abs(F), G), "float_power": (abs(F), G), "arctan2": (F, G), "hypot": (F, G),
    "logaddexp": (F, G), "logaddexp2": (F, G), "copysign": (F, SPECIAL[[1, 2, 3, 4, 0, 1, 2, 4]]),
    "heaviside": (F, G), "nextafter": (F, G), "equal": (F, G), "less": (F, G), "greater": (F, G),
    "not_equal": (SPECIAL, SPECIAL), "less_equal": (F, G), "greater_equal": (F, G),
    "logical_and": (F, G), "logical_or": (F, G), "logical_xor": (F, G), "isclose": (F, F + 1e-7),
}  # fmt: skip
WHOLE = (
    "add", "subtract", "multiply", "floor_divide", "remainder", "fmod", "maximum", "minimum",
    "bitwise_and", "bitwise_or", "bitwise_xor", "equal", "less",
)  # fmt: skip


@pytest.mark.parametrize("name", UNARY)
def test_unary_floats(name: str, run: Any, same: Any) -> None:
    x = np.asarray(UNARY[name], np.float32)
    with np.errstate(all="ignore"):
        want = getattr(np, name)(x)
    same(run(getattr(jnp, name), jnp.asarray(x)), want, rtol=3e-6)


@pytest.mark.parametrize("name", BINARY)
def test_binary_floats(name: str, run: Any, same: Any) -> None:
    x, y = BINARY[name]
    with np.errstate(all="ignore"):
        want = getattr(np, name)(x, y)
    want = want if isinstance(want, tuple) else np.asarray(want)
    want = np.asarray(want, np.float32) if name == "float_power" else want
    same(run(getattr(jnp, name), jnp.asarray(x), jnp.asarray(y)), want, rtol=3e-6)


@pytest.mark.parametrize("name", WHOLE)
def test_binary_integers(name: str, run: Any, same: Any) -> None:
    same(
        run(getattr(jnp, name), jnp.asarray(INTS), jnp.asarray(OTHER)),
        getattr(np, name)(INTS, OTHER),
    )
    low, high = INTS.astype(np.uint8), OTHER.astype(np.uint8)
    same(run(getattr(jnp, name), jnp.asarray(low), jnp.asarray(high)), getattr(np, name)(low, high))


def test_operands_broadcast(run: Any, same: Any) -> None:
    a, b, c = F.reshape(2, 4), G[:4], G[:2].reshape(2, 1)
    operands = [jnp.asarray(v) for v in (a, b, c)]
    same(run(lambda x, y, z: x * y - z / 2, *operands), a * b - c / 2)
    same(run(lambda x, y, z: jnp.where(x > y, z, 1), *operands), np.where(a > b, c, np.float32(1)))
    with pytest.raises(ShapeError, match=r"add: operands of shapes \(8,\), \(7,\) cannot"):
        jnp.add(F, np.zeros(7, np.float32))


def test_shifts_beyond_the_width(run: Any, same: Any) -> None:
    x, by = np.array([1, -8, -8, 5], np.int32), np.array([40, 33, 1, 2], np.int32)
    same(run(jnp.left_shift, jnp.asarray(x), jnp.asarray(by)), np.array([0, 0, -16, 20], np.int32))
    same(run(jnp.right_shift, jnp.asarray(x), jnp.asarray(by)), np.array([0, -1, -4, 1], np.int32))


def test_division_by_zero(run: Any, same: Any) -> None:
    one, zero = jnp.asarray(np.array([1, -1, 0], np.float32)), jnp.zeros(3)
    same(run(jnp.floor_divide, one, zero), np.array([INF, -INF, NAN], np.float32))
    same(run(jnp.remainder, one, zero), np.full(3, NAN, np.float32))


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 7, -1, -2])
def test_static_integer_powers(exponent: int, run: Any, same: Any) -> None:
    x = np.array([-2.0, -0.5, 1.0, 3.0], np.float32)
    same(run(lambda v: v**exponent, jnp.asarray(x)), x**exponent)


def test_integer_powers_wrap_and_truncate(run: Any, same: Any) -> None:
    x, y = np.array([3, -1, 1, 2, 0, 7], np.int32), np.array([100, -3, -5, -1, 0, 1], np.int32)
    want = np.array([pow(3, 100, 2**32) - 2**32, -1, 1, 0, 1, 7])
    want[0] = (pow(3, 100, 2**32) + 2**31) % 2**32 - 2**31
    same(run(jnp.power, jnp.asarray(x), jnp.asarray(y)), want.astype(np.int32))
    with pytest.raises(ArgumentError, match=r"negative power|exponent -1"):
        jnp.power(x, -1)


def test_clip_keeps_nan_and_open_ends(run: Any, same: Any) -> None:
    x = jnp.asarray(SPECIAL)
    same(run(lambda v: jnp.clip(v, 0, 1), x), np.clip(SPECIAL, 0, 1))
    same(run(lambda v: v.clip(max=1), x), np.minimum(SPECIAL, 1))
    same(run(lambda v: jnp.clip(v), x), SPECIAL)


@pytest.mark.parametrize("decimals", [0, 1, -1])
def test_round_halves_to_even(decimals: int, run: Any, same: Any) -> None:
    x = np.array([0.5, 1.5, -2.5, 12.25, 25.0, 34.9], np.float32)
    same(run(lambda v: jnp.round(v, decimals), jnp.asarray(x)), np.round(x, decimals))
    whole = np.array([4, 5, 15, -25, 26], np.int32)
    same(
        run(lambda v: jnp.round(v, -1), jnp.asarray(whole)), np.array([0, 0, 20, -20, 30], np.int32)
    )


def test_select_takes_the_first_that_holds(run: Any, same: Any) -> None:
    x = np.arange(6, dtype=np.float32)
    want = np.select([x < 2, x < 4], [x, x * 10], -1)
    out = run(lambda v: jnp.select([v < 2, v < 4], [v, v * 10], -1), jnp.asarray(x))
    same(out, want.astype(np.float32))


def test_logaddexp_at_infinities(run: Any, same: Any) -> None:
    a = np.array([INF, INF, -INF, -INF, NAN, 1000], np.float32)
    b = np.array([INF, -INF, -INF, 0, 0, 1000], np.float32)
    want = np.array([INF, INF, -INF, 0, NAN, 1000 + math.log(2)], np.float32)
    same(run(jnp.logaddexp, jnp.asarray(a), jnp.asarray(b)), want)


def test_bit_counts(run: Any, same: Any) -> None:
    x = np.array([0, 1, 7, -1, 255], np.int32)
    same(run(jnp.bitwise_count, jnp.asarray(x)), np.bitwise_count(x))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: jnp.add([1], 2), DTypeError, r"add: given list, expected an array"),
        (lambda: jnp.subtract(np.True_, np.False_), DTypeError, "logical_not"),
        (
            lambda: jnp.bitwise_and(1.0, 2),
            DTypeError,
            r"operands f32\[\]\*, i32\[\]\*, expected",
        ),
        (lambda: jnp.where(np.True_), ArgumentError, "depends on values"),
        (lambda: jnp.nonzero(F), ArgumentError, "depends on values"),
        (lambda: jnp.select([], []), ArgumentError, "expected as many"),
    ],
)
def test_wrong_operands_are_named(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()
