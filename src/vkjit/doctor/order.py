"""Stage ``order``: copies and barriers. A stale read changes the result for good.

All arithmetic is on whole numbers, so the result after a thousand rounds is known to the bit; the
NumPy evaluator makes the same rounds. Nothing waits between rounds on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import vkjit.numpy as jnp
from vkjit.api.autodiff import grad
from vkjit.doctor.comparing import Array
from vkjit.doctor.session import Program, Session
from vkjit.ir.evaluate import evaluate
from vkjit.lax import dynamic_update_slice
from vkjit.lowering.artifact import Copy, Launch, Plan, PlannedBuffer, Range, Role, Step
from vkjit.lowering.plan.hazards import check_order

ROUNDS = 1000
_QUICK_ROUNDS = 40
_SIDE = 64


def order(session: Session) -> None:
    """The copy-then-read loop, without and with donation, and the copied transposed weight."""
    rounds = _QUICK_ROUNDS if session.quick else ROUNDS
    side = (_SIDE, _SIDE)
    state = [session.rng.integers(-99, 99, side, np.int32) for _ in range(2)]
    weights = [session.rng.integers(-2, 3, s).astype(np.int32) for s in (side, (8, _SIDE))]
    loops: list[tuple[str, Callable[..., Any], Sequence[Array], tuple[int, ...]]] = [
        ("copy, then read", copy_then_read, state, ()),
        ("copy, then read, in donated memory", copy_then_read, state, (0, 1)),
        ("copied transposed weight in the backward", backward_through_a_copy, weights, ()),
    ]
    for what, function, start, donated in session.cases(loops):
        race(session, f"{what}, {rounds} rounds", function, (start, rounds, donated))
    for start in session.cases((state[0],)):
        _copy_command(session, start, rounds)


def race(
    session: Session,
    what: str,
    function: Callable[..., Any],
    of: tuple[Sequence[Array], int, tuple[int, ...]],
) -> None:
    """Feeds results back for so many rounds on the device and in NumPy, then compares.

    ``of`` is the first state, the number of rounds and which inputs are donated.
    """
    start, rounds, donated = of
    key = np.zeros((), np.int32)
    program = Program(session.device, function, (*start, key), donated)
    buffers = program.put(list(start))
    wanted: list[Any] = list(start)
    for turn in range(rounds):
        key = np.asarray(turn * 7 % _SIDE, np.int32)
        buffers = program.run([*buffers, *program.put([key])])
        wanted = list(evaluate(program.lowered.program, [*wanted, key]))
    for number, (got, want) in enumerate(zip(program.get(buffers), wanted, strict=True)):
        session.compare(f"{what}, state {number}", got, want)


def _copy_command(session: Session, start: Array, rounds: int) -> None:
    """The device's own copy of a buffer, read by the kernels that follow it."""
    program = Program(session.device, crosswise, (start,))
    loaded = session.device.load(with_copy(program.lowered.plan))
    (buffer,) = program.put([start])
    want: Any = start
    for _ in range(rounds):
        buffer, _ = loaded.run([buffer])
        (want,) = evaluate(program.lowered.program, [want])
    got = session.device.download(buffer, np.int32, start.shape)
    session.compare(f"copy of a buffer, then read, {rounds} rounds", got, want)


def with_copy(plan: Plan) -> Plan:
    """A plan of one input whose steps read a copy of it, which becomes the last output."""
    (source,) = (i for i, b in enumerate(plan.buffers) if b.role is Role.INPUT)
    outputs = sum(b.role is Role.OUTPUT for b in plan.buffers)
    size, copied = plan.buffers[source].size, len(plan.buffers)

    def moved(step: Step) -> Step:
        assert isinstance(step, Launch)
        ranges = [replace(r, buffer=copied) if r.buffer == source else r for r in step.arguments]
        return replace(step, arguments=tuple(ranges))

    first = Copy(Range(source, 0, size), Range(copied, 0, size))
    made = replace(
        plan,
        buffers=(*plan.buffers, PlannedBuffer(Role.OUTPUT, size, outputs)),
        steps=(first, *map(moved, plan.steps)),
        barriers=frozenset({1, *(b + 1 for b in plan.barriers)}),
        peak_bytes=plan.peak_bytes + size,
    )
    check_order(made)
    return made


def crosswise(x: Any) -> Any:
    """Every element from many others; int32, wraps."""
    return jnp.cumsum(x.T[::-1], axis=0) * 3 + 1


def copy_then_read(x: Any, y: Any, key: Any) -> tuple[Any, Any]:
    """A row of a copy is written and the whole copy read crosswise, twice.

    ``x`` and ``y`` are int32 and wrap; every element of the results depends on every element of
    the copies.
    """
    moved = dynamic_update_slice(x, y[:1] * 5 + 1, (key, 0))
    mixed = jnp.cumsum(jnp.cumsum(moved.T, axis=0)[::-1], axis=1) * 3 + key
    back = dynamic_update_slice(y, jnp.sum(mixed, axis=1)[None], (_SIDE - 1 - key, 0))
    return mixed, jnp.cumsum(jnp.cumsum(back[::-1], axis=0).T, axis=0) + moved


def backward_through_a_copy(w: Any, x: Any, key: Any) -> tuple[Any, Any]:
    """The transposed weight is copied before a product; the backward reads the copy again.

    Whole numbers of a few bits in float32, so that products are exact. ``w`` is int32[n,n], ``x``
    int32[m,n].
    """

    def loss(w: Any, x: Any) -> Any:
        turned = dynamic_update_slice(jnp.zeros_like(w), w.T, (jnp.minimum(key, 0), 0))
        y = x @ turned
        return jnp.sum(y * (y + 1.0))

    dw, dx = grad(loss, (0, 1))(w.astype(jnp.float32), x.astype(jnp.float32))
    new_w = (w * 3 + dw.astype(jnp.int32)) % 5 - 2
    new_x = (x * 3 + dx.astype(jnp.int32) + key) % 3 - 1
    return new_w, new_x
