"""Writes, which run exactly once: of a region (copy_into), of rows at indices (set_rows)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from vkjit import dtypes
from vkjit.errors import DTypeError, ShapeError
from vkjit.ir.avals import Aval, aval
from vkjit.ir.primitive import Array, Kind, Linear, Op, Remat, Sample, Tangent, Traits, Value
from vkjit.lowering.kernel.specs import KernelSpec, SetRowsSpec, WriteSpec
from vkjit.lowering.kernel.views import dense
from vkjit.ops.indexing import RowUpdate, repeated
from vkjit.ops.logical import select
from vkjit.ops.movement import pad, slice_
from vkjit.ops.structural import full, zeros
from vkjit.trace import aval_of, bind

Ints = tuple[int, ...]


@final
@dataclass(frozen=True)
class CopyInto(Op):
    """``dest`` with ``value`` written from ``starts`` on by ``strides``; operands (dest, value).

    The result lives in the memory of ``dest``: the old contents are gone, so the write runs once
    and no pass moves it across a reader.
    """

    starts: Ints
    strides: Ints

    traits: ClassVar[Traits] = Traits(Kind.WRITE, Remat.ONCE, linear_in=(0, 1), effect=True)

    def infer(self, *avals: Aval) -> Aval:
        """The region lies inside the destination; dtypes agree."""
        dest, value = avals
        if dest.dtype != value.dtype:
            raise DTypeError(
                f"copy_into: destination {dest}, value {value}; expected one dtype; "
                "cast with .astype(...)"
            )
        fits = len(self.starts) == len(self.strides) == dest.ndim == value.ndim
        if not fits or any(
            start < 0 or stride < 1 or (n and start + (n - 1) * stride >= size)
            for start, stride, n, size in zip(
                self.starts, self.strides, value.shape, dest.shape, strict=True
            )
        ):
            raise ShapeError(
                f"copy_into: value {value} at starts {self.starts}, strides {self.strides} does "
                f"not lie inside destination {dest}; expected a region of the destination"
            )
        return aval(dest.shape, dest.dtype)

    def _limits(self, shape: Ints) -> Ints:
        return tuple(
            start + (n - 1) * stride + 1 if n else start
            for start, stride, n in zip(self.starts, self.strides, shape, strict=True)
        )

    def evaluate(self, *arrays: Array) -> Array:
        """Writes into a copy; the evaluator has values, not memory."""
        dest, value = arrays
        out = np.array(dest)
        out[tuple(map(slice, self.starts, self._limits(value.shape), self.strides))] = value
        return out

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """Writes the tangent of the value into the tangent of the destination."""
        filled = [
            zeros(aval_of(p)) if t is None else t for p, t in zip(primals, tangents, strict=True)
        ]
        return bind(self, *primals), bind(self, *filled)

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """The region of the cotangent for the value; the rest, zero in the region, for dest."""
        (ct,) = cotangents
        dest, value = args
        of = aval_of(ct)
        shape = (value.aval if isinstance(value, Linear) else aval_of(value)).shape
        limits = self._limits(shape)
        to_dest = to_value = None
        if isinstance(dest, Linear):
            after = tuple(n - limit for n, limit in zip(of.shape, limits, strict=True))
            between = tuple(s - 1 for s in self.strides)
            written = pad(full(shape, np.True_), np.False_, self.starts, after, between)
            to_dest = select(written, of.dtype.type(0), ct)
        if isinstance(value, Linear):
            to_value = slice_(ct, self.starts, limits, self.strides)
        return to_dest, to_value

    def batch(self, args: Sequence[Value], batched: Sequence[bool]) -> Value:
        """The batch axis is written whole; each example has a destination of its own."""
        size = next(aval_of(a).shape[0] for a, flag in zip(args, batched, strict=True) if flag)
        pairs = zip(args, batched, strict=True)
        dest, value = [a if flag else repeated(a, size) for a, flag in pairs]
        return bind(CopyInto((0, *self.starts), (1, *self.strides)), dest, value)

    def kernel_spec(self, avals: Sequence[Aval], out: Aval) -> KernelSpec:
        """A write to the region."""
        return WriteSpec(dense(out.shape).sliced(self.starts, avals[1].shape, self.strides))

    @classmethod
    def samples(cls) -> list[Sample]:
        """Inner, strided, whole and empty regions; dtypes."""
        f = dtypes.float32
        dest = aval((4, 6), f)
        made = [
            Sample(cls((1, 2), (1, 1)), (dest, aval((2, 3), f))),
            Sample(cls((0, 1), (2, 2)), (dest, aval((2, 3), f))),
            Sample(cls((0, 0), (1, 1)), (dest, dest)),
            Sample(cls((4, 0), (1, 1)), (dest, aval((0, 6), f))),
        ]
        for dtype in (dtypes.float16, dtypes.bfloat16, dtypes.int8, dtypes.bool_):
            pair = aval((4, 6), dtype), aval((2, 3), dtype)
            made.append(Sample(cls((1, 2), (1, 1)), pair, 0.0))
        return made


def copy_into(dest: Value, value: Value, starts: Ints, strides: Ints | None = None) -> Value:
    """Writes ``value`` into ``dest`` from ``starts`` on; returns ``dest`` as it is afterwards."""
    return bind(CopyInto(starts, (1,) * len(starts) if strides is None else strides), dest, value)


@dataclass(frozen=True)
class _Rows(RowUpdate):
    """``out = x; out[a, indices[i...], c] = updates[a, i..., c]``; no index inside occurs twice."""

    def infer(self, *avals: Aval) -> Aval:
        """See ``RowUpdate.infer``; the result is never weak."""
        out = super().infer(*avals)
        return aval(out.shape, out.dtype)

    def evaluate(self, *arrays: Array) -> Array:
        """Writes into a copy, in order."""
        x, indices, updates = arrays
        out = np.array(x)
        rows, flat, given = self.rows(out, indices, updates)
        inside = (flat >= 0) & (flat < len(rows))
        rows[flat[inside]] = given[inside]
        return out

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """Writes the tangents of the rows into the tangent of the destination."""
        x, indices, updates = primals
        dx, _, du = tangents
        dx = zeros(aval_of(x)) if dx is None else dx
        du = zeros(aval_of(updates)) if du is None else du
        return bind(self, *primals), bind(self, dx, indices, du)

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """What a gather reads for the rows; the rest, zero where they went, for x."""
        (ct,) = cotangents
        x, indices, updates = args
        of = updates.aval if isinstance(updates, Linear) else aval_of(updates)
        to_x = bind(self, ct, indices, zeros(of)) if isinstance(x, Linear) else None
        if not isinstance(updates, Linear):
            return to_x, None, None
        return to_x, None, self.to_updates(ct, indices, of)

    def kernel_spec(self, avals: Sequence[Aval], out: Aval) -> KernelSpec:
        """A write at indices."""
        return SetRowsSpec(self.axis)

    @classmethod
    def samples(cls) -> list[Sample]:
        """One index inside or out of range, or none; dtypes."""
        narrow = (dtypes.float16, dtypes.bfloat16, dtypes.int8, dtypes.uint32, dtypes.bool_)
        return cls.samples_of([(), (1,), (0,)], narrow)


@final
@dataclass(frozen=True)
class SetRows(_Rows):
    """A write of rows: the result lives in the memory of ``x``, as that of ``CopyInto``."""

    traits: ClassVar[Traits] = Traits(Kind.WRITE, Remat.ONCE, linear_in=(0, 2), effect=True)


@final
@dataclass(frozen=True)
class WithRows(_Rows):
    """The value that a write of rows would leave.

    It is made in the memory of ``x`` where nobody needs that any more, and may be made again.
    """

    traits: ClassVar[Traits] = Traits(Kind.INDEXED, Remat.COSTLY, linear_in=(0, 2))


def set_rows(dest: Value, indices: Value, rows: Value, axis: int) -> Value:
    """Writes ``rows`` into ``dest`` at i32 ``indices`` along ``axis``; returns ``dest`` after it.

    No index may occur twice; those out of range are dropped.
    """
    return bind(SetRows(axis), dest, indices, rows)


def with_rows(x: Value, indices: Value, rows: Value, axis: int) -> Value:
    """``x`` with ``rows`` in the place of those at i32 ``indices`` along ``axis``.

    No index may occur twice; those out of range are dropped.
    """
    return bind(WithRows(axis), x, indices, rows)
