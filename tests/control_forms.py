"""A primitive for each control form, with what lowering and the evaluator ask of it and no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import numpy as np

from vkjit.ir.avals import Aval, aval
from vkjit.ir.control import Branch, Call, Control, Inline, Scan, While
from vkjit.ir.evaluate import evaluate
from vkjit.ir.primitive import Array, Kind, Primitive, Tangent, Traits, Value
from vkjit.ir.program import Program
from vkjit.trace import bind_outs, trace


@final
@dataclass(frozen=True)
class Runs(Primitive):
    """What ``form`` says."""

    form: Control

    traits: ClassVar[Traits] = Traits(Kind.CONTROL)

    def control(self) -> Control:
        return self.form

    def acts(self) -> bool:
        return isinstance(self.form, Call) or super().acts()

    def programs(self) -> tuple[Program, ...]:
        match self.form:
            case Scan() | Inline():
                return (self.form.body,)
            case While():
                return (self.form.condition, self.form.body)
            case Branch():
                return self.form.branches
            case Call():
                return ()
            case _:
                raise AssertionError(self.form)

    def with_programs(self, programs: Sequence[Program]) -> Runs:
        match self.form:
            case Scan() | Inline():
                return Runs(replace(self.form, body=programs[0]))
            case While():
                return Runs(replace(self.form, condition=programs[0], body=programs[1]))
            case Branch():
                return Runs(replace(self.form, branches=tuple(programs)))
            case Call():
                return self
            case _:
                raise AssertionError(self.form)

    def infer_outs(self, avals: Sequence[Aval]) -> tuple[Aval, ...]:
        if isinstance(self.form, Call):
            return ()
        outs = self.programs()[-1].out_avals
        if not isinstance(self.form, Scan):
            return outs
        c = self.form.carries
        return (*outs[:c], *(aval((self.form.length, *a.shape), a.dtype) for a in outs[c:]))

    def evaluate_outs(self, *arrays: Array) -> tuple[Array, ...]:
        match self.form:
            case Scan():
                return _scanned(self.form, arrays)
            case While():
                return _repeated(self.form, arrays)
            case Branch(branches):
                chosen = min(max(int(arrays[0]), 0), len(branches) - 1)
                return tuple(evaluate(branches[chosen], arrays[1:]))
            case Inline(body):
                return tuple(evaluate(body, arrays))
            case Call(function):
                function(*arrays)
                return ()
            case _:
                raise AssertionError(self.form)

    def jvp_outs(
        self, primals: Sequence[Value], tangents: Sequence[Tangent]
    ) -> tuple[tuple[Value, ...], tuple[Tangent, ...]]:
        raise self.missing("jvp")

    def transpose(self, cotangents: Sequence[Value], args: Sequence[Any]) -> tuple[Tangent, ...]:
        raise self.missing("transpose")

    def batch_outs(self, args: Sequence[Value], batched: Sequence[bool]) -> tuple[Value, ...]:
        raise self.missing("batch")


def _scanned(form: Scan, arrays: Sequence[Array]) -> tuple[Array, ...]:
    n, c = form.constants, form.carries
    carry = list(arrays[n : n + c])
    outs = [np.zeros((form.length, *a.shape), a.dtype) for a in form.body.out_avals[c:]]
    for turn in reversed(range(form.length)) if form.reverse else range(form.length):
        made = evaluate(form.body, [*arrays[:n], *carry, *[x[turn] for x in arrays[n + c :]]])
        carry = made[:c]
        for out, value in zip(outs, made[c:], strict=True):
            out[turn] = value
    return (*carry, *outs)


def _repeated(form: While, arrays: Sequence[Array]) -> tuple[Array, ...]:
    split = form.condition_constants
    start = split + form.body_constants
    carry = list(arrays[start:])
    while evaluate(form.condition, [*arrays[:split], *carry])[0]:
        carry = evaluate(form.body, [*arrays[split:start], *carry])
    return tuple(carry)


Function = Callable[..., Any]


def traced(function: Function, *avals: Aval) -> Program:
    """The program of a function that closes over no traced value."""
    made = trace(function, list(avals), function.__name__)
    assert not made.captured
    return made.program


def run(form: Control, *args: Value) -> tuple[Value, ...]:
    """Applies a form in the current trace."""
    return tuple(bind_outs(Runs(form), *args))
