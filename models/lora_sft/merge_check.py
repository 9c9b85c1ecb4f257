"""A merged file compared with its base and the adapter apart: logits and perplexity on a text."""

from __future__ import annotations

import gc
import inspect
import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

import vkjit as vj
import vkjit.numpy as jnp
from vkjit.errors import DataError
from vkjit_models.common.adapter_gguf import load_any_adapter
from vkjit_models.llama.lora import from_peft, with_adapter
from vkjit_models.llama.model import Inputs, forward

from .base import load_base

WINDOW = 256
"""Tokens of the text that are computed at once, at most."""


@final
@dataclass(frozen=True)
class MergeCheck:
    """How far a merged model is from its base with the adapter apart, on one text.

    Args:
        tokens: Of the text that were read.
        logit_change: Largest absolute difference of a logit.
        logit_size: Root mean square of the logits, to compare with.
        apart: Mean negative log likelihood of the text, base and adapter apart.
        merged: The same of the merged file.
    """

    tokens: int
    logit_change: float
    logit_size: float
    apart: float
    merged: float

    @property
    def perplexity_apart(self) -> float:
        """``exp(apart)``."""
        return math.exp(self.apart)

    @property
    def perplexity_merged(self) -> float:
        """``exp(merged)``."""
        return math.exp(self.merged)


def default_text() -> str:
    """A text that every machine has: the source of the standard library's ``textwrap``."""
    return inspect.getsource(textwrap)


def check_merge(
    base: str, adapter: Path, merged: Path, text: str, longest: int = 2 * WINDOW
) -> MergeCheck:
    """Runs both models over the first ``longest`` tokens of ``text``, one after the other.

    Args:
        base: The GGUF file that was merged into, or "smollm2".
        adapter: The adapter.
        merged: The merged file.
        text: What is read; windows of `WINDOW` tokens at most.
        longest: Tokens that are read, at most.

    Raises:
        DataError: The text has fewer than two tokens, or a file cannot be read.
    """
    apart = list(_run(base, adapter, text, longest))
    change = size = 0.0
    losses = np.zeros(2)
    count = numbers = 0
    for before, (ids, after) in zip(apart, _run(str(merged), None, text, longest), strict=True):
        change = max(change, float(np.abs(after - before[1]).max()))
        size += float(np.sum(np.square(before[1], dtype=np.float64)))
        losses += [_loss(before[1], ids), _loss(after, ids)]
        count, numbers = count + len(ids) - 1, numbers + after.size
    return MergeCheck(
        sum(len(ids) for ids, _ in apart), change, math.sqrt(size / numbers), *(losses / count)
    )


def _run(
    model: str, adapter: Path | None, text: str, longest: int
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.float32]]]:
    """Ids and logits of each window of the text. The model is given up at the end."""
    base = load_base(model)
    spec, adapters = base.spec, {}
    if adapter is not None:
        config, tensors = load_any_adapter(adapter, base.hyper)
        adapters = from_peft(base.hyper, tensors)
        spec = with_adapter(spec, config, adapters)
    plain = [(0, len(text))]  # control tokens inside a text are text
    ids = np.asarray(base.tokenizer.encode(text, plain).ids[:longest], np.int32)
    if len(ids) < 2:
        raise DataError(
            f"merge: the text has {len(ids)} tokens, expected at least 2 to measure a perplexity; "
            "give a longer one"
        )
    window = min(WINDOW, base.hyper.context_length, len(ids))
    run: Any = vj.jit(partial(forward, spec))
    for first in range(0, len(ids) - window + 1, window):
        part = ids[first : first + window]
        yield part, np.asarray(run(base.params, adapters, Inputs(jnp.asarray(part))))
    del base, run, adapters
    gc.collect()


def _loss(logits: NDArray[np.float32], ids: NDArray[np.int32]) -> float:
    """Sum of the negative log likelihoods of the tokens after the first, in float64."""
    wide = logits[:-1].astype(np.float64)
    top = wide.max(axis=1)
    log_sum = top + np.log(np.exp(wide - top[:, None]).sum(axis=1))
    return float(np.sum(log_sum - np.take_along_axis(wide, ids[1:, None], axis=1)[:, 0]))
