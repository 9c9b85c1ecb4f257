"""Low-rank adapters: which layers they sit on, how they start, how they are stored.

An adapted layer computes ``W x + s B (A x)`` with W frozen; s is alpha/r, or alpha/sqrt(r) for
rank-stabilised LoRA. Hu et al. 2021, arXiv:2106.09685; Kalajdzievski 2023, arXiv:2312.03732.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

import vkjit.numpy as jnp
from vkjit import random
from vkjit.errors import ConfigError, DataError
from vkjit_models.common.adapter_io import AdapterConfig, peft_name
from vkjit_models.common.gguf import LlamaHyper

from .config import linear_shapes, module_shapes
from .model import LoraPair

ALL_LINEAR = "all-linear"
"""The pattern for every linear layer of the blocks, as PEFT names it."""


@final
@dataclass(frozen=True)
class LoraSpec:
    """Rank, scale and placement of the adapters.

    Args:
        rank: Columns of B and rows of A, at least 1.
        alpha: Numerator of the scale.
        targets: Patterns for the layers, see `matches`.
        rslora: Scale by alpha/sqrt(rank) in place of alpha/rank.
        dropout: Share of A's inputs zeroed in training, from 0 up to but not 1.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = (ALL_LINEAR,)
    rslora: bool = False
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        """Factor on B(A x)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@final
@dataclass(frozen=True)
class Adapted:
    """A layer that gets an adapter: its name, shape (out, in) and the pattern that chose it."""

    module: str
    shape: tuple[int, int]
    pattern: str


@final
@dataclass(frozen=True)
class Skipped:
    """A module that stays as it is, with its shape and the reason."""

    module: str
    shape: tuple[int, ...]
    reason: str


@final
@dataclass(frozen=True)
class LoraPlan:
    """What a `LoraSpec` means for one model."""

    spec: LoraSpec
    adapted: tuple[Adapted, ...]
    skipped: tuple[Skipped, ...]

    @property
    def parameters(self) -> int:
        """Numbers in all A and B together."""
        return sum(self.spec.rank * sum(row.shape) for row in self.adapted)

    def peft_config(self, base: str | None) -> AdapterConfig:
        """The adapter's description in PEFT's terms; ``base`` names the base model."""
        names = dict.fromkeys(row.module.rpartition(".")[2] for row in self.adapted)
        return AdapterConfig(
            r=self.spec.rank,
            lora_alpha=self.spec.alpha,
            target_modules=tuple(names),
            use_rslora=self.spec.rslora,
            lora_dropout=self.spec.dropout,
            base_model_name_or_path=base,
        )


def matches(pattern: str, module: str) -> bool:
    """True if ``pattern`` chooses ``module``.

    ``all-linear`` chooses every linear layer; ``re:`` and a regular expression those whose whole
    name it matches; a text with ``*``, ``?`` or ``[`` is a glob over the whole name; anything else
    is a name or its last parts, as in PEFT (``q_proj``, ``mlp.up_proj``).
    """
    if pattern == ALL_LINEAR:
        return True
    if pattern.startswith("re:"):
        return re.fullmatch(pattern.removeprefix("re:"), module) is not None
    if any(sign in pattern for sign in "*?["):
        return fnmatch.fnmatchcase(module, pattern)
    return module == pattern or module.endswith("." + pattern)


def plan_adapters(hyper: LlamaHyper, spec: LoraSpec) -> LoraPlan:
    """Finds the layers that ``spec`` adapts and says of every other one why it does not.

    Raises:
        ConfigError: Rank, dropout or a pattern is invalid, or a pattern chooses no layer.
    """
    _check_spec(spec)
    linears = linear_shapes(hyper)
    adapted: dict[str, Adapted] = {}
    for pattern in spec.targets:
        chosen = [name for name in linears if matches(pattern, name)]
        if not chosen:
            raise ConfigError(_no_match(pattern, list(linears)))
        for name in chosen:
            adapted.setdefault(name, Adapted(name, linears[name], pattern))
    ordered = tuple(adapted[name] for name in linears if name in adapted)
    skipped = tuple(
        Skipped(name, shape, _skip_reason(name, shape))
        for name, shape in module_shapes(hyper).items()
        if name not in adapted
    )
    return LoraPlan(spec, ordered, skipped)


def init_adapters(plan: LoraPlan, key: Any) -> dict[str, LoraPair]:
    """Starting values, as PEFT's: A uniform in ±1/sqrt(in), B zero, so the model is unchanged.

    The bound is Kaiming's for slope sqrt(5). Each layer's A depends on ``key`` and the layer's
    place in the plan.
    """
    rank, pairs = plan.spec.rank, {}
    for i, row in enumerate(plan.adapted):
        rows, columns = row.shape
        bound = 1.0 / math.sqrt(columns)
        a = random.uniform(
            random.fold_in(key, i), (rank, columns), jnp.float32, minval=-bound, maxval=bound
        )
        pairs[row.module] = LoraPair(a, jnp.zeros((rows, rank), jnp.float32))
    return pairs


def to_peft(adapters: Mapping[str, LoraPair]) -> dict[str, NDArray[np.float32]]:
    """Adapter arrays under PEFT's names."""
    tensors: dict[str, NDArray[np.float32]] = {}
    for module, pair in adapters.items():
        tensors[peft_name(module, "A")] = np.asarray(pair.a, np.float32)
        tensors[peft_name(module, "B")] = np.asarray(pair.b, np.float32)
    return tensors


def from_peft(hyper: LlamaHyper, tensors: Mapping[str, NDArray[np.float32]]) -> dict[str, LoraPair]:
    """Adapters from arrays under PEFT's names, in the model's order.

    Raises:
        DataError: A name is no layer of the model, a pair is not whole, or a shape does not fit.
    """
    shapes, pairs, left = linear_shapes(hyper), {}, dict(tensors)
    for module, (rows, columns) in shapes.items():
        a, b = (left.pop(peft_name(module, which), None) for which in ("A", "B"))
        if a is None and b is None:
            continue
        if a is None or b is None or (b.shape[0], a.shape[1]) != (rows, columns):
            found = [None if x is None else x.shape for x in (a, b)]
            raise DataError(
                f"adapter: {module} has A and B of shapes {found}, expected (r, {columns}) and "
                f"({rows}, r); load an adapter of this model"
            )
        pairs[module] = LoraPair(jnp.asarray(a), jnp.asarray(b))
    if left:
        raise DataError(
            f"adapter: {len(left)} tensors belong to no layer of the model ({min(left)!r}), "
            "expected none; load an adapter of this model"
        )
    return pairs


def _check_spec(spec: LoraSpec) -> None:
    if spec.rank < 1 or not 0.0 <= spec.dropout < 1.0 or not spec.targets:
        raise ConfigError(
            f"lora: rank={spec.rank}, dropout={spec.dropout}, targets={list(spec.targets)} were "
            "given, expected rank >= 1, 0 <= dropout < 1 and at least one target; correct them"
        )
    for pattern in spec.targets:
        if pattern.startswith("re:"):
            try:
                re.compile(pattern.removeprefix("re:"))
            except re.error as error:
                raise ConfigError(
                    f"lora: target {pattern!r} is no regular expression ({error}); correct it"
                ) from error


def _no_match(pattern: str, modules: Sequence[str]) -> str:
    last = list(dict.fromkeys(name.rpartition(".")[2] for name in modules))
    near = difflib.get_close_matches(pattern, [*last, *modules, ALL_LINEAR], n=1, cutoff=0.3)
    advice = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(last)}"
    return f"lora: target {pattern!r} matches no linear layer, expected at least one; {advice}"


def _skip_reason(name: str, shape: tuple[int, ...]) -> str:
    if len(shape) == 1:
        return "a norm's vector"
    if name.startswith("model.layers."):
        return "no target pattern matches"
    if name == "lm_head":
        return "the output head"
    return "the embedding"
