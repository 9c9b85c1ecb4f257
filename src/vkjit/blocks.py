"""GGUF block types: how ggml stores runs of numbers as few bits each, as NumPy dtypes.

A *block* holds ``size`` consecutive numbers of a row as integer codes and their scales. An array of
a block dtype has one element per block: ``q4_k[576,2]`` is a matrix of 576 rows of 512 numbers.
Layouts are those of ggml (``ggml-common.h``, MIT), little-endian.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from vkjit.errors import DTypeError, ShapeError
from vkjit.k_quants import encode_q4_k, encode_q5_k, encode_q6_k

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


# -- the numbers of blocks: the definition that kernels are tested against -----------------------


def decode(block_type: BlockType, blocks: NDArray[Any]) -> NDArray[np.float32]:
    """The float32 numbers of an array of blocks.

    Args:
        block_type: of the blocks.
        blocks: of its dtype, of shape ``(..., n)``.

    Returns:
        numbers of shape ``(..., n * size)``, bit for bit those of ggml's C functions.

    Raises:
        DTypeError: ``blocks`` has another dtype, or is a scalar.
    """
    if blocks.dtype != block_type.dtype or not blocks.ndim:
        raise DTypeError(
            f"blocks.decode: {blocks.dtype}{list(blocks.shape)}; expected an array of {block_type}"
        )
    with np.errstate(invalid="ignore", over="ignore"):
        numbers = _DECODERS[block_type.name](blocks).astype(np.float32, copy=False)
    return numbers.reshape((*blocks.shape[:-1], blocks.shape[-1] * block_type.size))


def encode(block_type: BlockType, numbers: NDArray[Any]) -> NDArray[Any]:
    """Blocks that hold ``numbers``, byte for byte those of ggml's reference quantisers.

    Args:
        block_type: of the blocks.
        numbers: of shape ``(..., n)``, n a multiple of the block's size; read as float32.

    Returns:
        blocks of shape ``(..., n // size)``.

    Raises:
        ShapeError: rows are not whole blocks.
    """
    shape = numbers.shape
    if not shape or shape[-1] % block_type.size:
        raise ShapeError(
            f"blocks.encode: numbers of shape {list(shape)}; expected rows of a multiple of "
            f"{block_type.size} numbers for {block_type}"
        )
    blocks = np.zeros((*shape[:-1], shape[-1] // block_type.size), block_type.dtype)
    rows = np.asarray(numbers, np.float32).reshape((*blocks.shape, block_type.size))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        _ENCODERS[block_type.name](rows, blocks)
    return blocks


def drawn(
    block_type: BlockType,
    shape: tuple[int, ...],
    rng: np.random.Generator,
    scales: tuple[float, float] = (0.01, 1.0),
) -> NDArray[Any]:
    """Blocks with random codes, and with ``scales`` from a range: numbers for checks of devices."""
    nbytes = math.prod(shape) * block_type.nbytes
    blocks = rng.integers(0, 256, nbytes, np.uint8).view(block_type.dtype).reshape(shape)
    for field in [name for name in block_type.dtype.names or () if name in ("d", "dmin", "m")]:
        blocks[field] = rng.uniform(*scales, shape)
    return blocks


def _half(blocks: NDArray[Any], field: str) -> NDArray[np.float32]:
    return blocks[field].astype(np.float32)[..., None]


def _nibbles(packed: NDArray[Any]) -> NDArray[np.int32]:
    """Low nibbles of all bytes, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.int32)


def _fifths(blocks: NDArray[Any]) -> NDArray[np.int32]:
    """Codes of five bits: nibbles, and bit j of ``qh`` for number j."""
    high = np.unpackbits(blocks["qh"], axis=-1, bitorder="little").astype(np.int32)
    return _nibbles(blocks["qs"]) | high << 4


def _pairs(packed: NDArray[Any]) -> NDArray[np.int32]:
    """Nibbles of 128 bytes: of each 32 bytes the low ones, then the high ones."""
    return _nibbles(packed.reshape((*packed.shape[:-1], 4, 32)))


def _scales(blocks: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Eight scales and eight minima of 6 bits, each times its factor, over ``(..., 8, 1)``."""
    low, middle, high = (blocks["scales"][..., i : i + 4] for i in (0, 4, 8))
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=-1)
    minima = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=-1)
    return (_half(blocks, "d") * scales)[..., None], (_half(blocks, "dmin") * minima)[..., None]


def _decode_q4_k(blocks: NDArray[Any]) -> NDArray[Any]:
    scales, minima = _scales(blocks)
    codes = _pairs(blocks["qs"]).reshape((*blocks.shape, 8, 32)).astype(np.float32)
    return scales * codes - minima


def _decode_q5_k(blocks: NDArray[Any]) -> NDArray[Any]:
    scales, minima = _scales(blocks)
    high = blocks["qh"][..., None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    low = _pairs(blocks["qs"]).reshape((*blocks.shape, 8, 32))
    codes = (low | high.astype(np.int32) << 4).astype(np.float32)
    return scales * codes - minima


def _decode_q6_k(blocks: NDArray[Any]) -> NDArray[Any]:
    """Of each half of a block: four quarters of 32 numbers; quarters 0 and 2 share low bytes."""
    low = _nibbles(blocks["ql"].reshape((*blocks.shape, 2, 64)))
    quarters = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = blocks["qh"].reshape((*blocks.shape, 2, 1, 32)) >> quarters & 3
    codes = (low | high.astype(np.int32).reshape(low.shape) << 4) - 32
    scales = _half(blocks, "d") * blocks["scales"]
    return scales[..., None] * codes.reshape((*blocks.shape, 16, 16)).astype(np.float32)


_DECODERS: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "Q4_0": lambda x: _half(x, "d") * (_nibbles(x["qs"]) - 8).astype(np.float32),
    "Q4_1": lambda x: _half(x, "d") * _nibbles(x["qs"]).astype(np.float32) + _half(x, "m"),
    "Q5_0": lambda x: _half(x, "d") * (_fifths(x) - 16).astype(np.float32),
    "Q5_1": lambda x: _half(x, "d") * _fifths(x).astype(np.float32) + _half(x, "m"),
    "Q8_0": lambda x: _half(x, "d") * x["qs"].astype(np.float32),
    "Q4_K": _decode_q4_k,
    "Q5_K": _decode_q5_k,
    "Q6_K": _decode_q6_k,
}


def _inverse(scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """1 / scale, and 0 where a block holds zeros only."""
    return np.where(scale == 0, np.float32(0), np.float32(1) / scale)


def _split(codes: NDArray[Any]) -> NDArray[Any]:
    """The first half of the codes as low nibbles, the other half as high ones."""
    half = codes.shape[-1] // 2
    return codes[..., :half] & 15 | codes[..., half:] << 4


def _extreme(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of each block the first number of largest magnitude, with its sign."""
    return np.take_along_axis(rows, np.abs(rows).argmax(-1)[..., None], -1)


def _symmetric(rows: NDArray[np.float32], blocks: NDArray[Any], top: int) -> NDArray[np.uint8]:
    """Codes 0 ... 2 top - 1 about ``top``; sets the scale, its sign against the extreme one."""
    scale = _extreme(rows) / np.float32(-top)
    blocks["d"] = scale[..., 0].astype(np.float16)
    codes = np.trunc(rows * _inverse(scale) + np.float32(top + 0.5))
    return np.clip(codes, 0, 2 * top - 1).astype(np.uint8)


def _affine(rows: NDArray[np.float32], blocks: NDArray[Any], top: int) -> NDArray[np.uint8]:
    """Codes 0 ... top from the smallest to the largest number; sets scale and minimum."""
    low = rows.min(-1, keepdims=True)
    scale = (rows.max(-1, keepdims=True) - low) / np.float32(top)
    blocks["d"] = scale[..., 0].astype(np.float16)
    blocks["m"] = low[..., 0].astype(np.float16)
    codes = np.trunc((rows - low) * _inverse(scale) + np.float32(0.5))
    return np.clip(codes, 0, top).astype(np.uint8)


def _encode_q4_0(rows: NDArray[np.float32], blocks: NDArray[Any]) -> None:
    blocks["qs"] = _split(_symmetric(rows, blocks, 8))


def _encode_q4_1(rows: NDArray[np.float32], blocks: NDArray[Any]) -> None:
    blocks["qs"] = _split(_affine(rows, blocks, 15))


def _encode_fifths(codes: NDArray[np.uint8], blocks: NDArray[Any]) -> None:
    blocks["qs"] = _split(codes)
    blocks["qh"] = np.packbits(codes >> 4, axis=-1, bitorder="little")


def _encode_q5_0(rows: NDArray[np.float32], blocks: NDArray[Any]) -> None:
    _encode_fifths(_symmetric(rows, blocks, 16), blocks)


def _encode_q5_1(rows: NDArray[np.float32], blocks: NDArray[Any]) -> None:
    _encode_fifths(_affine(rows, blocks, 31), blocks)


def _encode_q8_0(rows: NDArray[np.float32], blocks: NDArray[Any]) -> None:
    peak = np.abs(rows).max(-1, keepdims=True)
    scale = (peak / np.float32(127)).astype(np.float32, copy=False)
    blocks["d"] = scale[..., 0].astype(np.float16)
    scaled = rows * _inverse(scale)
    size = np.abs(scaled)
    whole = np.floor(size)
    rounded = whole + (size - whole >= 0.5)  # ties away from zero, as C's roundf
    blocks["qs"] = np.copysign(rounded, scaled).astype(np.int8)


_ENCODERS: dict[str, Callable[[NDArray[np.float32], NDArray[Any]], None]] = {
    "Q4_0": _encode_q4_0,
    "Q4_1": _encode_q4_1,
    "Q5_0": _encode_q5_0,
    "Q5_1": _encode_q5_1,
    "Q8_0": _encode_q8_0,
    "Q4_K": encode_q4_k,
    "Q5_K": encode_q5_k,
    "Q6_K": encode_q6_k,
}
