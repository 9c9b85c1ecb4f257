"""Quantized arrays: weights that stay in GGUF's blocks in memory and in compiled programs.

    w = quant.from_bytes(data, "Q4_K", (576, 1536))  # 288 bytes for 512 numbers
    y = jnp.matmul(x, w.T)                           # products decode the blocks as they read them
    h = jnp.take(table, tokens, axis=0)              # so do lookups

No float copy of the numbers is made, in the backward pass neither. Blocks are constants to
derivatives: what is trained beside them are adapters. See docs/quantization.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, cast, final

import numpy as np

from vkjit import blocks as _blocks
from vkjit import dtypes, tree
from vkjit import numpy as jnp
from vkjit.blocks import BLOCK_TYPES, BlockType
from vkjit.dtypes import DType
from vkjit.errors import ArgumentError, DTypeError, ShapeError
from vkjit.ir.avals import Aval, aval
from vkjit.ir.primitive import Value
from vkjit.numpy._core import Packed
from vkjit.numpy._scatter import get
from vkjit.ops import quant as _ops
from vkjit.ops.logical import bitcast_convert_type
from vkjit.trace import Tracer, aval_of

__all__ = [
    "BLOCK_TYPES",
    "BlockType",
    "QuantizedArray",
    "dequantize",
    "from_bytes",
    "quantize",
]

_BITS_OF_BYTE = 8


@final
@tree.register_pytree_node_class
class QuantizedArray(Packed):
    """Numbers in blocks: a pytree with one leaf, ``blocks``.

    Functions of ``vkjit.numpy`` and ``vkjit.lax`` take it as an array of float32 numbers, products
    as one of the other operand's dtype. Leading axes can be indexed; rows stay whole.

    Args:
        blocks: array of a block dtype whose shape counts blocks along the last axis, of at least
            one axis; on a device, traced, or of NumPy.
        turned: whether the last two axes are exchanged; see ``mT``.
    """

    __slots__ = ("blocks", "turned")
    __array_priority__: ClassVar[int] = 1000  # NumPy leaves ``x @ w`` to this class

    def __init__(self, blocks: Any, *, turned: bool = False) -> None:
        of = aval_of(blocks)
        if of.block is None or of.ndim < 1 + turned:
            raise DTypeError(
                f"QuantizedArray: blocks {of}; expected an array of blocks with at least "
                f"{1 + turned} axes; make one with quant.from_bytes or quant.quantize"
            )
        self.blocks = blocks
        self.turned = turned

    def tree_flatten(self) -> tuple[tuple[Any], bool]:
        """The blocks, and whether the last two axes are exchanged."""
        return (self.blocks,), self.turned

    @classmethod
    def tree_unflatten(cls, turned: bool, children: Sequence[Any]) -> QuantizedArray:  # noqa: FBT001  the registry's protocol
        """An array whose leaf may be anything: trees of shapes and of flags have this form, too."""
        made = object.__new__(cls)
        (made.blocks,) = children
        made.turned = turned
        return made

    # -- what it is -----------------------------------------------------------------------------

    @property
    def block_type(self) -> BlockType:
        """How the numbers are packed."""
        found = aval_of(self.blocks).block
        assert found is not None
        return found

    @property
    def dtype(self) -> DType:
        """The dtype of one block."""
        return aval_of(self.blocks).dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes, in numbers.

        Raises:
            ShapeError: ``vmap`` or ``scan`` took an axis of a transpose's matrices.
        """
        shape = aval_of(self.blocks).shape
        if len(shape) < 1 + self.turned:
            raise ShapeError(
                f"QuantizedArray: a transpose with blocks of shape {shape}; vmap and scan take "
                "leading axes of blocks as they lie; map over the array itself, and transpose "
                "inside the function"
            )
        whole = (*shape[:-1], shape[-1] * self.block_type.size)
        return (*whole[:-2], whole[-1], whole[-2]) if self.turned else whole

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of numbers."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks."""
        return aval_of(self.blocks).nbytes

    @property
    def aval(self) -> Aval:
        """Shape and dtype of the numbers as other functions read them: float32."""
        return aval(self.shape, dtypes.float32)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"QuantizedArray({self.block_type.name}, shape={self.shape})"

    # -- reading --------------------------------------------------------------------------------

    def dequantize(self, dtype: Any = dtypes.float32) -> Value:
        """The numbers as float32, float16 or bfloat16.

        In a compiled function this is a view: whatever reads the result decodes the blocks, and
        numbers are stored only where the result leaves the function.
        """
        numbers = _ops.dequantize(self.blocks, dtypes.canonical(dtype))
        return jnp.swapaxes(numbers, self.ndim - 2, self.ndim - 1) if self.turned else numbers

    def astype(self, dtype: Any) -> Value:
        """The numbers in ``dtype``: ``dequantize``."""
        return self.dequantize(dtype)

    def __jax_array__(self) -> Value:
        return self.dequantize()

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray[Any, Any]:  # noqa: FBT001  NumPy's protocol
        numbers = np.asarray(self.dequantize())
        return numbers if dtype is None else numbers.astype(np.dtype(dtype))  # type: ignore[call-overload]

    @property
    def mT(self) -> QuantizedArray:
        """The same blocks with the last two axes exchanged."""
        return QuantizedArray(self.blocks, turned=not self.turned)

    @property
    def T(self) -> QuantizedArray:
        """The transpose of a matrix, in the same blocks.

        Raises:
            ShapeError: there are not two axes.
        """
        if self.ndim != 2:
            raise ShapeError(f"T: {self!r} has {self.ndim} axes, expected 2; use mT")
        return self.mT

    def __matmul__(self, other: Any) -> Value:
        return jnp.matmul(self, other)

    def __rmatmul__(self, other: Any) -> Value:
        return jnp.matmul(other, self)

    def __getitem__(self, index: Any) -> QuantizedArray:
        """Integers, slices and integer arrays along leading axes; the last axis stays whole.

        Raises:
            ArgumentError: the index reaches the axis of the blocks, or the array is turned.
        """
        parts = cast("tuple[Any, ...]", index) if isinstance(index, tuple) else (index,)
        plain = all(isinstance(p, (int, slice, np.integer)) or _is_integers(p) for p in parts)
        last = len(parts) >= self.ndim
        if last and parts[-1] == slice(None):
            parts, last = parts[:-1], False
        if not plain or last or self.turned:
            raise ArgumentError(
                f"index: {index!r} of {self!r}; expected integers and slices of the axes before "
                "the last one, whose blocks stay whole; index the result of dequantize()"
            )
        traced = any(isinstance(part, Tracer) for part in parts)
        return QuantizedArray(get(self.blocks, parts) if traced else self.blocks[parts])

    def reshape(self, *shape: Any) -> QuantizedArray:
        """Other leading axes; the last axis stays as it is.

        Raises:
            ShapeError: the last axis changes, or the sizes differ.
        """
        given = shape[0] if len(shape) == 1 else shape
        sizes: tuple[int, ...] = (given,) if isinstance(given, int) else tuple(given)
        row = self.shape[-1]
        if self.turned or not sizes or sizes[-1] not in (row, -1):
            raise ShapeError(
                f"reshape: {self!r} to {sizes}; expected a last axis of {row}, whose blocks stay "
                "whole; reshape the result of dequantize()"
            )
        return QuantizedArray(jnp.reshape(self.blocks, (*sizes[:-1], row // self.block_type.size)))


def _is_integers(part: Any) -> bool:
    is_array = isinstance(part, (np.ndarray, Tracer)) or hasattr(part, "aval")
    return is_array and dtypes.is_int(aval_of(part).dtype)


def block_type_of(block_type: str | BlockType) -> BlockType:
    """A block type, by itself or by its name.

    Raises:
        DTypeError: there is none of that name.
    """
    return _blocks.named(block_type) if isinstance(block_type, str) else block_type


def from_bytes(raw: Any, block_type: str | BlockType, shape: Sequence[int]) -> QuantizedArray:
    """The quantized array whose blocks lie in ``raw``, as GGUF files hold them.

    Args:
        raw: bytes, or an array of bytes; not copied before it goes to a device.
        block_type: such as ``"Q4_K"``.
        shape: in numbers; the last axis is a multiple of the block's size.

    Raises:
        ShapeError: the last axis is no multiple of the block's size.
        ArgumentError: ``raw`` has another number of bytes.
    """
    block, sizes = block_type_of(block_type), tuple(shape)
    if not sizes or sizes[-1] % block.size:
        raise ShapeError(
            f"from_bytes: shape {sizes} of {block}; expected a last axis of a multiple of "
            f"{block.size} numbers"
        )
    counts = (*sizes[:-1], sizes[-1] // block.size)
    given = np.frombuffer(raw, np.uint8) if isinstance(raw, bytes) else np.asarray(raw)
    data = np.ascontiguousarray(given).reshape(-1).view(np.uint8)
    if data.size != math.prod(counts) * block.nbytes:
        raise ArgumentError(
            f"from_bytes: {data.size} bytes for {block} of shape {sizes}; expected "
            f"{math.prod(counts) * block.nbytes}"
        )
    return QuantizedArray(data.view(block.dtype).reshape(counts))


def dequantize(x: Any, dtype: Any = dtypes.float32) -> Value:
    """The numbers of a quantized array, or of an array of blocks, as a float dtype."""
    held = x if isinstance(x, QuantizedArray) else QuantizedArray(x)
    return held.dequantize(dtype)


def quantize(x: Any, block_type: str | BlockType) -> QuantizedArray:
    """``x`` in blocks, byte for byte as ggml's reference quantisers have it.

    Q8_0 and Q4_0 are computed where ``x`` is, in compiled functions too. The other types that
    ``vkjit.blocks.encode`` knows are computed on the host.

    Args:
        x: floats whose last axis is a multiple of the block's size.
        block_type: such as ``"q8_0"``.

    Raises:
        DTypeError: ``x`` holds no floats, or is traced and the type is computed on the host.
        ShapeError: rows are not whole blocks.
    """
    block, of = block_type_of(block_type), aval_of(x)
    if not dtypes.is_float(of.dtype):
        raise DTypeError(f"quantize: operand {of}; expected floats")
    if not of.ndim or of.shape[-1] % block.size:
        raise ShapeError(
            f"quantize: operand {of} as {block}; expected a last axis of a multiple of {block.size}"
        )
    coder = _CODERS.get(block.name)
    if coder is not None:
        rows = jnp.reshape(x, (*of.shape[:-1], of.shape[-1] // block.size, block.size))
        return QuantizedArray(_ops.as_blocks(coder(jnp.astype(rows, dtypes.float32)), block))
    if isinstance(x, Tracer):
        raise DTypeError(
            f"quantize: traced operand {of} as {block}; compiled functions compute "
            f"{', '.join(_CODERS)}; quantize a concrete array"
        )
    return QuantizedArray(_blocks.encode(block, np.asarray(x, np.float32)))


def _inverse(scale: Value) -> Value:
    """1 / scale, and 0 where a block holds zeros only."""
    zero = scale == 0
    return jnp.where(zero, 0.0, 1.0 / jnp.where(zero, 1.0, scale))


def _half(scale: Value) -> Value:
    """A float32 scale rounded to float16, as int16."""
    return bitcast_convert_type(jnp.astype(scale, dtypes.float16), dtypes.int16)


def _pairs(codes: Value) -> Value:
    """Bytes, in int32, as int16 of two each."""
    paired = jnp.reshape(codes, (*codes.shape[:-1], codes.shape[-1] // 2, 2))
    low, high = paired[..., 0] & 255, paired[..., 1] & 255
    return jnp.astype(low | (high << _BITS_OF_BYTE), dtypes.int16)


def _code_q8_0(rows: Value) -> Value:
    """Scale max|x| / 127 and codes round(x / scale), ties away from zero."""
    scale = jnp.max(jnp.abs(rows), axis=-1, keepdims=True) / np.float32(127)
    scaled = rows * _inverse(scale)
    size = jnp.abs(scaled)
    whole = jnp.floor(size)
    rounded = whole + jnp.astype(size - whole >= 0.5, dtypes.float32)
    codes = jnp.astype(jnp.where(scaled < 0, -rounded, rounded), dtypes.int32)
    return jnp.concatenate([_half(scale), _pairs(codes)], axis=-1)


def _code_q4_0(rows: Value) -> Value:
    """Scale extreme / -8 and codes trunc(x / scale + 8.5), at most 15."""
    at = jnp.argmax(jnp.abs(rows), axis=-1, keepdims=True)
    scale = jnp.take_along_axis(rows, at, axis=-1) / np.float32(-8)
    codes = jnp.trunc(rows * _inverse(scale) + np.float32(8.5))
    codes = jnp.astype(jnp.clip(codes, 0, 15), dtypes.int32)
    half = codes.shape[-1] // 2
    packed = codes[..., :half] | (codes[..., half:] << 4)
    return jnp.concatenate([_half(scale), _pairs(packed)], axis=-1)


_CODERS = {"Q8_0": _code_q8_0, "Q4_0": _code_q4_0}
