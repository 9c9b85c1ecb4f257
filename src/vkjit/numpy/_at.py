"""``x.at[index]``: copies of an array with a part of it changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from vkjit.numpy import _scatter
from vkjit.numpy._core import ArrayLike
from vkjit.numpy._elementwise import negative, reciprocal

if TYPE_CHECKING:
    from vkjit.array import Array


@final
class At:
    """``x.at``: index it to say which part of a copy of ``x`` changes."""

    __slots__ = ("_array",)

    def __init__(self, array: Array) -> None:
        self._array = array

    def __getitem__(self, index: Any) -> AtIndex:
        return AtIndex(self._array, index)


@final
class AtIndex:
    """``x.at[index]``: methods give a copy of ``x`` with the elements at ``index`` changed.

    Values broadcast to the shape of ``x[index]`` and are cast to the dtype of ``x``. Indices that
    occur more than once: ``add``, ``multiply``, ``min`` and ``max`` apply every value, ``set``
    keeps the last. Indices out of range are dropped (``get`` clamps them), as ``mode`` says.
    """

    __slots__ = ("_array", "_index")

    def __init__(self, array: Array, index: Any) -> None:
        self._array = array
        self._index = index

    def get(self, *, mode: str | None = None, fill_value: Any = None) -> Array:
        """``x[index]``; ``mode`` 'clip' (default), 'fill' or 'wrap' for indices out of range."""
        return _scatter.get(self._array, self._index, mode=mode, fill_value=fill_value)

    def set(self, values: ArrayLike, *, mode: str | None = None) -> Array:
        """``x[index] = values``."""
        return _scatter.update(self._array, self._index, values, "set", mode)

    def add(self, values: ArrayLike, *, mode: str | None = None) -> Array:
        """``x[index] += values``."""
        return _scatter.update(self._array, self._index, values, "add", mode)

    def subtract(self, values: ArrayLike, *, mode: str | None = None) -> Array:
        """``x[index] -= values``."""
        return _scatter.update(self._array, self._index, negative(values), "add", mode)

    def multiply(self, values: ArrayLike, *, mode: str | None = None) -> Array:
        """``x[index] *= values``."""
        return _scatter.update(self._array, self._index, values, "multiply", mode)

    mul = multiply

    def divide(self, values: ArrayLike, *, mode: str | None = None) -> Array:
        """``x[index] /= values``."""
        return _scatter.update(self._array, self._index, reciprocal(values), "multiply", mode)

    def min(self, values: ArrayLike, *, mode: str | None = None) -> Array:
        """``x[index] = minimum(x[index], values)``."""
        return _scatter.update(self._array, self._index, values, "min", mode)

    def max(self, values: ArrayLike, *, mode: str | None = None) -> Array:
        """``x[index] = maximum(x[index], values)``."""
        return _scatter.update(self._array, self._index, values, "max", mode)
