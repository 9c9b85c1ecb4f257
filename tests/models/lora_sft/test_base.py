"""Loading a base model: what is held, and the receipt of what was mapped, copied and uploaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import vkjit.numpy as jnp
from vkjit.blocks import BLOCK_TYPES
from vkjit.quant import QuantizedArray
from vkjit_models.common.gguf import WeightFormat, open_gguf
from vkjit_models.lora_sft.base import load_base

GGUF = Path(__file__).resolve().parents[2] / "data" / "gguf" / "tiny_llama.gguf"


def test_the_receipt_counts_every_byte() -> None:
    base, file = load_base(str(GGUF)), open_gguf(GGUF)
    receipt = base.receipt
    assert receipt.file_bytes == GGUF.stat().st_size
    assert sum(row.tensors for row in receipt.rows) == len(file.tensors) == len(base.params)
    assert sum(row.file_bytes for row in receipt.rows) == sum(
        int(tensor.n_bytes) for tensor in file.tensors.values()
    )
    assert receipt.device_bytes == sum(p.nbytes for p in base.params.values())
    for row in receipt.rows:
        if row.kind in BLOCK_TYPES:
            assert (row.held, row.device_bytes) == (row.kind, row.file_bytes)
    assert [note.split(":")[0] for note in receipt.notes] == ["IQ4_NL", "Q2_K", "Q3_K", "IQ4_XS"]
    lines = receipt.text().splitlines()
    assert len(lines) == 1 + len(receipt.rows) + 1 + len(receipt.notes)
    assert lines[len(receipt.rows) + 1].split()[:3] == ["all", "packed", str(len(base.params))]


@pytest.mark.parametrize("weights", ["packed", "float32", "bfloat16", "float16"])
def test_weights_are_held_as_asked(weights: WeightFormat) -> None:
    base = load_base(str(GGUF), weights)
    expanded = load_base(str(GGUF), "float32").params
    for name, held in base.params.items():
        assert tuple(held.shape) == tuple(expanded[name].shape)
        if isinstance(held, QuantizedArray):
            assert weights == "packed"
            np.testing.assert_array_equal(held.dequantize(), expanded[name])
        elif weights != "packed":
            wanted = jnp.dtype("float32" if len(held.shape) == 1 else weights)
            assert held.dtype == wanted
    packed = [name for name, held in base.params.items() if isinstance(held, QuantizedArray)]
    assert len(packed) == (10 if weights == "packed" else 0)
    assert bool(base.receipt.notes) is (weights == "packed")


def test_states_have_the_type_asked_for() -> None:
    assert load_base(str(GGUF)).spec.dtype == "float32"
    assert load_base(str(GGUF), dtype="bfloat16").spec.dtype == "bfloat16"
