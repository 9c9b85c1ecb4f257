"""Random programs of whole numbers with loops, branches and calls: every order gives equal bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.control_forms import run, traced
from vkjit import numpy as jnp
from vkjit.ir.avals import Aval, aval
from vkjit.ir.control import Branch, Control, Scan, While
from vkjit.ir.program import Program
from vkjit.lax import dynamic_update_slice
from vkjit.ops.write import copy_into
from vkjit.trace import aval_of

I32 = np.dtype(np.int32)
I8 = np.dtype(np.int8)
SHAPES = ((4, 4), (4,), (3,), (2, 3), ())
Values = list[Any]
Random = np.random.Generator


def pick(rng: Random, values: Values) -> Any:
    return values[int(rng.integers(len(values)))]


def like(rng: Random, values: Values, of: Any) -> Any:
    """A value of the same aval."""
    return pick(rng, [v for v in values if aval_of(v) == aval_of(of)])


def arithmetic(rng: Random, values: Values) -> Any:
    a = pick(rng, values)
    b = like(rng, values, a)
    made = [a + b, a - b * 3, jnp.maximum(a, b), jnp.where(a > b, a, b), a * b]
    return made[int(rng.integers(5))]


def crosswise(rng: Random, values: Values) -> Any:
    """Each element from others, so that nothing can be computed in place."""
    a = pick(rng, values)
    if aval_of(a).ndim == 0:
        return a * 5 + 1
    made = [jnp.flip(a, 0), a + jnp.sum(a, axis=0), jnp.cumsum(a, axis=0), a - jnp.max(a)]
    if aval_of(a).shape == (4, 4):
        made += [a.T + 1, a @ like(rng, values, a)]
    return made[int(rng.integers(len(made)))]


def written(rng: Random, values: Values) -> Any:
    a = pick(rng, values)
    if aval_of(a).ndim == 0:
        return a
    row = like(rng, values, a)[:1] + 1
    if rng.integers(2):
        return copy_into(a, row, (aval_of(a).shape[0] - 1,) + (0,) * (aval_of(a).ndim - 1))
    at = jnp.sum(row) % 3
    return dynamic_update_slice(a, row, (at,) + (0,) * (aval_of(a).ndim - 1))


def block(rng: Random, values: Values, depth: int) -> Values:
    """More values, the last ones computed last."""
    made = list(values)
    for _ in range(int(rng.integers(1, 6))):
        kind = int(rng.integers(8 if depth else 6))
        match kind:
            case 0 | 1:
                made.append(arithmetic(rng, made))
            case 2 | 3:
                made.append(crosswise(rng, made))
            case 4 | 5:
                made.append(written(rng, made))
            case _:
                made += nested(rng, made, depth - 1)
    return made


def body_of(
    rng: Random, given: Sequence[Aval], wanted: Sequence[Aval], depth: int
) -> Callable[..., Values]:
    """A function of values of the avals ``given`` that gives values of the avals ``wanted``."""
    seed = int(rng.integers(1 << 31))

    def body(*args: Any) -> Values:
        own = np.random.default_rng(seed)
        values = block(own, list(args), depth)
        found: Values = []
        for want in wanted:
            fits = [v for v in values if aval_of(v) == want]
            found.append(fits[-1 - int(own.integers(min(3, len(fits))))])
        return found

    return body


def nested(rng: Random, values: Values, depth: int) -> Values:
    form, args = [scan, repeat, branch][int(rng.choice(3, p=[0.6, 0.2, 0.2]))](rng, values, depth)
    return list(run(form, *args))


def some(rng: Random, values: Values, least: int, most: int) -> Values:
    return [pick(rng, values) for _ in range(int(rng.integers(least, most + 1)))]


def scan(rng: Random, values: Values, depth: int) -> tuple[Control, Values]:
    length = int(rng.integers(1, 5))
    constants, carries = some(rng, values, 0, 2), some(rng, values, 1, 3)
    xs = [jnp.stack([like(rng, values, v) for _ in range(length)]) for v in some(rng, values, 0, 2)]
    given = [aval_of(v) for v in (*constants, *carries)]
    given += [aval(aval_of(x).shape[1:], aval_of(x).dtype) for x in xs]
    carried = given[len(constants) : len(constants) + len(carries)]
    extra = [given[int(rng.integers(len(given)))] for _ in range(int(rng.integers(3)))]
    body = traced(body_of(rng, given, [*carried, *extra], depth), *given)
    form = Scan(body, length, len(constants), len(carries), bool(rng.integers(2)))
    return form, [*constants, *carries, *xs]


def repeat(rng: Random, values: Values, depth: int) -> tuple[Control, Values]:
    """A loop of up to 4 turns, counted in its first carry."""
    counter = aval((), I32)
    constants, carries = some(rng, values, 0, 2), some(rng, values, 1, 3)
    fixed, moving = ([aval_of(v) for v in part] for part in (constants, carries))
    limit = int(rng.integers(5))
    condition = traced(lambda n, *_: [n < limit], counter, *moving)
    inside = body_of(rng, [*fixed, *moving], moving, depth)

    def body(*args: Any) -> Values:
        n, rest = args[len(fixed)], (*args[: len(fixed)], *args[len(fixed) + 1 :])
        return [n + 1, *inside(*rest)]

    form = While(condition, traced(body, *fixed, counter, *moving), 0, len(fixed))
    return form, [*constants, jnp.astype(jnp.sum(pick(rng, values)) * 0, I32), *carries]


def branch(rng: Random, values: Values, depth: int) -> tuple[Control, Values]:
    operands = some(rng, values, 1, 4)
    given = [aval_of(v) for v in operands]
    wanted = [given[int(rng.integers(len(given)))] for _ in range(int(rng.integers(1, 3)))]
    count = int(rng.integers(1, 4))
    branches = [traced(body_of(rng, given, wanted, depth), *given) for _ in range(count)]
    index = jnp.astype(jnp.sum(pick(rng, values)) % 5 - 1, I32)
    return Branch(tuple(branches)), [index, *operands]


def random_program(seed: int, depth: int = 2) -> Program:
    """A program over arrays of a few shapes, with control forms inside each other."""
    rng = np.random.default_rng(seed)
    avals = [aval(shape, I32) for shape in SHAPES] + [aval((3,), I8), aval((4, 4), I32)]

    def function(*args: Any) -> Values:
        values = block(rng, list(args), depth)
        values += nested(rng, values, depth)
        values = block(rng, values, 0)
        return values[len(args) :][-4:]

    return traced(function, *avals)
