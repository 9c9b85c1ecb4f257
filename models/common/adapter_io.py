"""LoRA adapters in PEFT's layout: ``adapter_model.safetensors`` and ``adapter_config.json``.

Tensors are named ``base_model.model.<module>.lora_A.weight`` (r, in) and ``lora_B.weight``
(out, r), ``<module>`` being the Hugging Face name of the linear layer. The layer's output gains
``scale * B(A x)``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from vkjit.errors import DataError

from .atomic import write_atomic

WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"

_PREFIX = "base_model.model."
_UNSUPPORTED = {
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "use_dora": (None, False),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
}  # keys that change the computation, and their values that do not


@final
@dataclass(frozen=True)
class AdapterConfig:
    """What PEFT needs to know to apply an adapter.

    Args:
        r: rank, at least 1.
        lora_alpha: numerator of the scale.
        target_modules: last parts of the adapted layers' names, such as ``q_proj``.
        use_rslora: scale by alpha/sqrt(r) in place of alpha/r.
        lora_dropout: probability of dropping an input of A in training, 0 up to 1.
        base_model_name_or_path: where the base weights came from.
    """

    r: int
    lora_alpha: float
    target_modules: tuple[str, ...]
    use_rslora: bool = False
    lora_dropout: float = 0.0
    base_model_name_or_path: str | None = None

    @property
    def scale(self) -> float:
        """Factor on B(A x)."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


def peft_name(module: str, which: Literal["A", "B"]) -> str:
    """Name under which PEFT stores A or B of ``module`` (``model.layers.0.self_attn.q_proj``)."""
    return f"{_PREFIX}{module}.lora_{which}.weight"


def save_adapter(
    directory: Path, config: AdapterConfig, tensors: Mapping[str, NDArray[np.float32]]
) -> None:
    """Write an adapter; each of its two files is replaced whole or left as it was.

    Args:
        directory: made if it does not exist.
        config: rank, scale and targets; checked against the tensors.
        tensors: float32 arrays under PEFT's names (:func:`peft_name`).

    Raises:
        DataError: names or shapes that do not make pairs of rank ``config.r``.
        OSError: the files cannot be written.
    """
    arrays = {name: np.asarray(tensors[name], np.float32, order="C") for name in sorted(tensors)}
    _check_pairs(arrays, config.r, str(directory))
    write_atomic(directory / WEIGHTS_NAME, save(arrays, metadata={"format": "pt"}))
    text = json.dumps(_to_peft(config), indent=2) + "\n"
    write_atomic(directory / CONFIG_NAME, text.encode())


def load_adapter(directory: Path) -> tuple[AdapterConfig, dict[str, NDArray[np.float32]]]:
    """Read an adapter that PEFT or :func:`save_adapter` wrote; tensors are float32.

    Raises:
        DataError: a file is missing or damaged, the config asks for what is not supported, or the
            tensors do not fit it.
    """
    config = _from_peft(_read_config(directory / CONFIG_NAME), directory / CONFIG_NAME)
    path = directory / WEIGHTS_NAME
    try:
        raw = load(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise DataError(f"adapter: cannot read {path}: {error}, expected safetensors") from error
    arrays = {name: np.asarray(raw[name], np.float32) for name in sorted(raw)}
    _check_pairs(arrays, config.r, str(path))
    return config, arrays


def _to_peft(config: AdapterConfig) -> dict[str, Any]:
    alpha = config.lora_alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": config.r,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": config.lora_dropout,
        "use_rslora": config.use_rslora,
        "target_modules": list(config.target_modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "base_model_name_or_path": config.base_model_name_or_path,
        "inference_mode": True,
    }


def _read_config(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"adapter: cannot read {path}: {error}, expected JSON") from error
    if not isinstance(data, dict) or data.get("peft_type") != "LORA":
        raise DataError(f"adapter: {path} is not a LoRA config, expected peft_type LORA")
    return data


def _from_peft(data: Mapping[str, Any], path: Path) -> AdapterConfig:
    for key, harmless in _UNSUPPORTED.items():
        if data.get(key) not in harmless:
            raise DataError(
                f"adapter: {path} has {key} = {data[key]!r}, expected {harmless[-1]!r}; this form "
                f"of LoRA is not supported"
            )
    rank, alpha, targets = (data.get(key) for key in ("r", "lora_alpha", "target_modules"))
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, (int, float)):
        raise DataError(
            f"adapter: {path} has r = {rank!r} and lora_alpha = {alpha!r}, expected a positive "
            f"integer and a number"
        )
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise DataError(
            f"adapter: {path} has target_modules = {targets!r}, expected a list of names"
        )
    return AdapterConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=tuple(targets),
        use_rslora=bool(data.get("use_rslora", False)),
        lora_dropout=float(data.get("lora_dropout", 0.0)),
        base_model_name_or_path=data.get("base_model_name_or_path"),
    )


def _check_pairs(arrays: Mapping[str, NDArray[np.float32]], rank: int, place: str) -> None:
    if not arrays:
        raise DataError(f"adapter: {place} has no tensors, expected pairs of lora_A and lora_B")
    for name, array in arrays.items():
        other = (
            name.replace(".lora_A.", ".lora_B.")
            if ".lora_A." in name
            else name.replace(".lora_B.", ".lora_A.")
        )
        if other == name or other not in arrays or not name.startswith(_PREFIX):
            raise DataError(
                f"adapter: {place} has {name!r} without its other half, expected "
                f"{_PREFIX}<module>.lora_A.weight beside ...lora_B.weight"
            )
        axis = 0 if ".lora_A." in name else 1
        if array.ndim != 2 or array.shape[axis] != rank:
            raise DataError(
                f"adapter: {name!r} of {place} has shape {array.shape}, expected rank {rank} at "
                f"axis {axis}"
            )
