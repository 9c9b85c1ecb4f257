"""Steps of random programs: operations on values of a pool, straight after one another."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, final

from hypothesis import strategies as st

from vkjit import dtypes
from vkjit.ir.avals import Aval
from vkjit.ir.primitive import Value
from vkjit.ops import (
    arithmetic,
    cast,
    compare,
    contract,
    extrema,
    indexing,
    logical,
    movement,
    reduce,
    reshaping,
    scan,
    special,
    structural,
    trigonometry,
)
from vkjit.ops import math as m
from vkjit.trace import aval_of

Draw = Callable[[st.SearchStrategy[Any]], Any]
Step = Callable[["Pool"], Value | None]

MAX_SIZE = 512
"""Elements of one value; larger ones are never made."""
MIXED = (dtypes.float32, dtypes.float32, dtypes.float16, dtypes.bfloat16, dtypes.int32)


@final
@dataclass
class Pool:
    """Values made so far and how to choose among them."""

    draw: Draw
    values: list[Value]
    smooth: bool
    steps: tuple[Step, ...] = ()
    left: list[int] = field(default_factory=lambda: [0])  # shared with the pools inside
    nesting: tuple[Step, ...] = ()  # steps with pools inside, which are not taken deeper down
    depth: int = 0

    def pick(self, fits: Callable[[Aval], bool]) -> Value | None:
        """A value that fits, a late one more often; None without one."""
        found = [v for v in self.values if fits(aval_of(v))]
        if not found:
            return None
        return found[-1 - self.draw(st.integers(0, min(len(found), 6) - 1))]

    def below(self, count: int) -> int:
        """An integer in [0, count)."""
        return self.draw(st.integers(0, count - 1))

    def flag(self) -> bool:
        return self.draw(st.booleans())

    def axes(self, of: Aval) -> tuple[int, ...]:
        """Some axes, in order."""
        return tuple(i for i in range(of.ndim) if self.flag())

    def grow(self, count: int) -> None:
        """Up to ``count`` operations more."""
        for _ in range(count):
            if self.left[0] <= 0:
                return
            self.left[0] -= 1
            made = self.steps[self.below(len(self.steps))](self)
            if made is not None:
                self.values.append(made)

    def inside(self, *params: Value) -> Pool:
        """The pool of a function of ``params`` that may close over values of this one."""
        outer = self.values[-3:] if self.flag() else []
        steps = [s for s in self.steps if self.depth < 1 or s not in self.nesting]
        return replace(
            self, values=[*outer, *params], steps=tuple(dict.fromkeys(steps)), depth=self.depth + 1
        )


def is_number(of: Aval) -> bool:
    return of.dtype != dtypes.bool_


def is_float(of: Aval) -> bool:
    return dtypes.is_float(of.dtype)


def like(of: Aval) -> Callable[[Aval], bool]:
    """A test for one shape and dtype."""
    return lambda a: a.shape == of.shape and a.dtype == of.dtype


def is_full(of: Aval) -> bool:
    return of.ndim > 0 and of.size > 0


SMOOTH_UNARY = (trigonometry.sin, trigonometry.cos, trigonometry.tanh, special.logistic)
ROUGH_UNARY = (arithmetic.absolute, m.floor, m.round_even, arithmetic.sign, special.erf)


def unary(pool: Pool) -> Value | None:
    x = pool.pick(is_float)
    if x is None:
        return None
    choices = SMOOTH_UNARY if pool.smooth else (*SMOOTH_UNARY, *ROUGH_UNARY)
    return choices[pool.below(len(choices))](x)


def binary(pool: Pool) -> Value | None:
    x = pool.pick(is_number)
    if x is None:
        return None
    of = aval_of(x)
    y = pool.pick(lambda a: a.dtype == of.dtype and (a.shape in (of.shape, ()) or of.shape == ()))
    rough = (extrema.maximum, extrema.minimum)
    choices = (structural.add, arithmetic.sub, arithmetic.mul, *(() if pool.smooth else rough))
    return choices[pool.below(len(choices))](x, y)


def bounded(pool: Pool) -> Value | None:
    """exp, log1p and sqrt where they are tame."""
    x = pool.pick(is_float)
    if x is None:
        return None
    inside = trigonometry.sin(x)
    choices = (
        m.exp,
        lambda v: m.log1p(structural.expand(arithmetic.mul(v, v), aval_of(v).shape)),
        lambda v: m.rsqrt(m.plus_one(arithmetic.mul(v, v))),
    )
    return choices[pool.below(len(choices))](inside)


def literal(pool: Pool) -> Value | None:
    x = pool.pick(is_float)
    if x is None:
        return None
    value = aval_of(x).dtype.type(pool.draw(st.sampled_from((0.0, -0.0, 1.0, -1.0, 0.5, 3.0))))
    return (arithmetic.mul if pool.flag() else structural.add)(x, value)


def choice(pool: Pool) -> Value | None:
    x = pool.pick(is_number)
    if x is None:
        return None
    of = aval_of(x)
    y = pool.pick(lambda a: a == of)
    test = pool.pick(lambda a: a.dtype == dtypes.bool_ and a.shape == of.shape)
    if test is None:
        tests = (compare.lt, compare.ge, compare.eq, compare.ne)
        test = tests[pool.below(4)](x, y)
    return logical.select(test, x, y)


def test(pool: Pool) -> Value | None:
    x = pool.pick(is_number)
    if x is None:
        return None
    of = aval_of(x)
    return (compare.lt if pool.flag() else compare.ne)(x, pool.pick(lambda a: a == of))


def converted(pool: Pool) -> Value | None:
    x = pool.pick(lambda a: True)
    kinds = (dtypes.float32, dtypes.float16, dtypes.bfloat16, dtypes.int32, dtypes.uint8)
    return cast.cast(x, kinds[pool.below(len(kinds))])


def permuted(pool: Pool) -> Value | None:
    x = pool.pick(lambda a: a.ndim > 1)
    if x is None:
        return None
    order = pool.draw(st.permutations(range(aval_of(x).ndim)))
    return structural.permute(x, tuple(order))


def reshaped(pool: Pool) -> Value | None:
    x = pool.pick(lambda a: True)
    of = aval_of(x)
    kind = pool.below(3)
    if kind == 0 or of.ndim == 0:
        return reshaping.reshape(x, (of.size,))
    if kind == 1 and of.ndim < 4:
        return reshaping.expand_dims(x, (pool.below(of.ndim + 1),))
    axis = pool.below(of.ndim)
    size = of.shape[axis]
    divisors = [d for d in range(2, size) if size % d == 0]
    if not divisors or of.ndim > 3:
        return reshaping.reshape(x, (of.size,))
    d = divisors[pool.below(len(divisors))]
    return reshaping.reshape(x, (*of.shape[:axis], d, size // d, *of.shape[axis + 1 :]))


def repeated(pool: Pool) -> Value | None:
    size = pool.below(7)
    x = pool.pick(lambda a: a.ndim < 4 and a.size * max(size, 1) <= MAX_SIZE)
    if x is None:
        return None
    of = aval_of(x)
    at = pool.below(of.ndim + 1)
    axes = tuple(i for i in range(of.ndim + 1) if i != at)
    return structural.broadcast(x, (*of.shape[:at], size, *of.shape[at:]), axes)


def cut(pool: Pool) -> Value | None:
    x = pool.pick(lambda a: a.ndim > 0)
    if x is None:
        return None
    of = aval_of(x)
    if pool.flag():
        return reshaping.reverse(x, pool.axes(of))
    starts = tuple(pool.below(n + 1) for n in of.shape)
    limits = tuple(pool.draw(st.integers(s, n)) for s, n in zip(starts, of.shape, strict=True))
    strides = tuple(1 + pool.below(3) for _ in of.shape)
    return movement.slice_(x, starts, limits, strides)


def placed(pool: Pool) -> Value | None:
    x = pool.pick(lambda a: a.ndim > 0 and a.size <= MAX_SIZE // 8)
    if x is None:
        return None
    of = aval_of(x)
    if pool.flag():
        y = pool.pick(lambda a: a == of)
        return movement.concatenate([x, y], pool.below(of.ndim))
    low = tuple(pool.below(4) - 1 for _ in of.shape)
    high = tuple(pool.below(3) for _ in of.shape)
    interior = tuple(pool.below(2) for _ in of.shape)
    sizes = [
        n + a + b + i * max(n - 1, 0)
        for n, a, b, i in zip(of.shape, low, high, interior, strict=True)
    ]
    if min(sizes) < 0 or math.prod(sizes) > MAX_SIZE:
        return None
    return movement.pad(x, of.dtype.type(0), low, high, interior)


def reduced(pool: Pool) -> Value | None:
    x = pool.pick(lambda a: is_number(a) and is_full(a))
    if x is None:
        return None
    of = aval_of(x)
    axes = pool.axes(of)
    if pool.smooth or pool.flag():
        return structural.reduce_sum(x, axes)
    kind = pool.below(3)
    if kind == 2:
        return reduce.argmax(x, pool.below(of.ndim))
    return (reduce.reduce_max, reduce.reduce_min)[kind](x, axes)


def scanned(pool: Pool) -> Value | None:
    x = pool.pick(lambda a: is_number(a) and a.ndim > 0)
    if x is None:
        return None
    return scan.cumsum(x, pool.below(aval_of(x).ndim), reverse=pool.flag())


def contracted(pool: Pool) -> Value | None:
    x = pool.pick(lambda a: is_float(a) and a.ndim > 0)
    if x is None:
        return None
    of = aval_of(x)
    axis = pool.below(of.ndim)
    size = of.shape[axis]
    y = pool.pick(lambda a: a.dtype == of.dtype and size in a.shape)
    other = aval_of(y)
    at = other.shape.index(size)
    shared = [
        (i, j)
        for i in range(of.ndim)
        for j in range(other.ndim)
        if i != axis and j != at and of.shape[i] == other.shape[j]
    ]
    batch = shared[pool.below(len(shared))] if shared and pool.flag() else None
    pairs = ((batch[0],), (batch[1],)) if batch else ((), ())
    free = of.size // max(size, 1) * (other.size // max(size, 1))
    rank = of.ndim + other.ndim - 2 - (1 if batch else 0)
    if free > MAX_SIZE or rank > 5:
        return None
    return contract.dot_general(x, y, ((axis,), (at,)), pairs)


def indexed(pool: Pool) -> Value | None:
    x = pool.pick(lambda a: is_number(a) and is_full(a) and a.ndim < 4)
    if x is None:
        return None
    of = aval_of(x)
    axis = pool.below(of.ndim)
    count = 1 + pool.below(5)
    ramp = reshaping.iota(dtypes.int32, (count,), 0)
    indices = arithmetic.rem(
        arithmetic.mul(ramp, dtypes.int32.type(1 + pool.below(3))),
        dtypes.int32.type(of.shape[axis]),
    )
    rows = indexing.gather(x, indices, axis)
    return indexing.scatter_add(x, indices, rows, axis) if pool.flag() else rows


SMOOTH_STEPS: tuple[Step, ...] = (unary, unary, binary, binary, bounded, literal)
SMOOTH_STEPS += (permuted, reshaped, repeated, cut, placed, reduced, scanned, contracted, indexed)
ALL_STEPS: tuple[Step, ...] = (*SMOOTH_STEPS, choice, test, converted)
