"""Which random keys a program consumes, and whether one twice.

Variables get numbers, equal where they must be equal: results of equal operations on equal numbers.
A key is consumed where a random function draws from it or splits it (``Consume``). Parts of an
array of keys are told apart by static positions only. In a loop, what does not change from turn to
turn is consumed again in each.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, assert_never, final

from vkjit.debug.key_uses import Consume, Use, reused
from vkjit.errors import MissingRuleError
from vkjit.ir.control import Branch, Call, Inline, Scan, Transfer, While
from vkjit.ir.primitive import Kind
from vkjit.ir.program import Atom, Eqn, Literal, Program, Var

Number: TypeAlias = int


@final
@dataclass(frozen=True, slots=True)
class Consumed:
    """The parameters and results of a program that hold keys it consumed: position and use."""

    params: tuple[tuple[int, Use], ...]
    results: tuple[tuple[int, Use], ...]


def consumed(program: Program) -> Consumed:
    """What a program consumes.

    Raises:
        KeyReuseError: a key is consumed twice.
    """
    flow = _Flow()
    params = [flow.fresh(0) for _ in program.params]
    results = flow.run(program, params, 0)

    def used(numbers: Sequence[Number]) -> tuple[tuple[int, Use], ...]:
        return tuple((i, flow.uses[n]) for i, n in enumerate(numbers) if n in flow.uses)

    return Consumed(used(params), used(results))


@final
class _Flow:
    """Numbers of variables, and the uses of numbers so far.

    ``depth`` of a number counts the loops around the innermost one in whose turns it changes.
    """

    def __init__(self) -> None:
        self.known: dict[Hashable, Number] = {}
        self.depth: list[int] = []
        self.whole: dict[Number, Number] = {}  # the array that a number is a part or view of
        self.uses: dict[Number, Use] = {}
        self.parts: dict[Number, Use] = {}  # of arrays of which a part was consumed

    def fresh(self, depth: int) -> Number:
        """A number of its own."""
        self.depth.append(depth)
        return len(self.depth) - 1

    def named(self, key: Hashable, depth: int) -> Number:
        """The number of what ``key`` describes."""
        if key not in self.known:
            self.known[key] = self.fresh(depth)
        return self.known[key]

    def number(self, atom: Atom, env: dict[Var, Number]) -> Number:
        """The number of an argument."""
        if isinstance(atom, Literal):
            return self.named((atom.aval, atom.value.tobytes()), 0)
        return env[atom]

    def run(self, program: Program, params: Sequence[Number], depth: int) -> list[Number]:
        """Follows a program inside ``depth`` loops; numbers of its results."""
        env = dict(zip(program.params, params, strict=True))
        for eqn in program.eqns:
            args = [self.number(a, env) for a in eqn.args]
            if isinstance(eqn.prim, Consume):
                self.consume(args[0], eqn.prim.use, depth)
                continue
            env.update(zip(eqn.outs, self.results(eqn, args, depth), strict=True))
        return [self.number(r, env) for r in program.results]

    def consume(self, number: Number, use: Use, depth: int) -> None:
        """Notes a use.

        Raises:
            KeyReuseError: it is not the first.
        """
        if self.depth[number] < depth:
            raise reused(use, use, "in each turn of a loop")
        before = self.parts.get(number)
        above = self.whole.get(number)
        part = number
        while before is None and part is not None:
            before = self.uses.get(part)
            part = self.whole.get(part)
        if before is not None:
            raise reused(before, use)
        self.uses[number] = use
        while above is not None:
            self.parts.setdefault(above, use)
            above = self.whole.get(above)

    def results(self, eqn: Eqn, args: Sequence[Number], depth: int) -> list[Number]:
        """Numbers of the results of an equation."""
        if eqn.prim.traits.kind is Kind.CONTROL:
            return self.controlled(eqn, args, depth)
        own = max([self.depth[a] for a in args], default=0)
        made = [self.named((eqn.prim, tuple(args), i), own) for i in range(len(eqn.outs))]
        if eqn.prim.traits.kind is Kind.VIEW and args[0] not in made:
            self.whole[made[0]] = args[0]
        return made

    def controlled(self, eqn: Eqn, args: Sequence[Number], depth: int) -> list[Number]:
        """Numbers of the results of an equation that runs programs."""
        try:
            form = eqn.prim.control()
        except MissingRuleError:
            return [self.fresh(depth) for _ in eqn.outs]
        match form:
            case Inline(body=body):
                return self.run(body, args, depth)
            case Scan():
                return self.scan(form, args, depth)
            case While():
                return self.looped(form, args, depth)
            case Branch(branches=branches):
                return self.branch(branches, args, depth)
            case Call():
                return []
            case Transfer():
                return list(args)
            case _:
                assert_never(form)

    def scan(self, form: Scan, args: Sequence[Number], depth: int) -> list[Number]:
        """A loop; what is sliced has a number of its own in each turn."""
        first = form.constants + form.carries
        inner = depth + 1 if form.length > 1 else depth
        carries = list(args[form.constants : first])
        carried = self.carried(form.body, form.constants, carries, inner)
        slices = [self.named(("slice", a), max(inner, self.depth[a])) for a in args[first:]]
        self.whole.update(zip(slices, args[first:], strict=True))
        self.run(form.body, [*args[: form.constants], *carried, *slices], inner)
        last = [b if a == b else self.fresh(depth) for a, b in zip(carried, carries, strict=True)]
        stacked = len(form.body.results) - form.carries
        return [*last, *[self.fresh(depth) for _ in range(stacked)]]

    def looped(self, form: While, args: Sequence[Number], depth: int) -> list[Number]:
        """A loop of carries alone."""
        tests, first = form.condition_constants, form.condition_constants + form.body_constants
        carries = list(args[first:])
        carried = self.carried(form.body, form.body_constants, carries, depth + 1)
        self.run(form.condition, [*args[:tests], *carried], depth + 1)
        self.run(form.body, [*args[tests:first], *carried], depth + 1)
        return [b if a == b else self.fresh(depth) for a, b in zip(carried, carries, strict=True)]

    def carried(
        self, body: Program, constants: int, carries: Sequence[Number], depth: int
    ) -> list[Number]:
        """Numbers of the carries inside: those that a turn hands on as they are do not change."""
        params = body.params[constants : constants + len(carries)]
        pairs = zip(params, body.results, carries, strict=False)
        return [before if r is p else self.fresh(depth) for p, r, before in pairs]

    def branch(
        self, branches: Sequence[Program], args: Sequence[Number], depth: int
    ) -> list[Number]:
        """One of several: each may consume what the others do."""
        uses, parts = dict(self.uses), dict(self.parts)
        after: list[dict[Number, Use]] = [{}, {}]
        columns: list[list[Number]] = []
        for program in branches:
            self.uses, self.parts = dict(uses), dict(parts)
            columns.append(self.run(program, args[1:], depth))
            after[0].update(self.uses)
            after[1].update(self.parts)
        self.uses, self.parts = after
        return [
            same[0] if len(set(same)) == 1 else self.fresh(depth)
            for same in zip(*columns, strict=True)
        ]
