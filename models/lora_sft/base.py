"""The base model of a run: weights on the device, tokenizer, chat template."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import vkjit.numpy as jnp
from vkjit_models.common.chat import ChatTemplate
from vkjit_models.common.gguf import LlamaHyper, open_gguf, read_llama
from vkjit_models.common.smollm2 import find_smollm2
from vkjit_models.common.tokenizer import Tokenizer
from vkjit_models.llama.model import LlamaSpec

SMOLLM2 = "smollm2"


@final
@dataclass(frozen=True)
class BaseModel:
    """A loaded model.

    Args:
        name: Where it came from, as adapters record it.
        hyper: Sizes and constants.
        params: f32 weights under Hugging Face names, on the device.
        tokenizer: From the same file.
    """

    name: str
    hyper: LlamaHyper
    params: dict[str, Any]
    tokenizer: Tokenizer

    @property
    def spec(self) -> LlamaSpec:
        """The model without adapters."""
        return LlamaSpec(self.hyper)

    @property
    def template(self) -> ChatTemplate:
        """The file's chat template."""
        return ChatTemplate.of(self.tokenizer)


def load_base(path: str) -> BaseModel:
    """Loads a GGUF file, or SmolLM2-135M-Instruct where ``path`` is "smollm2".

    Raises:
        DataError: The file is missing, damaged, or of an unsupported kind.
    """
    file = open_gguf(find_smollm2() if path == SMOLLM2 else Path(path))
    tokenizer = Tokenizer(file)
    hyper, weights = read_llama(file)
    params: dict[str, Any] = {}
    while weights:  # one at a time, so that host and device copies never both exist in full
        name, value = weights.popitem()
        params[name] = jnp.asarray(value)
    return BaseModel(path, hyper, params, tokenizer)
