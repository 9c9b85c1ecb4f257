"""Derivatives at the points where naive rules fail: ties, zeros, duplicates, guarded branches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vkjit import dtypes
from vkjit.ir.avals import aval
from vkjit.ir.evaluate import evaluate
from vkjit.ops import elementwise as ew
from vkjit.ops.cast import cast
from vkjit.ops.contract import dot_general
from vkjit.ops.indexing import gather, scatter_add
from vkjit.ops.movement import pad
from vkjit.ops.reduce import reduce_max, reduce_min, reduce_prod
from vkjit.ops.scan import cummax, cumprod
from vkjit.ops.structural import add, reduce_sum
from vkjit.trace import aval_of, trace

from .strategies import vjp_program

Array = np.ndarray[Any, Any]


def F(values: Any) -> Array:
    return np.asarray(values, np.float32)


def I(values: Any) -> Array:  # noqa: E743  short names of dtypes
    return np.asarray(values, np.int32)


def gradient(fn: Callable[..., Any], *inputs: Array) -> list[Array]:
    """Gradients of the sum of ``fn`` with respect to its float inputs."""

    def summed(*values: Any) -> list[Any]:
        out = fn(*values)
        return [reduce_sum(out, tuple(range(aval_of(out).ndim)))]

    traced = trace(summed, [aval(x.shape, x.dtype) for x in inputs])
    one = np.ones((), traced.program.out_avals[0].dtype)
    made = evaluate(vjp_program(traced.program), [*traced.captured, *inputs, one])
    return made[sum(dtypes.is_float(c.dtype) for c in traced.captured) :]


def assert_gradient(fn: Callable[..., Any], inputs: list[Array], want: list[Any]) -> None:
    for got, expected in zip(gradient(fn, *inputs), want, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_ties_of_two_operands_share_in_halves() -> None:
    x, y = F([1, 3, 3, 2]), F([1, 2, 4, 2])
    assert_gradient(ew.maximum, [x, y], [[0.5, 1, 0, 0.5], [0.5, 0, 1, 0.5]])
    assert_gradient(ew.minimum, [x, y], [[0.5, 0, 1, 0.5], [0.5, 1, 0, 0.5]])


def test_ties_of_a_reduction_share_equally() -> None:
    assert_gradient(lambda x: reduce_max(x, (0,)), [F([1, 3, 3, 2])], [[0, 0.5, 0.5, 0]])
    assert_gradient(lambda x: reduce_min(x, (1,)), [F([[2, 2], [5, 1]])], [[[0.5, 0.5], [0, 1]]])


def test_power_at_base_zero_and_at_negative_bases() -> None:
    x, p = F([0, 0, 0, -2, -2]), F([1, 2, 3, 3, 2])
    assert_gradient(lambda v: ew.power(v, p), [x], [[1, 0, 0, 12, -4]])
    assert_gradient(lambda v: ew.power(v, F(0)), [F([0, 2])], [[0, 0]])
    assert_gradient(lambda q: ew.power(F([0, 0]), q), [F([2, 0])], [[0, 0]])
    assert_gradient(lambda v: ew.integer_pow(v, 0), [F([0, 2])], [[0, 0]])
    assert_gradient(lambda v: ew.integer_pow(v, 2), [F([0, -3])], [[0, -6]])


def test_products_with_zeros_do_not_divide() -> None:
    def product(v: Any) -> Any:
        return reduce_prod(v, (0,))

    assert_gradient(product, [F([2, 0, 3, 4])], [[0, 24, 0, 0]])
    assert_gradient(product, [F([2, 0, 0, 3])], [[0, 0, 0, 0]])

    def running(v: Any) -> Any:
        return cumprod(v, 0)

    assert_gradient(running, [F([2, 0, 3, 4])], [[1, 32, 0, 0]])
    assert_gradient(running, [F([2, 0, 0, 3])], [[1, 2, 0, 0]])
    assert_gradient(running, [F([0, 2, 3])], [[9, 0, 0]])


def test_running_maximum_follows_its_holder() -> None:
    assert_gradient(lambda v: cummax(v, 0), [F([1, 3, 2, 5])], [[1, 2, 0, 1]])
    assert_gradient(lambda v: cummax(v, 0, reverse=True), [F([1, 3, 2, 5])], [[0, 0, 0, 4]])


def test_an_empty_extremum_has_no_gradient() -> None:
    assert_gradient(
        lambda v: reduce_max(v, (1,)), [np.zeros((2, 0), np.float32)], [np.zeros((2, 0))]
    )


def test_select_shields_the_guarded_argument() -> None:
    def guarded(v: Any) -> Any:
        positive = ew.gt(v, F(0))
        inner = ew.sqrt(ew.select(positive, v, F(1)))
        return ew.select(positive, inner, F(0))

    assert_gradient(guarded, [F([0, 4, -1])], [[0, 0.25, 0]])


def test_absolute_value_at_zero() -> None:
    assert_gradient(ew.absolute, [F([-2, 0, 3])], [[-1, 0, 1]])


def test_remainder() -> None:
    assert_gradient(ew.rem, [F([7, -7, 5]), F([2, 2, -3])], [[1, 1, 1], [-3, 3, 1]])


def test_stop_gradient_holds_at_second_order() -> None:
    def twice(v: Any) -> Any:
        return ew.mul(v, ew.stop_gradient(ew.mul(v, v)))

    assert_gradient(twice, [F([3])], [[9]])
    of = aval((1,), dtypes.float32)
    first = vjp_program(trace(lambda v: [reduce_sum(twice(v), (0,))], [of]).program)
    again = evaluate(vjp_program(first), [F([3]), F(1), F([1])])
    np.testing.assert_array_equal(again[0], [0])


def test_duplicate_indices_add_and_dropped_ones_do_not() -> None:
    index = I([0, 2, 2, 9, -1])
    weights = F([1, 10, 100, 1000, 10000])
    assert_gradient(
        lambda v: ew.mul(weights, gather(v, index, 0)), [F([1, 2, 3])], [[10001, 0, 1110]]
    )
    assert_gradient(
        lambda v, u: ew.square(scatter_add(v, index, u, 0)),
        [F([1, 2, 3]), F([10, 20, 30, 40, 50])],
        [[22, 4, 106], [22, 106, 106, 0, 0]],
    )


@pytest.mark.parametrize("narrow", [dtypes.float16, dtypes.bfloat16])
def test_cast_returns_the_cotangent_in_the_operands_dtype(narrow: dtypes.DType) -> None:
    x = F([1.5, -2])
    (got,) = gradient(lambda v: ew.mul(cast(v, narrow), narrow.type(3)), x)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, [3, 3])
    (back,) = gradient(lambda v: cast(v, dtypes.float32), x.astype(narrow))
    assert back.dtype == narrow


def test_nothing_flows_through_integers() -> None:
    def rounded(v: Any) -> Any:
        return add(v, cast(cast(v, dtypes.int32), dtypes.float32))

    assert_gradient(rounded, [F([1.5])], [[1]])


def test_pad_value_gets_the_sum_of_the_border() -> None:
    assert_gradient(
        lambda x, v: pad(x, v, (1, -1), (2, 0), (1, 0)),
        [F([[1, 2, 3], [4, 5, 6]]), F(7)],
        [[[0, 1, 1], [0, 1, 1]], 8],
    )


def test_transposed_products_need_no_permutation() -> None:
    """Dx = ct w' and dw = x' ct read every operand in its own layout."""
    shapes = ((3, 5), (5, 4)), ((3, 5), (4, 5))
    for (left, right), contract in zip(shapes, (((1,), (0,)), ((1,), (1,))), strict=True):
        f = dtypes.float32
        program = trace(
            lambda x, w, c=contract: [dot_general(x, w, c)], [aval(left, f), aval(right, f)]
        ).program
        names = [e.prim.name for e in vjp_program(program).eqns]
        assert names.count("dot_general") == 3  # the product itself is still there, unused
        assert "permute" not in names


def test_transposed_products_inherit_the_accumulation_dtype() -> None:
    b16 = dtypes.bfloat16
    program = trace(
        lambda x, w: [dot_general(x, w, ((1,), (0,)), preferred=dtypes.float32)],
        [aval((3, 5), b16), aval((5, 4), b16)],
    ).program
    backward = vjp_program(program)
    dots = [e.prim for e in backward.eqns if e.prim.name == "dot_general"]
    assert {p.parameters()["accumulate"] for p in dots} == {dtypes.float32}
    assert [a.dtype for a in backward.out_avals] == [b16, b16]
