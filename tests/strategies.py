"""Random programs over the operations, for properties that every program must have.

``CONTROL_STEPS`` are those that run programs: a new one takes values from its pool, makes the inner
program from a pool ``inside`` it, and returns one of its results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from tests.steps import (
    ALL_STEPS,
    MAX_SIZE,
    MIXED,
    SMOOTH_STEPS,
    Draw,
    Pool,
    Step,
    is_float,
    is_number,
    like,
)
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
    movement,
    naming,
    reshaping,
    structural,
    trigonometry,
    write,
)
from vkjit.trace import aval_of, trace

seeds = st.integers(0, 2**16)


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
            new = inner.pick(like(of))
            # Bounded, so that no loop raises a value to a power of its length.
            after.append(trigonometry.sin(new) if is_float(of) else new)
        small = [v for v in inner.values if aval_of(v).size * max(length, 1) <= MAX_SIZE]
        return after, small[-2:]

    last, ys = lax.scan(turn, carries, xs, length, reverse=pool.flag())
    made = [v for v in (*last, *ys) if not pool.smooth or is_float(aval_of(v))]
    pool.values.extend(made[1:])
    return made[0] if made else None


def number(pool: Pool, count: int) -> Value | None:
    """An i32 below ``count`` that one element of a value decides; locally constant if smooth."""
    x = pool.pick(lambda a: is_number(a) and a.size > 0)
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
                made = [v for v in inner.values if not pool.smooth or is_float(aval_of(v))][-2:]
                wanted[:] = [aval_of(v) for v in made]
                return made
            found = [inner.pick(like(of)) for of in wanted]
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
        after = [inner.pick(like(aval_of(v))) for v in values]
        bounded = [trigonometry.sin(v) if is_float(aval_of(v)) else v for v in after]
        return arithmetic.sub(left, dtypes.int32.type(1)), bounded

    def goes_on(carried: tuple[Value, list[Value]]) -> Value:
        return compare.gt(carried[0], dtypes.int32.type(0))

    last = lax.while_loop(goes_on, turn, (turns, carries))[1]
    made = [v for v in last if not pool.smooth or is_float(aval_of(v))]
    pool.values.extend(made[1:])
    return made[0] if made else None


def written(pool: Pool) -> Value | None:
    """A value whose region another overwrites."""
    dest = pool.pick(is_number)
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
        return [v for v in inner.values if not pool.smooth or is_float(aval_of(v))][-2:]

    outs = checkpoint(part, policy=POLICIES[pool.below(len(POLICIES))])(*given)
    pool.values.extend(outs[1:])
    return outs[0] if outs else None


CONTROL_STEPS: tuple[Step, ...] = (looped, chosen, checkpointed)


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
        pool = Pool(draw, list(values), smooth, steps, [count], (*CONTROL_STEPS, counted))
        pool.grow(count)
        wanted = 1 + pool.below(3)
        floats = [v for v in pool.values if not smooth or is_float(aval_of(v))]
        return floats[-wanted:]

    return trace(body, [aval(shape, dtype) for shape, dtype in given]).program
