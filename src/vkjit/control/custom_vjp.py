"""A program with a backward derivative of the user's own.

Differentiating it binds what the user's ``fwd`` does, and one linear primitive that stands for the
derivative: all that can be done with that is to transpose it, which binds what ``bwd`` does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NoReturn, final

from vkjit.control.batched import (
    over_batch,
    refuse_captured,
    size_of,
    spread_over,
    summed,
)
from vkjit.control.custom_call import CustomCall, Rule
from vkjit.dtypes import is_float
from vkjit.errors import MissingRuleError
from vkjit.ir.avals import Aval, aval
from vkjit.ir.control import Control
from vkjit.ir.primitive import Array, Kind, Linear, Primitive, Remat, Tangent, Traits, Value
from vkjit.ir.program import Program
from vkjit.ops.structural import zeros
from vkjit.passes.batch import Axis, along, axis
from vkjit.trace import apply_program, aval_of, bind_outs


class Backward(ABC):
    """Cotangents of the arguments from residuals and cotangents of the results."""

    @abstractmethod
    def pull(self, residuals: Sequence[Value], cotangents: Sequence[Tangent]) -> list[Tangent]:
        """One for each argument of the primitive, None where nothing flows; binds now."""


class VjpRule(Rule):
    """Results, and cotangents of arguments by way of residuals."""

    def over_batch(self, batched: tuple[bool, ...], extra: int) -> VjpRule:
        """See ``Rule.over_batch``."""
        return BatchedVjp(self, batched, extra, axis())

    @abstractmethod
    def forward(self, args: Sequence[Value]) -> tuple[list[Value], list[Value], Backward]:
        """Results, residuals, and what to do with them; operations are bound now."""


@final
@dataclass(frozen=True, eq=False)
class TracedBackward(Backward):
    """A backward rule that has been traced.

    Attributes:
        program: (residuals, cotangents of the results) to cotangents.
        arguments: position of the argument to which each belongs.
        count: of the arguments.
    """

    program: Program
    arguments: tuple[int, ...]
    count: int

    def pull(self, residuals: Sequence[Value], cotangents: Sequence[Tangent]) -> list[Tangent]:
        """See ``Backward.pull``."""
        avals = self.program.in_avals[len(residuals) :]
        cts = [zeros(of) if ct is None else ct for ct, of in zip(cotangents, avals, strict=True)]
        found = apply_program(self.program, [*residuals, *cts])
        grads: list[Tangent] = [None] * self.count
        for i, ct in zip(self.arguments, found, strict=True):
            grads[i] = ct
        return grads


@final
@dataclass(frozen=True, eq=False)
class TracedVjp(VjpRule):
    """A rule that has been traced.

    Attributes:
        fwd: (constants, arguments) to (``results`` results, residuals).
        bwd: (constants, captured arguments, residuals, cotangents of the results) to cotangents.
        arguments: position of the argument to which each of these belongs.
        constants: values for the first parameters of both.
        captured: number of leading arguments that both may read.
        results: number of results.
    """

    fwd: Program
    bwd: Program
    arguments: tuple[int, ...]
    constants: tuple[Value, ...]
    captured: int
    results: int

    def forward(self, args: Sequence[Value]) -> tuple[list[Value], list[Value], Backward]:
        """See ``VjpRule.forward``."""
        found = apply_program(self.fwd, [*self.constants, *args])
        shared = [*self.constants, *args[: self.captured]]
        residuals = [*shared, *found[self.results :]]
        return (
            found[: self.results],
            residuals,
            TracedBackward(self.bwd, self.arguments, len(args)),
        )


@final
@dataclass(frozen=True, eq=False)
class DeferredVjp(VjpRule):
    """A rule that is traced when it is needed, because it applies the function it belongs to."""

    trace: Callable[[Sequence[Aval]], TracedVjp]
    captured: int

    def forward(self, args: Sequence[Value]) -> tuple[list[Value], list[Value], Backward]:
        """See ``VjpRule.forward``."""
        own = args[self.captured :]
        outs, residuals, backward = self.trace([aval_of(v) for v in own]).forward(own)
        return outs, residuals, _After(backward, self.captured)


@final
@dataclass(frozen=True, eq=False)
class _After(Backward):
    """The cotangents of a rule whose arguments come after ``count`` others."""

    rule: Backward
    count: int

    def pull(self, residuals: Sequence[Value], cotangents: Sequence[Tangent]) -> list[Tangent]:
        """See ``Backward.pull``."""
        return [*[None] * self.count, *self.rule.pull(residuals, cotangents)]


@final
@dataclass(frozen=True, eq=False)
class BatchedVjp(VjpRule):
    """A rule for a batch along ``axis``.

    ``extra`` leading arguments are those of the batched body alone.
    """

    rule: VjpRule
    batched: tuple[bool, ...]
    extra: int
    axis: Axis | None

    def forward(self, args: Sequence[Value]) -> tuple[list[Value], list[Value], Backward]:
        """See ``VjpRule.forward``."""
        own = args[self.extra :]
        parts: list[tuple[int, Backward]] = []

        def one(*values: Value) -> list[Tangent]:
            outs, residuals, backward = self.rule.forward(values)
            parts.append((len(outs), backward))
            return [*outs, *residuals]

        with along(self.axis):
            found, spread = over_batch(one, own, self.batched)
        results, backward = parts[0]
        size = size_of(own, self.batched)
        outs = [
            v if s else spread_over(v, size)
            for v, s in zip(found[:results], spread[:results], strict=True)
        ]
        after = BatchedBackward(backward, tuple(spread[results:]), self.batched, self.axis)
        return outs, found[results:], _After(after, self.extra)


@final
@dataclass(frozen=True, eq=False)
class BatchedBackward(Backward):
    """A backward rule for a batch.

    Attributes:
        rule: of one example.
        residuals: which have the batch axis.
        batched: which arguments have it; None: all.
        axis: along which examples lie.
    """

    rule: Backward
    residuals: tuple[bool, ...]
    batched: tuple[bool, ...] | None
    axis: Axis | None

    def pull(self, residuals: Sequence[Value], cotangents: Sequence[Tangent]) -> list[Tangent]:
        """See ``Backward.pull``."""
        where = [i for i, ct in enumerate(cotangents) if ct is not None]
        given = [cotangents[i] for i in where]
        count = len(self.residuals)

        def one(*values: Value) -> list[Tangent]:
            cts: list[Tangent] = [None] * len(cotangents)
            for i, ct in zip(where, values[count:], strict=True):
                cts[i] = ct
            return self.rule.pull(values[:count], cts)

        args, flags = [*residuals, *given], [*self.residuals, *[True] * len(given)]
        size = size_of(args, flags)
        with along(self.axis):
            found, spread = over_batch(one, args, flags)
        full = [
            ct if ct is None or flag else spread_over(ct, size)
            for ct, flag in zip(found, spread, strict=True)
        ]
        wanted = self.batched or (True,) * len(full)
        return [
            ct if ct is None or flag else summed(ct) for ct, flag in zip(full, wanted, strict=True)
        ]


@final
@dataclass(frozen=True)
class CustomVjpCall(CustomCall[VjpRule]):
    """A program whose cotangents come from a ``VjpRule``."""

    def jvp_outs(
        self, primals: Sequence[Value], tangents: Sequence[Tangent]
    ) -> tuple[tuple[Value, ...], tuple[Tangent, ...]]:
        """The forward rule, and the backward rule to transpose to."""
        refuse_captured(f"custom_vjp {self.label}", tangents[: self.captured])
        outs, residuals, backward = self.rule.forward(primals)
        moving = tuple(i for i, t in enumerate(tangents) if t is not None)
        avals = tuple(aval(a.shape, a.dtype) for a in self.body.out_avals)
        prim = CustomVjpLinear(backward, len(residuals), moving, avals, self.label)
        found = iter(bind_outs(prim, *residuals, *[tangents[i] for i in moving]))
        return tuple(outs), tuple([next(found) if is_float(a.dtype) else None for a in avals])


@final
@dataclass(frozen=True)
class CustomVjpLinear(Primitive):
    """Tangents of the float results from residuals and tangents: known by its transpose alone.

    Attributes:
        backward: the transpose.
        residuals: number of leading arguments that it reads.
        moving: of which argument of the function each other argument is the tangent.
        avals: of the function's results.
        label: name of the function.
    """

    backward: Backward
    residuals: int
    moving: tuple[int, ...]
    avals: tuple[Aval, ...]
    label: str

    traits: ClassVar[Traits] = Traits(Kind.CONTROL, Remat.COSTLY)

    def _refuse(self) -> NoReturn:
        raise MissingRuleError(
            f"custom_vjp {self.label}: forward-mode differentiation (jvp, linearize, jacfwd, "
            "hessian) of a function that has a backward rule only; use reverse mode (grad, vjp, "
            "jacrev), or give it a custom_jvp rule"
        )

    def infer_outs(self, avals: Sequence[Aval]) -> tuple[Aval, ...]:
        """Those of the float results."""
        return tuple(a for a in self.avals if is_float(a.dtype))

    def evaluate_outs(self, *arrays: Array) -> tuple[Array, ...]:
        """None: there is no forward rule."""
        self._refuse()

    def jvp_outs(
        self, primals: Sequence[Value], tangents: Sequence[Tangent]
    ) -> tuple[tuple[Value, ...], tuple[Tangent, ...]]:
        """None: there is no forward rule."""
        self._refuse()

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """The backward rule."""
        given = iter(cotangents)
        cts = [next(given) if is_float(a.dtype) else None for a in self.avals]
        grads = self.backward.pull(args[: self.residuals], cts)
        return (*[None] * self.residuals, *[grads[i] for i in self.moving])

    def batch_outs(self, args: Sequence[Value], batched: Sequence[bool]) -> tuple[Value, ...]:
        """The backward rule over the batch."""
        size = size_of(args, batched)
        known, moving = args[: self.residuals], args[self.residuals :]
        flags = batched[self.residuals :]
        full = [v if f else spread_over(v, size) for v, f in zip(moving, flags, strict=True)]
        backward = BatchedBackward(self.backward, tuple(batched[: self.residuals]), None, axis())
        avals = tuple(aval((size, *a.shape), a.dtype) for a in self.avals)
        prim = replace(self, backward=backward, avals=avals)
        return tuple(bind_outs(prim, *known, *full))

    def control(self) -> Control:
        """None: there is no forward rule."""
        self._refuse()

    def parameters(self) -> dict[str, object]:
        """The name; a rule has no text."""
        return {"label": self.label}
