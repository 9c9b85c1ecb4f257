"""Batching: a program over one example becomes a program over a leading axis of examples."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import final

from vkjit.ir.primitive import Value
from vkjit.ir.program import Atom, Program, Var
from vkjit.trace import bind_outs, source_of


@final
class Axis:
    """A batch axis: its name, for collectives, and its size. Identity tells axes apart."""

    __slots__ = ("name", "size")

    def __init__(self, name: object, size: int) -> None:
        self.name = name
        self.size = size


@final
class _State(threading.local):
    """What is being batched in this thread: along which axis, and who takes it.

    ``masks`` are booleans for each example, all of which must be true.
    """

    def __init__(self) -> None:
        self.masks: tuple[Value, ...] = ()
        self.axis: Axis | None = None


_state = _State()


@contextmanager
def only(mask: Value) -> Generator[None]:
    """What is batched inside the block acts for the examples where ``mask`` is true, and no others.

    Other values are computed for all examples, as where branches that some take run for all.
    """
    before = _state.masks
    _state.masks = (*before, mask)
    try:
        yield
    finally:
        _state.masks = before


def masks() -> tuple[Value, ...]:
    """What an acting primitive must heed while it is batched: it acts where all are true."""
    return _state.masks


@contextmanager
def along(of: Axis | None) -> Generator[None]:
    """What is batched inside the block is batched along this axis."""
    before, _state.axis = _state.axis, of
    try:
        yield
    finally:
        _state.axis = before


def axis() -> Axis | None:
    """The axis along which a program is being batched."""
    return _state.axis


def batch(
    program: Program, values: Sequence[Value], batched: Sequence[bool]
) -> tuple[list[Value], list[bool]]:
    """Evaluates ``program`` once for a whole batch by binding operations.

    Args:
        program: over one example.
        values: one for each parameter.
        batched: whether the value has the batch axis in front; others are shared.

    Returns:
        results, and whether each has the batch axis in front.
    """
    env: dict[Var, Value] = dict(zip(program.params, values, strict=True))
    spread = {v for v, flag in zip(program.params, batched, strict=True) if flag}
    for eqn in program.eqns:
        args = [_value(a, env) for a in eqn.args]
        flags = [isinstance(a, Var) and a in spread for a in eqn.args]
        with source_of(eqn):
            if any(flags) or (_state.masks and eqn.prim.acts()):
                outs, varying = eqn.prim.batch_some(args, flags)
                spread.update([v for v, flag in zip(eqn.outs, varying, strict=True) if flag])
            else:
                outs = bind_outs(eqn.prim, *args)
        env.update(zip(eqn.outs, outs, strict=True))
    results = [_value(r, env) for r in program.results]
    return results, [isinstance(r, Var) and r in spread for r in program.results]


def _value(atom: Atom, env: dict[Var, Value]) -> Value:
    return env[atom] if isinstance(atom, Var) else atom.value
