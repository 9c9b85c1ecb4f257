"""The same elements at other positions: reshape, reverse; and iota, which are positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, cast, final

import numpy as np

from vkjit import dtypes
from vkjit.dtypes import DType
from vkjit.errors import ArgumentError, ShapeError
from vkjit.ir.avals import Aval, aval
from vkjit.ir.primitive import (
    Array,
    Kind,
    Linear,
    Op,
    Producer,
    Remat,
    Sample,
    Simpler,
    Tangent,
    Traits,
    Value,
)
from vkjit.ir.program import Atom
from vkjit.lowering.kernel.specs import IotaSpec, KernelSpec, ViewSpec
from vkjit.lowering.kernel.views import View
from vkjit.ops.structural import zeros
from vkjit.trace import aval_of, bind

Ints = tuple[int, ...]

OTHER_DTYPES = (dtypes.float16, dtypes.bfloat16, dtypes.int8, dtypes.uint32, dtypes.bool_)


def linear_jvp(
    prim: Op, primals: Sequence[Value], tangents: Sequence[Tangent]
) -> tuple[Value, Value]:
    """The jvp of an operation that is linear in its operands together."""
    out = bind(prim, *primals)
    filled = [zeros(aval_of(p)) if t is None else t for p, t in zip(primals, tangents, strict=True)]
    return out, bind(prim, *filled)


@final
@dataclass(frozen=True)
class Reshape(Op):
    """The same elements in row-major order with another shape."""

    shape: Ints

    traits: ClassVar[Traits] = Traits(Kind.VIEW, linear_in=(0,))

    def infer(self, *avals: Aval) -> Aval:
        """Sizes agree."""
        (x,) = avals
        if math.prod(self.shape) != x.size:
            raise ShapeError(
                f"reshape: operand {x} has {x.size} elements; shape {self.shape} has "
                f"{math.prod(self.shape)}; expected equal sizes"
            )
        return aval(self.shape, x.dtype, x.weak)

    def evaluate(self, *arrays: Array) -> Array:
        """ndarray.reshape."""
        return arrays[0].reshape(self.shape)

    def simplify(self, args: Sequence[Atom], producer: Producer) -> Simpler | None:
        """Nothing where the shape is the same, one reshape for two."""
        (x,) = args
        made = producer(x)
        if x.aval.shape == self.shape:
            return x
        if made is not None and isinstance(made.prim, Reshape):
            return self, made.args
        return None

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """Linear."""
        return linear_jvp(self, primals, tangents)

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """The shape from before."""
        return (reshape(cotangents[0], cast("Linear", args[0]).aval.shape),)

    def batch(self, args: Sequence[Value], batched: Sequence[bool]) -> Value:
        """The batch axis stays in front."""
        return reshape(args[0], (aval_of(args[0]).shape[0], *self.shape))

    def kernel_spec(self, avals: Sequence[Aval], out: Aval) -> KernelSpec:
        """A view where strides allow."""
        return ViewSpec(partial(View.reshaped, shape=self.shape))

    @classmethod
    def samples(cls) -> list[Sample]:
        """Merged, split and empty axes, scalars."""
        f = dtypes.float32
        cases = (
            ((15,), (3, 5)),
            ((3, 1, 5), (3, 5)),
            ((2, 3, 2), (4, 3)),
            ((), (1,)),
            ((1, 1), ()),
            ((3, 0), (0, 3)),
        )
        made = [Sample(cls(to), (aval(of, f),)) for to, of in cases]
        return made + [Sample(cls((15,)), (aval((3, 5), d),), 0.0) for d in OTHER_DTYPES]


@final
@dataclass(frozen=True)
class Reverse(Op):
    """The operand with ``axes`` running backwards."""

    axes: Ints

    traits: ClassVar[Traits] = Traits(Kind.VIEW, linear_in=(0,))

    def infer(self, *avals: Aval) -> Aval:
        """Axes are distinct and in range."""
        (x,) = avals
        if len(set(self.axes)) != len(self.axes) or any(not 0 <= a < x.ndim for a in self.axes):
            raise ShapeError(
                f"reverse: axes {self.axes} for operand {x}; expected distinct axes below {x.ndim}"
            )
        return x

    def evaluate(self, *arrays: Array) -> Array:
        """np.flip."""
        return np.flip(arrays[0], self.axes)

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """Linear."""
        return linear_jvp(self, primals, tangents)

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """Its own transpose."""
        return (reverse(cotangents[0], self.axes),)

    def batch(self, args: Sequence[Value], batched: Sequence[bool]) -> Value:
        """The batch axis stays as it is."""
        return reverse(args[0], tuple(a + 1 for a in self.axes))

    def kernel_spec(self, avals: Sequence[Aval], out: Aval) -> KernelSpec:
        """A view with negative strides."""
        starts = tuple(max(n - 1, 0) if i in self.axes else 0 for i, n in enumerate(out.shape))
        steps = tuple(-1 if i in self.axes else 1 for i in range(out.ndim))
        return ViewSpec(partial(View.sliced, starts=starts, shape=out.shape, steps=steps))

    @classmethod
    def samples(cls) -> list[Sample]:
        """One axis, both, an empty one."""
        f = dtypes.float32
        made = [Sample(cls(axes), (aval((3, 5), f),)) for axes in ((0,), (1,), (0, 1))]
        made.append(Sample(cls((0,)), (aval((0, 3), f),)))
        return made + [Sample(cls((1,)), (aval((3, 5), d),), 0.0) for d in OTHER_DTYPES]


@final
@dataclass(frozen=True)
class Iota(Op):
    """An array of ``shape`` that holds the position along ``axis``; no operands."""

    dtype: DType
    shape: Ints
    axis: int
    weak: bool = False

    traits: ClassVar[Traits] = Traits(Kind.POINTWISE, Remat.CHEAP, differentiable=False)

    def infer(self, *avals: Aval) -> Aval:
        """A number dtype and an axis in range."""
        if self.dtype == dtypes.bool_ or not 0 <= self.axis < len(self.shape):
            raise ArgumentError(
                f"iota: dtype {self.dtype}, shape {self.shape}, axis {self.axis}; expected a "
                "number dtype and an axis of the shape"
            )
        return aval(self.shape, self.dtype, self.weak)

    def evaluate(self, *arrays: Array) -> Array:
        """np.arange along the axis."""
        shape = [1] * len(self.shape)
        shape[self.axis] = self.shape[self.axis]
        line = np.arange(self.shape[self.axis]).astype(self.dtype).reshape(shape)
        return np.broadcast_to(line, self.shape)

    def kernel_spec(self, avals: Sequence[Aval], out: Aval) -> KernelSpec:
        """The index itself."""
        return IotaSpec(self.axis)

    @classmethod
    def samples(cls) -> list[Sample]:
        """Both axes; integers and floats."""
        of = (dtypes.int32, dtypes.uint8, dtypes.float32, dtypes.float16, dtypes.bfloat16)
        made = [Sample(cls(d, (3, 5), axis), ()) for d in of for axis in (0, 1)]
        weak = Sample(cls(dtypes.int32, (4,), 0, weak=True), ())
        return [*made, weak, Sample(cls(dtypes.int32, (0,), 0), ())]


def reshape(x: Value, shape: Ints) -> Value:
    """``x`` with another shape of the same size; ``x`` itself when it has that shape."""
    return x if aval_of(x).shape == shape else bind(Reshape(shape), x)


def squeeze(x: Value, axes: Ints) -> Value:
    """``x`` without ``axes``, which have size 1."""
    shape = aval_of(x).shape
    wrong = [a for a in axes if not 0 <= a < len(shape) or shape[a] != 1]
    if wrong:
        raise ShapeError(f"squeeze: axes {axes} for operand {aval_of(x)}; expected axes of size 1")
    return reshape(x, tuple(n for i, n in enumerate(shape) if i not in axes))


def expand_dims(x: Value, axes: Ints) -> Value:
    """``x`` with new axes of size 1, so that they stand at ``axes`` of the result."""
    sizes = iter(aval_of(x).shape)
    rank = aval_of(x).ndim + len(axes)
    return reshape(x, tuple(1 if i in axes else next(sizes) for i in range(rank)))


def reverse(x: Value, axes: Ints) -> Value:
    """``x`` with ``axes`` running backwards."""
    return bind(Reverse(axes), x) if axes else x


def iota(dtype: DType, shape: Ints, axis: int, *, weak: bool = False) -> Value:
    """The position along ``axis`` in an array of ``shape``."""
    return bind(Iota(dtype, shape, axis, weak))
