"""The type checker of programs: runs between passes and shows the equations around a fault."""

from __future__ import annotations

from vkjit.errors import InternalError, UserError
from vkjit.ir.program import Eqn, Program, Var
from vkjit.ir.text import Names, eqn_text

_AROUND = 4


def check(program: Program) -> Program:
    """Returns ``program`` if it is well formed.

    Every variable is defined once, before its uses; every equation's results have the avals that
    its primitive infers, weak types aside. So it is with the programs that equations run.

    Raises:
        InternalError: it is not; the message prints the neighbouring equations.
    """
    defined: set[Var] = set()
    for var in program.params:
        if var in defined:
            raise InternalError("program: a parameter appears twice")
        defined.add(var)
    for position, eqn in enumerate(program.eqns):
        for inner in eqn.prim.programs():
            check(inner)
        why = _fault(eqn, defined)
        if why:
            raise InternalError(f"{eqn.prim.name}: {why}\n{_around(program, position)}")
        defined.update(eqn.outs)
    for result in program.results:
        if isinstance(result, Var) and result not in defined:
            raise InternalError(
                f"program: a result of aval {result.aval} is never defined\n"
                f"{_around(program, len(program.eqns) - 1)}"
            )
    return program


def _fault(eqn: Eqn, defined: set[Var]) -> str | None:
    """What is wrong with one equation, if anything."""
    for arg in eqn.args:
        if isinstance(arg, Var) and arg not in defined:
            return f"argument of aval {arg.aval} is used before it is defined"
    for out in eqn.outs:
        if out in defined:
            return f"result of aval {out.aval} is defined twice"
    try:
        inferred = eqn.prim.applied([a.aval for a in eqn.args])
    except UserError as error:
        return f"operands are refused: {error}"
    for out, aval in zip(eqn.outs, inferred, strict=True):
        if (out.aval.shape, out.aval.dtype) != (aval.shape, aval.dtype):
            return f"result has aval {out.aval}, inferred {aval}"
    return None


def _around(program: Program, position: int) -> str:
    names = Names()
    for var in program.params:
        names.of(var)
    lines = [(i, eqn_text(e, names)) for i, e in enumerate(program.eqns)]
    low, high = max(0, position - _AROUND), position + _AROUND + 1
    marked = [f"{'>' if i == position else ' '} {line}" for i, line in lines[low:high]]
    return "\n".join(marked) + "\n(print the program for the whole text)"
