"""The floating-point mode of kernels on the CPU: what it flushes and what it leaves alone."""

from __future__ import annotations

import ctypes
import platform
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import vkjit as vj
from vkjit.lax import scan

MACHINE = platform.machine()
flushes = pytest.mark.skipif(
    MACHINE not in ("x86_64", "aarch64"), reason="no mode that flushes is known for this processor"
)
TINY = np.array([1e-45, 1e-40, -1e-39], np.float32)
TASKS = 1 << 18  # elements, more than one task takes


@pytest.fixture(autouse=True)
def _on_the_cpu() -> Any:
    with vj.default_device("cpu"):
        yield


def halved(x: Any, observe: Any = None) -> Any:
    """160 turns of a half: from 1, the last is 2**-160."""

    def turn(carry: Any, _: None) -> tuple[Any, None]:
        if observe is not None:
            vj.debug.callback(observe, carry)
        return carry * 0.5, None

    return scan(turn, x, None, length=160)[0]


@flushes
@pytest.mark.parametrize("count", [4, TASKS])
def test_loops_take_subnormals_for_zeros(count: int) -> None:
    """On the calling thread and on all others: whatever is not flushed would be seen here."""
    x = np.full(count, 2.0**32, np.float32)
    np.testing.assert_array_equal(vj.jit(halved)(x), 0 * x)
    y = np.full(count, 2.0**40, np.float32)
    np.testing.assert_array_equal(vj.jit(halved)(y), np.full(count, 2.0**-120))


def kept(x: np.ndarray) -> bool:
    """Whether arithmetic of this thread keeps subnormals."""
    return bool((x * np.float32(1) != 0).all() and x[0] + x[0] != x[0])


def test_callbacks_and_callers_keep_their_own_mode() -> None:
    seen: list[bool] = []

    def observe(row: np.ndarray) -> None:
        seen.append(kept(TINY))
        if row[0] < 0.1:
            raise ValueError("small")

    x = np.ones(4, np.float32)
    assert kept(TINY)
    vj.jit(halved)(x)
    assert kept(TINY)
    with pytest.raises(ValueError, match="small"):
        np.asarray(vj.jit(lambda x: halved(x, observe))(x))
    assert kept(TINY)
    assert seen == [True] * 5


@pytest.mark.skipif(MACHINE != "x86_64", reason="the number of the mode is of x86")
def test_the_mode_of_rounding_is_that_of_the_caller_again() -> None:
    """A loop rounds to nearest, whoever calls it."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "fesetround"):
        library = ctypes.CDLL("libm.so.6")
    third = vj.jit(lambda x: scan(lambda c, _: (c / 3, None), x, None, length=2)[0])
    x = np.array([1.0, 2.0, 5.0], np.float32)
    want = np.asarray(third(x)).copy()
    upward = 0x800
    library.fesetround(upward)
    try:
        got = third(x)
        mode = library.fegetround()
    finally:
        library.fesetround(0)
    assert mode == upward
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_all_small_floats_survive_conversions(dtype: Any) -> None:
    """To float32 and back, all that are not NaN, in several copies: threads share the work."""
    infinite = int(np.array(np.inf, dtype).view(np.uint16))
    bits = np.arange(1 << 16, dtype=np.uint16)
    every = np.tile(bits[(bits & 0x7FFF) <= infinite], TASKS >> 16).view(dtype)
    wide = every.astype(np.float32)
    got = np.asarray(vj.jit(lambda x: x.astype(np.float32))(every))
    np.testing.assert_array_equal(got.view(np.uint32), wide.view(np.uint32))
    back = np.asarray(vj.jit(lambda x: x.astype(dtype))(wide))
    np.testing.assert_array_equal(back.view(np.uint16), every.view(np.uint16))


def test_float16_computes_with_its_subnormals() -> None:
    """They are normal numbers of float32."""
    small = np.tile(np.arange(0x800, dtype=np.uint16), TASKS // 0x800).view(np.float16)
    half = np.float16(0.5)
    got = np.asarray(vj.jit(lambda x: (x + x) * half)(small))
    np.testing.assert_array_equal(got.view(np.uint16), small.view(np.uint16))


def test_nextafter_steps_through_subnormals() -> None:
    values = np.array([0, -0.0, 1e-45, -1e-45, 1e-40, 2.0**-126, -(2.0**-126), 1], np.float32)
    x, y = (np.tile(side.ravel(), TASKS // 64) for side in np.meshgrid(values, values))
    got = np.asarray(vj.jit(vj.numpy.nextafter)(x, y))
    np.testing.assert_array_equal(got.view(np.uint32), np.nextafter(x, y).view(np.uint32))
