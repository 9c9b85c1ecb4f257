"""Writes: copy_into puts values into a region of a destination and runs exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from vkjit import dtypes
from vkjit.errors import DTypeError, MissingRuleError, ShapeError
from vkjit.ir.avals import Aval, aval
from vkjit.ir.primitive import Array, Kind, Linear, Op, Remat, Sample, Tangent, Traits, Value
from vkjit.lowering.kernel.specs import KernelSpec, WriteSpec
from vkjit.lowering.kernel.views import dense
from vkjit.ops.logical import select
from vkjit.ops.movement import pad, slice_
from vkjit.ops.structural import broadcast, full, zeros
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
        """The batch axis is written whole; a destination without it cannot hold the results."""
        dest, value = args
        if not batched[0]:
            raise MissingRuleError(
                f"copy_into: a batched value for the unbatched destination {aval_of(dest)}; "
                "expected a batched destination; map over it as well"
            )
        if not batched[1]:
            of = aval_of(value)
            size = aval_of(dest).shape[0]
            value = broadcast(value, (size, *of.shape), tuple(range(1, of.ndim + 1)))
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
