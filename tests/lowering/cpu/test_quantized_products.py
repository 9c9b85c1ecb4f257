"""Functions with products out of quantized blocks, compiled for the CPU and for the reference."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vkjit as vj
from tests.quantized_products import random_blocks
from vkjit import blocks, lax, quant
from vkjit import numpy as jnp
from vkjit.blocks import BLOCK_TYPES, BlockType

Array = np.ndarray[Any, Any]
ERRORS = {"float32": 2.0**-20, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Of a result, relative to the sum of the sizes of its terms."""


def matrix(block_type: BlockType, rows: int, columns: int) -> tuple[quant.QuantizedArray, Array]:
    """Random blocks, and their numbers."""
    made = random_blocks(np.random.default_rng(rows), block_type, (rows, columns))
    return quant.QuantizedArray(made), blocks.decode(block_type, made)


def check(x: Array, w: quant.QuantizedArray, numbers: Array, side: str) -> None:
    """``x W^T``, ``x W`` or ``W x^T`` is that of the numbers in the type of ``x``."""
    forms = {"forward": lambda x, w: x @ w.T, "backward": lambda x, w: x @ w}
    form = forms.get(side, lambda x, w: w @ x.T)
    got = np.asarray(vj.jit(form)(x, w)).astype(np.float64)
    wide, rounded = x.astype(np.float64), numbers.astype(x.dtype).astype(np.float64)
    bound = form(np.abs(wide), np.abs(rounded)) * ERRORS[x.dtype.name] + 1e-6
    assert (np.abs(got - form(wide, rounded)) <= bound).all()


@st.composite
def cases(draw: st.DrawFn, most: int) -> tuple[Array, quant.QuantizedArray, Array, str]:
    block_type = draw(st.sampled_from(list(BLOCK_TYPES.values())))
    w, numbers = matrix(block_type, draw(st.integers(1, most)), block_type.size)
    side = draw(st.sampled_from(["forward", "backward", "left"]))
    dtype = draw(st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]))
    m, k = draw(st.integers(1, most)), w.shape[0 if side == "backward" else 1]
    x = np.random.default_rng(m).standard_normal((m, k)).astype(dtype)
    return x, w, numbers, side


@settings(max_examples=20)
@given(cases(50))
def test_products_are_those_of_the_numbers(
    case: tuple[Array, quant.QuantizedArray, Array, str],
) -> None:
    with vj.default_device("cpu"):
        check(*case)


@settings(max_examples=10)
@given(cases(3))
def test_so_they_are_on_the_reference(
    case: tuple[Array, quant.QuantizedArray, Array, str],
) -> None:
    with vj.default_device("reference"):
        check(*case)


def loss(x: Any, w: Any) -> Any:
    return jnp.sum(jnp.tanh(x @ w.T) ** 2)


def looped(x: Any, w: Any) -> Any:
    return jnp.sum(lax.scan(lambda h, v: (jnp.tanh(h @ v.T) @ v, None), x, w)[0])


@pytest.mark.parametrize("m", [1, 24, 200])
@pytest.mark.parametrize("closed", [False, True], ids=["argument", "constant"])
def test_gradients_read_the_blocks_and_nothing_else(m: int, closed: bool) -> None:  # noqa: FBT001
    """Two kernels for two products: nothing is copied, turned or decoded into memory."""
    w, _ = matrix(blocks.Q8_0, 576, 416)
    x = np.ones((m, 416), np.float32)
    fn = vj.grad(lambda x: loss(x, w)) if closed else vj.grad(loss)
    with vj.default_device("cpu"):
        lowered = vj.jit(fn).lower(*([x] if closed else [x, w]))
    plan = lowered.as_text("plan")
    assert re.findall(r"^ +\d+: (\w+)", plan, re.MULTILINE) == ["gemm", "gemm"]
    memory = lowered.memory()
    assert memory.temporaries == -(-m * 576 * 4 // 64) * 64
    assert memory.constants == (w.nbytes if closed else 0)


def test_stacked_layers_keep_their_blocks() -> None:
    made = random_blocks(np.random.default_rng(0), blocks.Q4_0, (3, 96, 64))
    made["d"] /= 16
    w, x = quant.QuantizedArray(made), np.ones((4, 64), np.float32) / 8
    with vj.default_device("cpu"):
        lowered = vj.jit(vj.grad(looped)).lower(x, w)
        got = vj.jit(vj.grad(looped))(x, w)
        want = vj.jit(vj.grad(looped))(x, blocks.decode(blocks.Q4_0, made))
    assert lowered.memory().temporaries < 96 * 64 * 4
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
