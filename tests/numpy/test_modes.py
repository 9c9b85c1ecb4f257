"""Indices out of range: every mode of ``x.at[...]`` against loops; derivatives, batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vkjit as vj
import vkjit.numpy as jnp
from vkjit import lax
from vkjit.errors import ArgumentError, IndexingError

Array = np.ndarray[Any, Any]

X = np.arange(1, 7, dtype=np.float32)
FAR = np.array([-9, -6, -1, 0, 2, 2, 5, 6, 40], np.int32)
VALUES = np.linspace(0.5, 2, len(FAR), dtype=np.float32)
APPLY = {
    "set": lambda old, new: new,
    "add": lambda old, new: old + new,
    "subtract": lambda old, new: old - new,
    "multiply": lambda old, new: old * new,
    "divide": lambda old, new: old / new,
    "power": lambda old, new: old**new,
    "min": min,
    "max": max,
}


def place(index: int, size: int, mode: str | None, *, wrap: bool) -> int | None:
    """Where an index points; None: nowhere."""
    index += size if wrap and index < 0 else 0
    if 0 <= index < size:
        return index
    return min(max(index, 0), size - 1) if mode == "clip" else None


def updated(  # noqa: PLR0913  all that an update is
    how: str, x: Array, indices: Array, values: Array, mode: Any, *, wrap: bool
) -> Array:
    out = x.copy()
    for index, value in zip(indices, values, strict=True):
        at = place(int(index), len(x), mode, wrap=wrap)
        if at is not None:
            out[at] = APPLY[how](out[at], value)
    return out


def read(x: Array, indices: Array, mode: Any, fill: float, *, wrap: bool) -> Array:
    how = "clip" if mode in (None, "promise_in_bounds") else mode
    places = [place(int(i), len(x), how, wrap=wrap) for i in indices]
    return np.array([fill if at is None else x[at] for at in places], x.dtype)


MODES = (None, "clip", "drop", "fill", "promise_in_bounds", lax.GatherScatterMode.CLIP)


def known(mode: Any) -> Any:
    return mode.value if isinstance(mode, lax.GatherScatterMode) else mode


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", APPLY)
def test_updates(how: str, mode: Any, wrap: bool) -> None:  # noqa: FBT001  a parameter
    got = getattr(jnp.asarray(X).at[FAR], how)(VALUES, mode=mode, wrap_negative_indices=wrap)
    want = updated(how, X, FAR, VALUES, known(mode), wrap=wrap)
    np.testing.assert_allclose(got, want, 1e-6)


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("fill", [None, 7.0])
@pytest.mark.parametrize("mode", MODES)
def test_reads(mode: Any, fill: Any, wrap: bool) -> None:  # noqa: FBT001  a parameter
    got = jnp.asarray(X).at[FAR].get(mode=mode, fill_value=fill, wrap_negative_indices=wrap)
    missing = np.nan if fill is None else fill
    np.testing.assert_array_equal(got, read(X, FAR, known(mode), missing, wrap=wrap))


def test_missing_elements_read_as_the_extreme_of_their_dtype() -> None:
    for dtype, want in (("int8", -128), ("uint8", 255), ("bool", True), ("int32", -(2**31))):
        x = jnp.zeros(3, dtype)
        assert x.at[np.array([5])].get(mode="fill").tolist() == [want]


def test_static_integers_follow_the_mode_that_is_named() -> None:
    x = jnp.asarray(X)
    for index in (6, -7, 10**12):
        with pytest.raises(IndexingError, match="out of range"):
            x.at[index].set(0)
        assert x.at[index].set(0, mode="drop").tolist() == X.tolist()
        assert np.isnan(float(x.at[index].get(mode="fill")))
    assert float(x.at[6].get(mode="clip")) == 6
    assert x.at[6].add(1, mode="clip").tolist() == [1, 2, 3, 4, 5, 7]
    assert x.at[-1].set(0, mode="drop", wrap_negative_indices=False).tolist() == X.tolist()
    both = jnp.zeros((2, 3)).at[jnp.array([0, 5]), 9].set(1, mode="clip")
    assert both.tolist() == [[0, 0, 1], [0, 0, 1]]


def test_static_indices_that_clip_to_one_position() -> None:
    x = jnp.zeros(2)
    assert x.at[np.array([1, 5])].set(np.array([3.0, 4.0]), mode="clip").tolist() == [0, 4]
    assert x.at[np.array([1, 5])].max(np.array([4.0, 3.0]), mode="clip").tolist() == [0, 4]


def test_unknown_modes_are_refused() -> None:
    x = jnp.asarray(X)
    with pytest.raises(ArgumentError, match=r"at.set: mode 'wrap', expected one of clip, fill"):
        x.at[FAR].set(VALUES, mode="wrap")
    with pytest.raises(ArgumentError, match=r"at.get: mode 'nearest'"):
        x.at[FAR].get(mode="nearest")


def test_quotients_of_integers_are_floats() -> None:
    assert jnp.arange(4).at[np.array([1, 1])].divide(2).tolist() == [0, 0.25, 2, 3]


@settings(max_examples=30)
@given(
    size=st.integers(1, 6),
    indices=st.lists(st.integers(-9, 9), min_size=1, max_size=7),
    how=st.sampled_from(["set", "add", "multiply", "min", "max"]),
    mode=st.sampled_from([None, "clip", "drop"]),
    seed=st.integers(0, 99),
)
def test_random_indices_traced_batched_and_differentiated(
    size: int, indices: list[int], how: str, mode: Any, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, (3, size)).astype(np.float32)
    where = np.stack([rng.permutation(indices) for _ in range(3)]).astype(np.int32)
    values = rng.uniform(-2, 2, where.shape).astype(np.float32)

    def fn(x: Any, where: Any, values: Any) -> Any:
        return getattr(x.at[where], how)(values, mode=mode)

    want = np.stack(
        [updated(how, *row, mode, wrap=True) for row in zip(x, where, values, strict=True)]
    )
    np.testing.assert_allclose(vj.vmap(fn)(x, where, values), want, 1e-5, 1e-6)

    weights = rng.uniform(-1, 1, size).astype(np.float32)

    def loss(x: Any, values: Any) -> Any:
        return jnp.sum(weights * fn(x, where[0], values))

    def difference(x: Array, values: Array, dx: Array, dv: Array) -> float:
        ends = [
            updated(how, x + s * dx, where[0], values + s * dv, mode, wrap=True) @ wide
            for s in (1e-5, -1e-5)
        ]
        return float(ends[0] - ends[1]) / 2e-5

    wide = weights.astype(np.float64)
    dx, dv = rng.uniform(-1, 1, size), rng.uniform(-1, 1, len(indices))
    to_x, to_values = vj.grad(loss, argnums=(0, 1))(x[0], values[0])
    got = float(np.asarray(to_x) @ dx + np.asarray(to_values) @ dv)
    expected = difference(x[0].astype(np.float64), values[0].astype(np.float64), dx, dv)
    np.testing.assert_allclose(got, expected, 2e-3, 2e-3)


@pytest.mark.parametrize("mode", ["clip", "drop"])
def test_modes_on_devices(mode: str, device: str) -> None:
    def fn(x: Any, where: Any, values: Any) -> Any:
        return x.at[where].add(values, mode=mode), x.at[where].get(mode=mode, fill_value=-1)

    with vj.default_device(device):
        added, got = vj.jit(fn)(X, FAR, VALUES)
    np.testing.assert_allclose(added, updated("add", X, FAR, VALUES, mode, wrap=True), 1e-6)
    np.testing.assert_array_equal(got, read(X, FAR, mode, -1.0, wrap=True))


@given(
    which=st.lists(st.integers(-2, 4), min_size=1, max_size=5),
    count=st.integers(1, 3),
)
def test_select_n(which: list[int], count: int) -> None:
    number = np.array(which, np.int32)
    cases = [np.arange(len(which), dtype=np.float32) + 10 * i for i in range(count)]
    rows = np.stack(cases)
    want = rows[np.clip(number, 0, count - 1), np.arange(len(which))]
    np.testing.assert_array_equal(lax.select_n(number, *cases), want)
    first = np.int32(which[0])
    np.testing.assert_array_equal(lax.select_n(first, *cases), rows[np.clip(first, 0, count - 1)])
    if count == 2:
        np.testing.assert_array_equal(
            lax.select_n(number > 0, *cases), np.where(number > 0, *cases[::-1])
        )


def test_select_n_refuses_booleans_for_three_cases() -> None:
    with pytest.raises(TypeError, match=r"select_n: which bool\[\] for 3 cases"):
        lax.select_n(True, X, X, X)
    with pytest.raises(ArgumentError, match="no cases"):
        lax.select_n(True)


def test_piecewise() -> None:
    by_numpy: Any = np.piecewise  # its stub knows functions only, not constants
    x = np.linspace(-2, 2, 9, dtype=np.float32)
    pieces = [lambda v, k: -v, lambda v, k: k * v, 3.0]
    conds = [x < 0, x > 1]
    want = np.where(x > 1, 2 * x, np.where(x < 0, -x, 3.0))
    got = jnp.piecewise(x, conds, pieces, 2.0)
    np.testing.assert_array_equal(got, want)
    assert jnp.piecewise(x, conds, [1.0, 2.0]).tolist() == by_numpy(x, conds, [1, 2]).tolist()
    overlapping = [x < 1, x < 0]
    assert (
        jnp.piecewise(x, overlapping, [1, 2]).tolist() == by_numpy(x, overlapping, [1, 2]).tolist()
    )
    gradient = vj.grad(lambda v: jnp.sum(jnp.piecewise(v, [v > 0], [jnp.sqrt, 0.0])))
    assert gradient(np.array([4.0, 0.0, -1.0], np.float32)).tolist() == [0.25, 0.0, 0.0]
    with pytest.raises(ArgumentError, match="piecewise: 1 functions for 2 conditions"):
        jnp.piecewise(x, conds, [1.0])


def test_small_helpers() -> None:
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    assert lax.collapse(x, 1).shape == (2, 12)
    assert lax.collapse(x, 0, 2).shape == (6, 4)
    assert [v.shape for v in lax.split(x, (1, 3), 2)] == [(2, 3, 1), (2, 3, 3)]
    assert lax.broadcast_shapes((2, 1), (3,)) == (2, 3)
    assert lax.broadcast_to_rank(x, 5).shape == (1, 1, 2, 3, 4)
    keys, values = lax.sort_key_val(np.array([3, 1, 2]), np.array([30, 10, 20]))
    assert (keys.tolist(), values.tolist()) == ([1, 2, 3], [10, 20, 30])
    np.testing.assert_array_equal(lax.dot(x[0], x[0].T), x[0] @ x[0].T)
    np.testing.assert_array_equal(lax.dot(x[0], x[0][0]), x[0] @ x[0][0])
    assert lax.empty((2,), np.int32).tolist() == [0, 0]
    for call in (
        lambda: lax.collapse(x, 2, 1),
        lambda: lax.split(x, (1, 1), 2),
        lambda: lax.dot(x, x),
        lambda: lax.broadcast_shapes((2,), (3,)),
    ):
        with pytest.raises(ValueError, match="expected"):
            call()
