"""What programs and plans make of blocks: no float copy, no constant, the text, files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import vkjit as vj
from tests.quantized import golden_blocks
from vkjit import blocks, dtypes, lax, quant
from vkjit import numpy as jnp
from vkjit.api.flat import flatten_call
from vkjit.errors import InternalError
from vkjit.export import deserialize, export
from vkjit.ir.parse import parse
from vkjit.ir.text import text
from vkjit.lowering.compile import check_blocks
from vkjit.lowering.kernel.types import F32
from vkjit.lowering.kernel.views import dense
from vkjit.lowering.plan.groups import (
    ControlGroup,
    LoadStep,
    LoopGroup,
    Partition,
    ScanGroup,
    StoreStep,
)
from vkjit.lowering.plan.partition import partition
from vkjit.ops.registry import PRIMITIVES
from vkjit.ops.structural import SumRule
from vkjit.passes.pipeline import simplify

ROWS = 24


def weights(*shape: int) -> quant.QuantizedArray:
    raw, _ = golden_blocks(blocks.Q4_K)
    return quant.QuantizedArray(raw[np.random.default_rng(3).integers(0, len(raw), shape)])


def groups_of(fn: Any, *args: Any) -> Partition:
    flat, leaves = flatten_call(fn, args)
    return partition(simplify(flat.trace(leaves).program, checked=True))


def lengths(parts: Partition) -> Iterator[int]:
    """Elements of every array, those of inner programs included."""
    yield from (info.length for info in parts.arrays)
    for group in parts.groups:
        if isinstance(group, ControlGroup):
            for inner in group.inner:
                yield from lengths(inner)


def once(x: Any, w: Any) -> Any:
    return jnp.sum(jnp.tanh(x @ w.T) @ w)


def looped(x: Any, w: Any) -> Any:
    """The same weights in each turn: nothing of them may be computed before the loop."""

    def body(h: Any, _: Any) -> Any:
        return jnp.tanh(h @ w.T @ w), None

    return jnp.sum(lax.scan(body, x, None, length=3)[0])


def scaled_in_a_loop(x: Any, w: Any) -> Any:
    """Elementwise work on constants is lifted out of loops, but not to be stored as floats."""

    def body(h: Any, _: Any) -> Any:
        return jnp.tanh(jnp.sum(h[:, None, :] * (w.dequantize() * 2)[None], -1) @ w), None

    return jnp.sum(lax.scan(body, x, None, length=3)[0])


def cast_first(x: Any, w: Any) -> Any:
    narrow = w.dequantize().astype(jnp.bfloat16)
    return jnp.sum(jnp.tanh(x.astype(jnp.bfloat16) @ narrow.T) @ narrow).astype(jnp.float32)


def checkpointed(x: Any, w: Any) -> Any:
    def block(x: Any) -> Any:
        return jnp.tanh(x @ w.T) @ w

    return jnp.sum(vj.checkpoint(block)(vj.checkpoint(block)(x)))


def looked_up(x: Any, w: Any) -> Any:
    return jnp.sum(jnp.take(w, jnp.int32([1, 2, 1]), axis=0) * x[0])


@pytest.mark.parametrize(
    "fn", [once, looped, scaled_in_a_loop, cast_first, checkpointed, looked_up]
)
@pytest.mark.parametrize("derived", [False, True])
def test_no_group_stores_the_numbers_of_a_matrix(fn: Any, derived: bool) -> None:  # noqa: FBT001
    w = weights(ROWS)
    x = np.ones((2, 512), np.float32)
    made = groups_of(vj.grad(fn) if derived else fn, x, w)
    assert max(lengths(made)) < ROWS * 512


def test_compiled_calls_have_no_room_for_the_numbers(device: str) -> None:
    raw, _ = golden_blocks(blocks.Q6_K)
    w = quant.QuantizedArray(np.tile(raw, (64, 1)))
    x = np.ones((2, 512), np.float32)
    with vj.default_device(device):
        for fn in (once, looked_up):
            memory = vj.jit(vj.value_and_grad(fn)).lower(x, w).memory()
            assert memory.temporaries < 4 * w.size / 8
        constant = vj.jit(lambda x: x @ w.T).lower(x).memory()
    assert constant.constants <= w.nbytes + 64


def test_closed_over_blocks_are_constants_that_stay_packed() -> None:
    w = weights(ROWS)
    x = np.ones((4, 512), np.float32)
    lowered = vj.jit(lambda x: x @ w.T).lower(x)
    assert "q4_k[24,2]" in lowered.as_text()
    np.testing.assert_allclose(
        vj.jit(lambda x: x @ w.T)(x), x @ np.asarray(w).T, rtol=1e-4, atol=1e-3
    )


def test_only_loops_and_products_may_read_blocks() -> None:
    view = dense((1, 512, 1))
    step = LoadStep(0, view, F32, blocks.Q4_K)
    check_blocks(LoopGroup((1, 512, 1), 0, (step,), (StoreStep(0, 1, view),)))
    running = ScanGroup(1, 512, 1, False, SumRule(dtypes.float32), step, 1, F32)
    with pytest.raises(InternalError, match="array 0 holds q4_k, expected numbers"):
        check_blocks(running)


def test_equal_reads_are_one_and_print_their_types() -> None:
    w = weights(ROWS)
    flat, leaves = flatten_call(lambda x, w: (x @ w.T) @ w, (np.ones((4, 512), "f4"), w))
    program = simplify(flat.trace(leaves).program, checked=True)
    source = text(program)
    assert source.count("dequantize[dtype=f32]") == 1
    assert "q4_k[24,2]" in source
    assert text(parse(source, PRIMITIVES)) == source


def test_gradients_save_the_blocks_and_not_their_numbers() -> None:
    w = weights(ROWS)

    def loss(x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ w.T) ** 2)

    saved = vj.saved_residuals(loss, np.ones((4, 512), np.float32))
    assert not any(s.aval.shape == (ROWS, 512) for s in saved)


def test_exported_functions_hold_blocks() -> None:
    w = weights(3)
    x = np.random.default_rng(0).normal(size=(2, 512)).astype("f4")
    fn = vj.jit(lambda x: x @ w.T)
    data = export(fn)(x).serialize()
    again = deserialize(data)
    np.testing.assert_array_equal(again.call(x), fn(x))


def test_donated_blocks_are_passed_on() -> None:
    w = weights(ROWS)
    held = vj.jit(lambda w: w)(w)
    out = vj.jit(lambda w: quant.QuantizedArray(w.blocks[::-1]), donate_argnums=0)(held)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(w)[::-1])
