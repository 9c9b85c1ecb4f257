"""Values that definitions fix: integer semantics, special floats, casts, accumulation, messages."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vkjit import dtypes
from vkjit.errors import ArgumentError, DTypeError, IndexingError, ShapeError
from vkjit.ir.avals import aval
from vkjit.ops import elementwise as ew
from vkjit.ops.cast import cast
from vkjit.ops.contract import dot_general
from vkjit.ops.indexing import gather, scatter_add
from vkjit.ops.movement import (
    OPERAND_LIMIT,
    concatenate,
    expand_dims,
    iota,
    pad,
    reshape,
    reverse,
    slice_,
    squeeze,
)
from vkjit.ops.reduce import argmax, argmin, reduce_and, reduce_max, reduce_min, reduce_or
from vkjit.ops.scan import cumsum
from vkjit.ops.structural import reduce_sum
from vkjit.ops.write import copy_into
from vkjit.trace import bind, trace

INF, NAN = np.inf, np.nan


def F(values: Any) -> np.ndarray[Any, Any]:
    return np.asarray(values, np.float32)


def H(values: Any) -> np.ndarray[Any, Any]:
    return np.asarray(values, np.float16)


def I(values: Any) -> np.ndarray[Any, Any]:  # noqa: E743  short names of dtypes
    return np.asarray(values, np.int32)


# Independent formulas in float64; the range is where each is defined.
FORMULAS: dict[str, tuple[Callable[[float], float], float, float]] = {
    "exp": (math.exp, -20, 20),
    "exp2": (lambda x: 2.0**x, -20, 20),
    "expm1": (math.expm1, -20, 20),
    "log": (math.log, 1e-6, 1e6),
    "log1p": (math.log1p, -0.99, 1e6),
    "sqrt": (math.sqrt, 0, 1e6),
    "rsqrt": (lambda x: x**-0.5, 1e-6, 1e6),
    "cbrt": (lambda x: math.copysign(abs(x) ** (1 / 3), x), -1e6, 1e6),
    "sin": (math.sin, -100, 100),
    "cos": (math.cos, -100, 100),
    "tan": (math.tan, -1.5, 1.5),
    "asin": (math.asin, -1, 1),
    "acos": (math.acos, -1, 1),
    "atan": (math.atan, -1e6, 1e6),
    "sinh": (math.sinh, -20, 20),
    "cosh": (math.cosh, -20, 20),
    "tanh": (math.tanh, -20, 20),
    "asinh": (math.asinh, -1e6, 1e6),
    "acosh": (math.acosh, 1, 1e6),
    "atanh": (math.atanh, -0.999, 0.999),
    "logistic": (lambda x: 1 / (1 + math.exp(-x)), -80, 80),
    "erf": (math.erf, -5, 5),
    "erfc": (math.erfc, -5, 9),
    "square": (lambda x: x * x, -1e6, 1e6),
}


@pytest.mark.parametrize("name", FORMULAS)
@given(data=st.data())
def test_float_functions_round_the_exact_value(name: str, data: st.DataObject) -> None:
    formula, low, high = FORMULAS[name]
    ends = float(F(low)), float(F(high))
    x = data.draw(st.floats(*ends, width=32, allow_subnormal=False))
    want = formula(x)
    got = getattr(ew, name)(np.asarray(x, np.float32))
    assert got.dtype == np.float32
    assert float(got) == pytest.approx(want, rel=4e-7, abs=1e-37)


@given(st.floats(-0.9375, 0.9375, width=32))
def test_erf_inv_inverts_erf(x: float) -> None:
    with dtypes.enable_x64():
        found = ew.erf_inv(np.asarray(x, np.float64))
    assert math.erf(float(found)) == pytest.approx(x, rel=1e-13, abs=1e-300)


@given(st.integers(-128, 127), st.integers(-128, 127))
def test_integer_division_truncates(x: int, y: int) -> None:
    a, b = np.asarray(x, np.int8), np.asarray(y, np.int8)
    quotient = -1 if y == 0 else math.trunc(x / y)
    assert int(ew.div(a, b)) == (quotient + 128) % 256 - 128
    assert int(ew.rem(a, b)) == (x if y == 0 else int(math.fmod(x, y)))


@given(st.integers(-5, 5), st.integers(0, 40))
def test_integer_power_wraps(x: int, n: int) -> None:
    want = (x**n + 2**31) % 2**32 - 2**31
    assert int(ew.power(np.asarray(x, np.int32), np.asarray(n, np.int32))) == want


def test_integer_power_with_negative_exponents_truncates() -> None:
    got = ew.power(I([1, -1, -1, 2, -3]), I([-3, -3, -2, -1, -1]))
    np.testing.assert_array_equal(got, [1, -1, 1, 0, 0])


def test_shifts_by_the_width_or_more() -> None:
    ones, eights = np.ones(3, np.int32), np.full(3, -8, np.int32)
    by = I([31, 32, -1])
    np.testing.assert_array_equal(ew.shift_left(ones, by), [-(2**31), 0, 0])
    np.testing.assert_array_equal(ew.shift_right_arithmetic(eights, by), [-1, -1, -1])
    np.testing.assert_array_equal(ew.shift_right_logical(eights, by), [1, 0, 0])


@pytest.mark.parametrize(
    ("dtype", "want"),
    [
        ("int32", [0, 2**31 - 1, -(2**31), 2, -2, 2**31 - 1, -(2**31)]),
        ("uint8", [0, 255, 0, 2, 0, 255, 0]),
        ("int8", [0, 127, -128, 2, -2, 127, -128]),
        ("uint32", [0, 2**32 - 1, 0, 2, 0, 2**32 - 1, 0]),
        ("bool", [True] * 7),
    ],
)
def test_float_to_integer_saturates(dtype: str, want: list[int]) -> None:
    x = F([NAN, INF, -INF, 2.9, -2.9, 1e20, -1e20])
    got = cast(x, np.dtype(dtype))
    np.testing.assert_array_equal(got, np.array(want, dtype))


def test_nan_spreads_through_extrema() -> None:
    x, y = F([NAN, 1, NAN]), F([1, NAN, NAN])
    assert np.isnan(ew.maximum(x, y)).all()
    assert np.isnan(ew.minimum(x, y)).all()
    assert np.isnan(ew.clamp(F(0), x, F(1))).tolist() == [True, False, True]
    assert np.isnan(reduce_max(x, (0,)))
    assert np.isnan(reduce_min(x, (0,)))


def test_signed_zeros() -> None:
    assert np.signbit(ew.sign(F(-0.0)))
    assert np.signbit(ew.rem(F(-4), F(2)))
    np.testing.assert_array_equal(
        ew.atan2(F([0, -0.0, 0, -0.0]), F([0, 0, -0.0, -0.0])), F([0, -0.0, np.pi, -np.pi])
    )


def test_rounding_goes_to_even() -> None:
    np.testing.assert_array_equal(ew.round_even(F([0.5, 1.5, 2.5, -0.5])), [0, 2, 2, 0])


@pytest.mark.parametrize(
    ("values", "largest", "smallest"),
    [
        ([0, 1, NAN, 2], 2, 2),
        ([NAN] * 3, 0, 0),
        ([1, 3, 3, 1], 1, 0),
        ([-0.0, 0.0], 0, 0),
        ([-INF, -INF], 0, 0),
    ],
)
@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float16, dtypes.bfloat16])
def test_positions(values: list[float], largest: int, smallest: int, dtype: dtypes.DType) -> None:
    x = np.array(values, dtype)
    assert int(argmax(x, 0)) == largest
    assert int(argmin(x, 0)) == smallest


def test_reductions_over_nothing() -> None:
    none = np.zeros((2, 0), np.float32)
    np.testing.assert_array_equal(reduce_max(none, (1,)), [-INF, -INF])
    np.testing.assert_array_equal(reduce_and(none > 0, (1,)), [True, True])
    np.testing.assert_array_equal(reduce_or(none > 0, (1,)), [False, False])
    np.testing.assert_array_equal(dot_general(none, none, ((1,), (1,))), np.zeros((2, 2)))


def test_sixteen_bit_floats_accumulate_in_float32() -> None:
    many = np.full((1, 4096), 0.1, np.float16)
    assert float(
        dot_general(many, np.ones((4096, 1), np.float16), ((1,), (0,)))[0, 0]
    ) == pytest.approx(4096 * float(H(0.1)), rel=1e-3)
    cancel = H([[300, 300, 300, 300]]), H([[300], [300], [-300], [-300]])
    assert float(dot_general(*cancel, ((1,), (0,)))[0, 0]) == 0
    assert float(cumsum(many[0], 0)[-1]) == pytest.approx(4096 * float(H(0.1)), rel=1e-3)
    assert float(reduce_sum(many, (0, 1))) == pytest.approx(4096 * float(H(0.1)), rel=1e-3)


def test_gather_clamps_and_scatter_drops() -> None:
    x, index = F([10, 20, 30]), I([[-5, 0], [2, 7]])
    np.testing.assert_array_equal(gather(x, index, 0), [[10, 10], [30, 30]])
    added = scatter_add(x, index, F([[1, 2], [4, 8]]), 0)
    np.testing.assert_array_equal(added, [12, 20, 34])


def test_movement() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(
        pad(x, F(9), (0, 1), (0, -1), (1, 0)), [[9, 0, 1], [9] * 3, [9, 3, 4]]
    )
    np.testing.assert_array_equal(pad(x, F(9), (0, -2), (0, -2), (0, 0)), np.zeros((2, 0)))
    np.testing.assert_array_equal(reverse(x, (0, 1)), x[::-1, ::-1])
    np.testing.assert_array_equal(slice_(x, (0, 1), (2, 3), (1, 2)), x[:, 1:3:2])
    assert expand_dims(x, (0, 2)).shape == (1, 2, 1, 3)
    assert squeeze(expand_dims(x, (0, 2)), (0, 2)).shape == (2, 3)
    np.testing.assert_array_equal(iota(dtypes.int32, (2, 3), 1), [[0, 1, 2]] * 2)
    np.testing.assert_array_equal(copy_into(x, F([[7]]), (1, 2)), [[0, 1, 2], [3, 4, 7]])
    many = [np.full(1, i, np.int32) for i in range(OPERAND_LIMIT * OPERAND_LIMIT + 5)]
    np.testing.assert_array_equal(concatenate(many, 0), np.arange(len(many)))


def test_functions_that_change_nothing_record_nothing() -> None:
    def same(x: Any) -> list[Any]:
        x = reshape(slice_(reverse(x, ()), (0, 0), (2, 3), (1, 1)), (2, 3))
        x = pad(cast(x, dtypes.float32), F(0), (0, 0), (0, 0), (0, 0))
        return [ew.integer_pow(concatenate([x], 0), 1)]

    assert trace(same, [aval((2, 3), dtypes.float32)]).program.eqns == ()


def test_weak_types() -> None:
    weak, strong = aval((), dtypes.float32, True), aval((2,), dtypes.float32)
    flag = aval((2,), dtypes.bool_)
    assert ew.Select().infer(flag, weak, weak).weak
    assert not ew.Select().infer(flag, weak, strong).weak
    assert not ew.Lt().infer(weak, weak).weak
    assert ew.Exp().infer(weak).weak


MESSAGES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: ew.mul(F([1]), I([1])), DTypeError, r"mul: operands f32\[1\], i32\[1\] have diff"),
    (lambda: ew.sub(F([1, 2]), F([1])), ShapeError, r"sub: operands f32\[2\], f32\[1\] have diff"),
    (lambda: ew.exp(I([1])), DTypeError, r"exp: does not take i32\[1\]"),
    (lambda: ew.select(F([1]), F([1]), F([2])), DTypeError, r"select: does not take f32\[1\]"),
    (lambda: ew.select(F([1]) > 0, F([1]), I([2])), DTypeError, "select: sides of dtypes"),
    (lambda: ew.integer_pow(I([1]), -1), ArgumentError, "integer_pow: operand of dtype int32"),
    (lambda: ew.and_(F([1]), F([1])), DTypeError, r"and: does not take f32\[1\]"),
    (lambda: reshape(F([1, 2]), (3,)), ShapeError, r"reshape: operand f32\[2\] has 2 elements"),
    (lambda: slice_(F([1]), (0,), (2,), (1,)), ShapeError, r"slice: .* for operand f32\[1\]"),
    (lambda: concatenate([F([1]), I([1])], 0), DTypeError, r"concatenate: operands f32\[1\], i32"),
    (lambda: concatenate([F([[1]]), F([1])], 0), ShapeError, r"f32\[1,1\], f32\[1\] along axis 0"),
    (lambda: squeeze(F([1, 2]), (0,)), ShapeError, r"squeeze: axes \(0,\) for operand f32\[2\]"),
    (
        lambda: argmax(np.zeros(0, np.float32), 0),
        ArgumentError,
        r"argmax: operand f32\[0\] is empty",
    ),
    (lambda: reduce_max(F([1]), (1,)), ShapeError, r"reduce_max: axes \(1,\) for operand f32\[1\]"),
    (lambda: cumsum(F([1]), 1), ShapeError, r"cumsum: axis 1 for operand f32\[1\]"),
    (lambda: gather(F([1]), F([0]), 0), DTypeError, r"gather: indices f32\[1\] for operand f32"),
    (
        lambda: gather(np.zeros(0, np.float32), I([0]), 0),
        IndexingError,
        r"gather: operand f32\[0\] is empty",
    ),
    (lambda: scatter_add(F([1]), I([0]), F([1, 2]), 0), ShapeError, r"expected updates of shape"),
    (lambda: dot_general(F([1]), I([1]), ((0,), (0,))), DTypeError, r"operands f32\[1\], i32\[1\]"),
    (lambda: dot_general(F([1]), F([1, 2]), ((0,), (0,))), ShapeError, r"f32\[1\], f32\[2\] with"),
    (lambda: copy_into(F([1]), F([1]), (1,)), ShapeError, r"copy_into: value f32\[1\] at starts"),
    (lambda: iota(dtypes.bool_, (2,), 0), ArgumentError, "iota: dtype bool"),
]


@pytest.mark.parametrize(("call", "error", "message"), MESSAGES)
def test_messages(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_bitcast_needs_one_width() -> None:
    with pytest.raises(DTypeError, match=r"bitcast_convert_type: does not take f32\[1\]"):
        bind(ew.BitcastConvertType(dtypes.int16), F([1]))
    np.testing.assert_array_equal(ew.bitcast_convert_type(F([1]), dtypes.int32), I([0x3F800000]))
