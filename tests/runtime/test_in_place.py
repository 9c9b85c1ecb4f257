"""Results in the memory of donated inputs: the values must be those without donation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import vkjit as vj
from vkjit import numpy as vnp

Array = np.ndarray[Any, Any]
HALF = 2100
"""Elements: several vectors, workgroups and tasks, and some more."""


def widened(x: Any) -> Any:
    """Reads 2 bytes where it writes 4: the elements that lie there are needed later."""
    return x[:HALF].astype(np.float32) * 2


def padded(x: Any) -> Any:
    """Zeros are written first, to the whole of the memory."""
    return vnp.pad(x[:HALF] + 1, (0, HALF))


def gradient_of_a_part(x: Any) -> Any:
    return vj.grad(lambda v: vnp.sum(v[:HALF] ** 2))(x)


def set_in_zeros(x: Any) -> Any:
    return vnp.zeros(2 * HALF, x.dtype).at[:HALF].set(x[:HALF] + 1)


def set_in_itself(x: Any) -> Any:
    return vj.lax.dynamic_update_slice(x * 2, x[HALF:] + 1, (7,))


def halves_exchanged(x: Any) -> Any:
    return vnp.concatenate([x[HALF:] + 1, x[:HALF] * 2])


def turned_around(x: Any) -> Any:
    return x[::-1] + x


def neighbours(x: Any) -> Any:
    return x + vnp.roll(x, 1)


def softmax(x: Any) -> Any:
    return vj.nn.softmax(x.reshape(10, -1)).reshape(-1)


CASES: list[tuple[Callable[..., Any], Any]] = [
    (widened, np.float16),
    (padded, np.float32),
    (gradient_of_a_part, np.float32),
    (set_in_zeros, np.float32),
    (set_in_itself, np.float32),
    (halves_exchanged, np.float32),
    (turned_around, np.float32),
    (neighbours, np.float32),
    (softmax, np.float32),
]


@pytest.mark.parametrize(("function", "dtype"), CASES, ids=[f.__name__ for f, _ in CASES])
def test_donation_changes_no_value(device: str, function: Callable[..., Any], dtype: Any) -> None:
    x = np.random.default_rng(0).standard_normal(2 * HALF).astype(dtype)
    with vj.default_device(device):
        want = np.asarray(vj.jit(function)(x))
        got = np.asarray(vj.jit(function, donate_argnums=0)(vnp.asarray(x)))
    np.testing.assert_array_equal(got, want)


def update(weights: Any, momentum: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """The step of an optimizer in the epilogue of a product."""
    momentum = 0.5 * momentum + x @ y
    return weights - momentum, momentum


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(33, 47, 29), (1, 65, 40), (5, 6, 900)],
)
def test_epilogues_of_products_update_in_place(device: str, m: int, n: int, k: int) -> None:
    rng = np.random.default_rng(0)
    shapes = (m, n), (m, n), (m, k), (k, n)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    with vj.default_device(device):
        step = vj.jit(update, donate_argnums=(0, 1))
        weights, momentum, *given = (vnp.asarray(a) for a in arrays)
        assert step.lower(weights, momentum, *given).memory().donated == 8 * m * n
        got = [np.asarray(v) for v in step(weights, momentum, *given)]
        want = [np.asarray(v) for v in vj.jit(update)(*arrays)]
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])
