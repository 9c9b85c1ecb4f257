"""LoRA adapters as GGUF files, which llama.cpp applies to a GGUF model (``--lora``).

Keys are ``general.type`` = adapter, ``adapter.type`` = lora, ``adapter.lora.alpha`` and
``general.architecture``; tensors ``blk.N.attn_q.weight.lora_a`` (r, in) and ``lora_b`` (out, r).
llama.cpp (``llama-adapter.h``) scales every layer by alpha / r, r being that layer's own, and reads
alpha = 0 as the scale 1. The rows of B of q and k are in the order of the base's rows in GGUF.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast, final

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

from vkjit.errors import DataError

from .adapter_config import AdapterConfig, unusual
from .adapter_io import WEIGHTS_NAME, load_adapter, peft_name, split_name
from .atomic import replacing
from .gguf import (
    LAYER_NAMES,
    SUPPORTED_ARCHITECTURES,
    GgufFile,
    LlamaHyper,
    open_gguf,
    permute_rows,
    unpermute_rows,
)

Tensors = Mapping[str, NDArray[np.float32]]
"""Arrays under PEFT's names (:func:`~vkjit_models.common.adapter_io.peft_name`)."""

_TO_GGUF = {theirs: ours for ours, theirs in LAYER_NAMES.items()}
_HALVES = {"lora_a": "A", "lora_b": "B"}


@final
class StoredScale(NamedTuple):
    """How one file-wide alpha gives every layer its scale.

    Args:
        alpha: What the file holds.
        factors: Layers whose B is multiplied, because alpha / r is not their scale.
    """

    alpha: float
    factors: dict[str, float]


def stored_scale(config: AdapterConfig, modules: Iterable[str]) -> StoredScale:
    """The alpha that suits most of ``modules``, and factors for the others.

    With one rank and one alpha it is ``alpha`` itself, or ``alpha * sqrt(r)`` for rank-stabilised
    LoRA, and there are no factors.
    """
    wanted = {name: config.plain_alpha_of(name) for name in modules}
    usual = Counter(alpha for alpha in wanted.values() if alpha).most_common(1)
    alpha = usual[0][0] if usual else 1.0  # 0 would be read as the scale 1
    return StoredScale(alpha, {name: value / alpha for name, value in unusual(alpha, wanted)})


def save_gguf_adapter(
    path: Path, hyper: LlamaHyper, config: AdapterConfig, tensors: Tensors
) -> tuple[str, ...]:
    """Write an adapter of a llama as GGUF; the file is replaced whole or left as it was.

    Args:
        path: The file.
        hyper: Sizes of the base model, whose heads decide the order of rows.
        config: Scales.
        tensors: float32 arrays under PEFT's names.

    Returns:
        Notes on what the file says otherwise than the adapter did.

    Raises:
        DataError: DoRA, which the format cannot hold, or a layer that it has no name for.
        OSError: The file cannot be written.
    """
    if config.use_dora:
        raise DataError(
            "export: the adapter has DoRA's magnitudes and a GGUF adapter holds A and B alone; "
            "merge it into the base model in place (vkjit merge), or export it to PEFT"
        )
    layers = {split_name(name, str(path)).module for name in tensors}
    ordered = sorted(layers, key=_order)
    alpha, factors = stored_scale(config, ordered)
    with replacing(path) as partial:
        writer = GGUFWriter(partial, SUPPORTED_ARCHITECTURES[0])
        writer.add_string("general.type", "adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", alpha)
        if config.base_model_name_or_path:
            writer.add_string("general.base_model.0.name", config.base_model_name_or_path)
            writer.add_uint32("general.base_model.count", 1)
        for module in ordered:
            a, b = (np.asarray(tensors[peft_name(module, which)]) for which in ("A", "B"))
            name = f"{gguf_name(module)}.weight"
            writer.add_tensor(f"{name}.lora_a", np.ascontiguousarray(a, np.float32))
            stored = np.float32(factors.get(module, 1.0)) * b
            writer.add_tensor(f"{name}.lora_b", _rows_to_gguf(module, stored, hyper))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return tuple(_notes(config, alpha, factors))


def load_gguf_adapter(
    path: Path, hyper: LlamaHyper
) -> tuple[AdapterConfig, dict[str, NDArray[np.float32]]]:
    """Read a GGUF adapter of a llama, into PEFT's names and the row order of Hugging Face.

    The config's ``r`` is the most frequent rank; layers of another rank are in its patterns.

    Raises:
        DataError: The file is no such adapter, or does not fit the model ``hyper``.
    """
    file = open_gguf(path)
    alpha = _read_alpha(file)
    tensors: dict[str, NDArray[np.float32]] = {}
    ranks: dict[str, int] = {}
    for name in file.tensors:
        module, half = _module_of(file, name)
        array = file.load_tensor(name)
        if half == "A":
            ranks[module] = array.shape[0]
        else:
            array = _rows_from_gguf(module, array, hyper, path)
        tensors[peft_name(module, "A" if half == "A" else "B")] = array
    for module in {split_name(name, str(path)).module for name in tensors}:
        _check_pair(module, tensors, path)
    usual = Counter(ranks.values()).most_common(1)[0][0]
    others = {module: rank for module, rank in ranks.items() if rank != usual}
    config = AdapterConfig(
        r=usual,
        lora_alpha=alpha or usual,
        target_modules=tuple(dict.fromkeys(name.rpartition(".")[2] for name in ranks)),
        rank_pattern=others,
        alpha_pattern={} if alpha else others,
        base_model_name_or_path=cast("Any", file.metadata.get("general.base_model.0.name")),
    )
    return config, tensors


def load_any_adapter(
    path: Path, hyper: LlamaHyper
) -> tuple[AdapterConfig, dict[str, NDArray[np.float32]]]:
    """Read an adapter in either format: a folder in PEFT's layout, or a GGUF file.

    Raises:
        DataError: There is no adapter, it is damaged, or it does not fit the model ``hyper``.
    """
    if path.is_dir():
        return load_adapter(path)
    if path.name == WEIGHTS_NAME:
        return load_adapter(path.parent)
    if not path.exists():
        raise DataError(
            f"adapter: {path} does not exist, expected a folder in PEFT's layout or a GGUF file; "
            "check the path"
        )
    return load_gguf_adapter(path, hyper)


def gguf_heads(module: str, hyper: LlamaHyper) -> int:
    """Heads whose rows GGUF orders otherwise: of q and k; 0 for all other layers."""
    last = module.rpartition(".")[2]
    return {"q_proj": hyper.heads, "k_proj": hyper.kv_heads}.get(last, 0)


def _rows_to_gguf(module: str, b: NDArray[np.float32], hyper: LlamaHyper) -> NDArray[np.float32]:
    heads = gguf_heads(module, hyper)
    return permute_rows(b, heads) if heads else np.ascontiguousarray(b)


def _rows_from_gguf(
    module: str, b: NDArray[np.float32], hyper: LlamaHyper, path: Path
) -> NDArray[np.float32]:
    heads = gguf_heads(module, hyper)
    if not heads:
        return b
    if b.shape[0] != heads * hyper.head_dim:
        raise DataError(
            f"adapter: {path} has B of shape {b.shape} for {module}, expected "
            f"({heads * hyper.head_dim}, r); load an adapter of this model"
        )
    return unpermute_rows(b, heads)


def gguf_name(module: str) -> str:
    """``model.layers.3.mlp.up_proj`` as ``blk.3.ffn_up``."""
    block, kind = _split(module)
    if kind not in _TO_GGUF:
        raise DataError(
            f"export: GGUF has no name for {module!r}, expected a linear layer of a llama's "
            "blocks; export the adapter to PEFT"
        )
    return f"blk.{block}.{_TO_GGUF[kind]}"


def _split(module: str) -> tuple[str, str]:
    """Index of the block and the name inside it."""
    parts = module.removeprefix("model.layers.").split(".", 1)
    return parts[0], parts[1] if len(parts) == 2 else ""


def _order(module: str) -> tuple[int, str]:
    block, kind = _split(module)
    return int(block) if block.isdigit() else -1, kind


def _module_of(file: GgufFile, name: str) -> tuple[str, str]:
    """The layer and the half of a tensor such as ``blk.0.attn_q.weight.lora_a``."""
    parts = name.split(".")
    known = len(parts) == 5 and parts[0] == "blk" and parts[2] in LAYER_NAMES
    if not known or not parts[1].isdigit() or parts[3] != "weight" or parts[4] not in _HALVES:
        raise DataError(
            f"adapter: {file.path} has the tensor {name!r}, expected "
            "blk.N.<linear layer>.weight.lora_a and lora_b; adapters of other tensors are not "
            "supported"
        )
    return f"model.layers.{int(parts[1])}.{LAYER_NAMES[parts[2]]}", _HALVES[parts[4]]


def _read_alpha(file: GgufFile) -> float:
    wanted = {"general.type": "adapter", "adapter.type": "lora"}
    found = {key: file.metadata.get(key) for key in wanted}
    if found != wanted or not file.tensors:
        raise DataError(
            f"adapter: {file.path} has general.type = {found['general.type']!r}, adapter.type = "
            f"{found['adapter.type']!r} and {len(file.tensors)} tensors, expected 'adapter', "
            "'lora' and at least a pair; choose another file"
        )
    if file.architecture not in SUPPORTED_ARCHITECTURES:
        raise DataError(
            f"adapter: {file.path} is for the architecture {file.architecture!r}, expected one of "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}; choose another adapter"
        )
    if "adapter.alora.invocation_tokens" in file.metadata:
        raise DataError(
            f"adapter: {file.path} is an activated LoRA (adapter.alora.invocation_tokens), "
            "expected one that always acts; choose another adapter"
        )
    return file.number("adapter.lora.alpha")


def _check_pair(module: str, tensors: Tensors, path: Path) -> None:
    a, b = tensors.get(peft_name(module, "A")), tensors.get(peft_name(module, "B"))
    shapes = [None if x is None else x.shape for x in (a, b)]
    if a is None or b is None or a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        raise DataError(
            f"adapter: {path} has lora_a and lora_b of shapes {shapes} for {module}, expected "
            "(r, in) and (out, r); the file is damaged"
        )


def _notes(config: AdapterConfig, alpha: float, factors: Mapping[str, float]) -> list[str]:
    notes: list[str] = []
    if alpha != config.lora_alpha:
        why = "alpha * sqrt(r) of rank-stabilised LoRA" if config.use_rslora else "the usual scale"
        notes.append(f"adapter.lora.alpha = {alpha:g} ({why}): llama.cpp scales by alpha / r")
    if factors:
        notes.append(
            f"B of {len(factors)} layers holds a factor, as one alpha cannot give them their scale"
        )
    return notes
