"""Functions as programs inside a program: what they close over becomes an argument."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from vkjit.ir.avals import Aval
from vkjit.ir.primitive import Value
from vkjit.ir.program import Program, Var
from vkjit.passes.dce import dce
from vkjit.trace import Traced, aval_of, trace


@final
@dataclass(frozen=True)
class Staged:
    """Programs of one list of parameters: (captured, explicit).

    ``captured`` are the values to pass for the first parameters of every program.
    """

    programs: tuple[Program, ...]
    captured: tuple[Value, ...]


def stage(fn: Callable[..., Sequence[Value]], avals: Sequence[Aval], name: str) -> Staged:
    """``fn``, of flat values to flat values, as one program."""
    return stage_together([(fn, avals, name)])


def stage_together(
    functions: Sequence[tuple[Callable[..., Sequence[Value]], Sequence[Aval], str]],
) -> Staged:
    """Functions as programs that share their captured values."""
    return together([trace(fn, avals, name) for fn, avals, name in functions])


def together(traced: Sequence[Traced]) -> Staged:
    """Traced functions as programs that share their captured values."""
    captured: dict[int, Value] = {}
    for item in traced:
        for value in item.captured:
            captured.setdefault(id(value), value)
    programs: list[Program] = []
    for item in traced:
        own = dict(zip(map(id, item.captured), item.program.params, strict=False))
        shared = [own.get(k) or Var(aval_of(v)) for k, v in captured.items()]
        explicit = item.program.params[len(item.captured) :]
        program = dce(item.program)  # what a rule made for nobody may not even be runnable
        programs.append(Program((*shared, *explicit), program.eqns, program.results, program.name))
    return Staged(tuple(programs), tuple(captured.values()))
