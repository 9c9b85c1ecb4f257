"""TANH, ERF and ERF_INV: odd functions as ``x`` times a rational function or polynomial.

Coefficients are minimax fits of the relative error, rounded to float32 where used.
"""

from __future__ import annotations

from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import BinOp, CmpOp, UnOp
from vkjit.lowering.legalize.logarithm import log
from vkjit.lowering.legalize.writing import (
    INFINITY,
    clamp,
    magnitude,
    number,
    polynomial,
    test,
)

_TANH_TOP = (1.0, 0.13379716341663597, 0.003494032674303524, 2.0583451495378735e-05,
             1.3319033540676639e-08)  # fmt: skip
_TANH_BOTTOM = (1.0, 0.4671303158751115, 0.025871065976654273, 0.0003283089805109109,
                7.762003109439908e-07)  # fmt: skip
_TANH_LIMIT = 9.4  # the ratio is at least 1 there, whatever rounding does
_ERF_TOP = (1.1283791462179626, 0.19037473553748685, 0.05274522294264737, 0.003764440093277684,
            0.0002848888409237972, 2.0507671641767925e-06)  # fmt: skip
_ERF_BOTTOM = (1.0, 0.5020479592816582, 0.11409662782989752, 0.014966841625010843,
               0.001162310221403973, 3.8099054284818166e-05)  # fmt: skip
_ERF_LIMIT = 4.03  # the same
# erf_inv(x) / x in w - 1 for w = -log(1 - x*x) < 5, and in sqrt(w) - 3 from there on.
_INV_CENTRE = (1.1273744106292725, 0.24783289432525635, 0.004250642843544483,
               -0.002376442775130272, 0.00010028132237493992, 3.82289981644135e-05,
               -4.401580554258544e-06, -5.24694542036741e-07, 1.4191151365139376e-07,
               -8.791028349719454e-09)  # fmt: skip
_INV_TAIL = (2.832976818084717, 1.0016751289367676, 0.009445684030652046, -0.007639409974217415,
             0.005683172028511763, -0.0035869874991476536, 0.001495857140980661,
             -7.661959534743801e-05, -0.0003187235852237791, 0.00012896425323560834)  # fmt: skip


def _odd_ratio(b: Builder, x: Value, top: tuple[float, ...], bottom: tuple[float, ...]) -> Value:
    square = b.mul(x, x)
    numerator = b.mul(x, polynomial(b, square, top))
    made = b.binary(BinOp.DIV, numerator, polynomial(b, square, bottom))
    return clamp(b, made, -1.0, 1.0)


def tanh(b: Builder, x: Value) -> Value:
    """The hyperbolic tangent; exactly 1 from the limit on, never beyond."""
    return _odd_ratio(b, clamp(b, x, -_TANH_LIMIT, _TANH_LIMIT), _TANH_TOP, _TANH_BOTTOM)


def erf(b: Builder, x: Value) -> Value:
    """The error function; exactly 1 from the limit on, never beyond."""
    return _odd_ratio(b, clamp(b, x, -_ERF_LIMIT, _ERF_LIMIT), _ERF_TOP, _ERF_BOTTOM)


def erf_inv(b: Builder, x: Value) -> Value:
    """The inverse error function; infinite at -1 and 1, NaN outside.

    The split into two polynomials is of Giles, "Approximating the erfinv function" (GPU Computing
    Gems, 2011).
    """
    one = number(b, x, 1.0)
    inside = b.mul(b.sub(one, x), b.add(one, x))
    w = b.unary(UnOp.NEG, log(b, inside))
    centre = polynomial(b, b.sub(w, number(b, x, 1.0)), _INV_CENTRE)
    root = b.sub(b.unary(UnOp.SQRT, w), number(b, x, 3.0))
    factor = b.select(test(b, CmpOp.LT, w, 5.0), centre, polynomial(b, root, _INV_TAIL))
    edge = test(b, CmpOp.EQ, magnitude(b, x), 1.0)
    return b.mul(x, b.select(edge, number(b, x, INFINITY), factor))


def rsqrt(b: Builder, x: Value) -> Value:
    """One over the square root, in the type of ``x``."""
    return b.binary(BinOp.DIV, b.const(x.type, 1.0), b.unary(UnOp.SQRT, x))
