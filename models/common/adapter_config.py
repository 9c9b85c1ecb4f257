"""What PEFT's ``adapter_config.json`` says: ranks, scales and placement of a LoRA adapter.

Keys and their meaning are those of PEFT 0.21 (``LoraConfig``); keys that change the computation in
ways this project does not compute are refused, others that only matter to a start are passed over.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard, TypeVar, final

from vkjit.errors import DataError

_T = TypeVar("_T")

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "lora_bias": (None, False),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (None, False),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "velora_config": (None,),
    "monteclora_config": (None,),
}  # keys that change the computation, and their values that do not

_CHANGES_BASE = re.compile(r"pissa.*|olora|corda|loftq|lora_ga")
"""Values of ``init_lora_weights`` with which the base weights were changed before training."""


@final
@dataclass(frozen=True)
class AdapterConfig:
    """What PEFT needs to know to apply an adapter.

    Args:
        r: rank, at least 1.
        lora_alpha: numerator of the scale.
        target_modules: last parts of the adapted layers' names, such as ``q_proj``, or whole
            names; one text is a regular expression over whole names.
        use_rslora: scale by alpha/sqrt(r) in place of alpha/r.
        lora_dropout: probability of dropping an input of A in training, 0 up to 1.
        base_model_name_or_path: where the base weights came from.
        use_dora: the rows of W + scale * B A are scaled to stored magnitudes.
        rank_pattern: ranks of layers whose rank is not ``r``; keys as `pattern_key` reads them.
        alpha_pattern: likewise numerators that are not ``lora_alpha``.
        layers_to_transform: indices of the blocks that are adapted; None: all.
        layers_pattern: names of the lists of blocks, such as ``layers``; empty: any.
        exclude_modules: layers left out although a target names them, written as targets are.
    """

    r: int
    lora_alpha: float
    target_modules: tuple[str, ...] | str
    use_rslora: bool = False
    lora_dropout: float = 0.0
    base_model_name_or_path: str | None = None
    use_dora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    layers_to_transform: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()
    exclude_modules: tuple[str, ...] | str = ()

    @property
    def scale(self) -> float:
        """Factor on B(A x) where no pattern says otherwise."""
        return lora_scale(self.lora_alpha, self.r, rslora=self.use_rslora)

    def rank_of(self, module: str) -> int:
        """Rank of one layer."""
        return pattern_value(self.rank_pattern, module, self.r)

    def alpha_of(self, module: str) -> float:
        """Numerator of one layer's scale."""
        return pattern_value(self.alpha_pattern, module, self.lora_alpha)

    def scale_of(self, module: str) -> float:
        """Factor on B(A x) of one layer."""
        return lora_scale(self.alpha_of(module), self.rank_of(module), rslora=self.use_rslora)

    def plain_alpha_of(self, module: str) -> float:
        """The alpha with which alpha / r is the layer's scale, for readers that know no other."""
        alpha = self.alpha_of(module)
        return alpha * math.sqrt(self.rank_of(module)) if self.use_rslora else alpha

    def scales(self, modules: Iterable[str]) -> tuple[tuple[str, float], ...]:
        """The layers among ``modules`` whose factor is not `scale`, with their factors."""
        return unusual(self.scale, {module: self.scale_of(module) for module in modules})


def lora_scale(alpha: float, rank: int, *, rslora: bool) -> float:
    """Factor on B(A x): alpha/rank, or alpha/sqrt(rank) for rank-stabilised LoRA.

    Hu et al. 2021, arXiv:2106.09685; Kalajdzievski 2023, arXiv:2312.03732.
    """
    return alpha / (math.sqrt(rank) if rslora else rank)


def unusual(usual: float, values: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """The entries of ``values`` that are not ``usual``."""
    return tuple((name, value) for name, value in values.items() if value != usual)


def pattern_key(patterns: Iterable[str], module: str) -> str | None:
    """The first of ``patterns`` that fits ``module``, None where none does.

    A pattern is a regular expression for the name's end, from its beginning or from a dot on, as
    PEFT has it: ``q_proj``, ``layers.0.self_attn.q_proj``, ``layers.[0-3]..*``, ``^model.*_proj``.
    """
    return next((p for p in patterns if re.match(rf"(.*\.)?({p})$", module)), None)


def pattern_value(patterns: Mapping[str, _T], module: str, default: _T) -> _T:
    """Value of the first of ``patterns`` that fits ``module`` (`pattern_key`), or ``default``."""
    key = pattern_key(patterns, module)
    return default if key is None else patterns[key]


def config_to_json(config: AdapterConfig) -> dict[str, Any]:
    """The config as PEFT stores it; keys at their default are left out where PEFT fills them in."""
    data: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": config.r,
        "lora_alpha": _number(config.lora_alpha),
        "lora_dropout": config.lora_dropout,
        "use_rslora": config.use_rslora,
        "target_modules": _names(config.target_modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "base_model_name_or_path": config.base_model_name_or_path,
        "inference_mode": True,
    }
    optional: dict[str, Any] = {
        "use_dora": config.use_dora,
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": {k: _number(alpha) for k, alpha in config.alpha_pattern.items()},
        "layers_pattern": list(config.layers_pattern),
        "exclude_modules": _names(config.exclude_modules),
    }
    data |= {key: value for key, value in optional.items() if value}
    if config.layers_to_transform is not None:
        data["layers_to_transform"] = list(config.layers_to_transform)
    return data


def config_from_json(data: Mapping[str, Any], place: str) -> AdapterConfig:
    """The config that PEFT stored; ``place`` names the file in messages.

    Raises:
        DataError: a value is of the wrong kind, or asks for what is not computed here.
    """
    _refuse_unsupported(data, place)
    rank, alpha = data.get("r"), data.get("lora_alpha")
    if not _is_rank(rank) or not _is_number(alpha):
        raise DataError(
            f"adapter: {place} has r = {rank!r} and lora_alpha = {alpha!r}, expected a positive "
            "integer and a number; correct the file"
        )
    layers = data.get("layers_to_transform")
    return AdapterConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=_read_names(data, "target_modules", place),
        use_rslora=bool(data.get("use_rslora", False)),
        lora_dropout=float(data.get("lora_dropout") or 0.0),
        base_model_name_or_path=data.get("base_model_name_or_path"),
        use_dora=bool(data.get("use_dora", False)),
        rank_pattern=_read_pattern(data, "rank_pattern", place),
        alpha_pattern=_read_pattern(data, "alpha_pattern", place),
        layers_to_transform=None if layers in (None, []) else _read_layers(layers, place),
        layers_pattern=_listed(_read_names(data, "layers_pattern", place)),
        exclude_modules=_read_names(data, "exclude_modules", place),
    )


def _refuse_unsupported(data: Mapping[str, Any], place: str) -> None:
    for key, harmless in _UNSUPPORTED.items():
        if data.get(key) not in harmless:
            raise DataError(
                f"adapter: {place} has {key} = {data[key]!r}, expected {harmless[-1]!r}; this form "
                "of LoRA is not supported: merge it with PEFT, or train without it"
            )
    start = data.get("init_lora_weights")
    if isinstance(start, str) and _CHANGES_BASE.fullmatch(start):
        raise DataError(
            f"adapter: {place} has init_lora_weights = {start!r}, which also changes the base "
            "weights; convert it with PEFT's path_initial_model_for_weight_conversion first"
        )


def _read_names(data: Mapping[str, Any], key: str, place: str) -> tuple[str, ...] | str:
    names = data.get(key)
    if names is None and key != "target_modules":
        return ()
    if isinstance(names, str):
        return names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(
            f"adapter: {place} has {key} = {names!r}, expected a list of names; correct the file"
        )
    return tuple(names)


def _read_pattern(data: Mapping[str, Any], key: str, place: str) -> dict[str, Any]:
    pattern = data.get(key) or {}
    ranks = key == "rank_pattern"
    good, what = (_is_rank, "positive integers") if ranks else (_is_number, "numbers")
    if not isinstance(pattern, dict) or not all(good(value) for value in pattern.values()):
        raise DataError(
            f"adapter: {place} has {key} = {pattern!r}, expected names with {what}; correct the "
            "file"
        )
    for name in pattern:
        check_pattern(name, f"adapter: {place}: {key}")
    return dict(pattern)


def check_pattern(pattern: str, where: str) -> None:
    """Refuses what is no regular expression.

    Raises:
        DataError: ``where`` begins the message.
    """
    try:
        re.compile(pattern)
    except re.error as error:
        raise DataError(
            f"{where} has the key {pattern!r}, expected a regular expression ({error}); correct it"
        ) from error


def _read_layers(layers: Any, place: str) -> tuple[int, ...]:
    listed = [layers] if isinstance(layers, int) else layers
    if not isinstance(listed, list) or not all(type(x) is int and x >= 0 for x in listed):
        raise DataError(
            f"adapter: {place} has layers_to_transform = {layers!r}, expected indices from 0 on; "
            "correct the file"
        )
    return tuple(listed)


def _listed(names: tuple[str, ...] | str) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _names(names: tuple[str, ...] | str) -> list[str] | str:
    return names if isinstance(names, str) else list(names)


def _number(value: float) -> float:
    """An integer where the value is one: PEFT's type of alpha."""
    return int(value) if float(value).is_integer() else value


def _is_rank(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 1


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
