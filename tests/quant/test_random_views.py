"""Random chains of views of blocks and of their numbers, against the same views in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vkjit as vj
from vkjit import blocks, quant
from vkjit import numpy as jnp
from vkjit.blocks import BLOCK_TYPES, BlockType

Array = np.ndarray[Any, Any]
SMALL = [block for block in BLOCK_TYPES.values() if block.size == 32] + [blocks.Q6_K]


@st.composite
def chains(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """Names of views and their parameters; those of blocks stand before the reading."""
    of_blocks = st.sampled_from(["flip", "swap", "take", "slice", "stack", "repeat"])
    of_numbers = st.sampled_from([*_VIEWS])
    first = draw(st.lists(of_blocks, max_size=2))
    then = draw(st.lists(of_numbers, max_size=3))
    seeds = st.integers(0, 999)
    steps = [(name, draw(seeds), True) for name in first]
    return [*steps, ("read", 0, True), *[(name, draw(seeds), False) for name in then]]


def _flip(xp: Any, x: Any, seed: int, last: int) -> Any:
    return xp.flip(x, seed % last)


def _swap(xp: Any, x: Any, seed: int, last: int) -> Any:
    return xp.swapaxes(x, seed % last, seed // 7 % last)


def _take(xp: Any, x: Any, seed: int, last: int) -> Any:
    axis = seed % last
    picks = np.random.default_rng(seed).integers(0, x.shape[axis], 3).astype(np.int32)
    return xp.take(x, picks, axis=axis)


def _slice(xp: Any, x: Any, seed: int, last: int) -> Any:
    axis = seed % last
    size = x.shape[axis]
    start = seed // 3 % size
    return x[(slice(None),) * axis + (slice(start, size, 1 + seed % 3),)]


def _stack(xp: Any, x: Any, seed: int, last: int) -> Any:
    return xp.concatenate([x, xp.flip(x, 0)], axis=seed % last)


def _repeat(xp: Any, x: Any, seed: int, last: int) -> Any:
    return xp.broadcast_to(x[:1], (2, *x.shape[1:]))


def _merge(xp: Any, x: Any, seed: int, last: int) -> Any:
    return xp.reshape(x, (1, -1, x.shape[-1]) if seed % 2 else (x.shape[0], 1, -1))


def _fold(xp: Any, x: Any, seed: int, last: int) -> Any:
    return xp.max(x, axis=seed % last, keepdims=True)


_VIEWS = {
    "flip": _flip,
    "swap": _swap,
    "take": _take,
    "slice": _slice,
    "stack": _stack,
    "repeat": _repeat,
    "merge": _merge,
    "fold": _fold,
}


def run(xp: Any, x: Any, steps: list[tuple[Any, ...]], block: BlockType) -> Any:
    for name, seed, packed in steps:
        if name == "read":
            x = blocks.decode(block, np.ascontiguousarray(x)) if xp is np else quant.dequantize(x)
        else:
            x = _VIEWS[name](xp, x, seed, 2 if packed else 3)
    return x


@pytest.mark.parametrize("name", ["reference", "cpu"])
@settings(max_examples=10)
@given(steps=chains(), block=st.sampled_from(SMALL))
def test_views_compose(name: str, steps: list[tuple[Any, ...]], block: BlockType) -> None:
    count = 2 if block.size == 32 else 1
    packed = blocks.drawn(block, (2, 3, count), np.random.default_rng(5))
    want = run(np, packed, steps, block)
    with vj.default_device(name):
        got = vj.jit(lambda x: run(jnp, x, steps, block))(packed)
    np.testing.assert_array_equal(got, want)


@settings(max_examples=6)
@given(
    m=st.integers(1, 40), n=st.integers(1, 40), rows=st.integers(1, 3), block=st.sampled_from(SMALL)
)
def test_products_of_odd_sizes(m: int, n: int, rows: int, block: BlockType) -> None:
    rng = np.random.default_rng(m * 41 + n)
    count = rows if block.size == 32 else 1
    packed = blocks.drawn(block, (n, count), rng)
    numbers = blocks.decode(block, packed).astype(np.float64)
    x = rng.normal(size=(m, numbers.shape[1])).astype("f4")
    y = rng.normal(size=(m, n)).astype("f4")

    def both(w: Any, x: Any, y: Any) -> Any:
        w = quant.QuantizedArray(w)
        return x @ w.T, y @ w

    with vj.default_device("cpu"):
        made = vj.jit(both)(packed, x, y)
    for got, want in zip(made, (x @ numbers.T, y @ numbers), strict=True):
        np.testing.assert_allclose(got, want, atol=3e-6 * max(1.0, np.abs(want).max()))
