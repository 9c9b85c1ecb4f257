"""Indexing against NumPy: basic and advanced reads, and .at[] updates with repeated indices."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import vkjit.numpy as jnp
from vkjit.errors import ArgumentError, IndexingError

SHAPE = (4, 3, 5)
X = np.arange(60, dtype=np.float32).reshape(SHAPE)
GRID = np.array([[0, -1], [2, 2]])
J = np.array([1, 0])
MASK = np.arange(12).reshape(4, 3) % 3 == 1

INDICES: dict[str, Any] = {
    "integer": 2,
    "negative integer": -1,
    "integers": (1, -2, 3),
    "slice": slice(1, 3),
    "stride": (slice(None), slice(None, None, 2)),
    "backwards": (slice(None, None, -1), slice(2, None, -2), slice(4, 0, -1)),
    "empty slice": (slice(3, 1), slice(None)),
    "ellipsis": (..., 1),
    "ellipsis in the middle": (0, ..., slice(1, 4)),
    "new axes": (None, 1, None, ..., None),
    "vector": J,
    "matrix": GRID,
    "vector on an axis": (slice(None), J),
    "vectors together": (slice(None), J, np.array([4, -5])),
    "broadcast vectors": (GRID, J),
    "vectors apart": (J, slice(None), np.array([2, 3])),
    "vectors apart by a new axis": (J, None, np.array([2, -3])),
    "integer beside vector": (1, J),
    "integer apart from vector": (1, slice(None), J),
    "vector and backwards slice": (J, slice(None, None, -1), slice(4, None, -2)),
    "vector, new axis first": (None, slice(None), J),
    "vector last": (..., GRID),
    "three vectors": (J, J, J),
    "mask": MASK,
    "mask of one axis": (slice(None), np.array([True, False, True])),
    "mask and slice": (MASK, slice(1, 4)),
}


def as_index(index: Any) -> Any:
    """NumPy arrays of an index as device arrays, so that nothing about them is static."""
    if isinstance(index, tuple):
        return tuple(as_index(part) for part in index)
    dynamic = isinstance(index, np.ndarray) and index.dtype != np.bool_
    return jnp.asarray(index) if dynamic else index


@pytest.mark.parametrize("name", INDICES)
def test_reading_is_as_in_numpy(name: str, run: Any, same: Any) -> None:
    index = INDICES[name]
    same(run(lambda x: x[index], jnp.asarray(X)), X[index])
    same(run(lambda x: x[as_index(index)], jnp.asarray(X)), X[index])


UFUNCS = {
    "add": np.add,
    "multiply": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


@pytest.mark.parametrize("how", ["set", *UFUNCS])
@pytest.mark.parametrize("name", INDICES)
def test_updates_are_as_in_numpy(name: str, how: str, run: Any, same: Any) -> None:
    index = INDICES[name]
    want = X.copy()
    rng = np.random.default_rng(len(name))
    values = rng.integers(-9, 90, X[index].shape).astype(np.float32)
    if how == "set":
        want[index] = values
    else:
        UFUNCS[how].at(want, index, values)
    for chosen in (index, as_index(index)):
        out = run(
            lambda x, v, i=chosen: getattr(x.at[i], how)(v), jnp.asarray(X), jnp.asarray(values)
        )
        same(out, want)


def test_a_scalar_or_row_broadcasts_over_the_part(run: Any, same: Any) -> None:
    want = X.copy()
    want[1:3, :, ::2] = np.array([1, 2, 3])
    same(run(lambda x: x.at[1:3, :, ::2].set(np.array([1, 2, 3])), jnp.asarray(X)), want)
    want[J] = 7
    out = run(lambda x: x.at[1:3, :, ::2].set(np.array([1, 2, 3])).at[J].set(7), jnp.asarray(X))
    same(out, want)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.bool_, np.float16])
def test_narrow_dtypes_keep_their_neighbours(dtype: Any, run: Any, same: Any) -> None:
    x = (np.arange(9) % 2).astype(dtype)
    want = x.copy()
    want[[3, 3, 5]] = np.array([0, 1, 1], dtype)
    index = jnp.asarray([3, 3, 5])
    same(run(lambda v: v.at[index].set(np.array([0, 1, 1], dtype)), jnp.asarray(x)), want)


def test_the_last_of_repeated_indices_wins(run: Any, same: Any) -> None:
    index = np.array([2, 0, 2, 2, 1, 0])
    values = np.array([1, 2, 3, 4, 5, 6], np.int32)
    out = run(
        lambda x, i, v: x.at[i].set(v),
        jnp.zeros(3, jnp.int32),
        jnp.asarray(index),
        jnp.asarray(values),
    )
    same(out, np.array([6, 5, 4], np.int32))


def test_out_of_range_reads_clamp_and_writes_drop(run: Any, same: Any) -> None:
    x, far = jnp.asarray(np.arange(4, dtype=np.float32)), jnp.asarray([7, -9, 1])
    same(run(lambda v: v[far], x), np.array([3, 0, 1], np.float32))
    same(run(lambda v: v.at[far].get(mode="fill"), x), np.array([np.nan, np.nan, 1], np.float32))
    same(run(lambda v: v.at[far].get(mode="wrap"), x), np.array([3, 3, 1], np.float32))
    same(run(lambda v: v.at[far].set(9), x), np.array([0, 9, 2, 3], np.float32))
    same(run(lambda v: v.at[far].add(9, mode="clip"), x), np.array([9, 10, 2, 12], np.float32))
    grid = jnp.asarray(np.zeros((2, 3), np.float32))
    at = (jnp.asarray([0, 1, 5]), jnp.asarray([3, 2, 0]))
    same(run(lambda v: v.at[at].set(1), grid), np.array([[0, 0, 0], [0, 0, 1]], np.float32))


@st.composite
def indices(draw: Any) -> Any:
    """A tuple of integers, slices, new axes, an ellipsis and index arrays for SHAPE."""
    parts: list[Any] = []
    for size in SHAPE[: draw(st.integers(0, 3))]:
        kind = draw(st.sampled_from(["int", "slice", "array", "new"]))
        if kind == "int":
            parts.append(draw(st.integers(-size, size - 1)))
        elif kind == "array":
            values = draw(st.lists(st.integers(-size, size - 1), min_size=2, max_size=2))
            parts.append(np.array(values).reshape(draw(st.sampled_from([(2,), (2, 1)]))))
        else:
            bound = st.none() | st.integers(-size - 1, size + 1)
            step = st.sampled_from([None, 1, 2, -1, -2])
            parts.append(slice(draw(bound), draw(bound), draw(step)))
            if kind == "new":
                parts.append(None)
    if draw(st.booleans()) and sum(p is not None for p in parts) < 3:
        parts.insert(draw(st.integers(0, len(parts))), Ellipsis)
    # A part for each axis has been drawn in order; an ellipsis moves those after it.
    return tuple(parts)


@given(indices())
def test_any_mixture_reads_and_writes_as_numpy(index: Any) -> None:
    try:
        want = X[index]
    except IndexError:
        return
    x = jnp.asarray(X)
    np.testing.assert_array_equal(np.asarray(x[as_index(index)]), want)
    changed = X.copy()
    changed[index] = -1
    np.testing.assert_array_equal(np.asarray(x.at[as_index(index)].set(-1)), changed)


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (4, IndexingError, r"4 is out of range for axis 0 of f32\[4,3,5\]"),
        ((0, 0, 0, 0), IndexingError, "4 indices for an array"),
        ([0, 1], IndexingError, "make an array of it"),
        (np.array([0.5]), IndexingError, "expected integers"),
        ((..., ...), IndexingError, "more than one"),
        (slice(0, 3, 0), IndexingError, "step 0"),
        (True, IndexingError, "boolean scalar"),
        ("a", IndexingError, "str for axis 0"),
    ],
)
def test_a_bad_index_says_what_is_wrong(index: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        jnp.asarray(X)[index]


def test_values_of_a_wrong_shape_are_named() -> None:
    with pytest.raises(ValueError, match=r"broadcast_to: operand f32\[2\] to shape \(3, 5\)"):
        jnp.asarray(X).at[0].set(np.zeros(2, np.float32))


def test_traced_masks_and_bounds_are_refused(run: Any) -> None:
    def masked(x: Any, m: Any) -> Any:
        return x[m]

    if run.__name__ == "traced":
        with pytest.raises(ArgumentError, match=r"use vkjit\.numpy\.where"):
            run(masked, jnp.asarray(X), jnp.asarray(MASK))
        with pytest.raises(IndexingError, match="dynamic_slice"):
            run(lambda x, n: x[:n], jnp.asarray(X), jnp.asarray(2))
    else:
        np.testing.assert_array_equal(run(masked, jnp.asarray(X), jnp.asarray(MASK)), X[MASK])


def test_assignment_says_what_to_use() -> None:
    with pytest.raises(TypeError, match=r"x = x\.at\[index\]\.set\(value\)"):
        jnp.asarray(X)[0] = 1.0
