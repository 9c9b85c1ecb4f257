"""Transfers: values that wait in memory of the host until they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from vkjit.ir.avals import Aval
from vkjit.ir.control import Control
from vkjit.ir.control import Transfer as Form
from vkjit.ir.primitive import Array, Kind, Linear, Primitive, Remat, Tangent, Traits, Value
from vkjit.ir.program import Atom, Eqn, Program
from vkjit.passes.inner import inner
from vkjit.trace import bind_outs


@final
@dataclass(frozen=True)
class Transfer(Primitive):
    """The operand, in memory of the host (``away``) or back in that of the device."""

    away: bool

    traits: ClassVar[Traits] = Traits(Kind.CONTROL, Remat.COSTLY)

    def infer_outs(self, avals: Sequence[Aval]) -> tuple[Aval, ...]:
        """That of the operand."""
        return tuple(avals)

    def evaluate_outs(self, *arrays: Array) -> tuple[Array, ...]:
        """The operand: the evaluator has values, not memory."""
        return arrays

    def jvp_outs(
        self, primals: Sequence[Value], tangents: Sequence[Tangent]
    ) -> tuple[tuple[Value, ...], tuple[Tangent, ...]]:
        """The tangent stays where it is."""
        return tuple(bind_outs(self, *primals)), tuple(tangents)

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """The cotangent."""
        return tuple(cotangents)

    def batch_outs(self, args: Sequence[Value], batched: Sequence[bool]) -> tuple[Value, ...]:
        """The whole batch."""
        return tuple(bind_outs(self, *args))

    def control(self) -> Control:
        """A copy between memories."""
        return Form(self.away)


def at_home(program: Program) -> Program:
    """``program`` without transfers, for devices whose memory is that of the host."""
    same: dict[Atom, Atom] = {}
    eqns: list[Eqn] = []
    for eqn in program.eqns:
        args = tuple([same.get(a, a) for a in eqn.args])
        if isinstance(eqn.prim, Transfer):
            same[eqn.outs[0]] = args[0]
        else:
            eqns.append(Eqn(eqn.prim, args, eqn.outs, eqn.source, eqn.region))
    results = tuple([same.get(r, r) for r in program.results])
    return inner(Program(program.params, tuple(eqns), results, program.name), at_home)
