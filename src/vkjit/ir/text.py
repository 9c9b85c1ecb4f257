"""The text form of programs.

    program(%0: f32[3,4], %1: f32[4]*) {
      %2: f32[4,3] = permute[perm=(1, 0)] %0
      %3: f32[4,3] = mul %2, 2.0:f32[]*
      return %3
    }

Variables are numbered by definition; ``exp@1`` is in recomputation region 1. Static parameters
print as Python literals, dtypes as their short names. Programs inside an equation follow it, two
levels deeper, each a scope of its own:

    program(%0: f32[], %1: f32[5]) {
      %2: f32[], %3: f32[5] = scan[length=5, constants=0, carries=1, reverse=False] %0, %1
        body = step(%0: f32[], %1: f32[]) {
          %2: f32[] = add %0, %1
          return %2, %2
        }
      return %3
    }

Of several programs each has its position: ``branches[0] = ...``. ``vkjit.ir.parse`` reads the text
back.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import TypeGuard, cast, final

import numpy as np

from vkjit.dtypes import DType, short
from vkjit.ir.program import Atom, Eqn, Literal, Program, Var


@final
class Names:
    """Numbers for variables, in the order in which they are first asked for."""

    __slots__ = ("_numbers",)

    def __init__(self) -> None:
        self._numbers: dict[Var, int] = {}

    def of(self, var: Var) -> str:
        """``%n`` for ``var``."""
        return f"%{self._numbers.setdefault(var, len(self._numbers))}"


def text(program: Program, *, lines: bool = False) -> str:
    """``program`` as text; with ``lines`` each equation ends in its source line."""
    return "\n".join(_lines(program, lines=lines))


def _lines(program: Program, *, lines: bool) -> Iterator[str]:
    names = Names()
    params = ", ".join(f"{names.of(v)}: {v.aval}" for v in program.params)
    yield f"{program.name}({params}) {{"
    for eqn in program.eqns:
        yield f"  {eqn_text(eqn, names, lines=lines)}"
        for label, inner in named_programs(eqn):
            first, *rest = _lines(inner, lines=lines)
            yield f"    {label} = {first}"
            for line in rest:
                yield f"    {line}"
    results = ", ".join(atom_text(r, names) for r in program.results)
    yield f"  return {results}".rstrip()
    yield "}"


def named_programs(eqn: Eqn) -> list[tuple[str, Program]]:
    """The programs that an equation runs, as the text names them: ``body``, ``branches[0]``."""
    found: list[tuple[str, Program]] = []
    for name, value in eqn.prim.parameters().items():
        if isinstance(value, Program):
            found.append((name, value))
        elif are_programs(value):
            found.extend((f"{name}[{i}]", inner) for i, inner in enumerate(value))
    return found


def are_programs(value: object) -> TypeGuard[tuple[Program, ...]]:
    """Whether a static parameter is a tuple of programs, one at least."""
    if not isinstance(value, tuple) or not value:
        return False
    return all(isinstance(v, Program) for v in cast("tuple[object, ...]", value))


def eqn_text(eqn: Eqn, names: Names, *, lines: bool = False) -> str:
    """One equation, without the programs that it runs."""
    args = ", ".join(atom_text(a, names) for a in eqn.args)
    outs = ", ".join(f"{names.of(v)}: {v.aval}" for v in eqn.outs)
    line = f"{outs} = {prim_text(eqn)} {args}" if outs else f"{prim_text(eqn)} {args}"
    return f"{line.rstrip()}  # {eqn.source}" if lines and eqn.source else line.rstrip()


def prim_text(eqn: Eqn) -> str:
    """The primitive's name, with its static parameters in brackets."""
    parameters = {
        k: v
        for k, v in eqn.prim.parameters().items()
        if not isinstance(v, Program) and not are_programs(v)
    }
    name = f"{eqn.prim.name}@{eqn.region}" if eqn.region else eqn.prim.name
    if not parameters:
        return name
    inside = ", ".join(f"{k}={parameter_text(v)}" for k, v in parameters.items())
    return f"{name}[{inside}]"


def parameter_text(value: object) -> str:
    """A static parameter as a Python literal; dtypes by short name, enum members by value."""
    if isinstance(value, Enum):
        return repr(value.value)
    if isinstance(value, np.dtype):
        return short(cast("DType", value))
    if isinstance(value, tuple):
        items = [parameter_text(v) for v in cast("tuple[object, ...]", value)]
        return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
    return repr(value)


def atom_text(atom: Atom, names: Names) -> str:
    """A variable's number, or ``value:aval`` of a literal; floats print exactly."""
    if isinstance(atom, Literal):
        value = atom.value
        printed = repr(float(value)) if atom.aval.dtype.kind in "fV" else repr(value.item())
        return f"{printed}:{atom.aval}"
    return names.of(atom)
