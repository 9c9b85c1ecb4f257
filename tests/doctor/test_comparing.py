"""The doctor's measure: what is equal, what is not, and that an error of 1% always shows."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from vkjit.doctor.comparing import compared, with_error
from vkjit.doctor.tolerances import DEPTH, ULPS, Kind, SumBound, allowed, format_of

F32, F16 = np.dtype(np.float32), np.dtype(np.float16)
BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("kind", list(DEPTH), ids=lambda kind: kind.value)
@pytest.mark.parametrize("length", [1, 576, 49_152])
def test_one_percent_is_never_allowed(dtype, kind: Kind, length: int) -> None:
    assert 0 < allowed(kind, dtype, length) < 0.01


def test_the_bound_is_the_formula() -> None:
    u = 2.0**-24
    want = 2 * (u + 4 * (10 + DEPTH[Kind.SUM]) * u)
    assert allowed(Kind.SUM, F32, 100) == pytest.approx(want)
    half = 2 * (2.0**-11 + 4 * (10 + DEPTH[Kind.SUM]) * u)
    assert allowed(Kind.SUM, F16, 100) == pytest.approx(half)
    assert allowed(Kind.SUM, np.dtype(np.int32), 100) == 0.0
    assert allowed(Kind.EXACT, F32) == 0.0


@pytest.mark.parametrize(
    "dtype", [F32, F16, BF16, np.dtype(np.int8), np.dtype(np.uint8), np.dtype(np.bool_)], ids=str
)
def test_a_planted_error_is_a_mismatch(dtype) -> None:
    values = (np.arange(-20, 60).reshape(8, 10) % 50).astype(dtype)
    assert compared("x", values, values, 0.0).mismatch is None
    limit = allowed(Kind.LAYER, dtype, 4096)
    distance = compared("x", with_error(values), values, limit)
    assert distance.mismatch is not None
    assert distance.mismatch.differ == 1
    assert distance.share > 1


def test_a_planted_error_shows_under_cancellation() -> None:
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((40, 5000)).astype(np.float32) for _ in range(2))
    wide = x.astype(np.float64) @ y.astype(np.float64).T
    want = wide.astype(np.float16)
    terms = np.abs(x).astype(np.float64) @ np.abs(y).astype(np.float64).T
    bound = SumBound(Kind.SUM, F16, 5000)
    scale = bound.scale(want, terms)
    near = (wide * (1 + 2e-7)).astype(np.float16)
    assert compared("x", near, want, bound.limit, scale).mismatch is None
    assert compared("x", with_error(want), want, bound.limit, scale).mismatch is not None


def test_nan_and_infinity_must_be_met() -> None:
    want = np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)
    assert compared("x", want.copy(), want, 1e-3).mismatch is None
    for place, value in ((0, 0.0), (1, -np.inf), (2, np.nan), (3, np.nan), (3, np.inf)):
        got = want.copy()
        got[place] = value
        mismatch = compared("x", got, want, 1e-3).mismatch
        assert mismatch is not None
        assert mismatch.at == (place,)
        assert mismatch.plain()["error"] is None


def test_subnormals_may_be_flushed_and_shapes_must_agree() -> None:
    tiny = np.array([1e-40, 0.0], np.float32)
    assert compared("x", np.zeros(2, np.float32), tiny, 1e-5).mismatch is None
    mismatch = compared("x", np.zeros(3), np.zeros(2), 1e-5).mismatch
    assert mismatch is not None
    assert "shape (3,)" in str(mismatch)
    assert compared("x", np.zeros((0, 3)), np.zeros((0, 3)), 0.0).mismatch is None


def test_every_function_has_one_promise() -> None:
    from vkjit.doctor.pointwise import BINARY, UNARY  # noqa: PLC0415  imports the library

    assert set(ULPS) == {*UNARY, *BINARY}
    assert format_of(F16).largest == 65504.0
