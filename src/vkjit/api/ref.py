"""Ref: the one mutable thing, an array that is written in place.

A write is an operation of the program (``copy_into``): it takes the array before and gives the
array after, so every later read depends on it by data, and no pass can repeat it or move it across
a reader. Pass a ``Ref`` to a jitted function to let it write the caller's memory.
"""

from __future__ import annotations

from typing import Any, final

from vkjit.array import Array
from vkjit.dtypes import promote
from vkjit.errors import DTypeError, IndexingError, ShapeError, TracerError
from vkjit.ir.avals import Aval
from vkjit.ir.primitive import Value
from vkjit.numpy import asarray, broadcast_to
from vkjit.numpy._index import Point, Run, parse
from vkjit.ops.reshaping import reshape
from vkjit.ops.write import copy_into
from vkjit.trace import aval_of, current_trace


@final
class Ref:
    """An array that ``ref[index] = value`` writes in place and ``ref[index]`` reads.

    Indices of writes are integers and slices with positive steps, known when the function is
    traced. The dtype of a value must be one that the array holds.

    Args:
        value: the first contents; an array, or anything ``vkjit.numpy.asarray`` takes.
    """

    __slots__ = ("_owner", "_value")

    def __init__(self, value: Any) -> None:
        self._value: Value = asarray(value)
        self._owner = current_trace()

    @property
    def aval(self) -> Aval:
        """Shape and dtype of the contents."""
        return aval_of(self._value)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return self.aval.shape

    @property
    def dtype(self) -> Any:
        """Element type."""
        return self.aval.dtype

    @property
    def value(self) -> Array:
        """The contents now; later writes do not change what was read."""
        return self._value

    def replace(self, value: Value) -> None:
        """Makes ``value``, of the same aval, the contents."""
        self._value = value

    def __getitem__(self, index: Any) -> Array:
        return self._value if index is Ellipsis else self._value[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        if current_trace() is not self._owner:
            raise TracerError(
                f"ref: a Ref {self.aval} made outside the traced function was written inside it; "
                "pass the Ref to the jitted function as an argument"
            )
        self._value = _written(self._value, index, self._fitting(value))

    def _fitting(self, value: Any) -> Value:
        """``value`` in the dtype of the contents, which must be able to hold it."""
        of, given = self.aval, aval_of(value)
        dtype, _ = promote((of.dtype, False), (given.dtype, given.weak))
        if dtype != of.dtype:
            raise DTypeError(
                f"ref: a value {given} was written to a Ref {of}; expected a dtype that "
                f"{of.dtype.name} holds; cast it with .astype(...)"
            )
        return asarray(value, of.dtype)

    def __repr__(self) -> str:
        return f"Ref({self._value!r})"


def _written(dest: Value, index: Any, value: Value) -> Value:
    """``dest`` with ``value`` broadcast over the region ``index``."""
    of = aval_of(dest)
    starts: list[int] = []
    strides: list[int] = []
    region: list[int] = []
    visible: list[int] = []
    for step in parse(of, index):
        if isinstance(step, Point):
            starts.append(step.at)
            strides.append(1)
            region.append(1)
        elif isinstance(step, Run) and step.step > 0:
            starts.append(step.start)
            strides.append(step.step)
            region.append(step.count)
            visible.append(step.count)
        else:
            raise IndexingError(
                f"ref: {index!r} cannot say where to write in {of}; expected integers and slices "
                "with positive steps"
            )
    try:
        spread = broadcast_to(value, tuple(visible))
    except ShapeError as error:
        raise ShapeError(
            f"ref: value {aval_of(value)} does not fit the region {tuple(visible)} of {of}"
        ) from error
    return copy_into(dest, reshape(spread, tuple(region)), tuple(starts), tuple(strides))
