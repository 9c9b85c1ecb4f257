"""The results of one of several programs, chosen by a number at run time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from vkjit import dtypes
from vkjit.control.batched import size_of, spread_over
from vkjit.control.inline import Inlined
from vkjit.control.inner import (
    Backward,
    Forward,
    filled,
    joined,
    moves,
    parted,
    placed,
    present,
    reads,
    same_type,
    sources,
    types,
    where_each,
    with_params,
    with_results,
    zero_of,
)
from vkjit.control.stage import Staged, stage_together
from vkjit.errors import DTypeError, ShapeError
from vkjit.ir import control
from vkjit.ir.avals import Aval, aval
from vkjit.ir.evaluate import evaluate
from vkjit.ir.primitive import (
    Array,
    Kind,
    Linear,
    Parts,
    Primitive,
    Producer,
    Remat,
    Simpler,
    Tangent,
    Traits,
    Value,
)
from vkjit.ir.program import Atom, Eqn, Literal, Program, Var
from vkjit.ops.compare import eq, ge, le
from vkjit.ops.special import stop_gradient
from vkjit.passes.batch import batch, only
from vkjit.passes.dce import dce
from vkjit.passes.linearize import read_from_outside, separate
from vkjit.passes.residuals import residuals
from vkjit.trace import aval_of, bind_outs

_INDEX = aval((), dtypes.int32)


@final
@dataclass(frozen=True)
class Cond(Primitive):
    """The results of one of ``branches``: the first operand is its number, clamped.

    The other operands are the parameters of every branch. All branches give results of the same
    shapes and dtypes.
    """

    branches: tuple[Program, ...]

    traits: ClassVar[Traits] = Traits(Kind.CONTROL, Remat.COSTLY, takes_zeros=True)

    def infer_outs(self, avals: Sequence[Aval]) -> tuple[Aval, ...]:
        """Results of all branches agree; one is weakly typed where it is so in all of them."""
        number, *operands = avals
        if not same_type(number, _INDEX):
            raise DTypeError(f"cond: number of the branch {number}, expected {_INDEX}; cast it")
        for branch in self.branches:
            _require_types("operands", operands, branch.in_avals)
            _require_types("results", branch.out_avals, self.branches[0].out_avals)
        columns = zip(*[branch.out_avals for branch in self.branches], strict=True)
        return tuple(
            aval(column[0].shape, column[0].dtype, all(of.weak for of in column))
            for column in columns
        )

    def evaluate_outs(self, *arrays: Array) -> tuple[Array, ...]:
        """Evaluates the branch that is chosen, and no other."""
        number, *operands = arrays
        return tuple(evaluate(self.branches[self._clamped(int(number))], operands))

    def jvp_outs(
        self, primals: Sequence[Value], tangents: Sequence[Tangent]
    ) -> tuple[tuple[Value, ...], tuple[Tangent, ...]]:
        """The branches with their derivatives; zeros where only another branch has a tangent."""
        number, *operands = primals
        moving = [t is not None for t in tangents[1:]]
        forms = [Forward(branch, moving) for branch in self.branches]
        given = present(tangents[1:])
        avals = [*self.branches[0].in_avals, *map(aval_of, given)]
        staged = stage_together([(f, avals, f.program.name) for f in forms])
        wanted = joined(form.given for form in forms)
        outs = self.branches[0].out_avals
        pairs = zip(staged.programs, forms, strict=True)
        agreed = tuple(filled(program, f.given, wanted, outs) for program, f in pairs)
        results = bind_outs(Cond(agreed), number, *staged.captured, *operands, *given)
        return tuple(results[: len(outs)]), tuple(placed(results[len(outs) :], wanted))

    def partial_eval(self, eqn: Eqn, moving: Sequence[bool]) -> Parts | None:
        """Known results and residuals from one choice, the linear results from another."""
        return _Split(self.branches, eqn, moving).parts()

    def transpose(
        self, cotangents: Sequence[Tangent], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """The transposes of the branches; zeros where only another branch has a cotangent."""
        number, *operands = args
        linear = [isinstance(a, Linear) for a in operands]
        moving = [ct is not None for ct in cotangents]
        known = [a for a in operands if not isinstance(a, Linear)]
        given = present(cotangents)
        forms = [Backward(branch, linear, moving) for branch in self.branches]
        known_avals, linear_avals = parted(self.branches[0].in_avals, linear)
        avals = [*known_avals, *map(aval_of, given)]
        staged = stage_together([(f, avals, f.program.name) for f in forms])
        wanted = joined(form.given for form in forms)
        pairs = zip(staged.programs, forms, strict=True)
        agreed = tuple(filled(program, f.given, wanted, linear_avals) for program, f in pairs)
        results = bind_outs(Cond(agreed), number, *staged.captured, *known, *given)
        found = iter(placed(results, wanted))
        return None, *[next(found) if flag else None for flag in linear]

    def batch_outs(self, args: Sequence[Value], batched: Sequence[bool]) -> tuple[Value, ...]:
        """One choice for the whole batch, or every branch and a choice for each example."""
        if batched[0]:
            return self._chosen_apart(args, batched)
        number, *operands = args
        staged = _batched(self.branches, operands, batched[1:])
        return tuple(bind_outs(Cond(staged.programs), number, *staged.captured, *operands))

    def _chosen_apart(self, args: Sequence[Value], batched: Sequence[bool]) -> tuple[Value, ...]:
        """Runs every branch.

        Examples that do not take a branch pass it constants, not what gradients flow to: its
        derivative may be infinite there, and a cotangent of zero would not undo that.
        """
        numbers, *operands = args
        size = size_of(args, batched)
        flags = [has or _differs(v) for v, has in zip(operands, batched[1:], strict=True)]
        whole = [
            spread_over(v, size) if now and not has else v
            for v, has, now in zip(operands, batched[1:], flags, strict=True)
        ]
        outs: list[Value] = []
        for position, branch in enumerate(self.branches):
            taken = self._taken(numbers, position)
            guarded = [where_each(taken, v, stop_gradient(v)) if _differs(v) else v for v in whole]
            with only(taken):
                results, spread = batch(branch, guarded, flags)
            pairs = zip(results, spread, strict=True)
            own = [v if has else spread_over(v, size) for v, has in pairs]
            if position:
                own = [where_each(taken, *pair) for pair in zip(own, outs, strict=True)]
            outs = own
        return tuple(outs)

    def _taken(self, numbers: Value, position: int) -> Value:
        """Which examples take the branch at ``position``; numbers beyond the ends are clamped."""
        compare = eq
        if position == 0:
            compare = le
        elif position == len(self.branches) - 1:
            compare = ge
        return compare(numbers, np.int32(position))

    def simplify(self, args: Sequence[Atom], producer: Producer) -> Simpler | None:
        """A branch whose number is known, without the choice."""
        number, *operands = args
        if len(self.branches) == 1:
            return Inlined(self.branches[0]), tuple(operands)
        if not isinstance(number, Literal):
            return None
        return Inlined(self.branches[self._clamped(int(number.value))]), tuple(operands)

    def pruned(self, eqn: Eqn, live: Sequence[bool]) -> Eqn:
        """Without results that nobody reads and operands that no branch reads."""
        _, keep = parted(range(len(live)), live)
        branches = [with_results(b, [b.results[i] for i in keep]) for b in self.branches]
        used = joined([reads(branch) for branch in branches])
        _, args = parted(eqn.args[1:], used)
        short = [with_params(branch, parted(branch.params, used)[1]) for branch in branches]
        outs = tuple(eqn.outs[i] for i in keep)
        return Eqn(Cond(tuple(short)), (eqn.args[0], *args), outs, eqn.source, eqn.region)

    def forwarded(self, eqn: Eqn) -> dict[int, Atom]:
        """Results that every branch passes through."""
        found: dict[int, Atom] = {}
        columns = zip(*[sources(branch) for branch in self.branches], strict=True)
        for i, column in enumerate(columns):
            first: int | None = column[0]
            if first is None or len(set(column)) > 1:
                continue
            given: Atom = eqn.args[1 + first]
            if given.aval is eqn.outs[i].aval:
                found[i] = given
        return found

    def control(self) -> control.Branch:
        """A choice."""
        return control.Branch(self.branches)

    def programs(self) -> tuple[Program, ...]:
        """The branches."""
        return self.branches

    def with_programs(self, programs: Sequence[Program]) -> Cond:
        """Other branches."""
        return Cond(tuple(programs))

    def _clamped(self, number: int) -> int:
        return min(max(number, 0), len(self.branches) - 1)


@final
class _Half:
    """One branch in two parts, and the residuals that lead from one to the other."""

    def __init__(self, branch: Program, flags: Sequence[bool]) -> None:
        self.branch = branch
        self.params, self.free = parted(branch.params, flags)
        self.moving = set(self.free)
        self.known, self.linear = separate(branch.eqns, self.moving)
        self.flags = [moves(r, self.moving) for r in branch.results]
        self.again: tuple[Eqn, ...] = ()
        self.forwarded: list[bool] = []
        self.kept: list[Var] = []

    def save(self, linear: Sequence[bool]) -> None:
        """Chooses the residuals, given which results the linear part computes."""
        read = read_from_outside(self.linear, parted(self.branch.results, linear)[1], self.moving)
        saved, self.again = residuals(self.known, self.params, read)
        self.forwarded = [p in saved for p in self.params]
        self.kept = [v for v in saved if v not in self.params]

    def known_program(self, linear: Sequence[bool], slots: Sequence[Aval | Var]) -> Program:
        """Known results, then the residual in each slot, or zeros."""
        results, _ = parted(self.branch.results, linear)
        zeros = {i: zero_of(s) for i, s in enumerate(slots) if isinstance(s, Aval)}
        made = [eqn for _, eqns in zeros.values() for eqn in eqns]
        values = [s if isinstance(s, Var) else zeros[i][0] for i, s in enumerate(slots)]
        eqns = (*self.known, *made)
        name = f"{self.branch.name}.known"
        return dce(Program(tuple(self.params), eqns, (*results, *values), name))

    def linear_program(
        self, linear: Sequence[bool], forwarded: Sequence[bool], slots: Sequence[Aval | Var]
    ) -> Program:
        """The linear results of forwarded parameters, residuals and moving parameters."""
        _, ahead = parted(self.params, forwarded)
        _, results = parted(self.branch.results, linear)
        kept = [s if isinstance(s, Var) else Var(s) for s in slots]
        eqns = (*self.again, *self.linear)
        name = f"{self.branch.name}.linear"
        return dce(Program((*ahead, *kept, *self.free), eqns, tuple(results), name))


@final
class _Split:
    """A choice whose operands move in part, as two choices.

    Operands that the linear part reads are passed to it as they are. The other residuals share
    slots: one holds a residual of each branch that has one of its aval.
    """

    def __init__(self, branches: Sequence[Program], eqn: Eqn, moving: Sequence[bool]) -> None:
        self.eqn = eqn
        self.args, self.free = parted(eqn.args[1:], moving[1:])
        self.halves = [_Half(branch, moving[1:]) for branch in branches]
        self.linear = joined(half.flags for half in self.halves)
        for half in self.halves:
            half.save(self.linear)

    def parts(self) -> Parts | None:
        """Both choices, or None where all of it is linear."""
        slots = _slots([half.kept for half in self.halves])
        residual = [_of(column) for column in zip(*slots, strict=True)]
        acts = any(eqn.prim.acts() for half in self.halves for eqn in half.known)
        if all(self.linear) and not residual and not acts:
            return None
        return Parts((self._known(slots, residual),), self._linear(slots, residual))

    def _known(self, slots: Sequence[Sequence[Aval | Var]], residual: Sequence[Var]) -> Eqn:
        pairs = zip(self.halves, slots, strict=True)
        branches = tuple(half.known_program(self.linear, own) for half, own in pairs)
        outs, _ = parted(self.eqn.outs, self.linear)
        return self._eqn(branches, self.args, [*outs, *residual])

    def _linear(
        self, slots: Sequence[Sequence[Aval | Var]], residual: Sequence[Var]
    ) -> tuple[Eqn, ...]:
        if not any(self.linear):
            return ()
        forwarded = joined(half.forwarded for half in self.halves)
        pairs = zip(self.halves, slots, strict=True)
        branches = tuple(half.linear_program(self.linear, forwarded, own) for half, own in pairs)
        _, ahead = parted(self.args, forwarded)
        _, outs = parted(self.eqn.outs, self.linear)
        return (self._eqn(branches, [*ahead, *residual, *self.free], outs),)

    def _eqn(self, branches: tuple[Program, ...], args: Sequence[Atom], outs: Sequence[Var]) -> Eqn:
        number, eqn = self.eqn.args[0], self.eqn
        return Eqn(Cond(branches), (number, *args), tuple(outs), eqn.source, eqn.region)


def _slots(kept: Sequence[Sequence[Var]]) -> list[list[Aval | Var]]:
    """Each branch's residuals in slots that they share; the aval where a branch has none."""
    avals: list[Aval] = []
    found: list[dict[int, Var]] = []
    for residual in kept:
        own: dict[int, Var] = {}
        for var in residual:
            fits = (i for i, of in enumerate(avals) if i not in own and same_type(of, var.aval))
            slot = next(fits, len(avals))
            if slot == len(avals):
                avals.append(aval(var.aval.shape, var.aval.dtype))
            own[slot] = var
        found.append(own)
    return [[own.get(i, of) for i, of in enumerate(avals)] for own in found]


def _of(column: Sequence[Aval | Var]) -> Var:
    """A new variable for what one slot holds."""
    of = next(s.aval for s in column if isinstance(s, Var))
    return Var(aval(of.shape, of.dtype))


def _batched(
    branches: Sequence[Program], operands: Sequence[Value], batched: Sequence[bool]
) -> Staged:
    """The branches over a batch, all results with the batch axis."""
    size = size_of(operands, batched)

    def over_batch(branch: Program) -> Callable[..., list[Value]]:
        def whole(*values: Value) -> list[Value]:
            outs, spread = batch(branch, values, batched)
            pairs = zip(outs, spread, strict=True)
            return [v if has else spread_over(v, size) for v, has in pairs]

        return whole

    avals = [aval_of(v) for v in operands]
    return stage_together([(over_batch(b), avals, b.name) for b in branches])


def _differs(value: Value) -> bool:
    """Whether gradients may flow to a value."""
    return dtypes.is_float(aval_of(value).dtype)


def _require_types(what: str, given: Sequence[Aval], expected: Sequence[Aval]) -> None:
    pairs = zip(given, expected, strict=False)
    if len(given) != len(expected) or not all(same_type(g, e) for g, e in pairs):
        raise ShapeError(f"cond: {what} {types(given)}, expected {types(expected)}")
