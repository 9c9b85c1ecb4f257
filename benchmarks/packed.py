"""Matrices in blocks of a few bits, as GGUF files hold them: random ones, and their numbers.

Layouts and formulas are ggml's (``ggml-common.h``, ``ggml-quants.c``, MIT). Written out here, and
not taken from vkjit, because the peers' processes have NumPy alone; a test compares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, final

import numpy as np

_DTYPES = {
    "Q4_0": np.dtype([("d", "<f2"), ("qs", "u1", 16)]),
    "Q4_1": np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)]),
    "Q5_0": np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)]),
    "Q5_1": np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)]),
    "Q8_0": np.dtype([("d", "<f2"), ("qs", "i1", 32)]),
    "Q4_K": np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)]),
    "Q5_K": np.dtype(
        [("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)]
    ),
    "Q6_K": np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")]),
}
_SIZES = {kind: 256 if kind.endswith("K") else 32 for kind in _DTYPES}
BITS = {kind: dtype.itemsize * 8 / _SIZES[kind] for kind, dtype in _DTYPES.items()}
"""Bits that a number takes, scales included, by block type."""
# Deviation of a number whose bits are random, in units of d: codes of 4, 5 or 8 bits around their
# mean; of K types times scales of 0..63 less 7.5 or 15.5 times minima of 0..63, or times -128..127.
_DEVIATIONS = {
    "Q4_0": 4.61, "Q4_1": 4.61, "Q5_0": 9.23, "Q5_1": 9.23, "Q8_0": 73.9,
    "Q4_K": 258.0, "Q5_K": 522.0, "Q6_K": 1366.0,
}  # fmt: skip
_MEANS = {"Q4_1": 7.5, "Q5_1": 15.5, "Q4_K": 7.5, "Q5_K": 15.5}
"""Of codes of types that have minima."""


@final
@dataclass(frozen=True, eq=False)
class Packed:
    """A matrix of a block type, or a stack of matrices.

    Args:
        kind: The block type, as GGUF spells it.
        blocks: Rows of blocks, (rows, blocks of a row), of the block type's dtype.
        layers: Matrices in the stack; 0 for a single matrix without an axis for it. Matrix n is
            ``blocks`` with its rows moved down by n, cyclically: different numbers at no cost.
    """

    kind: str
    blocks: np.ndarray
    layers: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Layers if there are any, rows and columns, in numbers."""
        rows, blocks = self.blocks.shape
        stack = (self.layers,) if self.layers else ()
        return (*stack, rows, blocks * _SIZES[self.kind])

    @property
    def first(self) -> Packed:
        """The matrix, or the first of the stack."""
        return Packed(self.kind, self.blocks)

    def raw(self) -> np.ndarray:
        """The blocks."""
        return self._stacked(self.blocks)

    def numbers(self) -> np.ndarray:
        """The matrix in float32."""
        return self._stacked(_numbers(self.kind, _Same(self.blocks)))

    def _stacked(self, matrix: np.ndarray) -> np.ndarray:
        if not self.layers:
            return matrix
        return np.stack([np.roll(matrix, n, 0) for n in range(self.layers)])


@final
class _Same:
    """An array as a key: itself, not its values."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __hash__(self) -> int:
        return id(self.array)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.array is self.array


def random_blocks(
    generator: np.random.Generator,
    kind: str,
    shape: tuple[int, int],
    deviation: float,
    layers: int = 0,
) -> Packed:
    """A matrix of random bits whose numbers have mean 0 (nearly) and the given deviation."""
    rows, columns = shape
    dtype, size = _DTYPES[kind], _SIZES[kind]
    count = rows * columns // size
    raw = np.frombuffer(generator.bytes(count * dtype.itemsize), dtype).copy()
    d = (deviation / _DEVIATIONS[kind] * generator.uniform(0.9, 1.1, count)).astype(np.float16)
    raw["d"] = d
    for name in ("m", "dmin"):
        if name in (dtype.names or ()):
            raw[name] = d * np.float16(-_MEANS[kind] if name == "m" else _MEANS[kind])
    return Packed(kind, raw.reshape(rows, columns // size), layers)


@lru_cache(maxsize=16)
def _numbers(kind: str, same: _Same) -> np.ndarray:
    blocks = same.array
    decoded = _DECODERS[kind](blocks)
    numbers = decoded.reshape(blocks.shape[0], -1)
    numbers.flags.writeable = False
    return numbers


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return blocks["d"].astype(np.float32)[..., None] * blocks["qs"].astype(np.float32)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    d, m = (blocks[name].astype(np.float32)[..., None] for name in ("d", "m"))
    return d * _nibbles(blocks["qs"]).astype(np.float32) + m


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    d = blocks["d"].astype(np.float32)[..., None]
    return d * (_nibbles(blocks["qs"]).astype(np.float32) - 8)


def _fifths(blocks: np.ndarray) -> np.ndarray:
    """Codes of 5 bits: bit j of ``qh`` is the highest of number j."""
    high = np.unpackbits(blocks["qh"], axis=-1, bitorder="little")
    return (_nibbles(blocks["qs"]) | high << 4).astype(np.float32)


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    return blocks["d"].astype(np.float32)[..., None] * (_fifths(blocks) - 16)


def _q5_1(blocks: np.ndarray) -> np.ndarray:
    d, m = (blocks[name].astype(np.float32)[..., None] for name in ("d", "m"))
    return d * _fifths(blocks) + m


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    return _k_affine(blocks, _k_nibbles(blocks))


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    """Run r has bit r of each byte of ``qh`` above its nibbles."""
    high = blocks["qh"][..., None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _k_affine(blocks, _k_nibbles(blocks) | high << 4)


def _k_nibbles(blocks: np.ndarray) -> Any:
    return _nibbles(blocks["qs"].reshape(*blocks.shape, 4, 32)).reshape(*blocks.shape, 8, 32)


def _k_affine(blocks: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Eight runs of 32 numbers a block, each with a scale and a minimum of 6 bits."""
    s = blocks["scales"]
    scales = np.concatenate([s[..., :4] & 63, (s[..., 8:] & 15) | (s[..., :4] >> 6 << 4)], -1)
    minima = np.concatenate([s[..., 4:8] & 63, (s[..., 8:] >> 4) | (s[..., 4:8] >> 6 << 4)], -1)
    d, dmin = (blocks[name].astype(np.float32)[..., None] for name in ("d", "dmin"))
    return (d * scales)[..., None] * codes.astype(np.float32) - (dmin * minima)[..., None]


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    """Sixteen runs of 16 numbers; each half of a block has four quarters of 32, two bits above."""
    low = _nibbles(blocks["ql"].reshape(*blocks.shape, 2, 64))
    low = low.reshape(*blocks.shape, 2, 4, 32)
    high = (
        blocks["qh"].reshape(*blocks.shape, 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8)
        & 3
    )
    codes = (low | high << 4).astype(np.float32).reshape(*blocks.shape, 16, 16) - 32
    scales = blocks["d"].astype(np.float32)[..., None] * blocks["scales"].astype(np.float32)
    return scales[..., None] * codes


def _nibbles(bytes_: np.ndarray) -> Any:
    """The lower halves of the bytes, then the upper ones."""
    return np.concatenate([bytes_ & 15, bytes_ >> 4], -1)


_DECODERS = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
