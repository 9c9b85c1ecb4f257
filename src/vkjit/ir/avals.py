"""Abstract values: the shape and dtype of an array, interned so that ``is`` compares them."""

from __future__ import annotations

import math
from typing import final

from vkjit.blocks import BlockType, block_of
from vkjit.dtypes import DType, short


@final
class Aval:
    """Shape, dtype and weakness of an array. Make one with ``aval``; equal avals are identical.

    ``block`` is the block type of quantized arrays, whose shapes count blocks.
    """

    __slots__ = ("block", "dtype", "shape", "weak")

    def __init__(self, shape: tuple[int, ...], dtype: DType, *, weak: bool) -> None:
        self.shape = shape
        self.dtype = dtype
        self.weak = weak
        self.block: BlockType | None = block_of(dtype)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of a dense array."""
        return self.size * self.dtype.itemsize

    def __repr__(self) -> str:
        dims = ",".join(map(str, self.shape))
        return f"{short(self.dtype)}[{dims}]{'*' if self.weak else ''}"

    def __reduce__(self) -> tuple[object, ...]:
        return aval, (self.shape, self.dtype, self.weak)


_interned: dict[tuple[tuple[int, ...], DType, bool], Aval] = {}


def aval(shape: tuple[int, ...], dtype: DType, weak: bool = False) -> Aval:  # noqa: FBT001
    """The interned aval; ``f32[3,4]`` prints one, a trailing ``*`` marks a weak type."""
    key = (shape, dtype, weak)
    found = _interned.get(key)
    if found is None:
        found = _interned[key] = Aval(shape, dtype, weak=weak)
    return found
