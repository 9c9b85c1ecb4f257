"""Passes on the programs that equations run, and what they do again in every turn."""

from __future__ import annotations

from collections.abc import Callable

from vkjit.ir.primitive import Kind
from vkjit.ir.program import Eqn, Program


def inner(program: Program, run: Callable[[Program], Program]) -> Program:
    """Applies ``run`` to the programs that equations of ``program`` run, not to those inside them.

    One that several equations run is transformed once, so that equal equations stay equal.
    """
    made: dict[Program, Program] = {}

    def once(found: Program) -> Program:
        if found not in made:
            made[found] = run(found)
        return made[found]

    eqns: list[Eqn] = []
    changed = False
    for eqn in program.eqns:
        if eqn.prim.traits.kind is Kind.CONTROL:
            before = eqn.prim.programs()
            after = [once(p) for p in before]
            if any(a is not b for a, b in zip(after, before, strict=True)):
                prim = eqn.prim.with_programs(after)
                eqn = Eqn(prim, eqn.args, eqn.outs, eqn.source, eqn.region)
                changed = True
        eqns.append(eqn)
    if not changed:
        return program
    return Program(program.params, tuple(eqns), program.results, program.name)


def silent(program: Program) -> Program:
    """``program`` without calls of the host, in inner programs too: they gave no results."""
    eqns = tuple([eqn for eqn in program.eqns if eqn.outs or not eqn.prim.acts()])
    return inner(Program(program.params, eqns, program.results, program.name), silent)


def lift(program: Program) -> Program:
    """Computes before a loop what is the same in each of its turns; see ``Primitive.lifted``."""
    if not any(eqn.prim.traits.kind is Kind.CONTROL for eqn in program.eqns):
        return program
    eqns: list[Eqn] = []
    for eqn in program.eqns:
        eqns.extend(eqn.prim.lifted(eqn) if eqn.prim.traits.kind is Kind.CONTROL else (eqn,))
    return Program(program.params, tuple(eqns), program.results, program.name)
