"""An adapter merged into its base: every adapted tensor becomes ``W + s B A``, streamed to a file.

One tensor at a time is read from the mapped base, in runs of rows; the rest of the file is copied
byte for byte (`vkjit_models.common.gguf_rewrite`). Merged rows are encoded in the type asked for,
and what the encoding did to the adapter's change is measured on the way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from vkjit.errors import DataError
from vkjit_models.common.adapter_config import AdapterConfig
from vkjit_models.common.adapter_gguf import Tensors, gguf_heads, llama_layout, load_any_adapter
from vkjit_models.common.adapter_io import peft_name, split_name
from vkjit_models.common.gguf import GgufFile, LlamaHyper, llama_hyper, permute_rows
from vkjit_models.common.gguf_rewrite import Piece, Replacement, rewrite_gguf
from vkjit_models.common.tensor_rows import (
    check_encoded,
    decode_rows,
    decoded,
    encode_rows,
    row_bytes,
)
from vkjit_models.llama.lora import from_peft

KEEP = "keep"
"""The type of a merged tensor that stays that of the base's."""
EATEN = 0.5
"""Error of the stored change, relative to the change, above which encoding is said to eat it."""

_CHUNK = 1 << 20  # numbers of a tensor that are expanded at once: a few MiB of float32


@final
@dataclass(frozen=True)
class Delta:
    """What an adapter does to one tensor, its rows in the tensor's order.

    Args:
        a: f32[r,in].
        b: f32[out,r].
        scale: Factor on B A.
        magnitude: f32[out], the norms that the rows of the sum are scaled to (DoRA), or None.
    """

    a: NDArray[np.float32]
    b: NDArray[np.float32]
    scale: float
    magnitude: NDArray[np.float32] | None = None

    def merged(self, base: NDArray[np.float32], first: int = 0) -> NDArray[np.float32]:
        """Rows ``first`` and following of the tensor with the adapter, given those of the base."""
        rows = slice(first, first + len(base))
        out = np.add(base, np.float32(self.scale) * (self.b[rows] @ self.a), dtype=np.float32)
        if self.magnitude is None:
            return out
        norms = np.sqrt(np.sum(np.square(out, dtype=np.float64), axis=1, keepdims=True))
        return np.multiply(out, self.magnitude[rows, None] / norms, dtype=np.float32)


@final
@dataclass
class Stored:
    """How well one merged tensor is stored; sums over all its numbers, in float64.

    Args:
        name: In the file.
        source: Type in the base.
        kind: Type in the result.
        change: Of (merged - base)².
        error: Of (stored - merged)².
        kept: Of (stored - base) (merged - base).
        size: Of merged².
    """

    name: str
    source: str
    kind: str
    change: float = 0.0
    error: float = 0.0
    kept: float = 0.0
    size: float = 0.0

    @property
    def relative_error(self) -> float:
        """Norm of what encoding changed, relative to the merged tensor's."""
        return math.sqrt(self.error / self.size) if self.size else 0.0

    @property
    def delta_error(self) -> float:
        """Norm of what encoding changed, relative to the norm of the adapter's change."""
        return math.sqrt(self.error / self.change) if self.change else 0.0

    @property
    def delta_kept(self) -> float:
        """Share of the adapter's change that the stored tensor has, along that change; 1 is all."""
        return self.kept / self.change if self.change else 1.0

    def add(
        self, base: NDArray[np.float32], merged: NDArray[np.float32], stored: NDArray[np.float32]
    ) -> None:
        """Counts some rows."""
        wide = np.float64
        change, error = merged.astype(wide) - base, stored.astype(wide) - merged
        self.change += float(np.sum(change * change))
        self.error += float(np.sum(error * error))
        self.kept += float(np.sum((change + error) * change))
        self.size += float(np.sum(np.square(merged, dtype=wide)))


@final
@dataclass(frozen=True)
class Merged:
    """What a merge wrote.

    Args:
        path: The new file.
        written: Its bytes.
        tensors: The merged tensors, in the file's order.
        copied: Number of tensors that were copied.
    """

    path: Path
    written: int
    tensors: tuple[Stored, ...]
    copied: int
    warnings: tuple[str, ...] = field(default=())


def merge_adapter(file: GgufFile, adapter: Path, out: Path, kind: str) -> Merged:
    """Writes ``file`` with an adapter merged into it.

    Args:
        file: The base model.
        adapter: A folder in PEFT's layout, or a GGUF file.
        out: The new file; written beside and renamed when complete.
        kind: Type of the merged tensors (``f16``, ``q8_0``, ...), or "keep" for their own.

    Raises:
        DataError: The adapter does not fit the base, a type has no encoder, or ``out`` is the base.
        OSError: The file cannot be written.
    """
    hyper = llama_hyper(file)
    config, tensors = load_any_adapter(adapter, hyper)
    from_peft(hyper, tensors)  # refuses what is no layer of the model
    layout = llama_layout(hyper)
    deltas = {
        f"{layout.name_of(module)}.weight": _delta(module, config, tensors, hyper)
        for module in {split_name(name, str(adapter)).module for name in tensors}
    }
    report: dict[str, Stored] = {}
    replaced: dict[str, Replacement] = {}
    for name, tensor in file.tensors.items():
        if name not in deltas:
            continue
        source = tensor.tensor_type.name
        wanted = source if kind == KEEP else kind.upper()
        check_encoded(wanted, f"tensor {name!r}")
        row_bytes(wanted, int(tensor.shape[0]))
        report[name] = Stored(name, source, wanted)
        pieces = partial(_pieces, file, deltas[name], report[name])
        replaced[name] = Replacement(wanted, pieces)
    written = rewrite_gguf(file, out, replaced)
    rows = tuple(report.values())
    return Merged(out, written, rows, len(file.tensors) - len(rows), tuple(_warnings(rows)))


def _delta(module: str, config: AdapterConfig, tensors: Tensors, hyper: LlamaHyper) -> Delta:
    """The adapter of a layer in GGUF's row order: B and magnitudes of q and k are permuted."""
    heads = gguf_heads(module, hyper)

    def ordered(rows: NDArray[np.float32]) -> NDArray[np.float32]:
        return permute_rows(rows, heads) if heads else rows

    magnitude = tensors.get(peft_name(module, "magnitude"))
    return Delta(
        tensors[peft_name(module, "A")],
        ordered(tensors[peft_name(module, "B")]),
        config.scale_of(module),
        None if magnitude is None else ordered(magnitude[:, None])[:, 0],
    )


def _pieces(file: GgufFile, delta: Delta, report: Stored) -> Iterator[Piece]:
    """The merged tensor in its new type, some rows at a time."""
    raw: NDArray[Any] = file.tensors[report.name].data
    step = max(1, _CHUNK // delta.a.shape[1])
    for first in range(0, len(raw), step):
        base = decode_rows(report.source, raw[first : first + step])
        merged = delta.merged(base, first)
        encoded = encode_rows(report.kind, merged)
        report.add(base, merged, decoded(report.kind, encoded))
        _check_finite(report)
        yield encoded.tobytes()


def _warnings(rows: tuple[Stored, ...]) -> Iterator[str]:
    for kind in dict.fromkeys(row.kind for row in rows):
        those = [row for row in rows if row.kind == kind and row.change]
        eaten = [row for row in those if row.delta_error > EATEN]
        if eaten:
            worst = max(eaten, key=lambda row: row.delta_error)
            yield (
                f"encoding as {kind.lower()} changed {len(eaten)} of {len(those)} tensors by more "
                f"than {EATEN:g} times what the adapter did (worst: {worst.name}, "
                f"{worst.delta_error:.3g} times): the training is partly rounded away; choose "
                "--type f16 or q8_0, or keep the adapter apart"
            )
    still = [row.name for row in rows if not row.change]
    if still:
        yield f"the adapter changes nothing in {len(still)} tensors, such as {still[0]}"


def _check_finite(row: Stored) -> None:
    if not math.isfinite(row.size + row.error):
        raise DataError(
            f"merge: {row.name} of the result is not finite in {row.kind}, expected finite "
            "weights; the adapter diverged, or its change overflows the type: choose bf16 or f32"
        )
