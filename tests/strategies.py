"""Random programs over the operations, for properties that every program must have.

``CONTROL_STEPS`` are those that run programs: a new one takes values from its pool, makes the inner
program from a pool ``inside`` it, and returns one of its results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from hypothesis import strategies as st

from vkjit import dtypes, lax
from vkjit.api.checkpoint import checkpoint
from vkjit.control import policies
from vkjit.dtypes import DType
from vkjit.ir.avals import Aval, aval
from vkjit.ir.primitive import Value
from vkjit.ir.program import Program
from vkjit.ops import (
    arithmetic,
    cast,
    compare,
    contract,
    extrema,
    indexing,
    logical,
    movement,
    naming,
    reduce,
    reshaping,
    scan,
    special,
    structural,
    trigonometry,
    write,
)
from vkjit.ops import math as m
from vkjit.trace import aval_of, trace

Draw = Callable[[st.SearchStrategy[Any]], Any]
Step = Callable[["Pool"], Value | None]

MAX_SIZE = 512
"""Elements of one value; larger ones are never made."""
FLOATS = (dtypes.float32,)
MIXED = (dtypes.float32, dtypes.float32, dtypes.float16, dtypes.bfloat16, dtypes.int32)
seeds = st.integers(0, 2**16)


@final
@dataclass
class Pool:
    """Values made so far and how to choose among them."""

    draw: Draw
    values: list[Value]
    smooth: bool
    steps: tuple[Step, ...] = ()
    left: list[int] = field(default_factory=lambda: [0])  # shared with the pools inside
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
        steps = self.steps if self.depth < 1 else tuple(set(self.steps) - {*CONTROL_STEPS, counted})
        steps = tuple(sorted(steps, key=lambda step: step.__name__))
        return Pool(self.draw, [*outer, *params], self.smooth, steps, self.left, self.depth + 1)


def _number(of: Aval) -> bool:
    return of.dtype != dtypes.bool_


def _float(of: Aval) -> bool:
    return dtypes.is_float(of.dtype)


def _like(of: Aval) -> Callable[[Aval], bool]:
    """A test for one shape and dtype."""
    return lambda a: a.shape == of.shape and a.dtype == of.dtype


def _full(of: Aval) -> bool:
    return of.ndim > 0 and of.size > 0


SMOOTH_UNARY = (trigonometry.sin, trigonometry.cos, trigonometry.tanh, special.logistic)
ROUGH_UNARY = (arithmetic.absolute, m.floor, m.round_even, arithmetic.sign, special.erf)


def unary(pool: Pool) -> Value | None:
    x = pool.pick(_float)
    if x is None:
        return None
    choices = SMOOTH_UNARY if pool.smooth else (*SMOOTH_UNARY, *ROUGH_UNARY)
    return choices[pool.below(len(choices))](x)


def binary(pool: Pool) -> Value | None:
    x = pool.pick(_number)
    if x is None:
        return None
    of = aval_of(x)
    y = pool.pick(lambda a: a.dtype == of.dtype and (a.shape in (of.shape, ()) or of.shape == ()))
    rough = (extrema.maximum, extrema.minimum)
    choices = (structural.add, arithmetic.sub, arithmetic.mul, *(() if pool.smooth else rough))
    return choices[pool.below(len(choices))](x, y)


def bounded(pool: Pool) -> Value | None:
    """exp, log1p and sqrt where they are tame."""
    x = pool.pick(_float)
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
    x = pool.pick(_float)
    if x is None:
        return None
    value = aval_of(x).dtype.type(pool.draw(st.sampled_from((0.0, -0.0, 1.0, -1.0, 0.5, 3.0))))
    return (arithmetic.mul if pool.flag() else structural.add)(x, value)


def choice(pool: Pool) -> Value | None:
    x = pool.pick(_number)
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
    x = pool.pick(_number)
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
    x = pool.pick(lambda a: _number(a) and _full(a))
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
    x = pool.pick(lambda a: _number(a) and a.ndim > 0)
    if x is None:
        return None
    return scan.cumsum(x, pool.below(aval_of(x).ndim), reverse=pool.flag())


def contracted(pool: Pool) -> Value | None:
    x = pool.pick(lambda a: _float(a) and a.ndim > 0)
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
    x = pool.pick(lambda a: _number(a) and _full(a) and a.ndim < 4)
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


def looped(pool: Pool) -> Value | None:
    """A scan over slices of one value, or of none, with up to two carries of any kind."""
    xs = pool.pick(lambda a: a.ndim > 0 and a.shape[0] < 5)
    picked = [pool.pick(lambda a: a.size <= MAX_SIZE // 4) for _ in range(pool.below(3))]
    carries = [c for c in picked if c is not None]
    if xs is None and not carries:
        return None
    length = aval_of(xs).shape[0] if xs is not None else pool.below(4)

    def turn(carry: list[Value], x: Value) -> tuple[list[Value], list[Value]]:
        inner = pool.inside(*carry, *([] if x is None else [x]))
        inner.grow(1 + pool.below(6))
        after: list[Value] = []
        for old in carry:
            of = aval_of(old)
            new = inner.pick(_like(of))
            # Bounded, so that no loop raises a value to a power of its length.
            after.append(trigonometry.sin(new) if _float(of) else new)
        small = [v for v in inner.values if aval_of(v).size * max(length, 1) <= MAX_SIZE]
        return after, small[-2:]

    last, ys = lax.scan(turn, carries, xs, length, reverse=pool.flag())
    made = [v for v in (*last, *ys) if not pool.smooth or _float(aval_of(v))]
    pool.values.extend(made[1:])
    return made[0] if made else None


def number(pool: Pool, count: int) -> Value | None:
    """An i32 below ``count`` that one element of a value decides; locally constant if smooth."""
    x = pool.pick(lambda a: _number(a) and a.size > 0)
    if x is None:
        return None
    of = aval_of(x)
    line = reshaping.reshape(x, (of.size,))
    first = reshaping.reshape(movement.slice_(line, (0,), (1,), (1,)), ())
    if pool.smooth:
        first = arithmetic.mul(first, of.dtype.type(0))
    total: Value = dtypes.int32.type(0)
    for _ in range(count - 1):
        edge = of.dtype.type(pool.below(2) * 2 if of.dtype.kind == "u" else pool.below(2) * 2 - 1)
        total = structural.add(total, cast.cast(compare.lt(first, edge), dtypes.int32))
    return total


def chosen(pool: Pool) -> Value | None:
    """The results of one of two or three functions of up to two values."""
    count = 2 + pool.below(2)
    index = number(pool, count)
    if index is None:
        return None
    given = [pool.pick(lambda a: True) for _ in range(1 + pool.below(2))]
    wanted: list[Aval] = []

    def branch(position: int) -> Callable[..., list[Value]]:
        def run(*values: Value) -> list[Value]:
            inner = pool.inside(*values)
            inner.grow(pool.below(6))
            if position == 0:
                made = [v for v in inner.values if not pool.smooth or _float(aval_of(v))][-2:]
                wanted[:] = [aval_of(v) for v in made]
                return made
            found = [inner.pick(_like(of)) for of in wanted]
            pairs = zip(found, wanted, strict=True)
            return [structural.zeros(of) if v is None else v for v, of in pairs]

        return run

    outs = lax.switch(index, [branch(i) for i in range(count)], *given)
    pool.values.extend(outs[1:])
    return outs[0] if outs else None


def counted(pool: Pool) -> Value | None:
    """A loop of up to three turns, as many as a value says; reverse mode refuses it."""
    turns = number(pool, 4)
    if turns is None:
        return None
    picked = [pool.pick(lambda a: a.size <= MAX_SIZE // 4) for _ in range(1 + pool.below(2))]
    carries = [v for v in picked if v is not None]

    def turn(carried: tuple[Value, list[Value]]) -> tuple[Value, list[Value]]:
        left, values = carried
        inner = pool.inside(left, *values)
        inner.grow(1 + pool.below(5))
        after = [inner.pick(_like(aval_of(v))) for v in values]
        bounded = [trigonometry.sin(v) if _float(aval_of(v)) else v for v in after]
        return arithmetic.sub(left, dtypes.int32.type(1)), bounded

    def goes_on(carried: tuple[Value, list[Value]]) -> Value:
        return compare.gt(carried[0], dtypes.int32.type(0))

    last = lax.while_loop(goes_on, turn, (turns, carries))[1]
    made = [v for v in last if not pool.smooth or _float(aval_of(v))]
    pool.values.extend(made[1:])
    return made[0] if made else None


def written(pool: Pool) -> Value | None:
    """A value whose region another overwrites."""
    dest = pool.pick(_number)
    if dest is None:
        return None
    of = aval_of(dest)
    value = pool.pick(
        lambda a: (
            a.dtype == of.dtype
            and a.ndim == of.ndim
            and all(m <= n for m, n in zip(a.shape, of.shape, strict=True))
        )
    )
    starts = [pool.below(n - m + 1) for m, n in zip(aval_of(value).shape, of.shape, strict=True)]
    return write.copy_into(dest, value, tuple(starts))


POLICIES: tuple[policies.Policy, ...] = (
    policies.nothing_saveable,
    policies.everything_saveable,
    policies.dots_saveable,
    policies.save_only_these_names("kept"),
    policies.save_anything_except_these_names("kept"),
)


def named(pool: Pool) -> Value | None:
    """A value with a name that policies know."""
    return naming.name(pool.pick(lambda a: True), "kept")


def checkpointed(pool: Pool) -> Value | None:
    """A function of up to three values whose inner values are computed again."""
    given = [pool.pick(lambda a: True) for _ in range(1 + pool.below(3))]

    def part(*values: Value) -> list[Value]:
        inner = pool.inside(*values)
        inner.grow(1 + pool.below(8))
        return [v for v in inner.values if not pool.smooth or _float(aval_of(v))][-2:]

    outs = checkpoint(part, policy=POLICIES[pool.below(len(POLICIES))])(*given)
    pool.values.extend(outs[1:])
    return outs[0] if outs else None


CONTROL_STEPS: tuple[Step, ...] = (looped, chosen, checkpointed)
SMOOTH_STEPS: tuple[Step, ...] = (unary, unary, binary, binary, bounded, literal)
SMOOTH_STEPS += (permuted, reshaped, repeated, cut, placed, reduced, scanned, contracted, indexed)
ALL_STEPS: tuple[Step, ...] = (*SMOOTH_STEPS, choice, test, converted)


def shapes(max_rank: int = 4) -> st.SearchStrategy[tuple[int, ...]]:
    """Up to rank 4 with sizes 0 to 7."""
    sizes = st.one_of(st.integers(1, 7), st.integers(0, 7))
    found = st.lists(sizes, max_size=max_rank).map(tuple)
    return found.filter(lambda s: math.prod(s) <= MAX_SIZE)


@st.composite
def programs(
    draw: Draw,
    *,
    max_steps: int = 30,
    kinds: Sequence[DType] = MIXED,
    smooth: bool = False,
    control: bool | Sequence[Step] = False,
) -> Program:
    """A program of up to ``max_steps`` operations; ``smooth`` ones are differentiable everywhere.

    The last values and some of the earlier ones are the results. With ``control``, some operations
    run programs, whose operations count: all of ``CONTROL_STEPS``, or those given.
    """
    given = draw(st.lists(st.tuples(shapes(), st.sampled_from(kinds)), min_size=1, max_size=3))
    steps = SMOOTH_STEPS if smooth else ALL_STEPS
    if control:
        steps += 2 * (CONTROL_STEPS if control is True else tuple(control))
    count = draw(st.integers(1, max_steps))

    def body(*values: Value) -> list[Value]:
        pool = Pool(draw, list(values), smooth, steps, [count])
        pool.grow(count)
        wanted = 1 + pool.below(3)
        floats = [v for v in pool.values if not smooth or _float(aval_of(v))]
        return floats[-wanted:]

    return trace(body, [aval(shape, dtype) for shape, dtype in given]).program
