"""Losses by category and by record with their uncertainty, and greedy replies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

import vkjit as vj
import vkjit.numpy as jnp
from vkjit_models.common.chat import encode_prompt
from vkjit_models.llama.loss import LossSpec, objective
from vkjit_models.llama.model import Adapters, Batch, LlamaSpec, Params, next_logits

from .base import BaseModel
from .data import WindowSet
from .tally import Sums

_BUFFER_STEP = 32  # a reply's buffer is a multiple of this, so few lengths are compiled
_NORMAL = 1.959963984540054  # the 97.5% point of the normal distribution


@final
@dataclass(frozen=True)
class HeldOut:
    """Mean cross-entropy over held-out targets, in nats per token.

    Args:
        loss: Over all targets.
        targets: Their number.
        by_category: Loss of each category's targets.
        targets_by_category: Their numbers.
        records: Conversations that the targets come from.
        low: Lower end of a 95% range for ``loss`` (`mean_range`); NaN below two records.
        high: Upper end.
    """

    loss: float
    targets: int
    by_category: dict[str, float]
    targets_by_category: dict[str, int] = field(default_factory=dict)
    records: int = 0
    low: float = math.nan
    high: float = math.nan

    @property
    def perplexity(self) -> float:
        """``exp(loss)``; infinity where that overflows."""
        return perplexity(self.loss)

    @property
    def perplexity_range(self) -> tuple[float, float]:
        """The 95% range of the perplexity: the exponentials of that of the loss."""
        return perplexity(self.low), perplexity(self.high)


def perplexity(loss: float) -> float:
    """``exp(loss)``; infinity where that overflows."""
    return math.exp(loss) if not loss >= 700.0 else math.inf


def mean_range(records: Sums) -> tuple[float, float]:
    """95% range of the mean loss per target, from the spread between records.

    Targets of one record are alike, so records are what is counted as drawn at random: the mean is
    the ratio of summed losses to summed targets, its variance that of a ratio estimator,
    ``n/(n-1) sum (l_i - L n_i)^2 / (sum n_i)^2`` (Cochran 1977, section 6.4), and the range is the
    mean plus and minus Student's t with n - 1 degrees of freedom times its root.

    Returns:
        Lower and upper end; both NaN below two records.
    """
    seen = records.targets > 0
    losses, targets = records.losses[seen], records.targets[seen]
    n = len(targets)
    if n < 2:
        return math.nan, math.nan
    mean = losses.sum() / targets.sum()
    squares = float(np.square(losses - mean * targets).sum())
    half = _student(n - 1) * math.sqrt(n / (n - 1) * squares) / float(targets.sum())
    return float(mean) - half, float(mean) + half


def _student(freedom: int) -> float:
    """The 97.5% point of Student's t, within 1% from 3 degrees of freedom (Hill's expansion)."""
    exact = {1: 12.7062, 2: 4.3027, 3: 3.1824}
    if freedom in exact:
        return exact[freedom]
    z, v = _NORMAL, float(freedom)
    first = (z**3 + z) / (4.0 * v)
    second = (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / (96.0 * v * v)
    third = (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / (384.0 * v**3)
    return z + first + second + third


@final
class Evaluator:
    """Compiled evaluation of one model.

    Every set of adapters of one structure is served by one program: all zeros, for the model
    without its adapter, costs no second compilation.
    """

    def __init__(self, spec: LlamaSpec, params: Params, capacity: int = 0) -> None:
        """Compiles at the first use of each shape.

        Args:
            spec: Sizes and the adapters' scale.
            params: The base weights.
            capacity: Targets that every batch has room for at least, so that one program serves
                sets of windows with fewer.
        """
        self._params, self._capacity = params, capacity
        self._losses = vj.jit(partial(losses_of, spec))
        self._next = vj.jit(partial(next_token, spec))

    def temporaries(self, adapters: Adapters, data: WindowSet, *, compiles: bool) -> int:
        """Bytes beside weights and adapters that evaluating a window takes; nothing is run.

        Args:
            adapters: Of the structure that will be evaluated.
            data: Windows like those that will be.
            compiles: Whether the program is made ready to run, too.
        """
        batch = self._roomy(data.batch([0]))
        make = self._losses.compile if compiles else self._losses.lower
        memory = make(self._params, adapters, batch).memory()
        return memory.temporaries + memory.outputs + memory.constants

    def records(self, adapters: Adapters, data: WindowSet, rows: Sequence[int]) -> Sums:
        """Sums by document of ``data`` over the windows ``rows``, one at a time."""
        count = len(data.categories)
        sums = Sums(np.zeros(count), np.zeros(count, np.int64))
        for row in rows:
            batch = self._roomy(data.batch([row]))
            losses = self._losses(self._params, adapters, batch)
            places = np.asarray(batch.rows)
            real = places >= 0
            # A target never starts a document, so the segment of its predictor is its own.
            documents = data.windows.segment_ids[row][places[real]]
            here = Sums.of(documents, np.asarray(losses)[real], count)
            sums = Sums(sums.losses + here.losses, sums.targets + here.targets)
        return sums

    def held_out(self, adapters: Adapters, data: WindowSet, rows: Sequence[int]) -> HeldOut:
        """Loss over the windows ``rows``."""
        records = self.records(adapters, data, rows)
        by_category = _by_category(records, data)
        total = int(records.targets.sum())
        low, high = mean_range(records)
        return HeldOut(
            loss=math.fsum(records.losses) / max(total, 1),
            targets=total,
            by_category={name: loss for name, (loss, _) in by_category.items()},
            targets_by_category={name: count for name, (_, count) in by_category.items()},
            records=int((records.targets > 0).sum()),
            low=low,
            high=high,
        )

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

    def _roomy(self, batch: Batch) -> Batch:
        """The batch with room for ``capacity`` targets."""
        lacks = self._capacity - len(batch.rows)
        if lacks <= 0:
            return batch

        def filled(field: Any) -> Any:
            return jnp.asarray(np.pad(np.asarray(field), (0, lacks), constant_values=-1))

        return batch._replace(rows=filled(batch.rows), categories=filled(batch.categories))


def losses_of(spec: LlamaSpec, params: Params, adapters: Adapters, batch: Batch) -> Any:
    """Plain cross-entropy of each target, computed as training computes it: f32 [K]."""
    return objective(spec, LossSpec(), params, adapters, batch).losses


def next_token(
    spec: LlamaSpec, params: Params, adapters: Adapters, tokens: Any, length: Any
) -> Any:
    """The most likely token after the first ``length`` of ``tokens`` [T]: int32 scalar."""
    return jnp.argmax(next_logits(spec, params, adapters, tokens, length))


def _by_category(records: Sums, data: WindowSet) -> Mapping[str, tuple[float, int]]:
    """Mean loss and targets of each category that has any."""
    names = data.category_names
    losses = np.bincount(data.category_ids, records.losses, minlength=len(names))
    targets = np.bincount(data.category_ids, records.targets, minlength=len(names)).astype(int)
    return {
        name: (float(loss / count), int(count))
        for name, loss, count in zip(names, losses, targets, strict=True)
        if count
    }


def _padded(prompt: NDArray[np.int32], length: int, pad_id: int) -> NDArray[np.int32]:
    size = -(-length // _BUFFER_STEP) * _BUFFER_STEP
    buffer = np.full(size, pad_id, np.int32)
    buffer[: len(prompt)] = prompt
    return buffer
