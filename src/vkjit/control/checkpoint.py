"""Checkpoint: a program whose inner values are computed again for its derivative, not kept.

The derivative of a checkpoint is a checkpoint. Linearizing one runs its body once and keeps the
arguments that are needed, and what the policy lets it save; the linear part is again a checkpoint,
which begins by computing the rest. Transposing that runs the same computations just before the
cotangents need them. Lowering puts the body in the place of the equation as a region of its own, so
that no pass merges a recomputation with the original and keeps the original alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

from vkjit.control.batched import size_of, spread_over
from vkjit.control.names import named_first
from vkjit.control.offload import Transfer
from vkjit.control.policies import Decision, Offload, Policy, parse
from vkjit.control.stage import stage
from vkjit.errors import ShapeError
from vkjit.ir.avals import Aval
from vkjit.ir.control import Control, Inline
from vkjit.ir.evaluate import evaluate
from vkjit.ir.primitive import (
    Array,
    Kind,
    Linear,
    Parts,
    Primitive,
    Pulled,
    Remat,
    Tangent,
    Traits,
    Value,
)
from vkjit.ir.program import Atom, Eqn, Literal, Program, Var
from vkjit.ops.naming import Name
from vkjit.passes.batch import batch
from vkjit.passes.cotangents import Cotangents
from vkjit.passes.dce import dce
from vkjit.passes.jvp import jvp
from vkjit.passes.linearize import read_from_outside, separate
from vkjit.passes.residuals import Residuals, chosen
from vkjit.passes.transpose import pull
from vkjit.trace import aval_of, bind_outs

Flat = Callable[..., Sequence[Value]]


@final
@dataclass(frozen=True)
class Checkpoint(Primitive):
    """The results of ``body``; its derivative keeps what ``policy`` lets it save.

    ``again`` says that the body computes again what another equation computed.
    """

    body: Program
    policy: Policy
    again: bool = False

    def __post_init__(self) -> None:
        # The text form writes a policy as its text.
        given: object = self.policy
        if isinstance(given, str):
            object.__setattr__(self, "policy", parse(given))

    traits: ClassVar[Traits] = Traits(Kind.CONTROL, Remat.COSTLY)

    def infer_outs(self, avals: Sequence[Aval]) -> tuple[Aval, ...]:
        """Those of the body."""
        wanted = self.body.in_avals
        if [(a.shape, a.dtype) for a in avals] != [(a.shape, a.dtype) for a in wanted]:
            raise ShapeError(
                f"checkpoint of {self.body.name}: operands {', '.join(map(str, avals))}; expected "
                f"{', '.join(map(str, wanted))}"
            )
        return self.body.out_avals

    def evaluate_outs(self, *arrays: Array) -> tuple[Array, ...]:
        """The body's results."""
        return tuple(evaluate(self.body, arrays))

    def jvp_outs(
        self, primals: Sequence[Value], tangents: Sequence[Tangent]
    ) -> tuple[tuple[Value, ...], tuple[Tangent, ...]]:
        """A checkpoint of the derivative."""
        count = len(primals)
        moving = [i for i, t in enumerate(tangents) if t is not None]
        given: list[bool] = []

        def both(*values: Value) -> list[Value]:
            directions: list[Tangent] = [None] * count
            for i, t in zip(moving, values[count:], strict=True):
                directions[i] = t
            outs, douts = jvp(self.body, values[:count], directions)
            given[:] = [d is not None for d in douts]
            return [*outs, *[d for d in douts if d is not None]]

        values = [*primals, *[t for t in tangents if t is not None]]
        outs = self.staged(both, values, f"{self.body.name}.jvp")
        rest = iter(outs[len(given) :])
        return tuple(outs[: len(given)]), tuple([next(rest) if g else None for g in given])

    def partial_eval(self, eqn: Eqn, moving: Sequence[bool]) -> Parts | None:
        """Runs what is known once; the linear part computes again what was not saved."""
        return _Split(self, eqn, moving).parts()

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """A checkpoint of the transposed body."""
        pulled = self.transpose_onto(cotangents, args, [None] * len(args))
        sums = Cotangents()
        for var, ct in zip(self.body.params, pulled.sums, strict=True):
            if ct is not None:
                sums.put(var, ct)
        for position, prim, ct in pulled.parts:
            sums.add_part(self.body.params[position], prim, ct)
        return tuple([sums.take(var) for var in self.body.params])

    def transpose_onto(
        self,
        cotangents: Sequence[Tangent],
        args: Sequence[Value | Linear],
        sums: Sequence[Tangent],
    ) -> Pulled:
        """A checkpoint of the transposed body, which computes known values where it needs them."""
        back = _Back(self.body, cotangents, args, sums)
        return back.pulled(replace(self, again=True).staged(back, back.values, back.name))

    def batch_outs(self, args: Sequence[Value], batched: Sequence[bool]) -> tuple[Value, ...]:
        """A checkpoint of the batched body."""
        size = size_of(args, batched)

        def many(*values: Value) -> list[Value]:
            outs, spread = batch(self.body, values, batched)
            return [
                out if flag else spread_over(out, size)
                for out, flag in zip(outs, spread, strict=True)
            ]

        return tuple(self.staged(many, args, f"{self.body.name}.batch"))

    def pruned(self, eqn: Eqn, live: Sequence[bool]) -> Eqn:
        """Drops results that nobody reads, and arguments that they alone needed."""
        pairs = zip(self.body.results, eqn.outs, live, strict=True)
        kept = [(r, out) for r, out, flag in pairs if flag]
        body = self.body
        smaller = dce(Program(body.params, body.eqns, tuple([r for r, _ in kept]), body.name))
        used = {a for e in smaller.eqns for a in e.args} | set(smaller.results)
        params = [(p, a) for p, a in zip(body.params, eqn.args, strict=True) if p in used]
        smaller = Program(
            tuple([p for p, _ in params]), smaller.eqns, smaller.results, smaller.name
        )
        outs = tuple([out for _, out in kept])
        prim = replace(self, body=smaller)
        return Eqn(prim, tuple([a for _, a in params]), outs, eqn.source, eqn.region)

    def control(self) -> Control:
        """The body in the equation's place."""
        return Inline(self.body, apart=self.again)

    def parameters(self) -> dict[str, object]:
        """The policy as text."""
        return {"body": self.body, "policy": str(self.policy), "again": self.again}

    def programs(self) -> tuple[Program, ...]:
        """The body."""
        return (self.body,)

    def with_programs(self, programs: Sequence[Program]) -> Primitive:
        """A checkpoint of another body."""
        return replace(self, body=programs[0])

    def saves(self, eqn: Eqn) -> Decision:
        """What the policy says of an equation's results."""
        avals = [a.aval for a in eqn.args]
        return self.policy(eqn.prim, *avals, **eqn.prim.parameters())

    def staged(self, fn: Flat, values: Sequence[Value], name: str) -> Sequence[Value]:
        """The results of ``fn``, of flat values, as a checkpoint like this one."""
        made = stage(fn, [aval_of(v) for v in values], name)
        (program,) = made.programs
        given = [*made.captured, *values]
        # What only passes through stays what it is: its cotangents add up where it is used.
        direct: dict[Atom, Value] = dict(zip(program.params, given, strict=True))
        direct.update({r: r.value for r in program.results if isinstance(r, Literal)})
        inner = tuple(dict.fromkeys([r for r in program.results if r not in direct]))
        prim = replace(self, body=Program(program.params, program.eqns, inner, name))
        if inner or prim.acts():
            direct.update(zip(inner, bind_outs(prim, *given), strict=True))
        return [direct[r] for r in program.results]


_EMPTY = Program((), (), ())


def checkpointed(fn: Flat, values: Sequence[Value], policy: Policy, name: str) -> Sequence[Value]:
    """``fn``, of flat values to flat values, as a checkpoint; its results on ``values``."""
    return Checkpoint(_EMPTY, policy).staged(fn, values, name)


@final
class _Back:
    """The transpose of a body: (known values, cotangents, sums so far) to sums and parts.

    Called once, with ``values`` or their tracers; ``pulled`` says what its results are.
    """

    def __init__(
        self,
        body: Program,
        cotangents: Sequence[Tangent],
        args: Sequence[Value | Linear],
        sums: Sequence[Tangent],
    ) -> None:
        self.name = f"{body.name}.transpose"
        self.args = args
        first = {id(a): i for i, a in reversed(list(enumerate(args))) if isinstance(a, Linear)}
        self.linear = list(reversed(first.values()))
        self.known = [i for i, a in enumerate(args) if not isinstance(a, Linear)]
        self.program = _ordered(body, [*self.known, *self.linear], args, first)
        self.moving = [ct is not None for ct in cotangents]
        self.before = [i for i in self.linear if sums[i] is not None]
        self.values: list[Value] = [args[i] for i in self.known]
        self.values += [ct for ct in cotangents if ct is not None]
        self.values += [sums[i] for i in self.before]
        self.summed: list[int] = []
        self.joined: list[tuple[int, Primitive]] = []

    def __call__(self, *values: Value) -> list[Value]:
        given = iter(values)
        known = [next(given) for _ in self.known]
        cotangents = [next(given) if flag else None for flag in self.moving]
        variables = dict(zip(self.linear, self.program.params[len(known) :], strict=True))
        sums = Cotangents()
        for i in self.before:
            sums.put(variables[i], next(given))
        # All of the body is one region in the end: what it computes again may join what reads it.
        pull(self.program, known, cotangents, sums, region=0)
        results: list[Value] = []
        for i, var in variables.items():
            total = sums.sum_of(var)
            if total is not None:
                self.summed.append(i)
                results.append(total)
        for i, var in variables.items():
            for prim, ct in sums.parts_of(var):
                self.joined.append((i, prim))
                results.append(ct)
        return results

    def pulled(self, results: Sequence[Value]) -> Pulled:
        """What the results say of the arguments."""
        found = iter(results)
        sums: list[Tangent] = [None] * len(self.args)
        for i in self.summed:
            sums[i] = next(found)
        return Pulled(tuple(sums), tuple([(i, prim, next(found)) for i, prim in self.joined]))


def _ordered(
    body: Program, order: Sequence[int], args: Sequence[Value | Linear], first: dict[int, int]
) -> Program:
    """``body`` with parameters in an order; linear arguments that are one are one parameter."""
    same: dict[Atom, Var] = {
        param: body.params[first[id(a)]]
        for param, a in zip(body.params, args, strict=True)
        if isinstance(a, Linear)
    }
    eqns = body.eqns
    if any(param is not kept for param, kept in same.items()):
        eqns = tuple(
            [
                Eqn(e.prim, tuple([same.get(a, a) for a in e.args]), e.outs, e.source, e.region)
                for e in eqns
            ]
        )
    results = tuple([same.get(r, r) for r in body.results])
    return Program(tuple([body.params[i] for i in order]), eqns, results, body.name)


@final
class _Split:
    """A checkpoint equation in two: what is known, and what is linear in its moving arguments."""

    def __init__(self, prim: Checkpoint, eqn: Eqn, moving: Sequence[bool]) -> None:
        self.prim = prim
        self.eqn = eqn
        body = prim.body
        pairs = list(zip(body.params, eqn.args, moving, strict=True))
        self.given = {param: arg for param, arg, _ in pairs}
        self.fixed = tuple([param for param, _, flag in pairs if not flag])
        self.tangents = tuple([param for param, _, flag in pairs if flag])
        self.moving = set(self.tangents)
        self.decisions: dict[Eqn, Decision] = {}
        self.known, self.linear = named_first(*separate(body.eqns, self.moving))

    def parts(self) -> Parts:
        """The equations that replace it."""
        results = list(zip(self.prim.body.results, self.eqn.outs, strict=True))
        still = [(r, out) for r, out in results if r not in self.moving]
        changing = [(r, out) for r, out in results if r in self.moving]
        read = read_from_outside(self.linear, (), self.moving)
        saved, again = self._offloaded(*self._residuals(read))
        # Residuals that are results, too, are one variable outside.
        outside: dict[Atom, Var] = {r: out for r, out in reversed(still) if isinstance(r, Var)}
        new = [v for v in saved if v not in self.given and v not in outside]
        outside.update({v: Var(v.aval) for v in new})
        known = self._eqn(
            self.known,
            self.fixed,
            [self.given[p] for p in self.fixed],
            [*still, *[(v, outside[v]) for v in new]],
            again=self.prim.again,
        )
        linear = self._eqn(
            [*again, *self.linear],
            (*saved, *self.tangents),
            [self.given.get(v) or outside[v] for v in saved]
            + [self.given[p] for p in self.tangents],
            changing,
            again=True,
        )
        return Parts(known, linear)

    def _decide(self, eqn: Eqn) -> Decision:
        if eqn not in self.decisions:
            self.decisions[eqn] = self.prim.saves(eqn)
        return self.decisions[eqn]

    def _offloaded(self, saved: Sequence[Var], again: Sequence[Eqn]) -> Residuals:
        """Residuals with those in memory of the host that the policy sends there."""
        makers = {out: eqn for eqn in self.known for out in eqn.outs}
        kept: list[Var] = []
        brought: list[Eqn] = []
        for var in saved:
            maker = makers.get(var)
            if maker is None or not isinstance(self._decide(maker), Offload):
                kept.append(var)
                continue
            there = Var(var.aval)
            source, region = maker.source, maker.region
            self.known.append(Eqn(Transfer(away=True), (var,), (there,), source, region))
            brought.append(Eqn(Transfer(away=False), (there,), (var,), source, region))
            kept.append(there)
        return tuple(kept), (*brought, *again)

    def _residuals(self, read: Sequence[Var]) -> Residuals:
        decide = self._decide
        return chosen(
            self.known,
            self.fixed,
            read,
            saveable=lambda eqn: bool(decide(eqn)),
            forced=lambda eqn: isinstance(eqn.prim, Name) or isinstance(decide(eqn), Offload),
        )

    def _eqn(
        self,
        eqns: Sequence[Eqn],
        params: Sequence[Var],
        args: Sequence[Atom],
        results: Sequence[tuple[Atom, Var]],
        *,
        again: bool,
    ) -> tuple[Eqn, ...]:
        """A checkpoint of ``eqns``; none where nothing is asked of it."""
        if not results and not any(eqn.prim.acts() for eqn in eqns):
            return ()
        body = self.prim.body
        inner = Program(tuple(params), tuple(eqns), tuple([r for r, _ in results]), body.name)
        prim = Checkpoint(dce(inner), self.prim.policy, again)
        outs = tuple([out for _, out in results])
        return (Eqn(prim, tuple(args), outs, self.eqn.source, self.eqn.region),)
