"""Ref: the one mutable thing, an array that is written in place.

A write is an operation of the program: it takes the array before and gives the array after, so
every later read depends on it by data, and no pass can repeat it or move it across a reader. Pass
a ``Ref`` to a jitted function to let it write the caller's memory. Bodies of loops, branches and
checkpoints may write a ``Ref`` of the function around them.
"""

from __future__ import annotations

from typing import Any, ClassVar, final

from vkjit.api.region import added, placed, set_rows_at
from vkjit.array import Array
from vkjit.control.cells import Cell
from vkjit.dtypes import promote
from vkjit.errors import DTypeError
from vkjit.ir.avals import Aval
from vkjit.ir.primitive import Value
from vkjit.numpy import asarray
from vkjit.trace import aval_of


@final
class Ref(Cell):
    """An array that ``ref[index] = value`` writes in place and ``ref[index]`` reads.

    An index of a write consists of integers, slices with positive steps and integer arrays;
    integers and arrays may be traced. Where arrays name an element more than once, the last value
    stays; what they name outside the array is dropped. The dtype of a value must be one that the
    array holds.

    A jitted function that writes a Ref takes over the memory of its contents: arrays that were read
    as a whole before, or given as first contents, are gone then, as after donation.

    Args:
        value: the first contents; an array, or anything ``vkjit.numpy.asarray`` takes.
    """

    __slots__ = ()
    array_hint: ClassVar[str] = "a Ref is no array: read it with ref[...]"

    def __init__(self, value: Any) -> None:
        super().__init__(asarray(value, aval_of(value).dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return self._aval.shape

    @property
    def dtype(self) -> Any:
        """Element type."""
        return self._aval.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self._aval.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._aval.size

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self._aval.nbytes

    @property
    def value(self) -> Array:
        """The contents now; later writes do not change what was read."""
        return self.take()

    def replace(self, value: Value) -> None:
        """Makes ``value``, of the same aval, the contents."""
        self.put(value)

    def __getitem__(self, index: Any) -> Array:
        contents = self.take()
        return contents if index is Ellipsis else contents[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.put(placed(self.take(), index, self._fitting(value)))

    def add(self, index: Any, value: Any) -> None:
        """``ref[index] += value``, where arrays that name an element more than once add each value.

        Raises:
            ShapeError, DTypeError, IndexingError: as a write does.
            TracerError: the Ref is not of the function that is being traced.
        """
        self.put(added(self.take(), index, self._fitting(value)))

    def set_rows(self, indices: Any, rows: Any, *, axis: int = 0, unique: bool = False) -> None:
        """Writes ``rows`` at ``indices`` along ``axis``: a cache's new entries, say.

        Args:
            indices: integers of any shape, traced or not; negative ones count from the end, those
                out of range are dropped.
            rows: of the shape that ``jnp.take(ref, indices, axis)`` has, or broadcast to it.
            axis: of the Ref.
            unique: promise that no index occurs twice; without it the last row of several stays,
                which takes longer to find out.
        """
        made = set_rows_at(self.take(), indices, self._fitting(rows), axis, unique=unique)
        self.put(made)

    @property
    def _aval(self) -> Aval:
        return aval_of(self.take())

    def _fitting(self, value: Any) -> Value:
        """``value`` in the dtype of the contents, which must be able to hold it."""
        of, given = self._aval, aval_of(value)
        dtype, _ = promote((of.dtype, False), (given.dtype, given.weak))
        if dtype != of.dtype:
            raise DTypeError(
                f"ref: a value {given} was written to a Ref {of}; expected a dtype that "
                f"{of.dtype.name} holds; cast it with .astype(...)"
            )
        return asarray(value, of.dtype)

    def __repr__(self) -> str:
        return f"Ref({self.take()!r})"
