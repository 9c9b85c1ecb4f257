"""A reply of a model, with or without an adapter."""

from __future__ import annotations

from pathlib import Path

from vkjit_models.common.adapter_gguf import load_any_adapter
from vkjit_models.llama.lora import from_peft, with_adapter

from .base import load_base
from .evaluate import Evaluator


def greedy_reply(question: str, model: str, adapter: Path | None, longest: int) -> str:
    """The most likely reply to ``question``, up to ``longest`` tokens.

    Args:
        question: What the user says.
        model: A GGUF file, or "smollm2".
        adapter: A folder in PEFT's layout or a GGUF file; None for the base model.
        longest: Tokens of the reply, at most.

    Raises:
        DataError: Model or adapter cannot be read, or do not belong together.
    """
    base = load_base(model)
    spec, adapters = base.spec, {}
    if adapter is not None:
        config, tensors = load_any_adapter(adapter, base.hyper)
        adapters = from_peft(base.hyper, tensors)
        spec = with_adapter(spec, config, adapters)
    return Evaluator(spec, base.params).reply(base, adapters, question, longest)
