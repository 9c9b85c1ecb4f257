"""Fixtures of the data side: stored files, the tiny GGUF, and the real one where it is at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gguf_files import write_gguf
from vkjit_models.common.gguf import GgufFile, open_gguf
from vkjit_models.common.smollm2 import cached_smollm2
from vkjit_models.common.tokenizer import Tokenizer

WriteLlama = Callable[..., Path]


@pytest.fixture(scope="session")
def data() -> Path:
    """Folder of stored test data."""
    return Path(__file__).resolve().parents[2] / "data"


@pytest.fixture(scope="session")
def tiny_gguf(data: Path) -> GgufFile:
    """A two-layer llama of 15 tensor types with a 512-token vocabulary, read by llama.cpp too."""
    return open_gguf(data / "gguf" / "tiny_llama.gguf")


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_gguf: GgufFile) -> Tokenizer:
    return Tokenizer(tiny_gguf)


@pytest.fixture(scope="session")
def smollm2_tokenizer() -> Tokenizer:
    path = cached_smollm2()
    if path is None:
        pytest.skip("SmolLM2 is not on this machine: run `make finetune` or set VKJIT_SMOLLM2")
    return Tokenizer(open_gguf(path))


@pytest.fixture
def write_llama(tmp_path: Path) -> WriteLlama:
    """Writes a one-layer llama GGUF: 4 tokens, width 8, 2 heads; tests break it in one place."""

    def write(
        *,
        metadata: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Any] | None = None,
        architecture: str = "llama",
    ) -> Path:
        settings: dict[str, Any] = {
            "embedding_length": 8, "feed_forward_length": 16, "block_count": 1,
            "attention.head_count": 2, "attention.head_count_kv": 1, "context_length": 32,
            "attention.layer_norm_rms_epsilon": 1e-5, "vocab_size": 4,
        }  # fmt: skip
        whole = {f"llama.{key}": v for key, v in (settings | dict(metadata or {})).items()}
        values = _small_tensors() | dict(tensors or {})
        return write_gguf(tmp_path / "small.gguf", architecture, whole, values)

    return write


def _small_tensors() -> dict[str, Any]:
    shapes = {
        "token_embd": (4, 8), "output_norm": (8,), "blk.0.attn_norm": (8,), "blk.0.attn_q": (8, 8),
        "blk.0.attn_k": (4, 8), "blk.0.attn_v": (4, 8), "blk.0.attn_output": (8, 8),
        "blk.0.ffn_norm": (8,), "blk.0.ffn_gate": (16, 8), "blk.0.ffn_up": (16, 8),
        "blk.0.ffn_down": (8, 16),
    }  # fmt: skip
    rng = np.random.default_rng(0)
    return {
        f"{name}.weight": rng.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }
