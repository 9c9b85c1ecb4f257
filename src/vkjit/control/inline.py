"""A program in the place of one equation: what is left of a branch whose number is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from vkjit.control.batched import size_of, spread_over
from vkjit.control.inner import Backward, placed, present
from vkjit.ir import control
from vkjit.ir.avals import Aval
from vkjit.ir.evaluate import evaluate
from vkjit.ir.primitive import Array, Kind, Linear, Primitive, Remat, Tangent, Traits, Value
from vkjit.ir.program import Program
from vkjit.passes.batch import batch
from vkjit.passes.jvp import jvp


@final
@dataclass(frozen=True)
class Inlined(Primitive):
    """The results of ``body``; every rule binds the operations of the body itself."""

    body: Program

    traits: ClassVar[Traits] = Traits(Kind.CONTROL, Remat.COSTLY, takes_zeros=True)

    def infer_outs(self, avals: Sequence[Aval]) -> tuple[Aval, ...]:
        """Those of the body."""
        return self.body.out_avals

    def evaluate_outs(self, *arrays: Array) -> tuple[Array, ...]:
        """Evaluates the body."""
        return tuple(evaluate(self.body, arrays))

    def jvp_outs(
        self, primals: Sequence[Value], tangents: Sequence[Tangent]
    ) -> tuple[tuple[Value, ...], tuple[Tangent, ...]]:
        """Differentiates the body in place."""
        outs, moved = jvp(self.body, primals, tangents)
        return tuple(outs), tuple(moved)

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """Transposes the body in place."""
        linear = [isinstance(a, Linear) for a in args]
        known = [a for a in args if not isinstance(a, Linear)]
        back = Backward(self.body, linear, [ct is not None for ct in cotangents])
        found = iter(placed(back(*known, *present(cotangents)), back.given))
        return tuple(next(found) if flag else None for flag in linear)

    def batch_outs(self, args: Sequence[Value], batched: Sequence[bool]) -> tuple[Value, ...]:
        """Batches the body in place."""
        size = size_of(args, batched)
        outs, spread = batch(self.body, args, batched)
        pairs = zip(outs, spread, strict=True)
        return tuple(out if has else spread_over(out, size) for out, has in pairs)

    def control(self) -> control.Inline:
        """The body in place."""
        return control.Inline(self.body)

    def programs(self) -> tuple[Program, ...]:
        """The body."""
        return (self.body,)

    def with_programs(self, programs: Sequence[Program]) -> Inlined:
        """Another body."""
        return Inlined(programs[0])
