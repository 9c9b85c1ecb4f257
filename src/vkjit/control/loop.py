"""A program repeated as long as another one says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar, final

from vkjit import dtypes
from vkjit.control.batched import example, size_of, spread_over
from vkjit.control.inner import (
    Forward,
    filled,
    moves,
    parted,
    placed,
    present,
    reads,
    same_type,
    spread_of,
    types,
    where_each,
    with_axis,
)
from vkjit.control.scan_prune import lifted
from vkjit.control.stage import stage
from vkjit.errors import ArgumentError, DTypeError, ShapeError
from vkjit.ir import control
from vkjit.ir.avals import Aval, aval
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
from vkjit.ir.program import Atom, Eqn, Program, Source, Var
from vkjit.ops.reduce import reduce_or
from vkjit.ops.structural import zeros
from vkjit.passes.batch import batch, only
from vkjit.passes.dce import dce
from vkjit.passes.inner import silent
from vkjit.passes.linearize import separate
from vkjit.trace import aval_of, bind_outs

T = TypeVar("T")

_TEST = aval((), dtypes.bool_)


@final
@dataclass(frozen=True)
class While(Primitive):
    """``body`` as long as ``condition`` gives true.

    Operands are the constants of the condition, those of the body, and the first carries; results
    are the last carries. ``condition``: (its constants, carries) to one bool of rank 0; ``body``:
    (its constants, carries) to carries. ``source`` is the user's line, for messages.
    """

    condition: Program
    body: Program
    condition_constants: int
    body_constants: int
    source: Source | None = field(default=None, compare=False, repr=False)

    traits: ClassVar[Traits] = Traits(Kind.CONTROL, Remat.COSTLY)

    def parameters(self) -> dict[str, object]:
        """What the text form prints."""
        return {name: v for name, v in super().parameters().items() if name != "source"}

    def infer_outs(self, avals: Sequence[Aval]) -> tuple[Aval, ...]:
        """The carries keep their shapes and dtypes."""
        tests, constants, carries = self._parted(avals)
        _require_types("operands of the condition", [*tests, *carries], self.condition.in_avals)
        _require_types("operands of the body", [*constants, *carries], self.body.in_avals)
        _require_types("results of the body", self.body.out_avals, carries)
        outs = self.condition.out_avals
        if len(outs) != 1 or not same_type(outs[0], _TEST):
            raise DTypeError(f"while: the condition gives {types(outs)}, expected ({_TEST})")
        pairs = zip(carries, self.body.out_avals, strict=True)
        return tuple(aval(c.shape, c.dtype, c.weak and out.weak) for c, out in pairs)

    def evaluate_outs(self, *arrays: Array) -> tuple[Array, ...]:
        """The loop in Python."""
        tests, constants, carries = self._parted(arrays)
        condition, body = Evaluator(self.condition), Evaluator(self.body)
        while bool(condition.run([*tests, *carries])[0]):
            carries = body.run([*constants, *carries])
        return tuple(carries)

    def jvp_outs(
        self, primals: Sequence[Value], tangents: Sequence[Tangent]
    ) -> tuple[tuple[Value, ...], tuple[Tangent, ...]]:
        """One loop of carries and tangents; carries that move in any turn have a tangent in all."""
        tests, constants, carries = self._parted(primals)
        _, dconstants, dcarries = self._parted(tangents)
        still = [t is not None for t in dconstants]
        given = present(dconstants)
        moving = self._fixpoint(still, [t is not None for t in dcarries])
        started = [
            zeros(aval_of(c)) if t is None else t
            for c, t, flag in zip(carries, dcarries, moving, strict=True)
            if flag
        ]
        form = Forward(self.body, [*still, *moving])
        avals = [*self.body.in_avals, *map(aval_of, given), *map(aval_of, started)]
        staged = stage(form, avals, self.body.name)
        body = filled(staged.programs[0], form.given, moving, self.body.out_avals)
        # Constants go before carries: (captured, constants, carries, tangents of either).
        lead, count = len(staged.captured) + len(constants), len(carries)
        first, last, rest = body.params[:lead], body.params[lead : lead + count], lead + count
        moved, ends = body.params[rest : rest + len(given)], body.params[rest + len(given) :]
        body = Program((*first, *moved, *last, *ends), body.eqns, body.results, body.name)
        condition = _with_more(self.condition, [aval_of(t) for t in started])
        looped = While(condition, body, len(tests), lead + len(given), source=self.source)
        results = bind_outs(
            looped, *tests, *staged.captured, *constants, *given, *carries, *started
        )
        return tuple(results[:count]), tuple(placed(results[count:], moving))

    def _fixpoint(self, constants: Sequence[bool], carries: Sequence[bool]) -> list[bool]:
        """Which carries have a tangent, given which constants and first carries have one."""
        flags = list(carries)
        while True:
            form = Forward(self.body, [*constants, *flags])
            _, moving = parted(self.body.in_avals, form.moving)
            stage(form, [*self.body.in_avals, *moving], self.body.name)
            pairs = zip(flags, form.given, strict=True)
            found = [before or now for before, now in pairs]
            if found == flags:
                return found
            flags = found

    def partial_eval(self, eqn: Eqn, moving: Sequence[bool]) -> Parts | None:
        """Carries that do not move have a loop of their own.

        The linear loop computes them again: keeping their values of every turn would need memory
        for a number of turns that nobody knows. Writes among that are sound, since either loop
        starts from the first carries and writes into memory of its own.
        """
        tests, constants, flags = map(list, self._parted(moving))
        while True:
            spread = set(parted(self.body.params, [*constants, *flags])[1])
            known, linear = separate(self.body.eqns, spread)
            found = [m or moves(r, spread) for m, r in zip(flags, self.body.results, strict=True)]
            if found == flags:
                break
            flags = found
        if all(flags):
            return None
        body = self.body
        still = self._without([*tests, *constants, *flags], known)
        # What acts does so in the first loop; in the second it would act once more.
        repeated = silent(Program(body.params, tuple(known), (), body.name))
        again = Program(body.params, (*repeated.eqns, *linear), body.results, body.name)
        args, _ = parted(eqn.args, [*tests, *constants, *flags])
        outs, _ = parted(eqn.outs, flags)
        first = Eqn(still, tuple(args), tuple(outs), eqn.source, eqn.region)
        fresh = [v if m else Var(v.aval) for v, m in zip(eqn.outs, flags, strict=True)]
        looped = self.with_programs((silent(self.condition), again))
        last = Eqn(looped, eqn.args, tuple(fresh), eqn.source, eqn.region)
        return Parts((first,), (last,) if any(flags) else ())

    def _without(self, left_out: Sequence[bool], eqns: Sequence[Eqn]) -> While:
        """The loop of fewer operands, its body made of ``eqns``."""
        tests, constants, carries = self._parted(left_out)
        body = _cut(self.body, [*constants, *carries], eqns, parted(self.body.results, carries)[0])
        condition = _cut(
            self.condition, [*tests, *carries], self.condition.eqns, self.condition.results
        )
        counts = tests.count(False), constants.count(False)
        return While(condition, body, *counts, source=self.source)

    def pruned(self, eqn: Eqn, live: Sequence[bool]) -> Eqn:
        """Without carries that nothing which is read depends on, and constants nobody reads."""
        tests = self.condition_constants
        asked = reads(dce(self.condition))
        keep = [now or by for now, by in zip(live, asked[tests:], strict=True)]
        while True:
            results = parted(self.body.results, keep)[1]
            body = dce(Program(self.body.params, self.body.eqns, tuple(results), self.body.name))
            read = reads(body)
            needed = read[self.body_constants :]
            found = [now or by for now, by in zip(keep, needed, strict=True)]
            if found == keep:
                break
            keep = found
        used = [*asked[:tests], *read[: self.body_constants], *keep]
        left_out = [not flag for flag in used]
        looped = self._without(left_out, body.eqns)
        outs = parted(eqn.outs, keep)[1]
        return Eqn(looped, tuple(parted(eqn.args, used)[1]), tuple(outs), eqn.source, eqn.region)

    def forwarded(self, eqn: Eqn) -> dict[int, Atom]:
        """Carries that the body passes through."""
        params, carries = self.body.params[self.body_constants :], self._parted(eqn.args)[2]
        rows = enumerate(zip(self.body.results, params, carries, eqn.outs, strict=True))
        return {
            i: given
            for i, (result, param, given, out) in rows
            if result is param and given.aval is out.aval
        }

    def lifted(self, eqn: Eqn) -> tuple[Eqn, ...]:
        """Before the loop: costly work of the body on constants, as a scan of it would have it.

        Nothing, if that has a loop like this one: where no turn is made, it might never end.
        """
        turn = control.Scan(self.body, 1, self.body_constants, len(eqn.outs))
        found = lifted(turn, narrowed=True)
        if found is None or _loops(found.before):
            return (eqn,)
        tests = self.condition_constants

        def loop(form: control.Scan) -> While:
            return While(self.condition, form.body, tests, form.constants, source=self.source)

        inner = Eqn(self, eqn.args[tests:], eqn.outs, eqn.source, eqn.region)
        *before, last = found.equations(inner, loop)
        args = (*eqn.args[:tests], *last.args)
        return (*before, Eqn(last.prim, args, eqn.outs, eqn.source, eqn.region))

    def transpose(
        self, cotangents: Sequence[Tangent], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """Refuses: the values of every turn would be needed, for nobody knows how many turns.

        Raises:
            ArgumentError: always; the message names the line of the loop.
        """
        where = f" (made at {self.source})" if self.source else ""
        raise ArgumentError(
            f"while_loop{where}: reverse-mode differentiation of a loop whose number of turns is "
            "known at run time only; expected a number that is known while tracing. Use lax.scan, "
            "or lax.fori_loop with bounds that are Python integers, or forward mode (jvp, jacfwd)"
        )

    def batch_outs(self, args: Sequence[Value], batched: Sequence[bool]) -> tuple[Value, ...]:
        """Turns of the whole batch; where the condition differs, until no example goes on."""
        size = size_of(args, batched)
        flags, apart = self._spread(args, batched)
        tests, constants, carries = self._parted(args)
        started = [
            spread_over(c, size) if flag and not has else c
            for c, flag, has in zip(carries, flags, self._parted(batched)[2], strict=True)
        ]
        over = _Batch(self, size, (*map(tuple, self._parted(batched)[:2]), tuple(flags)))
        results = (over.apart if apart else over.together)(tests, constants, started)
        pairs = zip(results, flags, strict=True)
        return tuple(v if flag else spread_over(v, size) for v, flag in pairs)

    def _spread(self, args: Sequence[Value], batched: Sequence[bool]) -> tuple[list[bool], bool]:
        """Which carries differ between examples in some turn, and whether the condition does."""
        tests, constants, flags = map(list, self._parted(batched))
        shapes = [example(aval_of(v), has) for v, has in zip(args, batched, strict=True)]
        size = size_of(args, batched)
        while True:
            now = [*tests, *constants, *flags]
            pairs = zip(shapes, now, strict=True)
            avals = [with_axis(of, size) if flag else of for of, flag in pairs]
            of_tests, of_constants, of_carries = self._parted(avals)
            (apart,) = spread_of(self.condition, [*of_tests, *of_carries], [*tests, *flags])
            found = spread_of(self.body, [*of_constants, *of_carries], [*constants, *flags])
            after = [apart or before or has for before, has in zip(flags, found, strict=True)]
            if after == flags:
                return flags, apart
            flags = after

    def control(self) -> control.While:
        """A loop."""
        return control.While(
            self.condition, self.body, self.condition_constants, self.body_constants
        )

    def programs(self) -> tuple[Program, ...]:
        """Condition and body."""
        return self.condition, self.body

    def with_programs(self, programs: Sequence[Program]) -> While:
        """Another condition and body."""
        condition, body = programs
        counts = self.condition_constants, self.body_constants
        return While(condition, body, *counts, source=self.source)

    def _parted(self, items: Sequence[T]) -> tuple[Sequence[T], Sequence[T], Sequence[T]]:
        """Constants of the condition, those of the body, carries."""
        first = self.condition_constants
        second = first + self.body_constants
        return items[:first], items[first:second], items[second:]


@final
class _Batch:
    """Loops over a batch, for one loop over an example.

    Args:
        loop: over an example.
        size: of the batch.
        batched: which constants of the condition, of the body, and which carries have the axis.
    """

    def __init__(self, loop: While, size: int, batched: Sequence[Sequence[bool]]) -> None:
        self.loop = loop
        self.size = size
        self.tests, self.constants, self.carries = batched

    def together(
        self, tests: Sequence[Value], constants: Sequence[Value], carries: Sequence[Value]
    ) -> Sequence[Value]:
        """All examples take the same number of turns."""
        inputs = [*map(aval_of, tests), *map(aval_of, carries)]
        asked = stage(self._goes_on, inputs, self.loop.condition.name)
        turned = stage(
            self._turn, [*map(aval_of, constants), *map(aval_of, carries)], self.loop.body.name
        )
        counts = len(asked.captured) + len(tests), len(turned.captured) + len(constants)
        looped = While(asked.programs[0], turned.programs[0], *counts, source=self.loop.source)
        return bind_outs(looped, *asked.captured, *tests, *turned.captured, *constants, *carries)

    def apart(
        self, tests: Sequence[Value], constants: Sequence[Value], carries: Sequence[Value]
    ) -> Sequence[Value]:
        """Turns until no example goes on; carries of those that are done stay as they are.

        The condition is evaluated once a turn: who goes on is a carry of its own.
        """
        running = self._goes_on(*tests, *carries)
        count, first = len(tests), len(tests) + len(constants)

        def turn(*values: Value) -> list[Value]:
            before, going = values[first:-1], values[-1]
            with only(going):
                after = self._turn(*values[count:-1])
                kept = [where_each(going, a, b) for a, b in zip(after, before, strict=True)]
                return [*kept, *self._goes_on(*values[:count], *kept)]

        def any_goes_on(*values: Value) -> list[Value]:
            return [reduce_or(values[-1], (0,))]

        last = [*map(aval_of, carries), *map(aval_of, running)]
        asked = stage(any_goes_on, last, self.loop.condition.name)
        turned = stage(
            turn, [*map(aval_of, tests), *map(aval_of, constants), *last], self.loop.body.name
        )
        counts = len(asked.captured), len(turned.captured) + first
        looped = While(asked.programs[0], turned.programs[0], *counts, source=self.loop.source)
        given = (*asked.captured, *turned.captured, *tests, *constants, *carries, *running)
        return bind_outs(looped, *given)[:-1]

    def _goes_on(self, *values: Value) -> list[Value]:
        return batch(self.loop.condition, values, [*self.tests, *self.carries])[0]

    def _turn(self, *values: Value) -> list[Value]:
        outs, spread = batch(self.loop.body, values, [*self.constants, *self.carries])
        return [
            spread_over(v, self.size) if flag and not has else v
            for v, flag, has in zip(outs, self.carries, spread, strict=True)
        ]


def _loops(program: Program) -> bool:
    """Whether a program, or one inside it, runs a loop of this kind."""
    prims = [eqn.prim for eqn in program.eqns]
    return any(isinstance(p, While) or any(map(_loops, p.programs())) for p in prims)


def _cut(
    program: Program, left_out: Sequence[bool], eqns: Sequence[Eqn], results: Sequence[Atom]
) -> Program:
    """A program of fewer parameters, equations and results."""
    params, _ = parted(program.params, left_out)
    return dce(Program(tuple(params), tuple(eqns), tuple(results), program.name))


def _with_more(program: Program, avals: Sequence[Aval]) -> Program:
    """A program that takes more arguments and does not read them."""
    params = (*program.params, *map(Var, avals))
    return Program(params, program.eqns, program.results, program.name)


def _require_types(what: str, given: Sequence[Aval], expected: Sequence[Aval]) -> None:
    pairs = zip(given, expected, strict=False)
    if len(given) != len(expected) or not all(same_type(g, e) for g, e in pairs):
        raise ShapeError(f"while: {what} {types(given)}, expected {types(expected)}")
