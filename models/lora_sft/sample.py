"""A reply of a model, with or without an adapter."""

from __future__ import annotations

from pathlib import Path

from vkjit_models.common.adapter_io import load_adapter
from vkjit_models.llama.lora import from_peft
from vkjit_models.llama.model import LlamaSpec

from .base import load_base
from .evaluate import Evaluator


def greedy_reply(question: str, model: str, adapter: Path | None, longest: int) -> str:
    """The most likely reply to ``question``, up to ``longest`` tokens.

    Args:
        question: What the user says.
        model: A GGUF file, or "smollm2".
        adapter: Folder of an adapter in PEFT's layout; None for the base model.
        longest: Tokens of the reply, at most.

    Raises:
        DataError: Model or adapter cannot be read, or do not belong together.
    """
    base = load_base(model)
    spec, adapters = LlamaSpec(base.hyper), {}
    if adapter is not None:
        config, tensors = load_adapter(adapter)
        spec, adapters = LlamaSpec(base.hyper, config.scale), from_peft(base.hyper, tensors)
    return Evaluator(spec, base.params).reply(base, adapters, question, longest)
