"""Numbers out of blocks on every device: goldens, views, lookups, products, and no float copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import vkjit as vj
from tests.quantized import golden_blocks
from vkjit import blocks, lax, quant
from vkjit import numpy as jnp
from vkjit.blocks import BLOCK_TYPES, BlockType

Array = np.ndarray[Any, Any]
ODD = [BLOCK_TYPES[name] for name in ("Q4_0", "Q8_0", "Q4_K", "Q6_K")]
"""Blocks of 18, 34, 144 and 210 bytes: both units, and starts off every word."""


def weights(
    block_type: BlockType, *shape: int, row: int = 512
) -> tuple[quant.QuantizedArray, Array]:
    """Rows of the golden blocks in some order, over ``(*shape, row)``, and their numbers."""
    raw, _ = golden_blocks(block_type)
    rows = raw[np.random.default_rng(3).integers(0, len(raw), shape), : row // block_type.size]
    return quant.QuantizedArray(rows), blocks.decode(block_type, rows)


def test_ggmls_numbers_bit_for_bit(device: str) -> None:
    given, wanted = {}, {}
    for block_type in BLOCK_TYPES.values():
        for part in ("", "random_"):
            key = f"{block_type}{part}"
            given[key], wanted[key] = golden_blocks(block_type, part)
    with vj.default_device(device):
        made = vj.jit(lambda given: {k: quant.dequantize(v) for k, v in given.items()})(given)
    for key, want in wanted.items():
        got = np.asarray(made[key])
        nan = np.isnan(want)
        np.testing.assert_array_equal(np.isnan(got), nan, err_msg=key)
        np.testing.assert_array_equal(got[~nan].view("i4"), want[~nan].view("i4"), err_msg=key)


VIEWS: dict[str, tuple[Callable[[Any], Any], Callable[[Array], Array]]] = {
    "exchanged": (lambda w: w.mT.dequantize() * 2, lambda v: np.swapaxes(v, 1, 2) * 2),
    "largest of rows": (lambda w: jnp.max(w, axis=-1), lambda v: v.max(-1)),
    "largest of columns": (lambda w: jnp.max(w, axis=1), lambda v: v.max(1)),
    "largest of matrices": (lambda w: jnp.max(w, axis=0), lambda v: v.max(0)),
    "indexed": (lambda w: w[1, 1:4].dequantize() + 1, lambda v: v[1, 1:4] + 1),
    "rows backwards": (lambda w: w[:, ::-1].dequantize() + 1, lambda v: v[:, ::-1] + 1),
    "some numbers": (
        lambda w: w.dequantize()[:, :, 3:77:5] + 1,
        lambda v: v[:, :, 3:77:5] + 1,
    ),
    "backwards": (lambda w: jnp.flip(w.dequantize(), -1) + 1, lambda v: v[..., ::-1] + 1),
    "axes of blocks": (
        lambda w: quant.dequantize(jnp.swapaxes(w.blocks, 0, 1)) + 1,
        lambda v: np.swapaxes(v, 0, 1) + 1,
    ),
    "repeated": (
        lambda w: quant.dequantize(jnp.broadcast_to(w.blocks[:1], (3, *w.blocks.shape[1:]))) + 1,
        lambda v: np.broadcast_to(v[:1], (3, *v.shape[1:])) + 1,
    ),
    "concatenated": (
        lambda w: quant.dequantize(jnp.concatenate([w.blocks, w.blocks[:1]], 0)) + 1,
        lambda v: np.concatenate([v, v[:1]], 0) + 1,
    ),
    "stacked": (
        lambda w: quant.dequantize(jnp.stack([w.blocks[0], w.blocks[1, ::-1]])),
        lambda v: np.stack([v[0], v[1, ::-1]]),
    ),
    "reshaped": (lambda w: w.reshape(10, 512).dequantize() + 1, lambda v: v.reshape(10, 512) + 1),
    "flat": (lambda w: jnp.ravel(w) + 1, lambda v: v.reshape(-1) + 1),
    "looked up": (lambda w: jnp.take(w, jnp.int32([3, 0, 3]), axis=1), lambda v: v[:, [3, 0, 3]]),
    "blocks looked up": (
        lambda w: w[:, jnp.int32([3, 0])].dequantize(),
        lambda v: v[:, [3, 0]],
    ),
    "columns looked up": (
        lambda w: jnp.take(w, jnp.int32([300, 0, 7]), axis=2),
        lambda v: v[:, :, [300, 0, 7]],
    ),
    "sorted": (lambda w: jnp.sort(w, axis=1), lambda v: np.sort(v, 1)),
    "padded": (
        lambda w: jnp.pad(w.dequantize(), ((0, 0), (1, 0), (0, 3))),
        lambda v: np.pad(v, ((0, 0), (1, 0), (0, 3))),
    ),
    "passed through": (lambda w: w, lambda v: v),
    "bfloat16": (lambda w: w.dequantize(jnp.bfloat16), lambda v: v.astype(ml_dtypes.bfloat16)),
    "float16": (lambda w: w.dequantize(jnp.float16), lambda v: v.astype(np.float16)),
    "chosen": (
        lambda w: quant.dequantize(lax.cond(jnp.max(w) > -1, _same, _reversed, w.blocks)),
        lambda v: v,
    ),
}


INTERPRETED = {"indexed", "looked up", "some numbers", "chosen"}
"""Views read on the reference device, too, which is slow."""


def _same(x: Any) -> Any:
    return x


def _reversed(x: Any) -> Any:
    return x[::-1]


@pytest.mark.parametrize("block_type", ODD, ids=str)
def test_views_read_the_same_numbers(device: str, block_type: BlockType) -> None:
    packed, values = weights(block_type, 2, 5)
    views = {n: v for n, v in VIEWS.items() if device != "reference" or n in INTERPRETED}
    with vj.default_device(device):
        made = vj.jit(lambda w: {name: f(w) for name, (f, _) in views.items()})(packed)
    for name, (_, want) in views.items():
        np.testing.assert_array_equal(np.asarray(made[name]), want(values), err_msg=name)


@pytest.mark.parametrize("block_type", [blocks.Q8_0, blocks.Q4_K], ids=str)
def test_blocks_whose_rows_are_not_runs_are_copied_as_blocks(
    device: str, block_type: BlockType
) -> None:
    packed, values = weights(block_type, 2, 5)
    count = packed.blocks.shape[-1]
    apart = values.reshape(2, 5, count, block_type.size)

    def read(x: Any) -> Any:
        return quant.dequantize(x[:, :, ::2]), quant.dequantize(jnp.swapaxes(x, 1, 2))

    with vj.default_device(device):
        some, turned = vj.jit(read)(packed.blocks)
    np.testing.assert_array_equal(some, apart[:, :, ::2].reshape(2, 5, -1))
    np.testing.assert_array_equal(turned, np.swapaxes(apart, 1, 2).reshape(2, count, -1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block_type", ODD, ids=str)
def test_products_read_blocks_in_either_operand(
    device: str, block_type: BlockType, dtype: str
) -> None:
    m, n = (3, 5) if device == "reference" else (17, 35)  # that one is slow
    packed, values = weights(block_type, n)
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(m, 512)).astype("f4") / 16).astype(dtype)
    dy = jnp.asarray(rng.normal(size=(m, n)).astype("f4")).astype(dtype)
    numbers = jnp.asarray(values).astype(dtype)

    def products(w: Any, x: Any, dy: Any) -> Any:
        return x @ w.T, dy @ w, w @ x.T, jnp.einsum("i,ki->k", x[0], w), w.T @ dy[0]

    with vj.default_device(device):
        made = vj.jit(products)(packed, x, dy)
    for got, want in zip(made, products(numbers, x, dy), strict=True):
        assert got.dtype.name == dtype
        bound = 2e-6 if dtype == "float32" else 2e-2
        wide = np.asarray(want, np.float32)
        error = np.abs(np.asarray(got, np.float32) - wide).max()
        assert error <= bound * max(np.abs(wide).max(), 1)


def layers(x: Any, stack: Any) -> Any:
    """A loop over stacked weights, each read forward and backward."""

    def body(h: Any, w: Any) -> Any:
        return jnp.tanh(h @ w.T @ w), None

    return jnp.sum(lax.scan(body, x, stack)[0])


def test_stacked_layers_and_their_gradients(device: str) -> None:
    packed, values = weights(blocks.Q8_0, 2, 3, row=64)
    x = np.random.default_rng(2).normal(size=(4, 64)).astype("f4") / 64
    with vj.default_device(device):
        got = vj.jit(vj.value_and_grad(layers))(x, packed)
        want = vj.jit(vj.value_and_grad(layers))(x, values)
    np.testing.assert_allclose(got[0], want[0], atol=1e-4)
    np.testing.assert_allclose(got[1], want[1], atol=1e-3 * np.abs(np.asarray(want[1])).max())


def test_activations_are_batched_beside_blocks() -> None:
    packed, values = weights(blocks.Q5_1, 7)
    x = np.random.default_rng(2).normal(size=(3, 4, 512)).astype("f4")
    made = vj.jit(vj.vmap(lambda x: x @ packed.T))(x)
    np.testing.assert_allclose(made, x @ values.T, rtol=1e-4, atol=1e-3)
    both, many = weights(blocks.Q5_1, 3, 7)
    made = vj.jit(vj.vmap(lambda x, w: x @ w.T))(x, both)
    np.testing.assert_allclose(made, x @ np.swapaxes(many, 1, 2), rtol=1e-4, atol=1e-3)
