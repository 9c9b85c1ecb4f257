"""``x.at[index]``: copies of an array with a part of it changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict, Unpack, final

from vkjit.numpy import _scatter
from vkjit.numpy._core import ArrayLike
from vkjit.numpy._creation import full_like
from vkjit.numpy._elementwise import negative, power, true_divide
from vkjit.numpy._scatter import Mode

if TYPE_CHECKING:
    from vkjit.array import Array


@final
class Options(TypedDict, total=False):
    """What methods of ``x.at[index]`` take by name; see there."""

    mode: Mode
    indices_are_sorted: bool
    unique_indices: bool
    wrap_negative_indices: bool


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
    keeps the last.

    ``mode`` says what indices out of range do: "drop" (or "fill") nothing, "clip" they count as the
    nearest end. Without it, or with "promise_in_bounds", index arrays drop and a static integer is
    refused. ``unique_indices`` promises that none occurs twice, which saves work. With
    ``wrap_negative_indices=False`` negative indices are out of range. ``indices_are_sorted`` is
    accepted as in JAX and changes nothing.
    """

    __slots__ = ("_array", "_index")

    def __init__(self, array: Array, index: Any) -> None:
        self._array = array
        self._index = index

    def get(
        self,
        *,
        mode: Mode = None,
        fill_value: Any = None,
        indices_are_sorted: bool = False,
        unique_indices: bool = False,
        wrap_negative_indices: bool = True,
    ) -> Array:
        """``x[index]``; out of range, index arrays clamp, or ``mode`` "fill" gives ``fill_value``.

        Args:
            mode: as in ``vkjit.numpy._scatter.get``: "clip", "fill" (or "drop"), "wrap".
            fill_value: None: NaN, the lowest signed or the highest unsigned integer, True.
            indices_are_sorted: accepted as in JAX.
            unique_indices: accepted as in JAX.
            wrap_negative_indices: whether negative indices count from the end.
        """
        del indices_are_sorted, unique_indices
        return _scatter.get(
            self._array,
            self._index,
            mode=mode,
            fill_value=fill_value,
            wrap=wrap_negative_indices,
        )

    def set(self, values: ArrayLike, **options: Unpack[Options]) -> Array:
        """``x[index] = values``."""
        return self._updated(values, "set", options)

    def add(self, values: ArrayLike, **options: Unpack[Options]) -> Array:
        """``x[index] += values``."""
        return self._updated(values, "add", options)

    def subtract(self, values: ArrayLike, **options: Unpack[Options]) -> Array:
        """``x[index] -= values``."""
        return self._updated(negative(values), "add", options)

    def multiply(self, values: ArrayLike, **options: Unpack[Options]) -> Array:
        """``x[index] *= values``."""
        return self._updated(values, "multiply", options)

    mul = multiply

    def divide(self, values: ArrayLike, **options: Unpack[Options]) -> Array:
        """``x[index] /= values``; integers become floats, as by ``/``."""
        return true_divide(self._array, self._of_ones(values, options))

    def power(self, values: ArrayLike, **options: Unpack[Options]) -> Array:
        """``x[index] **= values``."""
        return power(self._array, self._of_ones(values, options))

    def min(self, values: ArrayLike, **options: Unpack[Options]) -> Array:
        """``x[index] = minimum(x[index], values)``."""
        return self._updated(values, "min", options)

    def max(self, values: ArrayLike, **options: Unpack[Options]) -> Array:
        """``x[index] = maximum(x[index], values)``."""
        return self._updated(values, "max", options)

    def _updated(
        self, values: ArrayLike, how: _scatter.Update, options: Options, to: Array | None = None
    ) -> Array:
        return _scatter.update(
            self._array if to is None else to,
            self._index,
            values,
            how,
            options.get("mode"),
            unique=options.get("unique_indices", False),
            wrap=options.get("wrap_negative_indices", True),
        )

    def _of_ones(self, values: ArrayLike, options: Options) -> Array:
        """The product of the values at each position, and 1 where there are none."""
        ones = full_like(self._array, 1)
        return self._updated(values, "multiply", options, ones)
