"""Access by index arrays along one axis: gather and scatter_add, closed under transpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from vkjit import dtypes
from vkjit.dtypes import DType
from vkjit.errors import DTypeError, IndexingError, ShapeError
from vkjit.ir.avals import Aval, aval
from vkjit.ir.primitive import Array, Kind, Linear, Op, Remat, Sample, Tangent, Traits, Value
from vkjit.lowering.kernel.specs import GatherSpec, KernelSpec, ScatterAddSpec
from vkjit.ops.arithmetic import mul
from vkjit.ops.compare import eq, ge, lt
from vkjit.ops.extrema import clamp
from vkjit.ops.logical import and_, select
from vkjit.ops.movement import iota
from vkjit.ops.reshaping import reshape
from vkjit.ops.structural import add, broadcast, permute, zeros
from vkjit.trace import aval_of, bind

Ints = tuple[int, ...]


def check_indices(name: str, x: Aval, indices: Aval, axis: int) -> None:
    """Refuses indices that are not i32, or an axis that does not exist."""
    if indices.dtype != dtypes.int32:
        raise DTypeError(f"{name}: indices {indices} for operand {x}; expected i32; cast them")
    if not 0 <= axis < x.ndim:
        raise ShapeError(f"{name}: axis {axis} for operand {x}; expected one below {x.ndim}")


def joined(x: Ints, indices: Ints, axis: int) -> Ints:
    """The shape of ``x`` with ``axis`` replaced by the axes of the indices."""
    return x[:axis] + indices + x[axis + 1 :]


@final
@dataclass(frozen=True)
class Gather(Op):
    """``out[a, i..., c] = x[a, indices[i...], c]`` along ``axis``.

    Operands are (x, indices), indices i32 of any shape; those out of range clamp to the ends.

    With ``line``, x has rank 1 and index number i lies in ``[i * line, (i + 1) * line)``: each line
    gives one element. The transpose then compares positions instead of scattering.
    """

    axis: int
    line: int = 0

    traits: ClassVar[Traits] = Traits(Kind.INDEXED, Remat.COSTLY, linear_in=(0,), moves_blocks=True)

    def infer(self, *avals: Aval) -> Aval:
        """Indices are i32; something is there to gather."""
        x, indices = avals
        check_indices(self.name, x, indices, self.axis)
        if self.line and x.shape != (indices.size * self.line,):
            raise ShapeError(
                f"gather: operand {x} and indices {indices} for lines of {self.line} elements; "
                "expected one index for each line"
            )
        if x.shape[self.axis] == 0 and indices.size:
            raise IndexingError(
                f"gather: operand {x} is empty along axis {self.axis}, indices {indices}; "
                "expected at least one element"
            )
        return aval(joined(x.shape, indices.shape, self.axis), x.dtype, x.weak)

    def evaluate(self, *arrays: Array) -> Array:
        """np.take of clamped indices."""
        x, indices = arrays
        if x.shape[self.axis] == 0:
            return np.zeros(joined(x.shape, indices.shape, self.axis), x.dtype)
        return np.asarray(np.take(x, indices, axis=self.axis, mode="clip"))

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """Linear in the array."""
        x, indices = primals
        out = bind(self, x, indices)
        return out, None if tangents[0] is None else bind(self, tangents[0], indices)

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """Adds each cotangent where its element came from."""
        x, indices = args
        assert isinstance(x, Linear)
        if self.line:
            return self._to_lines(cotangents[0], x.aval, indices), None
        last = np.int32(max(x.aval.shape[self.axis] - 1, 0))
        inside = clamp(np.int32(0), indices, last)
        return scatter_add(zeros(x.aval), inside, cotangents[0], self.axis), None

    def _to_lines(self, ct: Value, of: Aval, indices: Value) -> Value:
        """The cotangent at the chosen position of each line, zeros elsewhere."""
        shape = (aval_of(indices).size, self.line)
        positions = reshape(iota(dtypes.int32, of.shape, 0), shape)
        chosen, there = (broadcast(reshape(v, shape[:1]), shape, (0,)) for v in (indices, ct))
        placed = select(eq(positions, chosen), there, of.dtype.type(0))
        return reshape(placed, of.shape)

    def batch(self, args: Sequence[Value], batched: Sequence[bool]) -> Value:
        """One of both batched needs views only; both become one gather over rows of the batch."""
        x, indices = args
        if not batched[1]:
            return gather(x, indices, self.axis + 1)
        if not batched[0]:
            out = gather(x, indices, self.axis)
            return permute(out, _front(self.axis, aval_of(out).ndim))
        rows, flat, order = _flattened(x, indices, self.axis)
        return permute(gather(rows, flat, 0, self.line), order)

    def kernel_spec(self, avals: Sequence[Aval], out: Aval) -> KernelSpec:
        """A gather."""
        return GatherSpec(self.axis)

    @classmethod
    def samples(cls) -> list[Sample]:
        """Each axis, indices of rank 0 to 2, some out of range; dtypes."""
        f = aval((3, 5, 4), dtypes.float32)
        made = [
            Sample(cls(axis), (f, aval(shape, dtypes.int32)), -2.0, 7.0)
            for axis in range(3)
            for shape in ((), (6,), (2, 3), (0,))
        ]
        for dtype in (dtypes.float16, dtypes.bfloat16, dtypes.int8, dtypes.uint32, dtypes.bool_):
            pair = aval((5, 3), dtype), aval((7,), dtypes.int32)
            made.append(Sample(cls(0), pair, 0.0, 7.0))
        one_line = aval((5,), dtypes.float32), aval((1, 1), dtypes.int32)
        return [*made, Sample(cls(0, line=5), one_line, 0.0, 4.0)]


def _front(axis: int, rank: int) -> Ints:
    """The permutation that brings ``axis`` to the front."""
    return (axis, *(i for i in range(rank) if i != axis))


def _flattened(x: Value, indices: Value, axis: int) -> tuple[Value, Value, Ints]:
    """A batched gather as one over rows: ``x`` as [batch * n, a, c], indices with row offsets.

    Indices are clamped first, so that none reaches into a neighbouring batch element.

    Returns:
        rows, indices [batch, i...], and the permutation of [batch, i..., a, c] to
        [batch, a, i..., c].
    """
    of, idx = aval_of(x), aval_of(indices)
    size, n = of.shape[0], of.shape[axis + 1]
    others = tuple(i for i in range(1, of.ndim) if i != axis + 1)
    moved = permute(x, (0, axis + 1, *others))
    rows = reshape(moved, (size * n, *(of.shape[i] for i in others)))
    inside = clamp(np.int32(0), indices, np.int32(max(n - 1, 0)))
    flat = add(inside, _row_offsets(size, n, idx.shape))
    count = idx.ndim - 1
    before = tuple(range(1 + count, 1 + count + axis))
    after = tuple(range(1 + count + axis, count + of.ndim - 1))
    return rows, flat, (0, *before, *range(1, 1 + count), *after)


def _row_offsets(size: int, n: int, shape: Ints) -> Value:
    """``n * b`` for batch element b, repeated to ``shape``."""
    offsets = mul(iota(dtypes.int32, (size,), 0), np.int32(n))
    return broadcast(offsets, shape, (0,))


@dataclass(frozen=True)
class RowUpdate(Op):
    """``x`` with ``updates[a, i..., c]`` joined to its elements ``x[a, indices[i...], c]``.

    Operands are (x, indices, updates), indices i32; those out of range are dropped. Subclasses say
    what joining is.
    """

    axis: int

    def at(self, axis: int, *operands: Value) -> Value:
        """The same of ``operands`` along another axis."""
        return bind(type(self)(axis), *operands)

    def infer(self, *avals: Aval) -> Aval:
        """Updates have the shape that a gather would give."""
        x, indices, updates = avals
        check_indices(self.name, x, indices, self.axis)
        if updates.dtype != x.dtype:
            raise DTypeError(
                f"{self.name}: operand {x} and updates {updates}; expected one dtype; "
                "cast with .astype(...)"
            )
        expected = joined(x.shape, indices.shape, self.axis)
        if updates.shape != expected:
            raise ShapeError(
                f"{self.name}: operand {x}, indices {indices}, updates {updates} along axis "
                f"{self.axis}; expected updates of shape {expected}"
            )
        return aval(x.shape, x.dtype, x.weak and updates.weak)

    def rows(self, out: Array, indices: Array, updates: Array) -> tuple[Array, Array, Array]:
        """For evaluation: rows of ``out`` in front, one index and one update for each of them."""
        lines = np.moveaxis(out, self.axis, 0)
        count = indices.ndim
        given = np.moveaxis(updates, range(self.axis, self.axis + count), range(count))
        return lines, indices.reshape(-1), given.reshape(indices.size, *lines.shape[1:])

    def to_updates(self, ct: Value, indices: Value, of: Aval) -> Value:
        """The cotangent of the updates: what a gather reads, 0 where one was dropped."""
        size = aval_of(ct).shape[self.axis]
        if size == 0:
            return zeros(of)
        kept = and_(ge(indices, np.int32(0)), lt(indices, np.int32(size)))
        axes = tuple(range(self.axis, self.axis + aval_of(indices).ndim))
        mask = broadcast(kept, of.shape, axes)
        return select(mask, gather(ct, indices, self.axis), of.dtype.type(0))

    def batch(self, args: Sequence[Value], batched: Sequence[bool]) -> Value:
        """The batch axis moves along, or becomes row offsets when indices are batched."""
        x, indices, updates = args
        size = next(aval_of(a).shape[0] for a, flag in zip(args, batched, strict=True) if flag)
        x = x if batched[0] else repeated(x, size)
        updates = updates if batched[2] else repeated(updates, size)
        if not batched[1]:
            return self.at(self.axis + 1, x, indices, updates)
        return self._batched_rows(x, indices, updates)

    def _batched_rows(self, x: Value, indices: Value, updates: Value) -> Value:
        """One update of [batch * n, a, c]; dropped indices leave its range."""
        of, idx = aval_of(x), aval_of(indices)
        size, n = of.shape[0], of.shape[self.axis + 1]
        rows, _, order = _flattened(x, indices, self.axis)
        kept = and_(ge(indices, np.int32(0)), lt(indices, np.int32(n)))
        flat = select(kept, add(indices, _row_offsets(size, n, idx.shape)), np.int32(-1))
        made = self.at(0, rows, flat, permute(updates, _inverse(order)))
        others = tuple(i for i in range(1, of.ndim) if i != self.axis + 1)
        front = (0, self.axis + 1, *others)
        split = reshape(made, tuple(of.shape[i] for i in front))
        return permute(split, _inverse(front))

    @classmethod
    def samples_of(cls, indices: Sequence[Ints], narrow: Sequence[DType]) -> list[Sample]:
        """Each axis with indices of each shape, some out of range; the second in dtypes."""

        def operands(x: Ints, i: Ints, axis: int, dtype: DType) -> tuple[Aval, Aval, Aval]:
            return aval(x, dtype), aval(i, dtypes.int32), aval(joined(x, i, axis), dtype)

        wide = [
            Sample(cls(axis), operands((3, 5, 4), i, axis, dtypes.float32), -2.0, 7.0)
            for axis in range(3)
            for i in indices
        ]
        pairs = [operands((5, 3), indices[1], 0, dtype) for dtype in narrow]
        return [*wide, *[Sample(cls(0), pair, 0.0, 7.0) for pair in pairs]]


@final
@dataclass(frozen=True)
class ScatterAdd(RowUpdate):
    """``out = x; out[a, indices[i...], c] += updates[a, i..., c]`` in the order of i.

    Every sum is rounded to the dtype of ``x``.
    """

    traits: ClassVar[Traits] = Traits(Kind.INDEXED, Remat.COSTLY, linear_in=(0, 2))

    def infer(self, *avals: Aval) -> Aval:
        """Numbers, not truth values."""
        out = super().infer(*avals)
        if out.dtype == dtypes.bool_:
            raise DTypeError(
                f"scatter_add: operand {avals[0]} and updates {avals[2]}; expected numbers; "
                "cast with .astype(...)"
            )
        return out

    def evaluate(self, *arrays: Array) -> Array:
        """np.add.at, which adds in order."""
        x, indices, updates = arrays
        out = np.array(x)
        rows, flat, given = self.rows(out, indices, updates)
        with np.errstate(all="ignore"):
            for index, update in zip(flat, given, strict=True):
                if 0 <= index < len(rows):
                    rows[index] += update
        return out

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """Linear in the array and the updates together."""
        x, indices, updates = primals
        out = bind(self, x, indices, updates)
        dx, _, du = tangents
        if du is None:
            return out, dx
        dx = zeros(aval_of(x)) if dx is None else dx
        return out, bind(self, dx, indices, du)

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """The cotangent itself, and what a gather reads; 0 where an update was dropped."""
        (ct,) = cotangents
        x, indices, updates = args
        to_x = ct if isinstance(x, Linear) else None
        if not isinstance(updates, Linear):
            return to_x, None, None
        return to_x, None, self.to_updates(ct, indices, updates.aval)

    def kernel_spec(self, avals: Sequence[Aval], out: Aval) -> KernelSpec:
        """A scatter in order."""
        return ScatterAddSpec(self.axis)

    @classmethod
    def samples(cls) -> list[Sample]:
        """Indices of rank 0 to 2, repeated and out of range; dtypes."""
        narrow = (dtypes.float16, dtypes.bfloat16, dtypes.int8, dtypes.uint32)
        return cls.samples_of([(), (6,), (2, 3), (0,)], narrow)


def repeated(x: Value, size: int) -> Value:
    """``x`` for each of ``size`` examples, along a new axis in front."""
    of = aval_of(x)
    return broadcast(x, (size, *of.shape), tuple(range(1, of.ndim + 1)))


def _inverse(order: Ints) -> Ints:
    return tuple(order.index(i) for i in range(len(order)))


def gather(x: Value, indices: Value, axis: int, line: int = 0) -> Value:
    """Elements of ``x`` along ``axis`` at i32 ``indices``, which clamp to the range."""
    return bind(Gather(axis, line), x, indices)


def scatter_add(x: Value, indices: Value, updates: Value, axis: int) -> Value:
    """``x`` with ``updates`` added at i32 ``indices`` along ``axis``; others are dropped."""
    return bind(ScatterAdd(axis), x, indices, updates)
