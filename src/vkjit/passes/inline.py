"""Inlining: bodies in the place of equations that stand for them."""

from __future__ import annotations

from typing import final

from vkjit.ir.control import Inline
from vkjit.ir.primitive import Kind
from vkjit.ir.program import Atom, Eqn, Program, Var
from vkjit.passes.inner import inner


def inline(program: Program) -> Program:
    """Puts bodies in the place of equations whose control form is ``Inline``, inner ones, too.

    Regions of a body become new ones each time, and so does all of one that stands ``apart``: equal
    equations of two recomputations, or of one and the original, are never merged.
    """
    if any(_form(eqn) is not None for eqn in program.eqns):
        splicer = _Splicer(max(eqn.region for eqn in program.eqns))
        same = {r: r for r in range(splicer.regions + 1)}
        results = splicer.run(program, dict(zip(program.params, program.params, strict=True)), same)
        program = Program(program.params, tuple(splicer.eqns), tuple(results), program.name)
    return inner(program, inline)


def _form(eqn: Eqn) -> Inline | None:
    if eqn.prim.traits.kind is not Kind.CONTROL:
        return None
    form = eqn.prim.control()
    return form if isinstance(form, Inline) else None


@final
class _Splicer:
    """The equations so far, and the number of the last region."""

    def __init__(self, regions: int) -> None:
        self.eqns: list[Eqn] = []
        self.regions = regions

    def run(self, program: Program, known: dict[Var, Atom], regions: dict[int, int]) -> list[Atom]:
        """Appends the equations of one program and returns its results.

        Args:
            program: a body, or the whole.
            known: what stands for its parameters.
            regions: numbers in the whole for those in ``program``; others are new.
        """
        for eqn in program.eqns:
            args = tuple([known[a] if isinstance(a, Var) else a for a in eqn.args])
            if eqn.region not in regions:
                self.regions += 1
                regions[eqn.region] = self.regions
            region = regions[eqn.region]
            form = _form(eqn)
            if form is not None:
                inside = dict(zip(form.body.params, args, strict=True))
                results = self.run(form.body, inside, {} if form.apart else {0: region})
                known.update(zip(eqn.outs, results, strict=True))
                continue
            outs = tuple([Var(v.aval) for v in eqn.outs])
            known.update(zip(eqn.outs, outs, strict=True))
            self.eqns.append(Eqn(eqn.prim, args, outs, eqn.source, region))
        return [known[r] if isinstance(r, Var) else r for r in program.results]
