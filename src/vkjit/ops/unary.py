"""Bases of the float functions of one operand: with a derivative, and step functions without."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, final

from vkjit import dtypes
from vkjit.dtypes import DType
from vkjit.ir.primitive import Array, Sample, Tangent, Traits, Value
from vkjit.lowering.kernel import nodes
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.types import UnOp
from vkjit.ops.arithmetic import mul
from vkjit.ops.pointwise import COSTLY, FLOATS, Flat, apply_wide, narrowed, unary_samples, widened
from vkjit.ops.structural import Pointwise
from vkjit.trace import bind


class FloatUnary(Pointwise):
    """A differentiable function of one float: a NumPy function, a kernel rule, a derivative."""

    traits: ClassVar[Traits] = COSTLY
    function: ClassVar[Callable[[Array], Any]]
    domain: ClassVar[tuple[float, float]] = (-2.0, 2.0)

    def accepts(self, dtype: DType) -> bool:
        """Floats."""
        return dtypes.is_float(dtype)

    def evaluate(self, *arrays: Array) -> Array:
        """The NumPy function, 16-bit floats in float32."""
        return apply_wide(type(self).function, *arrays)

    @abstractmethod
    def derivative(self, x: Value, out: Value) -> Value:
        """The derivative at ``x``, where the function has the value ``out``."""

    @abstractmethod
    def wide_scalar(self, b: Builder, x: nodes.Value) -> nodes.Value:
        """The kernel rule for f32 and f64."""

    @final
    def scalar(self, b: Builder, operands: Sequence[DType], *args: nodes.Value) -> nodes.Value:
        """``wide_scalar``, 16-bit floats through f32."""
        (x,) = args
        return narrowed(b, self.wide_scalar(b, widened(b, x)), x)

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """The tangent times the derivative."""
        (x,) = primals
        out = bind(self, x)
        return out, mul(tangents[0], self.derivative(x, out))

    @classmethod
    def samples(cls) -> list[Sample]:
        """Float dtypes and odd shapes in the domain."""
        return unary_samples(cls(), FLOATS, *cls.domain)


class KernelUnary(FloatUnary):
    """A float function that the kernel vocabulary has."""

    kernel: ClassVar[UnOp]

    @final
    def wide_scalar(self, b: Builder, x: nodes.Value) -> nodes.Value:
        """One node."""
        return b.unary(self.kernel, x)


class FloatStep(Flat):
    """A step function of one float: its derivative is zero wherever it exists."""

    function: ClassVar[Callable[[Array], Any]]
    kernel: ClassVar[UnOp]

    def accepts(self, dtype: DType) -> bool:
        """Floats."""
        return dtypes.is_float(dtype)

    @final
    def evaluate(self, *arrays: Array) -> Array:
        """The NumPy function."""
        return apply_wide(type(self).function, *arrays)

    @final
    def scalar(self, b: Builder, operands: Sequence[DType], *args: nodes.Value) -> nodes.Value:
        """One node."""
        return b.unary(self.kernel, args[0])

    @classmethod
    def samples(cls) -> list[Sample]:
        """Floats on both sides of zero."""
        return unary_samples(cls(), FLOATS, -5.0, 5.0, smooth=False)
