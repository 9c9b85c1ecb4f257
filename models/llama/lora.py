"""Low-rank adapters: which layers they sit on, how they start, how they are stored.

An adapted layer computes ``W x + s B (A x)`` with W frozen; s is alpha/r, or alpha/sqrt(r) for
rank-stabilised LoRA. Hu et al. 2021, arXiv:2106.09685; Kalajdzievski 2023, arXiv:2312.03732. With
DoRA the rows of ``W + s B A`` are scaled to trained magnitudes; Liu et al. 2024, arXiv:2402.09353.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

import vkjit as vj
import vkjit.numpy as jnp
from vkjit import random
from vkjit.errors import ArgumentError, ConfigError, DataError
from vkjit_models.common.adapter_config import (
    AdapterConfig,
    lora_scale,
    pattern_key,
    pattern_value,
    unusual,
)
from vkjit_models.common.adapter_io import peft_name
from vkjit_models.common.gguf import LlamaHyper

from .config import linear_shapes, module_shapes
from .model import Adapters, LlamaSpec, LoraPair, Params, row_squares
from .placement import (
    ALL_LINEAR,
    block_of_layer,
    check_expression,
    check_patterns,
    check_used,
    first_match,
    matches,
    parse_layers,
    part_of_layer,
)

__all__ = [
    "ALL_LINEAR",
    "Adapted",
    "LoraPlan",
    "LoraSpec",
    "Skipped",
    "decays",
    "from_peft",
    "init_adapters",
    "matches",
    "plan_adapters",
    "switched_off",
    "to_peft",
    "with_adapter",
    "with_row_squares",
]


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
        dora: Train the norms of the adapted rows beside A and B.
        exclude: Patterns for layers that get no adapter although a target chooses them.
        layers: Blocks that get adapters, such as ``0-7,28-``; None: all.
        attention: Whether attention's layers get adapters; a matter of placement alone.
        mlp: Likewise the MLP's.
        rank_pattern: Ranks of layers whose rank is not ``rank``; keys as PEFT reads them, see
            `vkjit_models.common.adapter_config.pattern_key`.
        alpha_pattern: Likewise numerators that are not ``alpha``.
        frozen: Patterns for layers whose adapter acts and is not trained.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = (ALL_LINEAR,)
    rslora: bool = False
    dropout: float = 0.0
    dora: bool = False
    exclude: tuple[str, ...] = ()
    layers: str | None = None
    attention: bool = True
    mlp: bool = True
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        """Factor on B(A x) where no pattern says otherwise."""
        return lora_scale(self.alpha, self.rank, rslora=self.rslora)


@final
@dataclass(frozen=True)
class Adapted:
    """A layer that gets an adapter.

    Args:
        module: Its name.
        shape: Of its weight, (out, in).
        pattern: The target that chose it.
        rank: Of its adapter.
        alpha: Numerator of its scale.
        scale: Factor on its B(A x).
        trained: False where the adapter acts and is not trained.
    """

    module: str
    shape: tuple[int, int]
    pattern: str
    rank: int
    alpha: float
    scale: float
    trained: bool


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
        """Trained numbers in all adapters together."""
        return sum(
            row.rank * sum(row.shape) + self.spec.dora * row.shape[0]
            for row in self.adapted
            if row.trained
        )

    def llama_spec(self, hyper: LlamaHyper, *, recompute: bool = False) -> LlamaSpec:
        """The model's constants with these adapters."""
        spec = self.spec
        return LlamaSpec(
            hyper,
            spec.scale,
            spec.dropout,
            recompute,
            lora_scales=unusual(spec.scale, {row.module: row.scale for row in self.adapted}),
            lora_frozen=tuple(row.module for row in self.adapted if not row.trained),
        )

    def frozen(self, adapters: Adapters) -> dict[str, LoraPair]:
        """A bool for each array of ``adapters``: True where it is not trained."""
        still = {row.module for row in self.adapted if not row.trained}
        return {
            name: _flags(pair, product=name in still, magnitude=name in still)
            for name, pair in adapters.items()
        }

    def peft_config(self, base: str | None) -> AdapterConfig:
        """The adapter's description in PEFT's terms; ``base`` names the base model."""
        spec, names = self.spec, [row.module for row in self.adapted]
        every = {block_of_layer(row.module) for row in self.skipped if _in_block(row)}
        every |= {block_of_layer(name) for name in names}
        targets, blocks = _compact(names)
        return AdapterConfig(
            r=spec.rank,
            lora_alpha=spec.alpha,
            target_modules=targets,
            use_rslora=spec.rslora,
            lora_dropout=spec.dropout,
            base_model_name_or_path=base,
            use_dora=spec.dora,
            rank_pattern=spec.rank_pattern,
            alpha_pattern=spec.alpha_pattern,
            layers_to_transform=None if blocks is None or set(blocks) == every else blocks,
        )


def plan_adapters(hyper: LlamaHyper, spec: LoraSpec) -> LoraPlan:
    """Finds the layers that ``spec`` adapts and says of every other one why it does not.

    Raises:
        ConfigError: Rank, dropout, a range or a pattern is invalid, or a pattern chooses no layer.
    """
    _check_spec(spec)
    linears = linear_shapes(hyper)
    blocks = None if spec.layers is None else parse_layers(spec.layers, hyper.layers)
    names = list(linears)
    for patterns, what in ((spec.targets, "target"), (spec.exclude, "exclude")):
        used = {p for p in patterns if any(matches(p, name) for name in names)}
        check_used(patterns, used, names, what)
    adapted, reasons = [], {}
    for name, shape in linears.items():
        reason = _left_out(spec, blocks, name)
        if reason is None:
            adapted.append(_adapted(spec, name, shape))
        else:
            reasons[name] = reason
    if not adapted:
        raise ConfigError(
            "lora: targets, exclude, layers, attention and mlp leave no layer, expected at least "
            "one; widen one of them"
        )
    _check_choices(spec, [row.module for row in adapted])
    chosen = {row.module for row in adapted}
    skipped = tuple(
        Skipped(name, shape, reasons.get(name) or _skip_reason(name, shape))
        for name, shape in module_shapes(hyper).items()
        if name not in chosen
    )
    return LoraPlan(spec, tuple(adapted), skipped)


def with_adapter(spec: LlamaSpec, config: AdapterConfig, adapters: Adapters) -> LlamaSpec:
    """The constants of a model with the adapters of a file and its config."""
    return replace(spec, lora_scale=config.scale, lora_scales=config.scales(adapters))


def init_adapters(plan: LoraPlan, key: Any, params: Params | None = None) -> dict[str, LoraPair]:
    """Starting values, as PEFT's: A uniform in ±1/sqrt(in), B zero, so the model is unchanged.

    The bound is Kaiming's for slope sqrt(5). Each layer's A depends on ``key`` and the layer's
    place in the plan. With DoRA the magnitudes start as the norms of the rows of W.

    Args:
        plan: The layers and their ranks.
        key: A random key.
        params: The base weights; only DoRA reads them.

    Raises:
        ArgumentError: DoRA without ``params``.
    """
    if plan.spec.dora and params is None:
        raise ArgumentError(
            "init_adapters: no params were given, DoRA starts from the norms of their rows; pass "
            "the base weights"
        )
    pairs = {}
    for i, row in enumerate(plan.adapted):
        rows, columns = row.shape
        bound = 1.0 / math.sqrt(columns)
        a = random.uniform(
            random.fold_in(key, i), (row.rank, columns), jnp.float32, minval=-bound, maxval=bound
        )
        magnitude = _row_norms(params, row.module) if plan.spec.dora and params else None
        pairs[row.module] = LoraPair(a, jnp.zeros((rows, row.rank), jnp.float32), magnitude)
    return pairs


def switched_off(adapters: Adapters, params: Params) -> dict[str, LoraPair]:
    """Adapters of the same structure that leave the model as it is.

    A and B are zero. Magnitudes are the norms of the base's rows, which the zero of the others
    would scale to nothing.
    """
    return {
        name: LoraPair(
            jnp.zeros_like(pair.a),
            jnp.zeros_like(pair.b),
            None if pair.magnitude is None else _row_norms(params, name),
        )
        for name, pair in adapters.items()
    }


def decays(adapters: Adapters) -> dict[str, LoraPair]:
    """A bool for each array: whether decay toward zero is meant for it.

    It is for A and B, whose zero is the base model, and not for DoRA's magnitudes, whose zero is a
    layer without output.
    """
    return {name: _flags(pair, product=True, magnitude=False) for name, pair in adapters.items()}


def with_row_squares(params: Params, adapters: Adapters) -> dict[str, Any]:
    """``params`` and, for every layer with a magnitude, the sums of squares of its rows.

    They do not change while W is frozen: with them a DoRA step does not compute them again.
    """
    squares = {
        f"{name}.row_squares": _squares(params[f"{name}.weight"])
        for name, pair in adapters.items()
        if pair.magnitude is not None
    }
    return {**params, **squares}


def to_peft(adapters: Adapters) -> dict[str, NDArray[np.float32]]:
    """Adapter arrays under PEFT's names."""
    tensors: dict[str, NDArray[np.float32]] = {}
    for module, pair in adapters.items():
        tensors[peft_name(module, "A")] = np.asarray(pair.a, np.float32)
        tensors[peft_name(module, "B")] = np.asarray(pair.b, np.float32)
        if pair.magnitude is not None:
            tensors[peft_name(module, "magnitude")] = np.asarray(pair.magnitude, np.float32)
    return tensors


def from_peft(hyper: LlamaHyper, tensors: Mapping[str, NDArray[np.float32]]) -> dict[str, LoraPair]:
    """Adapters from arrays under PEFT's names, in the model's order.

    Raises:
        DataError: A name is no layer of the model, a pair is not whole, or a shape does not fit.
    """
    return pairs_from_peft(linear_shapes(hyper), tensors)


def pairs_from_peft(
    shapes: Mapping[str, tuple[int, int]], tensors: Mapping[str, NDArray[np.float32]]
) -> dict[str, LoraPair]:
    """As `from_peft`, for any model whose linear layers have the given shapes (out, in).

    Raises:
        DataError: As there.
    """
    pairs: dict[str, LoraPair] = {}
    left = dict(tensors)
    for module, (rows, columns) in shapes.items():
        a, b = left.pop(peft_name(module, "A"), None), left.pop(peft_name(module, "B"), None)
        magnitude = left.pop(peft_name(module, "magnitude"), None)
        if a is None and b is None and magnitude is None:
            continue
        if a is None or b is None or (b.shape[0], a.shape[1]) != (rows, columns):
            found = [None if x is None else x.shape for x in (a, b)]
            raise DataError(
                f"adapter: {module} has A and B of shapes {found}, expected (r, {columns}) and "
                f"({rows}, r); load an adapter of this model"
            )
        scaled = None if magnitude is None else jnp.asarray(magnitude)
        pairs[module] = LoraPair(jnp.asarray(a), jnp.asarray(b), scaled)
    if left:
        raise DataError(
            f"adapter: {len(left)} tensors belong to no layer of the model ({min(left)!r}), "
            "expected linear layers of its blocks alone; load an adapter of this model"
        )
    return pairs


def _adapted(spec: LoraSpec, name: str, shape: tuple[int, int]) -> Adapted:
    rank = pattern_value(spec.rank_pattern, name, spec.rank)
    alpha = pattern_value(spec.alpha_pattern, name, spec.alpha)
    return Adapted(
        name,
        shape,
        first_match(spec.targets, name) or "",
        rank,
        alpha,
        lora_scale(alpha, rank, rslora=spec.rslora),
        first_match(spec.frozen, name) is None,
    )


def _left_out(spec: LoraSpec, blocks: frozenset[int] | None, name: str) -> str | None:
    """Why a linear layer gets no adapter; None where it gets one."""
    if first_match(spec.targets, name) is None:
        return "no target pattern matches"
    excluded = first_match(spec.exclude, name)
    if excluded is not None:
        return f"excluded by {excluded!r}"
    if blocks is not None and block_of_layer(name) not in blocks:
        return f"block is not in layers = {spec.layers!r}"
    placed = spec.attention if part_of_layer(name) == "self_attn" else spec.mlp
    if not placed:
        return f"{'attention' if part_of_layer(name) == 'self_attn' else 'mlp'} = false"
    return None


def _check_spec(spec: LoraSpec) -> None:
    if spec.rank < 1 or not 0.0 <= spec.dropout < 1.0 or not spec.targets:
        raise ConfigError(
            f"lora: rank={spec.rank}, dropout={spec.dropout}, targets={list(spec.targets)} were "
            "given, expected rank >= 1, 0 <= dropout < 1 and at least one target; correct them"
        )
    for patterns, what in (
        (spec.targets, "target"), (spec.exclude, "exclude"), (spec.frozen, "frozen"),
    ):  # fmt: skip
        check_patterns(patterns, what)
    for values, what in (
        (spec.rank_pattern, "rank_pattern"),
        (spec.alpha_pattern, "alpha_pattern"),
    ):
        for pattern, value in values.items():
            check_expression(pattern, pattern, what)
            if value <= 0:
                raise ConfigError(
                    f"lora: {what} gives {pattern!r} the value {value}, expected more than 0; "
                    "correct it"
                )


def _check_choices(spec: LoraSpec, names: list[str]) -> None:
    """Refuses patterns that no adapted layer follows: a slip of the pen would go unseen."""
    frozen = {first_match(spec.frozen, name) for name in names}
    check_used(spec.frozen, {p for p in frozen if p}, names, "frozen")
    if None not in frozen:
        raise ConfigError(
            f"lora: frozen = {list(spec.frozen)} chooses every adapted layer, expected at least "
            "one to train; narrow it"
        )
    for patterns, what in (
        (spec.rank_pattern, "rank_pattern"), (spec.alpha_pattern, "alpha_pattern"),
    ):  # fmt: skip
        used = {pattern_key(patterns, name) for name in names}
        check_used(patterns, {p for p in used if p}, names, what)


def _compact(names: list[str]) -> tuple[tuple[str, ...], tuple[int, ...] | None]:
    """Kinds and blocks whose product ``names`` is; where it is none, whole names and no blocks."""
    kinds = dict.fromkeys(name.rpartition(".")[2] for name in names)
    per_kind = Counter(name.rpartition(".")[2] for name in names)
    blocks = sorted({block_of_layer(name) for name in names})
    if all(count == len(blocks) for count in per_kind.values()):
        return tuple(kinds), tuple(blocks)
    return tuple(names), None


def _in_block(row: Skipped) -> bool:
    return len(row.shape) == 2 and row.module.startswith("model.layers.")


def _flags(pair: LoraPair, *, product: bool, magnitude: bool) -> LoraPair:
    return LoraPair(product, product, None if pair.magnitude is None else magnitude)


_squares = vj.jit(row_squares)


def _row_norms(params: Params, module: str) -> Any:
    return jnp.sqrt(_squares(params[f"{module}.weight"]))


def _skip_reason(name: str, shape: tuple[int, ...]) -> str:
    if len(shape) == 1:
        return "a norm's vector"
    return "the output head" if name == "lm_head" else "the embedding"
