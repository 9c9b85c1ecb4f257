"""Loops over what is empty, alike, constant or narrow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import vkjit as vj
from vkjit import lax
from vkjit import numpy as jnp

Case = tuple[Callable[..., Any], tuple[Any, ...]]
x = np.arange(6, dtype=np.float32).reshape(2, 3)


def empty_slices(c: Any, xs: Any) -> Any:
    return lax.scan(lambda c, x: (c + jnp.sum(x), x * 2), c, xs)


def empty_carry(c: Any, xs: Any) -> Any:
    return lax.scan(lambda c, x: (c * 2, x + 1), c, xs)


def one_value_in_all_roles(a: Any) -> Any:
    """Constant, two carries and slices are one array; results are returned twice."""

    def body(carry: Any, row: Any) -> Any:
        p, q = carry
        return (q + row[0], p * 2 + a), (p, row)

    (p, q), ys = lax.scan(body, (a, a), a)
    return p, q, p, ys, a


def constants_as_carries(xs: Any) -> Any:
    return lax.scan(lambda c, x: ((c[0] + 1, c[1] & (x > 1), 7), c[0] * x), (0, True, 3), xs)


def passed_through(a: Any, b: Any) -> Any:
    """Carries that never change, that change places, and that nobody reads."""

    def body(carry: Any, _: Any) -> Any:
        p, q, r, s = carry
        return (p, r, q, s + 1), None

    return lax.scan(body, (a, a * 2, b, b), None, length=3)[0][:3]


def narrow(flags: Any, small: Any, half: Any) -> Any:
    def body(carry: Any, slices: Any) -> Any:
        count, total, mean = carry
        flag, number, weight = slices
        made = (~count & flag, total + number, mean * jnp.bfloat16(0.5) + weight)
        return made, (flag, number, weight)

    start = flags[0], small[0], half[0]
    return lax.scan(body, start, (flags, small, half), reverse=True)


def results_in_results(a: Any) -> Any:
    """A result of a loop inside is the slice, the carry and the result of the one around it."""

    def inner(c: Any, y: Any) -> Any:
        return c + y, c

    def outer(c: Any, row: Any) -> Any:
        c, ys = lax.scan(inner, c, row)
        return c, ys

    return lax.scan(outer, a[0, 0], a)


CASES: dict[str, Case] = {
    "empty slices": (empty_slices, (np.float32(1), np.zeros((4, 0), np.float32))),
    "no turn": (empty_slices, (np.float32(1), np.zeros((0, 3), np.float32))),
    "empty carry": (empty_carry, (np.zeros((0, 2), np.float32), x)),
    "one value in all roles": (one_value_in_all_roles, (np.ones((3, 3), np.float32),)),
    "constants as carries": (constants_as_carries, (x[0],)),
    "passed through": (passed_through, (x, x + 1)),
    "narrow": (
        narrow,
        (
            np.asarray([[True, False, True], [True, True, False]]),
            np.asarray([[1, -2, 3], [100, 100, -100]], np.int8),
            jnp.asarray(x, jnp.bfloat16),
        ),
    ),
    "results in results": (results_in_results, (x,)),
}


@pytest.mark.parametrize("donate", ["kept", "donated"])
@pytest.mark.parametrize("case", CASES)
def test_a_compiled_loop_gives_what_eager_turns_give(device: str, case: str, donate: str) -> None:
    fn, args = CASES[case]
    wanted = vj.tree.map(np.asarray, fn(*args))
    given = tuple(range(len(args))) if donate == "donated" else ()
    with vj.default_device(device):
        placed = [vj.device_put(np.asarray(a)) for a in args]
        got = vj.tree.map(np.asarray, vj.jit(fn, donate_argnums=given)(*placed))
    assert vj.tree.structure(got) == vj.tree.structure(wanted)
    for a, b in zip(vj.tree.leaves(got), vj.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
