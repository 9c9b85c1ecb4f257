"""Ranges and placement: slice, pad, concatenate, closed under transpose; reshape and the like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import ClassVar, cast, final

import numpy as np

from vkjit import dtypes
from vkjit.errors import ArgumentError, DTypeError, ShapeError
from vkjit.ir.avals import Aval, aval
from vkjit.ir.primitive import (
    Array,
    Kind,
    Linear,
    Op,
    Primitive,
    Sample,
    Tangent,
    Traits,
    Value,
)
from vkjit.lowering.kernel.specs import KernelSpec, PlaceSpec, ViewSpec
from vkjit.lowering.kernel.views import View, dense
from vkjit.ops.arithmetic import sub
from vkjit.ops.logical import select
from vkjit.ops.reshaping import (
    OTHER_DTYPES,
    Iota,
    Reshape,
    Reverse,
    expand_dims,
    iota,
    linear_jvp,
    reshape,
    reverse,
    squeeze,
)
from vkjit.ops.structural import broadcast, full, reduce_sum
from vkjit.trace import aval_of, bind

__all__ = [
    "OPERAND_LIMIT",
    "Concatenate",
    "Iota",
    "Pad",
    "Reshape",
    "Reverse",
    "Slice",
    "concatenate",
    "expand_dims",
    "iota",
    "pad",
    "reshape",
    "reverse",
    "slice_",
    "squeeze",
]

Ints = tuple[int, ...]


@final
@dataclass(frozen=True)
class Slice(Op):
    """Elements ``starts[i], starts[i] + strides[i], ...`` below ``limits[i]`` of each axis."""

    starts: Ints
    limits: Ints
    strides: Ints

    traits: ClassVar[Traits] = Traits(Kind.VIEW, linear_in=(0,), joins_cotangents=True)

    def infer(self, *avals: Aval) -> Aval:
        """Ranges lie inside the operand."""
        (x,) = avals
        fits = len(self.starts) == len(self.limits) == len(self.strides) == x.ndim
        if not fits or any(
            not 0 <= start <= limit <= size or stride < 1
            for start, limit, stride, size in zip(
                self.starts, self.limits, self.strides, x.shape, strict=True
            )
        ):
            raise ShapeError(
                f"slice: starts {self.starts}, limits {self.limits}, strides {self.strides} for "
                f"operand {x}; expected 0 <= start <= limit <= size and stride >= 1 for each axis"
            )
        return aval(self.shape, x.dtype, x.weak)

    @property
    def shape(self) -> Ints:
        """Shape of the result."""
        return tuple(
            -(-(limit - start) // stride)
            for start, limit, stride in zip(self.starts, self.limits, self.strides, strict=True)
        )

    def evaluate(self, *arrays: Array) -> Array:
        """Basic indexing."""
        index = tuple(map(slice, self.starts, self.limits, self.strides))
        return np.asarray(arrays[0][index])

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """Linear."""
        return linear_jvp(self, primals, tangents)

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """Zeros around and between."""
        (ct,) = cotangents
        of = cast("Linear", args[0]).aval
        after: list[int] = []
        for n, start, stride, size in zip(
            self.shape, self.starts, self.strides, of.shape, strict=True
        ):
            after.append(size - (start + max(n - 1, 0) * stride + min(n, 1)))
        between = tuple(s - 1 for s in self.strides)
        return (pad(ct, of.dtype.type(0), self.starts, tuple(after), between),)

    @classmethod
    def join_cotangents(cls, of: Aval, parts: Sequence[tuple[Primitive, Value]]) -> Value | None:
        """A concatenation where slices follow each other along an axis, padded to its ends."""
        slices = [(cast("Slice", prim), ct) for prim, ct in parts]
        axis = _run_axis([prim for prim, _ in slices], of.shape)
        if axis is None:
            return None
        slices.sort(key=lambda item: (item[0].starts[axis], item[0].limits[axis]))
        value = concatenate([ct for _, ct in slices], axis)
        low, high = slices[0][0].starts[axis], of.shape[axis] - slices[-1][0].limits[axis]
        if low == high == 0:
            return value

        def only(amount: int) -> Ints:
            return tuple(amount if a == axis else 0 for a in range(of.ndim))

        return pad(value, aval_of(value).dtype.type(0), only(low), only(high), only(0))

    def batch(self, args: Sequence[Value], batched: Sequence[bool]) -> Value:
        """The batch axis stays whole."""
        (x,) = args
        size = aval_of(x).shape[0]
        return slice_(x, (0, *self.starts), (size, *self.limits), (1, *self.strides))

    def kernel_spec(self, avals: Sequence[Aval], out: Aval) -> KernelSpec:
        """A view with an offset and longer strides."""
        return ViewSpec(
            partial(View.sliced, starts=self.starts, shape=out.shape, steps=self.strides)
        )

    @classmethod
    def samples(cls) -> list[Sample]:
        """Inner ranges, strides with and without a rest, empty ranges."""
        f = aval((5, 7), dtypes.float32)
        made = [
            Sample(cls((1, 2), (4, 7), (1, 1)), (f,)),
            Sample(cls((0, 1), (5, 7), (2, 3)), (f,)),
            Sample(cls((1, 0), (5, 6), (3, 4)), (f,)),
            Sample(cls((2, 3), (2, 7), (1, 1)), (f,)),
            Sample(cls((5, 0), (5, 7), (1, 2)), (f,)),
        ]
        return made + [
            Sample(cls((1, 2), (4, 7), (2, 1)), (aval((5, 7), d),), 0.0) for d in OTHER_DTYPES
        ]


def _run_axis(slices: Sequence[Slice], shape: Ints) -> int | None:
    """The axis along which several slices follow each other without a gap, if there is one."""
    if len(slices) < 2 or any(stride != 1 for part in slices for stride in part.strides):
        return None
    differing = [
        axis
        for axis, size in enumerate(shape)
        if any((part.starts[axis], part.limits[axis]) != (0, size) for part in slices)
    ]
    if len(differing) != 1:
        return None
    (axis,) = differing
    ranges = sorted((part.starts[axis], part.limits[axis]) for part in slices)
    return axis if all(a[1] == b[0] for a, b in pairwise(ranges)) else None


@final
@dataclass(frozen=True)
class Pad(Op):
    """``low`` elements before, ``high`` after and ``interior`` between those of each axis.

    Operands are (value, x): a scalar for the new elements, and the array.
    """

    low: Ints
    high: Ints
    interior: Ints

    traits: ClassVar[Traits] = Traits(Kind.PLACE, linear_in=(0, 1))

    def infer(self, *avals: Aval) -> Aval:
        """One dtype, a scalar value, amounts of at least 0 for each axis."""
        value, x = avals
        if value.dtype != x.dtype:
            raise DTypeError(f"pad: operand {x} with value {value}; expected one dtype")
        amounts = (self.low, self.high, self.interior)
        fits = value.shape == () and all(len(a) == x.ndim for a in amounts)
        if not fits or any(n < 0 for a in amounts for n in a):
            raise ShapeError(
                f"pad: operand {x}, value {value}, low {self.low}, high {self.high}, interior "
                f"{self.interior}; expected a scalar value and amounts of at least 0 for each axis"
            )
        return aval(self.padded(x.shape), x.dtype, x.weak and value.weak)

    def padded(self, shape: Ints) -> Ints:
        """Shape of the result."""
        return tuple(
            low + n + max(n - 1, 0) * inner + high
            for n, low, high, inner in zip(shape, self.low, self.high, self.interior, strict=True)
        )

    def _index(self, shape: Ints) -> tuple[slice, ...]:
        return tuple(
            slice(low, low + (n - 1) * (inner + 1) + 1 if n else low, inner + 1)
            for n, low, inner in zip(shape, self.low, self.interior, strict=True)
        )

    def evaluate(self, *arrays: Array) -> Array:
        """Writes the array into a filled one."""
        value, x = arrays
        out = np.full(self.padded(x.shape), value, x.dtype)
        out[self._index(x.shape)] = x
        return out

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """Linear in both."""
        return linear_jvp(self, primals, tangents)

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """A strided slice for x; the sum of the rest for the value."""
        (ct,) = cotangents
        value, x = args
        of = x.aval if isinstance(x, Linear) else aval_of(x)
        index = self._index(of.shape)
        inner = slice_(
            ct,
            tuple(i.start for i in index),
            tuple(i.stop for i in index),
            tuple(i.step for i in index),
        )
        to_value = None
        if isinstance(value, Linear):
            axes = tuple(range(of.ndim))
            to_value = sub(reduce_sum(ct, axes), reduce_sum(inner, axes))
        return to_value, inner if isinstance(x, Linear) else None

    def batch(self, args: Sequence[Value], batched: Sequence[bool]) -> Value:
        """No padding along the batch axis; a batched value fills by a choice."""
        value, x = args
        if not batched[0]:
            return pad(x, value, (0, *self.low), (0, *self.high), (0, *self.interior))
        size = aval_of(value).shape[0]
        of = aval_of(x)
        shape = of.shape[1:] if batched[1] else of.shape
        if not batched[1]:
            x = broadcast(x, (size, *shape), tuple(range(1, of.ndim + 1)))
        inside = pad(full(shape, np.True_), np.False_, self.low, self.high, self.interior)
        out = (size, *aval_of(inside).shape)
        placed = pad(x, of.dtype.type(0), (0, *self.low), (0, *self.high), (0, *self.interior))
        return select(
            broadcast(inside, out, tuple(range(1, len(out)))), placed, broadcast(value, out, (0,))
        )

    def kernel_spec(self, avals: Sequence[Aval], out: Aval) -> KernelSpec:
        """The value everywhere, then the array into a strided region."""
        shape = avals[1].shape
        steps = tuple(i + 1 for i in self.interior)
        starts = tuple(low if n else 0 for low, n in zip(self.low, shape, strict=True))
        return PlaceSpec((dense(out.shape).sliced(starts, shape, steps),), fill=True)

    @classmethod
    def samples(cls) -> list[Sample]:
        """Edges, gaps, an empty operand."""
        f, s = aval((3, 5), dtypes.float32), aval((), dtypes.float32)
        made = [
            Sample(cls((1, 0), (0, 2), (0, 0)), (s, f)),
            Sample(cls((0, 1), (2, 0), (2, 1)), (s, f)),
            Sample(cls((1, 1), (0, 0), (1, 0)), (s, aval((0, 2), dtypes.float32))),
        ]
        return made + [
            Sample(cls((1, 0), (0, 2), (0, 1)), (aval((), d), aval((3, 5), d)), 0.0)
            for d in OTHER_DTYPES
        ]


OPERAND_LIMIT = 32
"""Operands of one concatenation; kernels have a limited number of buffers."""


@final
@dataclass(frozen=True)
class Concatenate(Op):
    """Operands one after another along ``axis``; at most ``OPERAND_LIMIT``."""

    axis: int

    traits: ClassVar[Traits] = Traits(
        Kind.PLACE, linear_in=tuple(range(OPERAND_LIMIT)), moves_blocks=True
    )

    def infer(self, *avals: Aval) -> Aval:
        """One dtype and, other than along the axis, one shape."""
        listed = ", ".join(map(str, avals))
        if not 1 <= len(avals) <= OPERAND_LIMIT:
            raise ArgumentError(
                f"concatenate: {len(avals)} operands; expected 1 to {OPERAND_LIMIT}"
            )
        first = avals[0]
        if any(a.dtype != first.dtype for a in avals):
            raise DTypeError(f"concatenate: operands {listed} have different dtypes; cast them")
        if not 0 <= self.axis < first.ndim or any(
            self._others(a.shape) != self._others(first.shape) for a in avals
        ):
            raise ShapeError(
                f"concatenate: operands {listed} along axis {self.axis}; expected equal sizes on "
                "all other axes"
            )
        shape = list(first.shape)
        shape[self.axis] = sum(a.shape[self.axis] for a in avals)
        return aval(tuple(shape), first.dtype, all(a.weak for a in avals))

    def _others(self, shape: Ints) -> Ints:
        return (len(shape), *shape[: self.axis], *shape[self.axis + 1 :])

    def evaluate(self, *arrays: Array) -> Array:
        """np.concatenate."""
        return np.concatenate(arrays, axis=self.axis)

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """Linear in all operands together."""
        return linear_jvp(self, primals, tangents)

    def _ranges(self, shapes: Sequence[Ints]) -> list[tuple[Ints, Ints]]:
        """Starts and limits of each operand in the result."""
        found: list[tuple[Ints, Ints]] = []
        offset = 0
        for shape in shapes:
            starts, limits = [0] * len(shape), list(shape)
            starts[self.axis] = offset
            offset += shape[self.axis]
            limits[self.axis] = offset
            found.append((tuple(starts), tuple(limits)))
        return found

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """Each operand's range of the cotangent."""
        (ct,) = cotangents
        avals = [a.aval if isinstance(a, Linear) else aval_of(a) for a in args]
        ranges = self._ranges([a.shape for a in avals])
        return tuple(
            slice_(ct, starts, limits, (1,) * len(starts)) if isinstance(a, Linear) else None
            for a, (starts, limits) in zip(args, ranges, strict=True)
        )

    def batch(self, args: Sequence[Value], batched: Sequence[bool]) -> Value:
        """Unbatched operands repeat."""
        size = next(aval_of(a).shape[0] for a, b in zip(args, batched, strict=True) if b)
        full: list[Value] = []
        for a, is_batched in zip(args, batched, strict=True):
            of = aval_of(a)
            axes = tuple(range(1, of.ndim + 1))
            full.append(a if is_batched else broadcast(a, (size, *of.shape), axes))
        return bind(Concatenate(self.axis + 1), *full)

    def kernel_spec(self, avals: Sequence[Aval], out: Aval) -> KernelSpec:
        """One region for each operand."""
        whole = dense(out.shape)
        ranges = self._ranges([a.shape for a in avals])
        ones = (1,) * out.ndim
        regions = [whole.sliced(r[0], a.shape, ones) for r, a in zip(ranges, avals, strict=True)]
        return PlaceSpec(tuple(regions), fill=False)

    @classmethod
    def samples(cls) -> list[Sample]:
        """Two and three operands, along both axes, with an empty one."""
        f = dtypes.float32
        made = [
            Sample(cls(0), (aval((2, 3), f), aval((1, 3), f))),
            Sample(cls(1), (aval((2, 3), f), aval((2, 0), f), aval((2, 5), f))),
            Sample(cls(0), (aval((4,), f),)),
        ]
        return made + [
            Sample(cls(1), (aval((2, 3), d), aval((2, 4), d)), 0.0) for d in OTHER_DTYPES
        ]


def slice_(x: Value, starts: Ints, limits: Ints, strides: Ints) -> Value:
    """A strided range of each axis; ``x`` itself for the whole."""
    if not any(starts) and limits == aval_of(x).shape and all(s == 1 for s in strides):
        return x
    return bind(Slice(starts, limits, strides), x)


def pad(x: Value, value: Value, low: Ints, high: Ints, interior: Ints) -> Value:
    """``x`` with ``value`` before, after and between; negative ``low`` and ``high`` cut off."""
    if any((*low, *high, *interior)):
        at_least = tuple(max(n, 0) for n in low), tuple(max(n, 0) for n in high)
        made = x
        if any((*at_least[0], *at_least[1], *interior)):
            made = bind(Pad(*at_least, interior), value, x)
        shape = aval_of(made).shape
        starts = tuple(max(-n, 0) for n in low)
        limits = tuple(max(n - max(-h, 0), s) for n, h, s in zip(shape, high, starts, strict=True))
        return slice_(made, starts, limits, (1,) * len(shape))
    return x


def concatenate(operands: Sequence[Value], axis: int) -> Value:
    """Operands one after another along ``axis``; many are joined in several rounds."""
    todo = list(operands)
    while len(todo) > OPERAND_LIMIT:
        todo = [
            concatenate(todo[i : i + OPERAND_LIMIT], axis)
            for i in range(0, len(todo), OPERAND_LIMIT)
        ]
    return todo[0] if len(todo) == 1 else bind(Concatenate(axis), *todo)
