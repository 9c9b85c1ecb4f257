"""The base model of a run: weights on the device, tokenizer, chat template."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from vkjit import device_put, quant
from vkjit.blocks import BLOCK_TYPES, block_of
from vkjit_models.common.chat import ChatTemplate
from vkjit_models.common.gguf import (
    HostWeight,
    LlamaHyper,
    WeightFormat,
    llama_hyper,
    llama_weights,
    open_gguf,
)
from vkjit_models.common.smollm2 import find_smollm2
from vkjit_models.common.tokenizer import Tokenizer
from vkjit_models.llama.model import LlamaSpec

SMOLLM2 = "smollm2"
_HEAD, _SAMPLE, _SAMPLES = 2**20, 2**16, 64  # bytes, bytes, count: of a fingerprint


@final
@dataclass(frozen=True)
class ReceiptRow:
    """What became of a file's tensors of one type.

    Args:
        kind: The type in the file.
        held: The type on the device: a block type or a float type.
        tensors: How many there are.
        file_bytes: Their size in the file, mapped and read once.
        copied_bytes: Bytes written on the host on the way.
        device_bytes: Bytes uploaded, and their size on the device.
    """

    kind: str
    held: str
    tensors: int
    file_bytes: int
    copied_bytes: int
    device_bytes: int


@final
@dataclass(frozen=True)
class Receipt:
    """What loading a model mapped, copied and uploaded.

    Args:
        weights: The format that was asked for.
        file_bytes: Size of the file, all of it mapped.
        rows: By type in the file and on the device.
    """

    weights: WeightFormat
    file_bytes: int
    rows: tuple[ReceiptRow, ...]

    @property
    def copied_bytes(self) -> int:
        """Bytes written on the host."""
        return sum(row.copied_bytes for row in self.rows)

    @property
    def device_bytes(self) -> int:
        """Bytes of the weights on the device."""
        return sum(row.device_bytes for row in self.rows)

    @property
    def notes(self) -> tuple[str, ...]:
        """Types that take more than in the file although it was asked for as it lies."""
        if self.weights != "packed":
            return ()
        return tuple(
            f"{row.kind}: {row.tensors} tensors expanded to {row.held}, "
            f"{row.file_bytes} to {row.device_bytes} bytes; products read blocks of "
            f"{', '.join(BLOCK_TYPES)}"
            for row in self.rows
            if row.device_bytes > row.file_bytes
        )

    def text(self) -> str:
        """The receipt as a table, with its notes."""
        total = ReceiptRow(
            "all",
            self.weights,
            sum(row.tensors for row in self.rows),
            sum(row.file_bytes for row in self.rows),
            self.copied_bytes,
            self.device_bytes,
        )
        lines = [
            f"{'type':<7} {'held as':<9} {'tensors':>7} {'in file':>13} {'copied':>13} "
            f"{'on device':>13}"
        ]
        lines += [
            f"{row.kind:<7} {row.held:<9} {row.tensors:>7} {row.file_bytes:>13,} "
            f"{row.copied_bytes:>13,} {row.device_bytes:>13,}"
            for row in (*self.rows, total)
        ]
        return "\n".join((*lines, *self.notes))


@final
@dataclass(frozen=True)
class BaseModel:
    """A loaded model.

    Args:
        name: Where it came from, as adapters record it.
        hyper: Sizes and constants.
        params: Weights under Hugging Face names, on the device.
        tokenizer: From the same file.
        receipt: What loading it cost.
        dtype: Of the states between layers, see `LlamaSpec`.
        fingerprint: Tells whether two files are the same, see `fingerprint`.
    """

    name: str
    hyper: LlamaHyper
    params: dict[str, Any]
    tokenizer: Tokenizer
    receipt: Receipt
    dtype: str = "float32"
    fingerprint: str = ""

    @property
    def spec(self) -> LlamaSpec:
        """The model without adapters."""
        return LlamaSpec(self.hyper, dtype=self.dtype)

    @property
    def template(self) -> ChatTemplate:
        """The file's chat template."""
        return ChatTemplate.of(self.tokenizer)


def load_base(path: str, weights: WeightFormat = "packed", dtype: str = "float32") -> BaseModel:
    """Loads a GGUF file, or SmolLM2-135M-Instruct where ``path`` is "smollm2".

    Args:
        path: The file; it is mapped, and its tensors are uploaded one after the other.
        weights: How weights are held on the device: "packed" as in the file.
        dtype: Of the states between layers.

    Raises:
        ArgumentError: ``weights`` is no format.
        DataError: The file is missing, damaged, or of an unsupported kind.
    """
    file = open_gguf(find_smollm2() if path == SMOLLM2 else Path(path))
    tokenizer, hyper = Tokenizer(file), llama_hyper(file)
    params, receipt = upload(llama_weights(file, hyper, weights))
    whole = Receipt(weights, file.path.stat().st_size, receipt)
    return BaseModel(path, hyper, params, tokenizer, whole, dtype, fingerprint(file.path))


def fingerprint(path: Path) -> str:
    """SHA-256 of a file's size, its first MiB and 64 samples of 64 KiB spread over it.

    Weights that differ do so nearly everywhere: a few MiB tell models apart without reading all.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(_HEAD))
        for i in range(_SAMPLES):
            file.seek(size * i // _SAMPLES)
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def upload(weights: Iterable[HostWeight]) -> tuple[dict[str, Any], tuple[ReceiptRow, ...]]:
    """Weights on the device by name, blocks as quantized arrays, and rows of the receipt.

    One at a time, so that host and device copies never both exist in full.
    """
    params: dict[str, Any] = {}
    sums: dict[tuple[str, str], tuple[int, int, int, int]] = {}
    for weight in weights:
        value = weight.value
        block = block_of(value.dtype)
        placed = device_put(value)
        params[weight.name] = placed if block is None else quant.QuantizedArray(placed)
        key = (weight.kind, value.dtype.name if block is None else block.name)
        one = (1, weight.file_bytes, weight.copied_bytes, value.nbytes)
        sums[key] = tuple(np.add(sums.get(key, (0, 0, 0, 0)), one).tolist())
    return params, tuple(ReceiptRow(*key, *numbers) for key, numbers in sums.items())
