"""A program whose derivative is a rule of the user's own, in one mode or the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, TypeVar

from vkjit.control.batched import batched_body, led
from vkjit.ir.avals import Aval
from vkjit.ir.control import Inline
from vkjit.ir.evaluate import evaluate
from vkjit.ir.primitive import Array, Kind, Linear, Primitive, Remat, Tangent, Traits, Value
from vkjit.ir.program import Program
from vkjit.trace import bind_outs


class Rule(ABC):
    """What the derivative is. Arguments and results are those of the primitive."""

    @abstractmethod
    def over_batch(self, batched: tuple[bool, ...], extra: int) -> Rule:
        """The rule for a batch.

        Args:
            batched: which arguments have the batch axis in front.
            extra: number of leading arguments that the batched primitive has and this has not.
        """


RuleT = TypeVar("RuleT", bound=Rule)


@dataclass(frozen=True)
class CustomCall(Primitive, Generic[RuleT]):
    """``body`` of the arguments; subclasses differentiate it by ``rule``.

    The first ``captured`` arguments are values that the function closes over: there is no
    derivative with respect to them.
    """

    body: Program
    rule: RuleT
    captured: int
    label: str

    traits: ClassVar[Traits] = Traits(Kind.CONTROL, Remat.COSTLY)

    def infer_outs(self, avals: Sequence[Aval]) -> tuple[Aval, ...]:
        """Those of the body."""
        return self.body.out_avals

    def evaluate_outs(self, *arrays: Array) -> tuple[Array, ...]:
        """The body."""
        return tuple(evaluate(self.body, arrays))

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """None: it is not linear."""
        raise self.missing("transpose", f"{self.label} is not linear; differentiate it")

    def batch_outs(self, args: Sequence[Value], batched: Sequence[bool]) -> tuple[Value, ...]:
        """Body and rule over the batch."""
        args, batched = led(args, batched)
        body, closed = batched_body(self.body, args, batched)
        rule = self.rule.over_batch(tuple(batched), len(closed))
        prim = replace(self, body=body, rule=rule, captured=self.captured + len(closed))
        return tuple(bind_outs(prim, *closed, *args))

    def control(self) -> Inline:
        """The body in place: nothing differentiates it any more."""
        return Inline(self.body)

    def programs(self) -> tuple[Program, ...]:
        """The body."""
        return (self.body,)

    def with_programs(self, programs: Sequence[Program]) -> Primitive:
        """With another body."""
        return replace(self, body=programs[0])

    def parameters(self) -> dict[str, object]:
        """The body; a rule has no text."""
        return {"body": self.body, "label": self.label}
