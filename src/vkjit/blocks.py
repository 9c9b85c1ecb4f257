"""GGUF block types: how ggml stores runs of numbers as few bits each, as NumPy dtypes.

A *block* holds ``size`` consecutive numbers of a row as integer codes and their scales. An array of
a block dtype has one element per block: ``q4_k[576,2]`` is a matrix of 576 rows of 512 numbers.
Layouts are those of ggml (``ggml-common.h``, MIT), little-endian.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np

from vkjit.errors import DTypeError

DType = np.dtype[Any]


@final
@dataclass(frozen=True, slots=True)
class BlockType:
    """One block layout.

    Args:
        name: As GGUF files and llama.cpp spell it.
        size: Numbers in a block.
        dtype: The structured NumPy dtype of one block.
        unit: Bytes to which every block of a dense array is aligned: 2 or 4.
    """

    name: str
    size: int
    dtype: DType
    unit: int

    @property
    def short(self) -> str:
        """The name in printed programs, such as ``q4_k``."""
        return self.name.lower()

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return self.dtype.itemsize

    def __repr__(self) -> str:
        return self.short


def _block(name: str, size: int, *fields: tuple[str, str] | tuple[str, str, int]) -> BlockType:
    dtype = np.dtype(list(fields))
    return BlockType(name, size, dtype, 2 if dtype.itemsize % 4 else 4)


Q4_0 = _block("Q4_0", 32, ("d", "<f2"), ("qs", "u1", 16))
Q4_1 = _block("Q4_1", 32, ("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16))
Q5_0 = _block("Q5_0", 32, ("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16))
Q5_1 = _block("Q5_1", 32, ("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16))
Q8_0 = _block("Q8_0", 32, ("d", "<f2"), ("qs", "i1", 32))
Q4_K = _block("Q4_K", 256, ("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128))
Q5_K = _block(
    "Q5_K", 256, ("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32),
    ("qs", "u1", 128),
)  # fmt: skip
Q6_K = _block("Q6_K", 256, ("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2"))

BLOCK_TYPES: dict[str, BlockType] = {
    block.name: block for block in (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K)
}
"""All block types by name."""

_BY_DTYPE = {block.dtype: block for block in BLOCK_TYPES.values()}


def block_of(dtype: DType) -> BlockType | None:
    """The block type of a dtype, None where its elements are numbers."""
    return _BY_DTYPE.get(dtype) if dtype.names else None


def named(name: str) -> BlockType:
    """The block type called ``name``, in any case.

    Raises:
        DTypeError: There is none.
    """
    found = BLOCK_TYPES.get(name.upper())
    if found is None:
        raise DTypeError(
            f"blocks: {name!r} is not a block type; expected one of {', '.join(BLOCK_TYPES)}"
        )
    return found
