"""scan: a program that runs for each slice of its inputs and hands carries to the next turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np

from vkjit.control.batched import size_of, spread_over
from vkjit.control.scan_batch import batched_scan
from vkjit.control.scan_form import Derived, sections, stacked
from vkjit.control.scan_jvp import derivative
from vkjit.control.scan_prune import lifted, pruned, unchanged
from vkjit.control.scan_sink import sunk
from vkjit.control.scan_split import split
from vkjit.control.scan_transpose import apart, known_carries, transposed
from vkjit.errors import DTypeError, ShapeError
from vkjit.ir.avals import Aval
from vkjit.ir.control import Scan as Form
from vkjit.ir.evaluate import Evaluator
from vkjit.ir.primitive import (
    Array,
    Kind,
    Linear,
    Parts,
    Primitive,
    Remat,
    Tangent,
    Traits,
    Value,
)
from vkjit.ir.program import Atom, Eqn, Program, Var
from vkjit.ops.structural import permute, zeros
from vkjit.passes.linearize import separate
from vkjit.passes.transpose import transpose as backward
from vkjit.trace import aval_of, bind_outs


@final
@dataclass(frozen=True)
class Scan(Primitive):
    """``length`` turns of ``body``; arguments and results as in ``vkjit.ir.control.Scan``."""

    body: Program
    length: int
    constants: int
    carries: int
    reverse: bool = False

    traits: ClassVar[Traits] = Traits(Kind.CONTROL, Remat.COSTLY, takes_zeros=True)

    @classmethod
    def of(cls, form: Form) -> Scan:
        """The primitive of a control form."""
        return cls(form.body, form.length, form.constants, form.carries, form.reverse)

    def control(self) -> Form:
        """The loop."""
        return Form(self.body, self.length, self.constants, self.carries, self.reverse)

    def programs(self) -> tuple[Program, ...]:
        """The body."""
        return (self.body,)

    def with_programs(self, programs: Sequence[Program]) -> Scan:
        """Another body of the same parameters and results."""
        return replace(self, body=programs[0])

    def infer_outs(self, avals: Sequence[Aval]) -> tuple[Aval, ...]:
        """Carries as the body gives them; its other results stacked."""
        wanted = self._arguments()
        if len(avals) != len(wanted):
            raise ShapeError(f"scan: {len(avals)} operands, expected {len(wanted)}")
        for given, want in zip(avals, wanted, strict=True):
            _agree("operand", given, want)
        _, carries, _ = sections(self.control(), self.body.in_avals)
        outs = self.body.out_avals
        for given, want in zip(outs, carries, strict=False):
            _agree("carry after a turn", given, want)
        ys = [stacked(a, self.length) for a in outs[self.carries :]]
        return (*outs[: self.carries], *ys)

    def _arguments(self) -> list[Aval]:
        constants, carries, slices = sections(self.control(), self.body.in_avals)
        return [*constants, *carries, *(stacked(a, self.length) for a in slices)]

    def evaluate_outs(self, *arrays: Array) -> tuple[Array, ...]:
        """Turn by turn."""
        constants, carried, xs = sections(self.control(), arrays)
        body = Evaluator(self.body)
        made = self.body.out_avals[self.carries :]
        ys = [np.zeros((self.length, *a.shape), a.dtype) for a in made]
        carry = list(carried)
        turns = range(self.length)
        for turn in reversed(turns) if self.reverse else turns:
            outs = body.run([*constants, *carry, *[x[turn] for x in xs]])
            carry = outs[: self.carries]
            for y, out in zip(ys, outs[self.carries :], strict=True):
                y[turn] = out
        return (*carry, *ys)

    def jvp_outs(
        self, primals: Sequence[Value], tangents: Sequence[Tangent]
    ) -> tuple[tuple[Value, ...], tuple[Tangent, ...]]:
        """One scan of values and tangents; only what moves has a tangent."""
        moving = tuple(t is not None for t in tangents)
        made = derivative(self.control(), moving)
        args = [_tangent(primals[i], tangents[i]) if t else primals[i] for i, t in made.inputs]
        outs = dict(zip(made.outputs, _bound(made.scan, args), strict=True))
        results = range(len(self.body.results))
        return (
            tuple(outs[i, False] for i in results),
            tuple(outs.get((i, True)) for i in results),
        )

    def partial_eval(self, eqn: Eqn, moving: Sequence[bool]) -> Parts | None:
        """The scan of what is known, which stacks residuals, and the scan of what moves.

        Costly work on constants comes before both, so that the cotangents of its results add up in
        the loop, and are pulled back once.
        """
        made = lifted(self.control(), narrowed=False)
        *before, loop = (eqn,) if made is None else made.equations(eqn, Scan.of)
        moved = {a for a, flag in zip(eqn.args, moving, strict=True) if flag}
        known, linear = separate(before, {a for a in moved if isinstance(a, Var)})
        assert isinstance(loop.prim, Scan)
        moved.update([out for e in linear for out in e.outs])
        parts = split(loop.prim.control(), tuple([a in moved for a in loop.args])).parts(
            loop, Scan.of
        )
        return Parts((*known, *parts.known), (*linear, *parts.linear))

    def transpose(
        self, cotangents: Sequence[Tangent], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """The scan in the opposite direction; cotangents of constants add up in it or behind it."""
        form = self.control()
        linear = tuple(isinstance(a, Linear) for a in args)
        if known_carries(form, linear):
            program, known = apart(Scan.of, form, linear)
            values = [args[i] for i in known]
            found = iter(backward(program, values, cotangents))
            return tuple(next(found) if flag else None for flag in linear)
        live = tuple(ct is not None for ct in cotangents)
        made = transposed(form, linear, live)
        values = made.arguments(form, args, cotangents)
        outs = dict(zip(made.outputs, _summed(made.scan, values), strict=True))
        return tuple(outs.get(i) if flag else None for i, flag in enumerate(linear))

    def batch_outs(self, args: Sequence[Value], batched: Sequence[bool]) -> tuple[Value, ...]:
        """Batches the loop; what is the same for every example is repeated."""
        size = size_of(args, batched)
        outs, flags = self.batch_some(args, batched)
        pairs = zip(outs, flags, strict=True)
        return tuple(out if flag else spread_over(out, size) for out, flag in pairs)

    def batch_some(
        self, args: Sequence[Value], batched: Sequence[bool]
    ) -> tuple[tuple[Value, ...], tuple[bool, ...]]:
        """The batch axis is the first of carries and constants, the second of stacked arrays."""
        form, size = self.control(), size_of(args, batched)
        made = batched_scan(form, tuple(batched), size)
        constants, carried, xs = sections(form, list(zip(args, batched, strict=True)))
        values = [
            *[a for a, _ in constants],
            *[
                spread_over(a, size) if new and not old else a
                for (a, old), new in zip(carried, made.carries, strict=True)
            ],
            *[_swapped(a) if b else a for a, b in xs],
        ]
        outs = _bound(made.scan, values)
        pairs = zip(outs[self.carries :], made.ys, strict=True)
        ys = [_swapped(out) if flag else out for out, flag in pairs]
        return (*outs[: self.carries], *ys), (*made.carries, *made.ys)

    def pruned(self, eqn: Eqn, live: Sequence[bool]) -> Eqn:
        """Without carries, outputs and operands that nothing read depends on."""
        made = pruned(self.control(), live)
        if made is None:
            return eqn
        args = tuple(eqn.args[i] for i in made.args)
        outs = tuple(eqn.outs[i] for i in made.outs)
        return Eqn(Scan.of(made.form), args, outs, eqn.source, eqn.region)

    def forwarded(self, eqn: Eqn) -> dict[int, Atom]:
        """Carries that no turn changes."""
        return {
            i: eqn.args[self.constants + i]
            for i in unchanged(self.control())
            if eqn.args[self.constants + i].aval is eqn.outs[i].aval
        }

    def lifted(self, eqn: Eqn) -> tuple[Eqn, ...]:
        """Before the loop: costly work on constants, and what is no larger than its operands."""
        made = lifted(self.control(), narrowed=True)
        return (eqn,) if made is None else made.equations(eqn, Scan.of)


def _agree(what: str, given: Aval, want: Aval) -> None:
    if given.shape != want.shape:
        raise ShapeError(f"scan: {what} is {given}, the body takes {want}")
    if given.dtype != want.dtype:
        raise DTypeError(f"scan: {what} is {given}, the body takes {want}")


def _bound(made: Derived, args: Sequence[Value]) -> Sequence[Value]:
    return bind_outs(Scan.of(made.form), *made.captured, *args)


def _summed(made: Derived, args: Sequence[Value]) -> Sequence[Value]:
    """As ``_bound``, with sums of products behind the loop where that is cheaper."""
    found = sunk(made.form)
    if found is None:
        return _bound(made, args)
    return found.run(lambda form, given: bind_outs(Scan.of(form), *given), [*made.captured, *args])


def _tangent(primal: Value, tangent: Tangent) -> Value:
    return zeros(aval_of(primal)) if tangent is None else tangent


def _swapped(x: Value) -> Value:
    """The first two axes exchanged."""
    return permute(x, (1, 0, *range(2, aval_of(x).ndim)))
