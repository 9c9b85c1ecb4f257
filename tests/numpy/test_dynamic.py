"""Slices from a traced start: values, derivatives, batches of starts; on every device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vkjit as vj
import vkjit.numpy as jnp
from vkjit import lax
from vkjit.errors import IndexingError

Array = np.ndarray[Any, Any]


def spot(start: int, size: int, length: int) -> slice:
    """Where a slice lies: negative starts count from the end, then it is moved inside."""
    start += length if start < 0 else 0
    at = min(max(start, 0), length - size)
    return slice(at, at + size)


def place(starts: Any, sizes: Any, shape: Any) -> tuple[slice, ...]:
    return tuple(spot(int(s), n, m) for s, n, m in zip(starts, sizes, shape, strict=True))


@st.composite
def cases(draw: Any) -> tuple[Array, tuple[int, ...], Array]:
    """An array, the sizes of a slice, and starts for three examples."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    sizes = tuple(draw(st.integers(0, n)) for n in shape)
    starts = [[draw(st.integers(-7, 7)) for _ in shape] for _ in range(3)]
    x = np.random.default_rng(draw(st.integers(0, 99))).uniform(-2, 2, shape)
    return x.astype(np.float32), sizes, np.array(starts, np.int32)


@settings(max_examples=30)
@given(case=cases())
def test_slices(case: Any) -> None:
    x, sizes, starts = case

    def cut(x: Any, start: Any) -> Any:
        return lax.dynamic_slice(x, start, sizes)

    wants = [x[place(s, sizes, x.shape)] for s in starts]
    np.testing.assert_array_equal(cut(x, tuple(starts[0].tolist())), wants[0])
    np.testing.assert_array_equal(cut(x, starts[0]), wants[0])
    np.testing.assert_array_equal(vj.vmap(cut, (None, 0))(x, starts), np.stack(wants))
    many = np.stack([x, x + 1, x + 2])
    np.testing.assert_array_equal(
        vj.vmap(cut)(many, starts), np.stack([w + i for i, w in enumerate(wants)])
    )
    np.testing.assert_array_equal(
        vj.vmap(cut, (0, None))(many, starts[1]), np.stack([wants[1] + i for i in range(3)])
    )
    ct = np.random.default_rng(0).uniform(-1, 1, sizes).astype(np.float32)
    gradient = np.zeros_like(x)
    gradient[place(starts[0], sizes, x.shape)] = ct
    got, pulled = vj.vjp(lambda x: cut(x, starts[0]), x)[1], None
    (pulled,) = got(ct)
    np.testing.assert_array_equal(pulled, gradient)
    moved = vj.jvp(lambda x: cut(x, starts[0]), (x,), (x * 2,))[1]
    np.testing.assert_array_equal(moved, wants[0] * 2)


@settings(max_examples=30)
@given(case=cases())
def test_updates(case: Any) -> None:
    x, sizes, starts = case
    update = np.random.default_rng(1).uniform(-2, 2, (3, *sizes)).astype(np.float32)

    def paste(x: Any, new: Any, start: Any) -> Any:
        return lax.dynamic_update_slice(x, new, start)

    wants = np.stack([x] * 3)
    for want, new, start in zip(wants, update, starts, strict=True):
        want[place(start, sizes, x.shape)] = new
    np.testing.assert_array_equal(paste(x, update[0], tuple(starts[0].tolist())), wants[0])
    np.testing.assert_array_equal(paste(x, update[0], starts[0]), wants[0])
    np.testing.assert_array_equal(vj.vmap(paste, (None, 0, 0))(x, update, starts), wants)
    np.testing.assert_array_equal(vj.vmap(paste)(np.stack([x] * 3), update, starts), wants)

    ct = np.random.default_rng(0).uniform(-1, 1, x.shape).astype(np.float32)
    _, pull = vj.vjp(lambda x, new: paste(x, new, starts[0]), x, update[0])
    to_x, to_new = pull(ct)
    where = place(starts[0], sizes, x.shape)
    outside = ct.copy()
    outside[where] = 0
    np.testing.assert_array_equal(to_x, outside)
    np.testing.assert_array_equal(to_new, ct[where])
    moved = vj.jvp(lambda x, new: paste(x, new, starts[0]), (x, update[0]), (x * 2, update[0] * 3))
    want = x * 2
    want[where] = update[0] * 3
    np.testing.assert_array_equal(moved[1], want)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "bool"])
def test_on_devices(dtype: str, device: str) -> None:
    x = (np.arange(24).reshape(4, 6) % 5).astype(dtype)
    new = (np.arange(6).reshape(2, 3) % 2).astype(dtype)

    def fn(x: Any, new: Any, start: Any) -> Any:
        return lax.dynamic_slice(x, start, (2, 3)), lax.dynamic_update_slice(x, new, start)

    def mapped(starts: Any) -> Any:
        return vj.vmap(fn, (None, None, 0))(x, new, starts)

    starts = np.array([[0, 0], [1, 2], [9, -2], [-3, 9]], np.int32)
    with vj.default_device(device):
        for start in starts:
            cut, pasted = vj.jit(fn)(x, new, start)
            where = place(start, (2, 3), x.shape)
            np.testing.assert_array_equal(cut, x[where])
            want = x.copy()
            want[where] = new
            np.testing.assert_array_equal(pasted, want)
        cuts, pastes = vj.jit(mapped)(starts)
    np.testing.assert_array_equal(cuts, mapped(starts)[0])
    np.testing.assert_array_equal(pastes, mapped(starts)[1])


def test_gradients_on_devices(device: str) -> None:
    x = np.arange(12, dtype=np.float32).reshape(4, 3)

    def loss(x: Any, start: Any) -> Any:
        part = lax.dynamic_slice_in_dim(x, start, 2)
        whole = lax.dynamic_update_index_in_dim(x, part[0] * part[1], start, 0)
        return jnp.sum(whole * whole)

    with vj.default_device(device):
        got = vj.jit(vj.grad(loss))(x, 1)
    rows = x.astype(np.float64)
    want = 2 * rows
    want[1] = 2 * rows[1] * rows[2] ** 2
    want[2] += 2 * rows[1] ** 2 * rows[2]
    np.testing.assert_allclose(got, want, 1e-6)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int32"])
def test_starts_of_any_integer_dtype(dtype: str) -> None:
    x = np.arange(5)
    info = np.iinfo(dtype)
    for start in (info.min, 0, 3, info.max):
        want = x[spot(int(start), 2, 5)].tolist()
        value = np.asarray(start, dtype)
        assert lax.dynamic_slice(x, (value,), (2,)).tolist() == want
        assert vj.jit(lambda s: lax.dynamic_slice(x, (s,), (2,)))(value).tolist() == want


def test_negative_starts_that_do_not_count_from_the_end() -> None:
    x = np.arange(5)
    cut = vj.jit(lambda s: lax.dynamic_slice_in_dim(x, s, 2, allow_negative_indices=False))
    assert cut(-1).tolist() == [0, 1]
    assert cut(9).tolist() == [3, 4]
    with pytest.raises(IndexingError, match="dynamic_slice: start -1 with allow_negative"):
        lax.dynamic_slice(x, (-1,), (2,), allow_negative_indices=False)
