"""The operations that passes may name: add, broadcast, permute, reduce_sum; and ``Pointwise``.

Pointwise operands have one dtype and one shape; a rank-0 operand counts as repeated. Casting and
NumPy broadcasting happen above, in ``vkjit.numpy``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast, final

import numpy as np

from vkjit import dtypes
from vkjit.dtypes import DType
from vkjit.errors import DTypeError, ShapeError
from vkjit.ir.avals import Aval, aval
from vkjit.ir.primitive import (
    Array,
    Kind,
    Linear,
    Op,
    Producer,
    Remat,
    Sample,
    Tangent,
    Traits,
    Value,
    without_neutral,
)
from vkjit.ir.program import Atom
from vkjit.lowering.kernel import nodes
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.elements import scalar_type
from vkjit.lowering.kernel.specs import KernelSpec, PointwiseSpec, ReduceSpec, ViewSpec
from vkjit.lowering.kernel.types import (
    BinOp,
    ConvertOp,
    ScalarType,
    with_elem,
)
from vkjit.lowering.kernel.views import View
from vkjit.trace import aval_of, bind


def float_of(dtype: DType) -> DType:
    """The dtype in which sums of ``dtype`` run: 16-bit floats accumulate in float32."""
    return dtypes.float32 if dtype in (dtypes.float16, dtypes.bfloat16) else dtype


class Pointwise(Op):
    """An operation on each element; subclasses give ``evaluate``, ``scalar`` and a derivative."""

    traits: ClassVar[Traits] = Traits(Kind.POINTWISE)

    def result_dtype(self, *operands: DType) -> DType:
        """Dtype of the result; that of the operands unless a subclass says otherwise."""
        return operands[0]

    def accepts(self, dtype: DType) -> bool:
        """Whether operands may have ``dtype``."""
        return True

    @abstractmethod
    def scalar(self, b: Builder, operands: Sequence[DType], *args: nodes.Value) -> nodes.Value:
        """Kernel values of the result from kernel values of the operands."""

    @final
    def infer(self, *avals: Aval) -> Aval:
        """Checks that operands share dtype and shape, rank-0 ones aside."""
        first = avals[0]
        shape = first.shape
        for other in avals:
            if other is first:
                continue
            if other.dtype != first.dtype and not self.mixes_dtypes():
                raise DTypeError(
                    f"{self.name}: operands {_list(avals)} have different dtypes; expected one "
                    "dtype; cast with .astype(...)"
                )
            if other.shape != shape:
                if other.shape == ():
                    continue
                if shape != ():
                    raise ShapeError(
                        f"{self.name}: operands {_list(avals)} have different shapes; expected "
                        "one shape (rank-0 operands repeat); broadcast them first"
                    )
                shape = other.shape
        if not self.accepts(first.dtype):
            raise DTypeError(f"{self.name}: does not take {_list(avals)}; cast with .astype(...)")
        dtype = self.result_dtype(*[a.dtype for a in avals])
        weak = self.is_weak(*avals) and dtype != dtypes.bool_
        # Tracing is quick because most results have an operand's aval.
        if dtype is first.dtype and shape is first.shape and weak is first.weak:
            return first
        return aval(shape, dtype, weak)

    def is_weak(self, *avals: Aval) -> bool:
        """Whether the result is weakly typed (booleans never are)."""
        for a in avals:  # noqa: SIM110  a generator costs a microsecond here
            if not a.weak:
                return False
        return True

    def mixes_dtypes(self) -> bool:
        """Whether operands of different dtypes are expected (``select`` takes a bool first)."""
        return False

    def kernel_spec(self, avals: Sequence[Aval], out: Aval) -> KernelSpec:
        """One scalar function, with the operand dtypes bound."""
        return PointwiseSpec(_Scalar(self, tuple(a.dtype for a in avals)))

    def batch(self, args: Sequence[Value], batched: Sequence[bool]) -> Value:
        """Operands get one rank: unbatched ones repeat along the new axis by themselves."""
        return bind(self, *align_batch(args, batched))


@final
@dataclass(frozen=True, slots=True)
class _Scalar:
    """A pointwise scalar rule with its operand dtypes; equal rules make equal kernels."""

    prim: Pointwise
    operands: tuple[DType, ...]

    def __call__(self, b: Builder, *args: nodes.Value) -> nodes.Value:
        return self.prim.scalar(b, self.operands, *args)

    def __repr__(self) -> str:
        return self.prim.name


def align_batch(args: Sequence[Value], batched: Sequence[bool]) -> list[Value]:
    """Operands of a pointwise operation under a leading batch axis, all of rank 0 or full rank."""
    size = next(
        aval_of(a).shape[0] for a, is_batched in zip(args, batched, strict=True) if is_batched
    )
    rank = max(aval_of(a).ndim - is_batched for a, is_batched in zip(args, batched, strict=True))
    shape = next(
        aval_of(a).shape[is_batched:]
        for a, is_batched in zip(args, batched, strict=True)
        if aval_of(a).ndim - is_batched == rank
    )
    out: list[Value] = []
    for a, is_batched in zip(args, batched, strict=True):
        of = aval_of(a)
        if of.ndim == 0:
            out.append(a)
        elif not is_batched:
            out.append(broadcast(a, (size, *shape), tuple(range(1, rank + 1))))
        elif of.ndim - 1 < rank:
            out.append(broadcast(a, (size, *shape), (0,)))
        else:
            out.append(a)
    return out


def _list(avals: Sequence[Aval]) -> str:
    return ", ".join(map(str, avals))


@final
@dataclass(frozen=True)
class Add(Pointwise):
    """x + y; integers wrap, booleans or."""

    traits: ClassVar[Traits] = Traits(Kind.POINTWISE, linear_in=(0, 1))

    def evaluate(self, *arrays: Array) -> Array:
        """NumPy's sum in the operands' dtype."""
        with np.errstate(all="ignore"):
            return np.asarray(np.add(arrays[0], arrays[1]))

    def simplify(self, args: Sequence[Atom], producer: Producer) -> Atom | None:
        """``x + -0.0`` is x; ``x + 0.0`` is not, for -0.0."""
        return without_neutral(args, -0.0, 0, 1)

    def scalar(self, b: Builder, operands: Sequence[DType], *args: nodes.Value) -> nodes.Value:
        """Float or wrapping integer addition."""
        x, y = args
        return b.binary(BinOp.OR if operands[0] == dtypes.bool_ else BinOp.ADD, x, y)

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """d(x + y) = dx + dy."""
        out = add(*primals)
        shape = aval_of(out).shape
        parts = [expand(t, shape) for t in tangents if t is not None]
        return out, add(*parts) if len(parts) == 2 else parts[0]

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """The cotangent goes to both sides, summed where a side was repeated."""
        return tuple(
            unbroadcast(cotangents[0], a.aval) if isinstance(a, Linear) else None for a in args
        )

    @classmethod
    def samples(cls) -> list[Sample]:
        """Vectors, matrices and a repeated scalar."""
        f, s = aval((3, 5), dtypes.float32), aval((), dtypes.float32)
        return [Sample(cls(), (f, f)), Sample(cls(), (f, s)), Sample(cls(), (s, f))]


@final
@dataclass(frozen=True)
class Broadcast(Op):
    """The operand repeated to ``shape``; its axis ``i`` becomes axis ``axes[i]``."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]

    traits: ClassVar[Traits] = Traits(Kind.VIEW, linear_in=(0,))

    def infer(self, *avals: Aval) -> Aval:
        """Each operand axis has size 1 or that of its target axis; targets increase."""
        (x,) = avals
        fits = len(self.axes) == x.ndim and all(
            a < b for a, b in zip(self.axes, self.axes[1:], strict=False)
        )
        if not fits or any(
            not 0 <= axis < len(self.shape) or size not in (1, self.shape[axis])
            for size, axis in zip(x.shape, self.axes, strict=True)
        ):
            raise ShapeError(
                f"broadcast: operand {x} along axes {self.axes} does not fit shape {self.shape}; "
                "expected sizes of 1 or equal sizes"
            )
        return aval(self.shape, x.dtype, x.weak)

    def evaluate(self, *arrays: Array) -> Array:
        """np.broadcast_to after inserting axes."""
        (x,) = arrays
        full = [1] * len(self.shape)
        for size, axis in zip(x.shape, self.axes, strict=True):
            full[axis] = size
        return np.broadcast_to(x.reshape(full), self.shape)

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """Linear."""
        return bind(self, primals[0]), bind(self, tangents[0])

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """Sums over the axes along which the operand was repeated."""
        of = cast("Linear", args[0]).aval
        kept = dict(zip(self.axes, of.shape, strict=True))
        summed = tuple(
            axis
            for axis, size in enumerate(self.shape)
            if kept.get(axis) != size or axis not in kept
        )
        ct = reduce_sum(cotangents[0], summed)
        ones = tuple(i for i, axis in enumerate(self.axes) if axis not in summed)
        return (broadcast(ct, of.shape, ones) if aval_of(ct).shape != of.shape else ct,)

    def batch(self, args: Sequence[Value], batched: Sequence[bool]) -> Value:
        """The batch axis stays in front."""
        size = aval_of(args[0]).shape[0]
        return broadcast(args[0], (size, *self.shape), (0, *(a + 1 for a in self.axes)))

    def kernel_spec(self, avals: Sequence[Aval], out: Aval) -> KernelSpec:
        """A view with strides of 0."""
        return ViewSpec(partial(View.broadcast, shape=self.shape, axes=self.axes))

    @classmethod
    def samples(cls) -> list[Sample]:
        """New axes, repeated axes, a scalar."""
        f = aval((3, 1), dtypes.float32)
        return [
            Sample(cls((2, 3, 4), (1, 2)), (f,)),
            Sample(cls((3, 1, 2), (0, 1)), (f,)),
            Sample(cls((4,), ()), (aval((), dtypes.float32),)),
        ]


@final
@dataclass(frozen=True)
class Permute(Op):
    """The operand with its axes in the order ``perm``."""

    perm: tuple[int, ...]

    traits: ClassVar[Traits] = Traits(Kind.VIEW, linear_in=(0,))

    def infer(self, *avals: Aval) -> Aval:
        """``perm`` names every axis once."""
        (x,) = avals
        if sorted(self.perm) != list(range(x.ndim)):
            raise ShapeError(
                f"permute: axes {self.perm} for operand {x}; "
                f"expected each of its {x.ndim} axes once"
            )
        return aval(tuple(x.shape[p] for p in self.perm), x.dtype, x.weak)

    def evaluate(self, *arrays: Array) -> Array:
        """np.transpose."""
        return np.transpose(arrays[0], self.perm)

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """Linear."""
        return bind(self, primals[0]), bind(self, tangents[0])

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """The inverse permutation."""
        return (permute(cotangents[0], tuple(int(i) for i in np.argsort(self.perm))),)

    def batch(self, args: Sequence[Value], batched: Sequence[bool]) -> Value:
        """The batch axis stays in front."""
        return permute(args[0], (0, *(p + 1 for p in self.perm)))

    def kernel_spec(self, avals: Sequence[Aval], out: Aval) -> KernelSpec:
        """A view with permuted strides."""
        return ViewSpec(partial(View.permuted, axes=self.perm))

    @classmethod
    def samples(cls) -> list[Sample]:
        """Two and three axes."""
        return [
            Sample(cls((1, 0)), (aval((3, 4), dtypes.float32),)),
            Sample(cls((2, 0, 1)), (aval((2, 3, 4), dtypes.float32),)),
        ]


@final
@dataclass(frozen=True, slots=True)
class SumRule:
    """Addition in the accumulation type: float32 for 16-bit floats, else the operand's own."""

    dtype: DType

    @property
    def operand(self) -> ScalarType:
        """Kernel type of the elements."""
        return scalar_type(self.dtype)

    @property
    def accumulator(self) -> ScalarType:
        """Kernel type of the sum."""
        return scalar_type(float_of(self.dtype))

    def initial(self, b: Builder, lanes: int) -> tuple[nodes.Value, ...]:
        """Zero."""
        zero = 0.0 if self.accumulator.kind == "float" else 0
        return (b.splat(b.const(self.accumulator, zero), lanes),)

    def step(
        self, b: Builder, state: tuple[nodes.Value, ...], x: nodes.Value, index: nodes.Value
    ) -> tuple[nodes.Value, ...]:
        """State + x."""
        wide = b.convert(ConvertOp.FLOAT, x, with_elem(x.type, self.accumulator))
        return (b.add(state[0], wide),)

    def merge(
        self, b: Builder, left: tuple[nodes.Value, ...], right: tuple[nodes.Value, ...]
    ) -> tuple[nodes.Value, ...]:
        """Left + right."""
        return (b.add(left[0], right[0]),)

    def finish(self, b: Builder, state: tuple[nodes.Value, ...]) -> nodes.Value:
        """Rounded once to the operand's dtype."""
        return b.convert(ConvertOp.FLOAT, state[0], with_elem(state[0].type, self.operand))


@final
@dataclass(frozen=True)
class ReduceSum(Op):
    """Sum over ``axes``, accumulated in float32 for 16-bit floats; integers wrap; empty is 0."""

    axes: tuple[int, ...]

    traits: ClassVar[Traits] = Traits(Kind.REDUCE, Remat.COSTLY, linear_in=(0,))

    def infer(self, *avals: Aval) -> Aval:
        """The operand without ``axes``; booleans must be cast first."""
        (x,) = avals
        if x.dtype == dtypes.bool_:
            raise DTypeError(f"reduce_sum: operand {x}; expected numbers; cast with .astype(...)")
        return aval(reduced_shape(self.name, x, self.axes), x.dtype, x.weak)

    def evaluate(self, *arrays: Array) -> Array:
        """np.sum in the accumulation dtype."""
        (x,) = arrays
        with np.errstate(all="ignore"):
            total: Any = np.sum(x, axis=self.axes, dtype=float_of(x.dtype))
            return np.asarray(total).astype(x.dtype)

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """Linear."""
        return bind(self, primals[0]), bind(self, tangents[0])

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """Repeats the cotangent along the summed axes."""
        of = cast("Linear", args[0]).aval
        kept = tuple(i for i in range(of.ndim) if i not in self.axes)
        return (broadcast(cotangents[0], of.shape, kept),)

    def batch(self, args: Sequence[Value], batched: Sequence[bool]) -> Value:
        """The batch axis stays in front."""
        return reduce_sum(args[0], tuple(a + 1 for a in self.axes))

    def kernel_spec(self, avals: Sequence[Aval], out: Aval) -> KernelSpec:
        """Sum."""
        return ReduceSpec(self.axes, SumRule(out.dtype))

    @classmethod
    def samples(cls) -> list[Sample]:
        """Last, first, middle and all axes."""
        f = aval((3, 4, 5), dtypes.float32)
        return [Sample(cls(axes), (f,)) for axes in ((2,), (0,), (1,), (0, 1, 2))]


def reduced_shape(name: str, x: Aval, axes: tuple[int, ...]) -> tuple[int, ...]:
    """Shape without ``axes``, which must be distinct and in range."""
    if len(set(axes)) != len(axes) or any(not 0 <= a < x.ndim for a in axes):
        raise ShapeError(
            f"{name}: axes {axes} for operand {x}; expected distinct axes below {x.ndim}"
        )
    return tuple(n for i, n in enumerate(x.shape) if i not in axes)


def add(x: Value, y: Value) -> Value:
    """X + y, operands of one dtype and shape (or rank 0)."""
    return bind(Add(), x, y)


def broadcast(x: Value, shape: tuple[int, ...], axes: tuple[int, ...]) -> Value:
    """``x`` repeated to ``shape``, its axis ``i`` at ``axes[i]``; ``x`` when nothing changes."""
    if aval_of(x).shape == shape and axes == tuple(range(len(shape))):
        return x
    return bind(Broadcast(shape, axes), x)


def permute(x: Value, perm: tuple[int, ...]) -> Value:
    """``x`` with its axes in the order ``perm``; ``x`` itself for the identity."""
    return x if perm == tuple(range(len(perm))) else bind(Permute(perm), x)


def reduce_sum(x: Value, axes: tuple[int, ...]) -> Value:
    """Sum over ``axes``; ``x`` itself when there are none."""
    return bind(ReduceSum(axes), x) if axes else x


def full(shape: tuple[int, ...], value: Value) -> Value:
    """An array of ``shape`` with the scalar ``value`` everywhere."""
    return broadcast(value, shape, ())


def zeros(of: Aval) -> Value:
    """Zeros with the shape and dtype of ``of``."""
    return full(of.shape, of.dtype.type(0))


def expand(x: Value, shape: tuple[int, ...]) -> Value:
    """A rank-0 value repeated to ``shape``; others as they are."""
    return broadcast(x, shape, ()) if aval_of(x).ndim == 0 and shape else x


def unbroadcast(ct: Value, of: Aval) -> Value:
    """A cotangent summed to rank 0 where the operand was a repeated scalar."""
    shape = aval_of(ct).shape
    return reduce_sum(ct, tuple(range(len(shape)))) if of.shape == () and shape else ct
