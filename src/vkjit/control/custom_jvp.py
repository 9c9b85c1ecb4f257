"""A program with a forward derivative of the user's own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from vkjit.control.batched import over_batch, refuse_captured, size_of, spread_over
from vkjit.control.custom_call import CustomCall, Rule
from vkjit.dtypes import is_float
from vkjit.ir.avals import Aval
from vkjit.ir.primitive import Tangent, Value
from vkjit.ir.program import Program
from vkjit.ops.structural import zeros
from vkjit.passes.batch import Axis, along, axis
from vkjit.trace import apply_program, aval_of


class JvpRule(Rule):
    """Results and their tangents."""

    def over_batch(self, batched: tuple[bool, ...], extra: int) -> JvpRule:
        """See ``Rule.over_batch``."""
        return BatchedJvp(self, batched, extra, axis())

    @abstractmethod
    def apply(
        self, primals: Sequence[Value], tangents: Sequence[Tangent]
    ) -> tuple[list[Value], list[Tangent]]:
        """Results and their tangents; operations are bound now."""


@final
@dataclass(frozen=True, eq=False)
class TracedJvp(JvpRule):
    """A rule that has been traced.

    Attributes:
        program: (constants, arguments, tangents of the float arguments from ``captured`` on) to
            (results, tangents of the float results).
        constants: values for its first parameters.
        captured: number of leading arguments that have no tangents.
    """

    program: Program
    constants: tuple[Value, ...]
    captured: int

    def apply(
        self, primals: Sequence[Value], tangents: Sequence[Tangent]
    ) -> tuple[list[Value], list[Tangent]]:
        """See ``JvpRule.apply``."""
        own = zip(primals[self.captured :], tangents[self.captured :], strict=True)
        moving = [
            zeros(aval_of(x)) if t is None else t for x, t in own if is_float(aval_of(x).dtype)
        ]
        found = apply_program(self.program, [*self.constants, *primals, *moving])
        floats = sum(is_float(a.dtype) for a in self.program.out_avals)
        count = len(found) - floats // 2
        rest = iter(found[count:])
        outs = found[:count]
        return outs, [next(rest) if is_float(aval_of(v).dtype) else None for v in outs]


@final
@dataclass(frozen=True, eq=False)
class DeferredJvp(JvpRule):
    """A rule that is traced when it is needed, because it applies the function it belongs to."""

    trace: Callable[[Sequence[Aval]], TracedJvp]
    captured: int

    def apply(
        self, primals: Sequence[Value], tangents: Sequence[Tangent]
    ) -> tuple[list[Value], list[Tangent]]:
        """See ``JvpRule.apply``."""
        own = primals[self.captured :]
        return self.trace([aval_of(v) for v in own]).apply(own, tangents[self.captured :])


@final
@dataclass(frozen=True, eq=False)
class BatchedJvp(JvpRule):
    """A rule for a batch along ``axis``.

    ``extra`` leading arguments are those of the batched body alone.
    """

    rule: JvpRule
    batched: tuple[bool, ...]
    extra: int
    axis: Axis | None

    def apply(
        self, primals: Sequence[Value], tangents: Sequence[Tangent]
    ) -> tuple[list[Value], list[Tangent]]:
        """See ``JvpRule.apply``."""
        primals, tangents = primals[self.extra :], tangents[self.extra :]
        where = [i for i, t in enumerate(tangents) if t is not None]
        count = len(primals)

        def one(*values: Value) -> list[Tangent]:
            moving: list[Tangent] = [None] * count
            for i, t in zip(where, values[count:], strict=True):
                moving[i] = t
            outs, douts = self.rule.apply(values[:count], moving)
            return [*outs, *douts]

        size = size_of(primals, self.batched)
        flags = [*self.batched, *[self.batched[i] for i in where]]
        with along(self.axis):
            args = [*primals, *[tangents[i] for i in where]]
            found, spread = over_batch(one, args, flags)
        full = [
            v if v is None or s else spread_over(v, size)
            for v, s in zip(found, spread, strict=True)
        ]
        half = len(full) // 2
        return full[:half], full[half:]


@final
@dataclass(frozen=True)
class CustomJvpCall(CustomCall[JvpRule]):
    """A program whose derivative is a ``JvpRule``."""

    def jvp_outs(
        self, primals: Sequence[Value], tangents: Sequence[Tangent]
    ) -> tuple[tuple[Value, ...], tuple[Tangent, ...]]:
        """The rule."""
        refuse_captured(f"custom_jvp {self.label}", tangents[: self.captured])
        outs, douts = self.rule.apply(primals, tangents)
        return tuple(outs), tuple(douts)
