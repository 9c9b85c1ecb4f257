"""How reductions and scans combine values: products, extrema, positions of extrema, and, or."""

from __future__ import annotations

import math
from typing import final

import numpy as np

from vkjit import dtypes
from vkjit.dtypes import DType
from vkjit.lowering.kernel import nodes
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.elements import scalar_type
from vkjit.lowering.kernel.types import (
    I1,
    I32,
    BinOp,
    CmpOp,
    ConvertOp,
    Number,
    ScalarType,
    lanes_of,
    scalar_of,
    with_elem,
)
from vkjit.ops.compare import comparison
from vkjit.ops.structural import float_of

State = tuple[nodes.Value, ...]


def _wide(b: Builder, x: nodes.Value, elem: ScalarType) -> nodes.Value:
    return b.convert(ConvertOp.FLOAT, x, with_elem(x.type, elem))


class _Rule:
    """Rules are equal when their parts are, so that equal groups share kernels."""

    __slots__ = ()

    def _parts(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._parts() == self._parts()

    def __hash__(self) -> int:
        return hash((type(self), *map(repr, self._parts())))

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self._parts()}"


@final
class BinaryRule(_Rule):
    """One kernel operation and its identity; 16-bit floats are kept in float32."""

    __slots__ = ("accumulator", "identity", "op", "operand")

    def __init__(self, operand: DType, op: BinOp, identity: Number) -> None:
        self.operand = scalar_type(operand)
        self.accumulator = scalar_type(float_of(operand))
        self.op = op
        self.identity = identity

    def initial(self, b: Builder, lanes: int) -> State:
        """The identity."""
        return (b.splat(b.const(self.accumulator, self.identity), lanes),)

    def step(self, b: Builder, state: State, x: nodes.Value, index: nodes.Value) -> State:
        """State op x."""
        return (b.binary(self.op, state[0], _wide(b, x, self.accumulator)),)

    def merge(self, b: Builder, left: State, right: State) -> State:
        """Left op right."""
        return (b.binary(self.op, left[0], right[0]),)

    def finish(self, b: Builder, state: State) -> nodes.Value:
        """Rounded once to the operand's dtype."""
        return _wide(b, state[0], self.operand)


@final
class BooleanRule(_Rule):
    """And or or of booleans; the state is an i32 of 0 or 1, because i1 cannot live in memory."""

    __slots__ = ("identity", "op")

    def __init__(self, op: BinOp) -> None:
        self.op = op
        self.identity = 1 if op is BinOp.AND else 0

    def initial(self, b: Builder, lanes: int) -> State:
        """True for and, false for or."""
        return (b.splat(b.const(I32, self.identity), lanes),)

    def step(self, b: Builder, state: State, x: nodes.Value, index: nodes.Value) -> State:
        """State op x."""
        wide = b.convert(ConvertOp.ZEXT, x, with_elem(x.type, I32))
        return (b.binary(self.op, state[0], wide),)

    def merge(self, b: Builder, left: State, right: State) -> State:
        """Left op right."""
        return (b.binary(self.op, left[0], right[0]),)

    def finish(self, b: Builder, state: State) -> nodes.Value:
        """As a boolean."""
        (x,) = state
        return b.compare(CmpOp.NE, x, b.splat(b.const(I32, 0), lanes_of(x.type)))


@final
class PositionRule(_Rule):
    """Position of the largest (or smallest) element: the first NaN, else the first of the ties.

    The state is (value, position as i32). Since ties are decided by position, the order in which
    states merge does not matter.
    """

    __slots__ = ("better", "elem", "identity", "operand")

    def __init__(self, operand: DType, *, largest: bool) -> None:
        self.operand = operand
        self.elem = scalar_type(float_of(operand))
        self.better = comparison(CmpOp.GT if largest else CmpOp.LT, operand)
        self.identity = worst(operand, largest=largest)

    def initial(self, b: Builder, lanes: int) -> State:
        """The worst value at the last position: any element wins against it."""
        value = b.splat(b.const(self.elem, self.identity), lanes)
        return value, b.splat(b.const(I32, np.iinfo(np.int32).max), lanes)

    def step(self, b: Builder, state: State, x: nodes.Value, index: nodes.Value) -> State:
        """One element against the state."""
        lanes = lanes_of(x.type)
        if scalar_of(index.type).bits > 32:
            index = b.convert(ConvertOp.TRUNC, index, with_elem(index.type, I32))
        return self.merge(b, state, (_wide(b, x, self.elem), b.splat(index, lanes)))

    def merge(self, b: Builder, left: State, right: State) -> State:
        """The better of both."""
        (x, i), (y, j) = left, right
        wins = b.compare(self.better, y, x)
        ties = b.compare(CmpOp.EQ, y, x)
        if dtypes.is_float(self.operand):
            x_nan, y_nan = b.compare(CmpOp.NE, x, x), b.compare(CmpOp.NE, y, y)
            wins = b.binary(BinOp.OR, wins, b.binary(BinOp.AND, y_nan, _not(b, x_nan)))
            ties = b.binary(BinOp.OR, ties, b.binary(BinOp.AND, y_nan, x_nan))
        first = b.binary(BinOp.AND, ties, b.compare(CmpOp.LT, j, i))
        takes = b.binary(BinOp.OR, wins, first)
        return b.select(takes, y, x), b.select(takes, j, i)

    def finish(self, b: Builder, state: State) -> nodes.Value:
        """The position."""
        return state[1]


def _not(b: Builder, x: nodes.Value) -> nodes.Value:
    return b.binary(BinOp.XOR, x, b.splat(b.const(I1, True), lanes_of(x.type)))


def worst(dtype: DType, *, largest: bool) -> Number:
    """The identity of max (``largest``) or min, as kernels write it: integers carry no sign."""
    if dtypes.is_float(dtype):
        return -math.inf if largest else math.inf
    limits = np.iinfo(dtype)
    if dtypes.is_signed(dtype):
        return int(limits.min if largest else limits.max)
    return 0 if largest else -1


def max_rule(dtype: DType) -> BinaryRule:
    """The largest; NaN spreads."""
    signed = BinOp.MAX_S if dtypes.is_signed(dtype) else BinOp.MAX_U
    op = BinOp.MAX if dtypes.is_float(dtype) else signed
    return BinaryRule(dtype, op, worst(dtype, largest=True))


def min_rule(dtype: DType) -> BinaryRule:
    """The smallest; NaN spreads."""
    signed = BinOp.MIN_S if dtypes.is_signed(dtype) else BinOp.MIN_U
    op = BinOp.MIN if dtypes.is_float(dtype) else signed
    return BinaryRule(dtype, op, worst(dtype, largest=False))


def product_rule(dtype: DType) -> BinaryRule:
    """The product; integers wrap."""
    return BinaryRule(dtype, BinOp.MUL, 1.0 if dtypes.is_float(dtype) else 1)
