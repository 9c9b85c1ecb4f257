"""Programs that stop at the first operation whose result is not finite, and say why.

A check stands behind each suspected operation, in programs inside programs, too. Its operands are
values of the program, so a failing check has them at hand, as the device computed them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import numpy as np

from vkjit.control.callback import call, check
from vkjit.debug.flags import bad
from vkjit.debug.modes import Watch
from vkjit.dtypes import is_float
from vkjit.errors import NonFiniteError
from vkjit.ir.control import Scan, While
from vkjit.ir.primitive import Kind, Primitive, Value
from vkjit.ir.program import Atom, Eqn, Literal, Program, Source, Var
from vkjit.ir.text import prim_text
from vkjit.ops.logical import not_
from vkjit.trace import bind_outs, source_of, trace

Array: TypeAlias = np.ndarray[Any, Any]
Suspect = Callable[[Eqn], bool]

_SHOWN = 4
"""Operands with their values in a message."""


@final
@dataclass(eq=False)
class Turns:
    """Counts the turns of one loop while its program runs; ``length`` is None where unknown."""

    name: str
    length: int | None
    reverse: bool = False
    source: Source | None = None
    done: int = 0

    def begin(self) -> None:
        """Before the loop."""
        self.done = 0

    def turn(self) -> None:
        """At the start of each turn."""
        self.done += 1

    def __str__(self) -> str:
        of = "" if self.length is None else f" of {self.length}"
        number = self.done - 1
        place = ""
        if self.reverse and self.length is not None:
            place = f" (slice {self.length - 1 - number}, it runs backwards)"
        where = f" at {self.source}" if self.source else ""
        return f"in turn {number}{of} of the {self.name}{where}{place}"


@final
class Tainted(Exception):
    """A suspect whose operands were not finite already: the cause lies before it."""

    def __init__(self, error: NonFiniteError) -> None:
        super().__init__(str(error))
        self.error = error


def checked(program: Program, watch: Watch, suspect: Suspect, *, causes: bool) -> Program:
    """``program`` with a check behind each suspect; what calls the host is left out.

    The check raises ``NonFiniteError``, or with ``causes`` ``Tainted`` where an operand that is no
    parameter is not finite already.
    """
    return _Checker(watch, suspect, causes).program(program, ())


@final
class _Checker:
    """Adds checks to programs."""

    def __init__(self, watch: Watch, suspect: Suspect, causes: bool) -> None:  # noqa: FBT001  a mode
        self.watch = watch
        self.suspect = suspect
        self.causes = causes

    def program(
        self, program: Program, loops: tuple[Turns, ...], counted: Turns | None = None
    ) -> Program:
        """One program; ``counted`` counts how often it runs, ``loops`` are those around it."""

        def run(*values: Value) -> list[Value]:
            if counted is not None:
                call(counted.turn, "turn", ())
            env: dict[Var, Value] = dict(zip(program.params, values, strict=True))
            given = set(program.params)
            for eqn in program.eqns:
                if eqn.outs or not eqn.prim.acts():
                    with source_of(eqn):
                        self.equation(eqn, env, given, loops)
            return [env[r] if isinstance(r, Var) else r.value for r in program.results]

        return trace(run, program.in_avals, program.name).program

    def equation(
        self, eqn: Eqn, env: dict[Var, Value], given: set[Var], loops: tuple[Turns, ...]
    ) -> None:
        """Binds one equation and its check."""
        args = [env[a] if isinstance(a, Var) else a.value for a in eqn.args]
        prim = self.inside(eqn, loops)
        outs = bind_outs(prim, *args)
        env.update(zip(eqn.outs, outs, strict=True))
        if eqn.prim.traits.kind is Kind.CONTROL or not self.suspect(eqn):
            return
        for position, out in enumerate(outs):
            if is_float(out.aval.dtype) and out.aval.size:
                shown = tuple(eqn.args) if self.causes else ()
                report = _Report(eqn, position, self.watch, loops, _outside(shown, given))
                arrays = [v for a, v in zip(eqn.args, args, strict=True) if isinstance(a, Var)]
                check(report, "finite", [not_(bad(out, self.watch)), out, *arrays])

    def inside(self, eqn: Eqn, loops: tuple[Turns, ...]) -> Primitive:
        """The primitive with checks in the programs that it runs."""
        programs = eqn.prim.programs()
        if eqn.prim.traits.kind is not Kind.CONTROL or not programs:
            return eqn.prim
        counted: Turns | None = None
        match eqn.prim.control():
            case Scan(length=length, reverse=reverse):
                counted = Turns("scan", length, reverse, eqn.source)
                made = [self.program(programs[0], (*loops, counted), counted)]
            case While():
                counted = Turns("while_loop", None, source=eqn.source)
                inner = (*loops, counted)
                condition, body = programs
                # The condition runs before each turn, and once more.
                made = [self.program(condition, inner, counted), self.program(body, inner)]
            case _:
                made = [self.program(p, loops) for p in programs]
        if counted is not None:
            call(counted.begin, "loop", ())
        return eqn.prim.with_programs(made)


def _outside(args: Sequence[Atom], given: set[Var]) -> tuple[bool, ...]:
    """Which variables among ``args`` some equation of the program computes."""
    return tuple(a not in given for a in args if isinstance(a, Var))


@final
@dataclass(frozen=True)
class _Report:
    """Tells of a result that is not finite. Called with (check, result, operands)."""

    eqn: Eqn
    position: int
    watch: Watch
    loops: tuple[Turns, ...]
    made: tuple[bool, ...] = field(default=())

    def __call__(self, fine: Array, result: Array, *operands: Array) -> None:
        if fine.all():
            return
        index = tuple(int(i) for i in np.unravel_index(int(np.argmin(fine)), fine.shape))
        error = NonFiniteError(self.text(fine, result, operands, index))
        tainted = any(
            made and is_float(v.dtype) and wrong(v, self.watch).any()
            for made, v in zip(self.made, operands, strict=False)
        )
        if tainted:
            raise Tainted(error)
        raise error

    def text(
        self, fine: Array, result: Array, operands: Sequence[Array], index: tuple[int, ...]
    ) -> str:
        """The message."""
        eqn, of = self.eqn, self.eqn.outs[self.position].aval
        count = fine.size - int(np.count_nonzero(fine))
        name = prim_text(Eqn(eqn.prim, (), ()))  # without the number of its region
        lines = [
            f"{self.watch.value}: {name} gave {result[index]} at {list(index)} of {of} "
            f"({count} of {fine.size} elements)"
        ]
        if eqn.source is not None:
            way = "forward, computed again: " if eqn.region else "forward: "
            if eqn.source.backward:
                way = "backward: in the cotangent of "
            lines.append(f"  {way}the line {eqn.source}")
        lines += [f"  {loop}" for loop in reversed(self.loops)]
        values = iter(operands)
        shown = [a.value if isinstance(a, Literal) else next(values) for a in eqn.args]
        for number, (atom, value) in enumerate(zip(eqn.args[:_SHOWN], shown, strict=False)):
            array = np.asarray(value)
            already = is_float(array.dtype) and wrong(array, self.watch).any()
            given = ", so it was given" if already else ""
            lines.append(f"  operand {number} {atom.aval}: {_value(array, index, of)}{given}")
        return "\n".join(lines)


def wrong(values: Array, watch: Watch) -> Array:
    """Where floats in host memory are not as they should be."""
    wide = values.astype(np.float64) if values.dtype.itemsize < 8 else values
    return np.asarray(np.isnan(wide) if watch is Watch.NAN else ~np.isfinite(wide))


def _value(operand: Array, index: tuple[int, ...], of: Any) -> str:
    """An operand at the place of the result, or what can be said of all of it."""
    if operand.ndim == 0:
        return str(operand)
    if operand.shape == of.shape:
        return f"{operand[index]} there"
    if not is_float(operand.dtype):
        return f"from {operand.min()} to {operand.max()}" if operand.size else "empty"
    finite = operand[np.isfinite(operand.astype(np.float64))]
    others = operand.size - finite.size
    extent = f"from {finite.min()} to {finite.max()}" if finite.size else "nothing finite"
    return f"{extent}, {others} of {operand.size} elements not finite"
