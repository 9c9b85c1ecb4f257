"""Special functions: logistic, erf, erfc, erf_inv; and stop_gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from vkjit import dtypes
from vkjit.dtypes import DType
from vkjit.ir.primitive import Array, Producer, Sample, Value
from vkjit.ir.program import Atom
from vkjit.lowering.kernel import nodes
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.types import BinOp, UnOp, scalar_of
from vkjit.ops.arithmetic import mul, neg, sub
from vkjit.ops.math import exp
from vkjit.ops.pointwise import FLOATS, INTS, Flat, const_like, has_sign, scalar_like, unary_samples
from vkjit.ops.unary import FloatUnary, KernelUnary
from vkjit.trace import bind

Function = Callable[[Array], Any]

TWO_OVER_SQRT_PI = 2.0 / math.sqrt(math.pi)

# exp(x*x) * erfc(x) * (1 + 2 x) for x >= 0 as a Chebyshev series in t = (x - 2) / (x + 2), from
# 60 points computed with 40 digits. float32 needs the first 12 terms (next: 1e-8 of 1.18).
_ERFC_SERIES = (
    1.1760066555883003561, 0.025779673870048208056, -0.10659315067778503349,
    0.038808879574483821116, -0.0054148999308937250187, -0.00040815257282372384223,
    0.00019843768248553527861, 9.8425327760481476623e-6, -7.7632655610628557201e-6,
    -7.1740014575294720086e-7, 3.1406949555820059912e-7, 6.1884236695470459479e-8,
    -9.890619934491816558e-9, -4.5953996225184462612e-9, -7.1805877297435378594e-11,
    2.6296183334296179825e-10, 4.8677340543525255305e-11, -8.0268042147707780076e-12,
    -4.7791335871380417324e-12, -4.3470127390271201335e-13, 2.4123142680453446733e-13,
    8.6109013236902995489e-14, 2.5947802883040069846e-15, -5.8722339783839803684e-15,
    -1.7019105725106082099e-15, 1.3894412150272754308e-17, 1.4093792954818626316e-16,
)  # fmt: skip
_ERFC_TERMS_F32 = 12
_ERFC_END = 30.0
"""From here on erfc is 0 even in float64."""


def _np_logistic(x: Array) -> Any:
    decayed = np.exp(-np.abs(x))
    return np.where(x >= 0, x.dtype.type(1), decayed) / (1 + decayed)


@final
@dataclass(frozen=True)
class Logistic(FloatUnary):
    """``1 / (1 + exp(-x))``; only ``exp(-|x|)`` is taken, so nothing overflows."""

    function: ClassVar[Function] = _np_logistic

    def wide_scalar(self, b: Builder, x: nodes.Value) -> nodes.Value:
        """``(1 or e) / (1 + e)`` with e = exp(-|x|)."""
        one = const_like(b, x, 1.0)
        decayed = b.unary(UnOp.EXP, b.unary(UnOp.NEG, b.unary(UnOp.ABS, x)))
        above = b.select(has_sign(b, x), decayed, one)
        return b.binary(BinOp.DIV, above, b.add(one, decayed))

    def derivative(self, x: Value, out: Value) -> Value:
        """``s (1 - s)``."""
        return mul(out, sub(scalar_like(out, 1), out))


_erf_each = np.frompyfunc(math.erf, 1, 1)
_erfc_each = np.frompyfunc(math.erfc, 1, 1)


def _np_erf(x: Array) -> Any:
    return np.asarray(_erf_each(x.astype(np.float64)), np.float64)


def _np_erfc(x: Array) -> Any:
    return np.asarray(_erfc_each(x.astype(np.float64)), np.float64)


@final
@dataclass(frozen=True)
class Erf(KernelUnary):
    """The error function."""

    function: ClassVar[Function] = _np_erf
    kernel: ClassVar[UnOp] = UnOp.ERF

    def derivative(self, x: Value, out: Value) -> Value:
        """``2 / sqrt(pi) exp(-x**2)``."""
        return mul(exp(neg(mul(x, x))), scalar_like(x, TWO_OVER_SQRT_PI))


@final
@dataclass(frozen=True)
class Erfc(FloatUnary):
    """``1 - erf(x)`` with full relative accuracy on the right."""

    function: ClassVar[Function] = _np_erfc

    def wide_scalar(self, b: Builder, x: nodes.Value) -> nodes.Value:
        """``exp(-x**2) series(t) / (1 + 2 x)`` for |x|; reflected on the left."""
        one, two = const_like(b, x, 1.0), const_like(b, x, 2.0)
        size = b.binary(BinOp.MIN, b.unary(UnOp.ABS, x), const_like(b, x, _ERFC_END))
        t = b.binary(BinOp.DIV, b.sub(size, two), b.add(size, two))
        scaled = b.binary(BinOp.DIV, _chebyshev(b, t), b.fma(two, size, one))
        # The rounding error of the square would be a relative error of 87 units at x = 9.
        square = b.mul(size, size)
        lost = b.fma(size, size, b.unary(UnOp.NEG, square))
        decayed = b.unary(UnOp.EXP, b.unary(UnOp.NEG, square))
        right = b.mul(b.mul(decayed, b.sub(one, lost)), scaled)
        return b.select(has_sign(b, x), b.sub(two, right), right)

    def derivative(self, x: Value, out: Value) -> Value:
        """``-2 / sqrt(pi) exp(-x**2)``."""
        return mul(exp(neg(mul(x, x))), scalar_like(x, -TWO_OVER_SQRT_PI))


def _chebyshev(b: Builder, t: nodes.Value) -> nodes.Value:
    """The series at ``t`` by Clenshaw's recurrence."""
    terms = _ERFC_SERIES[:_ERFC_TERMS_F32] if scalar_of(t.type).bits == 32 else _ERFC_SERIES
    twice = b.add(t, t)
    last = const_like(b, t, 0.0)
    current = const_like(b, t, terms[-1])
    for term in terms[-2:0:-1]:
        following = b.fma(twice, current, b.sub(const_like(b, t, term), last))
        last, current = current, following
    return b.fma(t, current, b.sub(const_like(b, t, terms[0]), last))


# Wichura 1988, "Algorithm AS241", PPND16: numerators and denominators, highest power first.
_CENTRE = (
    (2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
     13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.3871328727963666080),
    (5226.4952788528545610, 28729.085735721942674, 39307.895800092710610, 21213.794301586595867,
     5394.1960214247511077, 687.18700749205790830, 42.313330701600911252, 1.0),
)  # fmt: skip
_MIDDLE = (
    (7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1,
     1.27045825245236838258, 3.64784832476320460504, 5.76949722146069140550,
     4.63033784615654529590, 1.42343711074968357734),
    (1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2,
     1.48103976427480074590e-1, 6.89767334985100004550e-1, 1.67638483018380384940,
     2.05319162663775882187, 1.0),
)  # fmt: skip
_TAIL = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3,
     2.65321895265761230930e-2, 2.96560571828504891230e-1, 1.78482653991729133580,
     5.46378491116411436990, 6.65790464350110377720),
    (2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5,
     7.86869131145613259100e-4, 1.48753612908506148525e-2, 1.36929880922735805310e-1,
     5.99832206555887937690e-1, 1.0),
)  # fmt: skip


def _ratio(terms: tuple[tuple[float, ...], tuple[float, ...]], x: Array) -> Array:
    return np.polyval(terms[0], x) / np.polyval(terms[1], x)


def _np_erf_inv(x: Array) -> Any:
    """By the normal quantile; relative error 1e-16."""
    x = x.astype(np.float64)
    tail = (1.0 - np.abs(x)) * 0.5
    root = np.sqrt(-np.log(np.where(tail > 0.0, tail, 0.5)))
    centre = _ratio(_CENTRE, 0.180625 - 0.25 * x * x) * (0.5 * x)
    outer = np.where(root <= 5.0, _ratio(_MIDDLE, root - 1.6), _ratio(_TAIL, root - 5.0))
    inside = np.where(np.abs(x) <= 0.85, centre, np.copysign(outer, x))
    edge = np.where(np.abs(x) == 1.0, np.copysign(np.inf, x), np.nan)
    return np.where(np.abs(x) < 1.0, inside / math.sqrt(2.0), edge)


@final
@dataclass(frozen=True)
class ErfInv(KernelUnary):
    """The inverse error function; infinite at -1 and 1, NaN beyond."""

    function: ClassVar[Function] = _np_erf_inv
    kernel: ClassVar[UnOp] = UnOp.ERF_INV
    domain: ClassVar[tuple[float, float]] = (-0.9, 0.9)

    def derivative(self, x: Value, out: Value) -> Value:
        """``sqrt(pi) / 2 exp(erf_inv(x)**2)``."""
        return mul(exp(mul(out, out)), scalar_like(out, 1.0 / TWO_OVER_SQRT_PI))


@final
@dataclass(frozen=True)
class StopGradient(Flat):
    """``x``, with a derivative of zero."""

    def evaluate(self, *arrays: Array) -> Array:
        """The operand."""
        return arrays[0]

    def scalar(self, b: Builder, operands: Sequence[DType], *args: nodes.Value) -> nodes.Value:
        """The operand."""
        return args[0]

    def simplify(self, args: Sequence[Atom], producer: Producer) -> Atom | None:
        """The operand: what is simplified is differentiated no more."""
        return args[0]

    @classmethod
    def samples(cls) -> list[Sample]:
        """All dtypes."""
        return unary_samples(cls(), (*FLOATS, *INTS, dtypes.bool_), smooth=False)


def logistic(x: Value) -> Value:
    """``1 / (1 + exp(-x))``."""
    return bind(Logistic(), x)


def erf(x: Value) -> Value:
    """The error function."""
    return bind(Erf(), x)


def erfc(x: Value) -> Value:
    """``1 - erf(x)``."""
    return bind(Erfc(), x)


def erf_inv(x: Value) -> Value:
    """The inverse error function."""
    return bind(ErfInv(), x)


def stop_gradient(x: Value) -> Value:
    """``x``, which differentiation takes for a constant."""
    return bind(StopGradient(), x)
