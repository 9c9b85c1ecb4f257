"""Rows of numbers in GGUF's tensor types: decoded, encoded, and how many bytes they take."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from numpy.typing import NDArray

from vkjit import blocks
from vkjit.errors import DataError

_FLOATS: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16),
}  # fmt: skip

ENCODED_TYPES: tuple[str, ...] = (*_FLOATS, *blocks.BLOCK_TYPES)
"""Types that `encode_rows` writes."""

_NEAREST = {"Q2_K": "Q4_K", "Q3_K": "Q4_K", "IQ4_NL": "Q4_1", "IQ4_XS": "Q4_K"}


def row_bytes(kind: str, columns: int) -> int:
    """Bytes of a row of ``columns`` numbers.

    Raises:
        DataError: The row is no whole number of the type's blocks.
    """
    size, width = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    if columns % size:
        raise DataError(
            f"gguf: a row has {columns} numbers, expected whole blocks of {size} for {kind}; "
            "choose another type, such as f16"
        )
    return columns // size * width


def decode_rows(kind: str, raw: NDArray[Any]) -> NDArray[np.float32]:
    """float32 numbers of rows as ``ReaderTensor.data`` holds them, bit for bit ggml's."""
    return np.asarray(quants.dequantize(raw, GGMLQuantizationType[kind]), np.float32)


def encode_rows(kind: str, rows: NDArray[np.float32]) -> NDArray[Any]:
    """Numbers (n, columns) in a type: an array of floats, or of blocks.

    Floats are rounded to the nearest, ties to even; blocks are those of ggml's reference
    quantisers.

    Raises:
        DataError: There is no encoder for the type, or rows are no whole blocks of it.
    """
    check_encoded(kind, "the rows")
    row_bytes(kind, rows.shape[-1])
    if kind in _FLOATS:
        with np.errstate(over="ignore"):
            return rows.astype(_FLOATS[kind])
    return blocks.encode(blocks.named(kind), rows)


def decoded(kind: str, encoded: NDArray[Any]) -> NDArray[np.float32]:
    """What `encode_rows` gave, as float32 numbers."""
    if kind in _FLOATS:
        return encoded.astype(np.float32)
    return blocks.decode(blocks.named(kind), encoded)


def check_encoded(kind: str, what: str) -> None:
    """Refuses a type without an encoder.

    Raises:
        DataError: ``what`` is to be of ``kind``; the message offers the nearest type.
    """
    if kind not in ENCODED_TYPES:
        nearest = f"; the nearest is {_NEAREST[kind].lower()}" if kind in _NEAREST else ""
        raise DataError(
            f"gguf: {what} would be {kind}, which has no encoder here, expected one of "
            f"{', '.join(one.lower() for one in ENCODED_TYPES)}{nearest}"
        )
