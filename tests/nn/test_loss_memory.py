"""What blockwise losses hold at a time, by their plans: no logits of all rows, no other head."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

import vkjit as vj
from vkjit import nn, quant
from vkjit.lowering.compile import compile_program
from vkjit.lowering.target import ALL_SCALARS, MINIMAL_GPU, Target
from vkjit.passes.pipeline import simplify
from vkjit.runtime import get_device

ROWS, VOCABULARY, WIDTH = 1024, 49152, 576
BLOCK = (256, 4096)
GPU = dataclasses.replace(
    MINIMAL_GPU,
    name="gpu",
    storage=ALL_SCALARS,
    max_workgroup=(1024, 1024, 64),
    max_invocations=1024,
    shared_bytes=49152,
    subgroup_sizes=(32,),
    subgroup_ops=True,
)
LOGITS = 4 * BLOCK[0] * BLOCK[1]
SLICE = 4 * BLOCK[1] * WIDTH
STATES = 4 * ROWS * WIDTH
SMALL = 1 << 20
"""For what each row carries from block to block."""


def cross_entropy(hidden: Any, base: Any, weight: Any, targets: Any) -> Any:
    del base
    return nn.linear_cross_entropy(
        hidden, weight, targets, label_smoothing=0.1, row_chunk=BLOCK[0], vocab_chunk=BLOCK[1]
    ).sum()


def masked_kl(hidden: Any, base: Any, weight: Any, targets: Any) -> Any:
    return nn.linear_target_masked_kl(
        hidden, base, weight, targets, row_chunk=BLOCK[0], vocab_chunk=BLOCK[1]
    ).sum()


FLOATS = vj.ShapeDtypeStruct((VOCABULARY, WIDTH), "float32")


def temporaries(
    loss: Callable[..., Any], argnums: int | tuple[int, ...], target: Target, head: Any = FLOATS
) -> int:
    """Bytes of the arena of a compiled loss with its gradients."""
    array = vj.ShapeDtypeStruct
    states = array((ROWS, WIDTH), "float32")
    program = vj.make_ir(vj.value_and_grad(loss, argnums=argnums))(
        states, states, head, array((ROWS,), "int32")
    )
    return compile_program(simplify(program), target).plan.arena_bytes


@pytest.mark.parametrize("name", ["cpu", "gpu"])
@pytest.mark.parametrize(("loss", "blocks"), [(cross_entropy, 2), (masked_kl, 4)])
def test_a_frozen_head_costs_blocks_of_logits(
    loss: Callable[..., Any], blocks: int, name: str
) -> None:
    """Logits and what they are raised to; a slice of the head where products pack it; states."""
    target = get_device("cpu").target if name == "cpu" else GPU
    found = temporaries(loss, 0, target)
    assert found < blocks * LOGITS + SLICE + 3 * STATES + SMALL
    assert found < 4 * ROWS * VOCABULARY / 4
    assert found < 4 * VOCABULARY * WIDTH / 2


def test_a_trained_head_costs_slices_of_itself() -> None:
    found = temporaries(cross_entropy, (0, 2), get_device("cpu").target)
    assert found < 3 * LOGITS + 4 * SLICE + 4 * STATES + SMALL
    assert found < 4 * VOCABULARY * WIDTH / 2


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_a_packed_head_is_read_as_it_lies(name: str) -> None:
    """Numbers of a slice at most, where a product packs them: never those of the head."""
    target = get_device("cpu").target if name == "cpu" else GPU
    blocks = vj.ShapeDtypeStruct((VOCABULARY, WIDTH // 32), quant.block_type_of("q8_0").dtype)
    found = temporaries(cross_entropy, 0, target, quant.QuantizedArray(blocks))
    assert found < 2 * LOGITS + SLICE + 3 * STATES + SMALL
