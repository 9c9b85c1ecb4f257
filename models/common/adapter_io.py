"""LoRA adapters in PEFT's layout: ``adapter_model.safetensors`` and ``adapter_config.json``.

Tensors are named ``base_model.model.<module>.lora_A.weight`` (r, in) and ``lora_B.weight``
(out, r), ``<module>`` being the Hugging Face name of the linear layer. The layer's output gains
``scale * B(A x)``. DoRA adds ``lora_magnitude_vector`` (out): the norms of the adapted rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from vkjit.errors import DataError

from .adapter_config import AdapterConfig, config_from_json, config_to_json
from .atomic import write_atomic

__all__ = [
    "CONFIG_NAME",
    "WEIGHTS_NAME",
    "AdapterConfig",
    "Part",
    "load_adapter",
    "peft_name",
    "save_adapter",
    "split_name",
]

WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"

Part = Literal["A", "B", "magnitude"]
"""What an adapted layer stores: A, B, and for DoRA the magnitudes."""

_PREFIX = "base_model.model."
_PARTS: dict[Part, str] = {
    "A": "lora_A.weight", "B": "lora_B.weight", "magnitude": "lora_magnitude_vector",
}  # fmt: skip
_NAME = re.compile(
    r"base_model\.model\.(?P<module>.+)\.(?:lora_(?P<half>[AB])\.weight"
    r"|(?P<magnitude>lora_magnitude_vector)(?:\.weight)?)"
)
_FOREIGN = (
    (".lora_embedding_", "an adapter of an embedding, which is not supported"),
    (".modules_to_save", "a layer trained as a whole (modules_to_save), which is not supported"),
    (".lora_bias", "a bias of an adapter, which is not supported"),
    ("original_module", "a layer trained as a whole, which is not supported"),
)


def peft_name(module: str, which: Part) -> str:
    """Name of A, B or the magnitudes of ``module`` (``model.layers.0.self_attn.q_proj``)."""
    return f"{_PREFIX}{module}.{_PARTS[which]}"


@final
class TensorName(NamedTuple):
    """A tensor's layer and what it is of the layer."""

    module: str
    part: Part


def split_name(name: str, place: str) -> TensorName:
    """Takes a name of `peft_name`'s form apart; ``place`` names the file in messages.

    Raises:
        DataError: The name is not of that form; the message says what it is, where that is known.
    """
    found = _NAME.fullmatch(name)
    if found is not None:
        part: Part = "magnitude" if found["half"] is None else "A" if found["half"] == "A" else "B"
        return TensorName(found["module"], part)
    known = next((what for sign, what in _FOREIGN if sign in name), None)
    raise DataError(
        f"adapter: {place} has {name!r}{f': {known}' if known else ''}, expected "
        f"{_PREFIX}<module>.lora_A.weight beside ...lora_B.weight; save it with PEFT's "
        "save_pretrained, with linear layers alone as targets"
    )


def save_adapter(
    directory: Path, config: AdapterConfig, tensors: Mapping[str, NDArray[np.float32]]
) -> None:
    """Write an adapter; each of its two files is replaced whole or left as it was.

    Args:
        directory: made if it does not exist.
        config: rank, scale and targets; checked against the tensors.
        tensors: float32 arrays under PEFT's names (:func:`peft_name`).

    Raises:
        DataError: names or shapes that do not make pairs of the ranks in ``config``.
        OSError: the files cannot be written.
    """
    arrays = {name: np.asarray(tensors[name], np.float32, order="C") for name in sorted(tensors)}
    _check_layers(arrays, config, str(directory))
    write_atomic(directory / WEIGHTS_NAME, save(arrays, metadata={"format": "pt"}))
    text = json.dumps(config_to_json(config), indent=2) + "\n"
    write_atomic(directory / CONFIG_NAME, text.encode())


def load_adapter(directory: Path) -> tuple[AdapterConfig, dict[str, NDArray[np.float32]]]:
    """Read an adapter that PEFT or :func:`save_adapter` wrote; tensors are float32.

    Raises:
        DataError: a file is missing or damaged, the config asks for what is not supported, or the
            tensors do not fit it.
    """
    place = directory / CONFIG_NAME
    config = config_from_json(_read_config(place), str(place))
    path = directory / WEIGHTS_NAME
    arrays: dict[str, NDArray[np.float32]] = {}
    for name, array in sorted(_read_tensors(path).items()):
        module, part = split_name(name, str(path))
        arrays[peft_name(module, part)] = np.asarray(array, np.float32)
    _check_layers(arrays, config, str(path))
    return config, arrays


def _read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with safe_open(path, framework="np") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"adapter: cannot read {path}: {error}, expected safetensors; check the path"
        ) from error


def _read_config(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(
            f"adapter: cannot read {path}: {error}, expected JSON; check the path"
        ) from error
    if not isinstance(data, dict) or data.get("peft_type") != "LORA":
        raise DataError(
            f"adapter: {path} is not a LoRA config, expected peft_type LORA; choose another adapter"
        )
    return data


def _check_layers(arrays: Mapping[str, NDArray[Any]], config: AdapterConfig, place: str) -> None:
    if not arrays:
        raise DataError(
            f"adapter: {place} has no tensors, expected pairs of lora_A and lora_B; choose another "
            "adapter"
        )
    wanted: set[Part] = {"A", "B", "magnitude"} if config.use_dora else {"A", "B"}
    layers: dict[str, dict[Part, NDArray[Any]]] = {}
    for name, array in arrays.items():
        module, part = split_name(name, place)
        layers.setdefault(module, {})[part] = array
    for module, parts in layers.items():
        if parts.keys() != wanted:
            raise DataError(
                f"adapter: {place} has {', '.join(sorted(parts))} of {module}, expected "
                f"{', '.join(sorted(wanted))} with use_dora = {config.use_dora}; the file and its "
                "config do not belong together"
            )
        _check_shapes(module, parts, config.rank_of(module), place)


def _check_shapes(module: str, parts: Mapping[Part, NDArray[Any]], rank: int, place: str) -> None:
    a, b, magnitude = parts["A"], parts["B"], parts.get("magnitude")
    halves: tuple[tuple[NDArray[Any], int, Part], ...] = ((a, 0, "A"), (b, 1, "B"))
    for array, axis, which in halves:
        if array.ndim != 2 or array.shape[axis] != rank:
            raise DataError(
                f"adapter: {peft_name(module, which)!r} of {place} has shape {array.shape}, "
                f"expected rank {rank} at axis {axis}; the file and its config do not belong "
                "together"
            )
    if magnitude is not None and magnitude.shape != b.shape[:1]:
        raise DataError(
            f"adapter: {peft_name(module, 'magnitude')!r} of {place} has shape "
            f"{magnitude.shape}, expected {b.shape[:1]}; the file is damaged"
        )
