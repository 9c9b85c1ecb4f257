"""ERF_INV in float64, which no mathematical library of C has.

Wichura, "Algorithm AS241: The Percentage Points of the Normal Distribution", Applied Statistics 37
(1988), PPND16, at ``(x + 1) / 2``: relative error about 1e-16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.interpret_ops import CENTRE, MIDDLE, TAIL
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import BinOp, CmpOp, UnOp


def _polynomial(b: Builder, x: Value, highest_first: Sequence[float]) -> Value:
    made: Value = b.const(x.type, highest_first[0])
    for term in highest_first[1:]:
        made = b.add(b.mul(made, x), b.const(x.type, term))
    return made


def _ratio(b: Builder, x: Value, terms: tuple[Sequence[float], Sequence[float]]) -> Value:
    return b.binary(BinOp.DIV, _polynomial(b, x, terms[0]), _polynomial(b, x, terms[1]))


def erf_inv(b: Builder, x: Value) -> Value:
    """The inverse error function of float64; infinite at -1 and 1, NaN outside."""
    size = b.unary(UnOp.ABS, x)
    one, zero = b.const(x.type, 1.0), b.const(x.type, 0.0)
    tail = b.mul(b.sub(one, size), b.const(x.type, 0.5))
    root = b.unary(UnOp.SQRT, b.unary(UnOp.NEG, b.unary(UnOp.LOG, tail)))
    quarter = b.mul(b.mul(x, x), b.const(x.type, 0.25))
    centre = _ratio(b, b.sub(b.const(x.type, 0.180625), quarter), CENTRE)
    centre = b.mul(centre, b.mul(size, b.const(x.type, 0.5)))
    middle = _ratio(b, b.sub(root, b.const(x.type, 1.6)), MIDDLE)
    outer = _ratio(b, b.sub(root, b.const(x.type, 5.0)), TAIL)
    beyond = b.compare(CmpOp.LE, root, b.const(x.type, 5.0))
    made = b.select(beyond, middle, outer)
    near = b.compare(CmpOp.LE, size, b.const(x.type, 0.85))
    made = b.mul(b.select(near, centre, made), b.const(x.type, 1.0 / math.sqrt(2.0)))
    infinite = b.const(x.type, math.inf)
    made = b.select(b.compare(CmpOp.EQ, size, one), infinite, made)
    made = b.select(b.compare(CmpOp.LT, x, zero), b.unary(UnOp.NEG, made), made)
    return b.select(b.compare(CmpOp.EQ, x, zero), x, made)
