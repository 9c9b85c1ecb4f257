"""Held-out loss by category, and greedy replies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

import vkjit as vj
import vkjit.numpy as jnp
from vkjit_models.common.chat import encode_prompt
from vkjit_models.llama.model import (
    Adapters,
    LlamaSpec,
    Params,
    next_logits,
    target_losses,
)

from .base import BaseModel
from .data import WindowSet

_BUFFER_STEP = 32  # a reply's buffer is a multiple of this, so few lengths are compiled


@final
@dataclass(frozen=True)
class HeldOut:
    """Mean cross-entropy over held-out targets, in nats per token.

    Args:
        loss: Over all targets.
        targets: Their number.
        by_category: Loss of each category's targets.
    """

    loss: float
    targets: int
    by_category: dict[str, float]

    @property
    def perplexity(self) -> float:
        """``exp(loss)``; infinity where that overflows."""
        return math.exp(self.loss) if self.loss < 700.0 else math.inf


@final
class Evaluator:
    """Compiled evaluation of one model.

    Every set of adapters of one structure is served by one program: all zeros, for the model
    without its adapter, costs no second compilation.
    """

    def __init__(self, spec: LlamaSpec, params: Params) -> None:
        """Compiles at the first use of each shape.

        Args:
            spec: Sizes and the adapters' scale.
            params: The base weights.
        """
        self._params = params
        self._losses: Callable[..., Any] = vj.jit(partial(target_losses, spec))
        self._next: Callable[..., Any] = vj.jit(partial(next_token, spec))

    def held_out(self, adapters: Adapters, data: WindowSet, rows: Sequence[int]) -> HeldOut:
        """Loss over the windows ``rows``, one at a time."""
        sums: dict[str, float] = dict.fromkeys(sorted(set(data.categories)), 0.0)
        counts = dict.fromkeys(sums, 0)
        categories = np.array(data.categories)
        for row in rows:
            batch = data.batch([row])
            losses, _ = self._losses(self._params, adapters, batch)
            losses = np.asarray(losses, np.float64)
            # A target never starts a document, so the segment of its predictor is its own.
            places = np.asarray(batch.rows)
            of_place = categories[np.asarray(batch.segments).reshape(-1)[places]]
            for name in sums:
                mine = (places >= 0) & (of_place == name)
                sums[name] += float(losses[mine].sum())
                counts[name] += int(mine.sum())
        total = sum(counts.values())
        loss = math.fsum(sums.values()) / max(total, 1)
        return HeldOut(loss, total, {n: sums[n] / counts[n] for n in sums if counts[n]})

    def reply(self, base: BaseModel, adapters: Adapters, question: str, longest: int) -> str:
        """The most likely reply to ``question``, token by token, up to ``longest`` tokens.

        The whole text is run again for every token; a question too long for the model's context
        loses its beginning.
        """
        messages = [{"role": "user", "content": question}]
        prompt = encode_prompt(base.tokenizer, base.template, messages, control_tokens="escape")
        prompt = prompt[-max(1, base.hyper.context_length - longest) :]
        buffer = _padded(prompt, len(prompt) + longest, base.tokenizer.pad_id)
        length, last = len(prompt), len(prompt) + longest
        while length < last:
            token = int(self._next(self._params, adapters, jnp.asarray(buffer), np.int32(length)))
            if token == base.tokenizer.eos_id:
                break
            buffer[length] = token
            length += 1
        return base.tokenizer.decode(buffer[len(prompt) : length], skip_control=True)


def next_token(
    spec: LlamaSpec, params: Params, adapters: Adapters, tokens: Any, length: Any
) -> Any:
    """The most likely token after the first ``length`` of ``tokens`` [T]: int32 scalar."""
    return jnp.argmax(next_logits(spec, params, adapters, tokens, length))


def _padded(prompt: NDArray[np.int32], length: int, pad_id: int) -> NDArray[np.int32]:
    size = -(-length // _BUFFER_STEP) * _BUFFER_STEP
    buffer = np.full(size, pad_id, np.int32)
    buffer[: len(prompt)] = prompt
    return buffer
