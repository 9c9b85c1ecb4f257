"""Views against NumPy's own strided arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vkjit.lowering.kernel.views import View, collapse, dense, dense_strides

Array = np.ndarray[Any, Any]

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def read(view: View, memory: Array) -> Array:
    """The elements that a view names, by its definition: offset plus index times stride."""
    out = np.empty(view.shape, memory.dtype)
    for index in np.ndindex(*view.shape):
        out[index] = memory[
            view.offset + sum(i * s for i, s in zip(index, view.strides, strict=True))
        ]
    return out


def memory_of(shape: tuple[int, ...]) -> Array:
    return np.arange(max(1, math.prod(shape)))


def steps(draw: Any, view: View, array: Array) -> tuple[View, Array]:
    """One random operation on a view and on the array it stands for."""
    kind = draw(st.sampled_from(("permuted", "sliced", "broadcast")))
    rank = len(view.shape)
    if kind == "permuted":
        axes = tuple(draw(st.permutations(range(rank))))
        return view.permuted(axes), array.transpose(axes)
    if kind == "broadcast":
        at, size = draw(st.integers(0, rank)), draw(st.integers(0, 3))
        shape = (*view.shape[:at], size, *view.shape[at:])
        axes = tuple(i for i in range(rank + 1) if i != at)
        return view.broadcast(shape, axes), np.broadcast_to(np.expand_dims(array, at), shape)
    starts: list[int] = []
    sizes: list[int] = []
    strides: list[int] = []
    for size in view.shape:
        step = draw(st.sampled_from((1, 2, -1)))
        start = draw(st.integers(0, max(size - 1, 0)))
        reach = size - start if step > 0 else start + 1
        count = draw(st.integers(0, -(-reach // abs(step)))) if size else 0
        starts.append(start)
        sizes.append(count)
        strides.append(step)
    taken = array
    for axis, (start, count, step) in enumerate(zip(starts, sizes, strides, strict=True)):
        taken = np.take(taken, [start + step * i for i in range(count)], axis)
    return view.sliced(starts, sizes, strides), taken


@st.composite
def views(draw: Any) -> tuple[View, Array, Array]:
    """A view after up to four operations, the memory, and the array it must read."""
    shape = draw(shapes)
    memory = memory_of(shape)
    view, array = dense(shape), memory[: math.prod(shape)].reshape(shape)
    for _ in range(draw(st.integers(0, 4))):
        if math.prod(view.shape) > 300 or len(view.shape) > 5:
            break
        view, array = steps(draw, view, array)
    return view, memory, array


@given(views())
def test_views_compose_as_numpy_does(given_: tuple[View, Array, Array]) -> None:
    view, memory, array = given_
    assert view.shape == array.shape
    assert view.size == array.size
    np.testing.assert_array_equal(read(view, memory), array)


@given(views(), st.data())
def test_a_reshaped_view_reads_the_same_elements(
    given_: tuple[View, Array, Array], data: st.DataObject
) -> None:
    view, memory, array = given_
    parts = [d for d in range(1, view.size + 1) if view.size and view.size % d == 0] or [1]
    first = data.draw(st.sampled_from(parts))
    shape = (first, view.size // first)
    seen = view.reshaped(shape)
    if seen is not None and view.size:
        np.testing.assert_array_equal(read(seen, memory), array.reshape(shape))


@given(shapes, st.data())
def test_a_dense_view_reshapes_to_anything(shape: tuple[int, ...], data: st.DataObject) -> None:
    view = dense(shape)
    assert view.is_dense()
    flat = view.reshaped((view.size,))
    assert flat is not None
    again = flat.reshaped(shape)
    assert again is not None
    if view.size:
        np.testing.assert_array_equal(
            read(again, memory_of(shape)), memory_of(shape).reshape(shape)
        )


def test_reshape_of_a_transposed_view_is_refused() -> None:
    transposed = dense((3, 4)).permuted((1, 0))
    assert transposed.reshaped((12,)) is None
    assert transposed.reshaped((2, 2, 3)) == View((2, 2, 3), (2, 1, 4), 0)
    assert dense((2, 6)).sliced((0, 0), (2, 4), (1, 1)).reshaped((8,)) is None


@given(shapes)
def test_dense_strides_are_numpys(shape: tuple[int, ...]) -> None:
    if math.prod(shape):
        itemsize = np.dtype(np.int8).itemsize
        want = np.zeros(shape, np.int8).strides
        got = dense_strides(shape)
        kept = [i for i, n in enumerate(shape) if n > 1]
        assert [got[i] * itemsize for i in kept] == [want[i] for i in kept]


@given(views(), views())
def test_collapse_keeps_every_address_of_every_operand(
    one: tuple[View, Array, Array], two: tuple[View, Array, Array]
) -> None:
    view = one[0]
    other = View(view.shape, tuple(reversed(dense_strides(view.shape))), two[0].offset)
    shape, rows = collapse(view.shape, [view.strides, other.strides])
    if view.size == 0:
        return
    assert math.prod(shape) == view.size
    assert all(n > 1 for n in shape) or shape == (1,)
    for strides, whole in zip(rows, (view, other), strict=True):
        size = 1 + sum(abs(s) * (n - 1) for s, n in zip(whole.strides, whole.shape, strict=True))
        low = sum(min(s * (n - 1), 0) for s, n in zip(whole.strides, whole.shape, strict=True))
        memory = np.arange(size)
        before = read(View(whole.shape, whole.strides, -low), memory).reshape(-1)
        after = read(View(shape, strides, -low), memory).reshape(-1)
        np.testing.assert_array_equal(before, after)


def test_collapse_merges_what_all_operands_walk_as_one() -> None:
    assert collapse((2, 3, 4), [(12, 4, 1), (12, 4, 1)]) == ((24,), [(1,), (1,)])
    assert collapse((2, 3, 4), [(12, 4, 1), (0, 4, 1)]) == ((2, 12), [(12, 1), (0, 1)])
    assert collapse((2, 1, 4), [(4, 9, 1)]) == ((8,), [(1,)])
    assert collapse((1, 1), [(5, 7)]) == ((1,), [(0,)])
