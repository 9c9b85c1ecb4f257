"""LoRA adapters as GGUF files, which llama.cpp applies to a GGUF model (``--lora``).

Keys are ``general.type`` = adapter, ``adapter.type`` = lora, ``adapter.lora.alpha`` and
``general.architecture``; tensors ``blk.N.attn_q.weight.lora_a`` (r, in) and ``lora_b`` (out, r).
llama.cpp (``llama-adapter.h``) scales every layer by alpha / r, r being that layer's own, and reads
alpha = 0 as the scale 1. The rows of B, and the columns of A, are in the order of the base's rows
and columns in GGUF (:class:`AdapterLayout`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast, final

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
    unpermute_rows,
)

Tensors = Mapping[str, NDArray[np.float32]]
"""Arrays under PEFT's names (:func:`~vkjit_models.common.adapter_io.peft_name`)."""

Half: TypeAlias = Literal["A", "B"]
"""A is (r, in), B is (out, r)."""

_HALVES: Mapping[str, Half] = {"lora_a": "A", "lora_b": "B"}


@final
@dataclass(frozen=True)
class AdapterLayout:
    """What an architecture's GGUF adapters are named, and in which order their rows lie.

    Args:
        architecture: Value of ``general.architecture``.
        names: Hugging Face names of a block's linear layers by their names in the file.
        places: For a layer's name inside its block: where each of B's rows, or A's columns, of
            Hugging Face lies in the file; None: in the same place.
    """

    architecture: str
    names: Mapping[str, str]
    places: Callable[[str, Half], NDArray[np.intp] | None]

    @cached_property
    def to_gguf(self) -> dict[str, str]:
        """Names in the file by Hugging Face name."""
        return {theirs: ours for ours, theirs in self.names.items()}

    def name_of(self, module: str) -> str:
        """``model.layers.3.mlp.up_proj`` as ``blk.3.ffn_up``.

        Raises:
            DataError: The file format has no name for it.
        """
        block, kind = _split(module)
        if kind not in self.to_gguf:
            raise DataError(
                f"export: GGUF has no name for {module!r}, expected a linear layer of a "
                f"{self.architecture}'s blocks; export the adapter to PEFT"
            )
        return f"blk.{block}.{self.to_gguf[kind]}"

    def stored(self, module: str, half: Half, array: NDArray[np.float32]) -> NDArray[np.float32]:
        """A or B in the order of the file."""
        places = self.places(_split(module)[1], half)
        moved = array if places is None else _taken(array, half, np.argsort(places))
        return np.ascontiguousarray(moved, np.float32)

    def loaded(
        self, module: str, half: Half, array: NDArray[np.float32], path: Path
    ) -> NDArray[np.float32]:
        """A or B of the file ``path`` in the order of Hugging Face.

        Raises:
            DataError: It has not as many rows or columns as the layer.
        """
        places = self.places(_split(module)[1], half)
        if places is None:
            return array
        length = len(places)
        if array.shape[0 if half == "B" else -1] != length:
            wanted = f"({length}, r)" if half == "B" else f"(r, {length})"
            raise DataError(
                f"adapter: {path} has {half} of shape {array.shape} for {module}, expected "
                f"{wanted}; load an adapter of this model"
            )
        return np.ascontiguousarray(_taken(array, half, places))


Base: TypeAlias = LlamaHyper | AdapterLayout
"""What a GGUF adapter belongs to: a llama, by its sizes, or any architecture's layout."""


def llama_layout(hyper: LlamaHyper) -> AdapterLayout:
    """The layout of a llama: rows of q and k are in GGUF's order of rotations."""

    def places(kind: str, half: Half) -> NDArray[np.intp] | None:
        heads = gguf_heads(kind, hyper) if half == "B" else 0
        if not heads:
            return None
        rows = np.arange(heads * hyper.head_dim, dtype=np.intp)
        return unpermute_rows(rows[:, None], heads)[:, 0]

    return AdapterLayout(SUPPORTED_ARCHITECTURES[0], LAYER_NAMES, places)


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
    path: Path, base: Base, config: AdapterConfig, tensors: Tensors
) -> tuple[str, ...]:
    """Write an adapter as GGUF; the file is replaced whole or left as it was.

    Args:
        path: The file.
        base: The base model, whose heads decide the order of rows.
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
    layout = _layout_of(base)
    layers = {split_name(name, str(path)).module for name in tensors}
    ordered = sorted(layers, key=_order)
    alpha, factors = stored_scale(config, ordered)
    with replacing(path) as partial:
        writer = GGUFWriter(partial, layout.architecture)
        writer.add_string("general.type", "adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", alpha)
        if config.base_model_name_or_path:
            writer.add_string("general.base_model.0.name", config.base_model_name_or_path)
            writer.add_uint32("general.base_model.count", 1)
        for module in ordered:
            a, b = (np.asarray(tensors[peft_name(module, which)]) for which in ("A", "B"))
            name = f"{layout.name_of(module)}.weight"
            scaled = np.float32(factors.get(module, 1.0)) * b
            writer.add_tensor(f"{name}.lora_a", layout.stored(module, "A", a))
            writer.add_tensor(f"{name}.lora_b", layout.stored(module, "B", scaled))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return tuple(_notes(config, alpha, factors))


def load_gguf_adapter(
    path: Path, base: Base
) -> tuple[AdapterConfig, dict[str, NDArray[np.float32]]]:
    """Read a GGUF adapter of ``base``, into PEFT's names and the row order of Hugging Face.

    The config's ``r`` is the most frequent rank; layers of another rank are in its patterns.

    Raises:
        DataError: The file is no such adapter, or does not fit the model ``base``.
    """
    file, layout = open_gguf(path), _layout_of(base)
    alpha = _read_alpha(file, layout.architecture)
    tensors: dict[str, NDArray[np.float32]] = {}
    ranks: dict[str, int] = {}
    for name in file.tensors:
        module, half = _module_of(file, name, layout.names)
        array = layout.loaded(module, half, file.load_tensor(name), path)
        if half == "A":
            ranks[module] = array.shape[0]
        tensors[peft_name(module, half)] = array
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
    path: Path, base: Base
) -> tuple[AdapterConfig, dict[str, NDArray[np.float32]]]:
    """Read an adapter in either format: a folder in PEFT's layout, or a GGUF file.

    Raises:
        DataError: There is no adapter, it is damaged, or it does not fit the model ``base``.
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
    return load_gguf_adapter(path, base)


def gguf_heads(module: str, hyper: LlamaHyper) -> int:
    """Heads whose rows GGUF orders otherwise: of q and k; 0 for all other layers."""
    last = module.rpartition(".")[2]
    return {"q_proj": hyper.heads, "k_proj": hyper.kv_heads}.get(last, 0)


def _taken(array: NDArray[np.float32], half: Half, places: NDArray[np.intp]) -> NDArray[np.float32]:
    return array[places] if half == "B" else array[:, places]


def _split(module: str) -> tuple[str, str]:
    """Index of the block and the name inside it."""
    parts = module.removeprefix("model.layers.").split(".", 1)
    return parts[0], parts[1] if len(parts) == 2 else ""


def _order(module: str) -> tuple[int, str]:
    block, kind = _split(module)
    return int(block) if block.isdigit() else -1, kind


def _layout_of(base: Base) -> AdapterLayout:
    return base if isinstance(base, AdapterLayout) else llama_layout(base)


def _module_of(file: GgufFile, name: str, names: Mapping[str, str]) -> tuple[str, Half]:
    """The layer and the half of a tensor such as ``blk.0.attn_q.weight.lora_a``."""
    parts = name.split(".")
    known = len(parts) == 5 and parts[0] == "blk" and parts[2] in names
    if not known or not parts[1].isdigit() or parts[3] != "weight" or parts[4] not in _HALVES:
        raise DataError(
            f"adapter: {file.path} has the tensor {name!r}, expected "
            "blk.N.<linear layer>.weight.lora_a and lora_b; adapters of other tensors are not "
            "supported"
        )
    return f"model.layers.{int(parts[1])}.{names[parts[2]]}", _HALVES[parts[4]]


def _read_alpha(file: GgufFile, architecture: str) -> float:
    wanted = {"general.type": "adapter", "adapter.type": "lora"}
    found = {key: file.metadata.get(key) for key in wanted}
    if found != wanted or not file.tensors:
        raise DataError(
            f"adapter: {file.path} has general.type = {found['general.type']!r}, adapter.type = "
            f"{found['adapter.type']!r} and {len(file.tensors)} tensors, expected 'adapter', "
            "'lora' and at least a pair; choose another file"
        )
    if file.architecture != architecture:
        raise DataError(
            f"adapter: {file.path} is for the architecture {file.architecture!r}, expected "
            f"{architecture}, that of the base model; choose another adapter"
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
