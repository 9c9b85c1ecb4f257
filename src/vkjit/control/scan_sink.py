"""Sums of products that a transposed scan carries, taken behind it as one product over all turns.

The gradient of a weight is such a sum: a carry of the weight's size, read and written in each turn.
Where both factors are stacked anyway, or are small against the weight, they cost less memory
traffic than the carry, and the product over all turns runs at the speed of a large one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

from vkjit.control.remembered import remembered
from vkjit.control.scan_form import sections
from vkjit.ir.control import Scan as Form
from vkjit.ir.primitive import Kind, Primitive, Value
from vkjit.ir.program import Atom, Eqn, Program, Var
from vkjit.ops.contract import DotGeneral
from vkjit.ops.structural import Add, add
from vkjit.passes.dce import dce
from vkjit.trace import bind, source_of

Loop = Callable[[Form, Sequence[Value]], Sequence[Value]]
"""Runs a loop on its arguments."""

MOST_STACKED = 64 << 20
"""Bytes in which factors of one loop may be stacked beyond what it stacks; they are never more than
what it reads stacked. A body with loops inside, or that computes again what was not kept, stacks
nothing more: chunks and checkpoints hold their bounds."""

_GAIN = 4
"""A sum must be so many times as large as what it has each turn stack."""


@final
@dataclass(frozen=True)
class Sum:
    """The carry of that number is the sum of these products, one for each turn."""

    carry: int
    product: Eqn


@final
@dataclass(frozen=True)
class Sunk:
    """A loop without the carries of ``sums``, whose last stacked results are ``extra``."""

    original: Form
    form: Form
    sums: tuple[Sum, ...]
    extra: tuple[Var, ...]

    def run(self, loop: Loop, args: Sequence[Value]) -> list[Value]:
        """The results of the original loop: those of the smaller one, and the sums."""
        form = self.original
        constants, carries, xs = sections(form, args)
        totals = {s.carry: s.product for s in self.sums}
        kept = [a for i, a in enumerate(carries) if i not in totals]
        outs = iter(loop(self.form, [*constants, *kept, *xs]))
        last = [None if i in totals else next(outs) for i in range(form.carries)]
        ys = [next(outs) for _ in form.body.results[form.carries :]]
        where: dict[Atom, Value] = dict(zip(self.extra, outs, strict=True))
        where.update(zip(form.body.results[form.carries :], ys, strict=True))
        where.update(zip(sections(form, form.body.params)[2], xs, strict=True))
        for i, product in totals.items():
            with source_of(product):
                factors = [where[a] for a in product.args]
                last[i] = add(carries[i], bind(_over_turns(product.prim), *factors))
        return [*[value for value in last if value is not None], *ys]


@remembered()
def sunk(form: Form) -> Sunk | None:
    """The loop without sums of products that are better taken behind it; None: it has none."""
    body = dce(form.body)
    form = replace(form, body=body)
    if form.length < 2 or any(e.prim.traits.kind is Kind.CONTROL for e in body.eqns):
        return None
    slices = sections(form, body.params)[2]
    there = {*slices, *body.results[form.carries :]}
    room = min(MOST_STACKED, form.length * sum(v.aval.nbytes for v in slices))
    chosen: list[Sum] = []
    extra: list[Var] = []
    for found in _sums(form):
        factors = dict.fromkeys(a for a in found.product.args if a not in there)
        more = [a for a in factors if isinstance(a, Var)]
        size = sum(v.aval.nbytes for v in more)
        pays = _GAIN * size <= found.product.outs[0].aval.nbytes
        if pays and size * form.length <= room:
            room -= size * form.length
            there.update(more)
            extra += more
            chosen.append(found)
    if not chosen:
        return None
    return Sunk(form, _without(form, {s.carry for s in chosen}, extra), tuple(chosen), tuple(extra))


def _without(form: Form, gone: set[int], extra: list[Var]) -> Form:
    """The loop without some carries and with more stacked results."""
    body = form.body
    constants, carries, slices = sections(form, body.params)
    params = (*constants, *[p for i, p in enumerate(carries) if i not in gone], *slices)
    results = (*[r for i, r in enumerate(body.results) if i not in gone], *extra)
    smaller = dce(Program(params, body.eqns, results, body.name))
    return replace(form, body=smaller, carries=form.carries - len(gone))


def _sums(form: Form) -> list[Sum]:
    """The carries to which each turn adds a product that nothing else reads."""
    body = form.body
    made = {out: eqn for eqn in body.eqns for out in eqn.outs}
    reads = Counter([a for eqn in body.eqns for a in eqn.args if isinstance(a, Var)])
    reads.update([r for r in body.results if isinstance(r, Var)])
    constants, carries, _ = sections(form, body.params)
    fixed = set(constants)
    found: list[Sum] = []
    for i, (carry, result) in enumerate(zip(carries, body.results, strict=False)):
        added = _made(made, result)
        if added is None or not isinstance(added.prim, Add) or carry not in added.args:
            continue
        (term,) = [a for a in added.args if a is not carry] or [carry]
        product = _made(made, term)
        alone = all(reads[v] == 1 for v in (carry, result, term) if isinstance(v, Var))
        if product is None or not alone or not isinstance(product.prim, DotGeneral):
            continue
        if all(isinstance(a, Var) and a not in fixed for a in product.args):
            found.append(Sum(i, product))
    return found


def _made(made: dict[Var, Eqn], atom: Atom) -> Eqn | None:
    return made.get(atom) if isinstance(atom, Var) else None


def _over_turns(prim: Primitive) -> DotGeneral:
    """The product of factors stacked along a leading axis, summed over that, too."""
    assert isinstance(prim, DotGeneral)
    return replace(
        prim,
        lhs_contract=(0, *[a + 1 for a in prim.lhs_contract]),
        rhs_contract=(0, *[a + 1 for a in prim.rhs_contract]),
        lhs_batch=tuple([a + 1 for a in prim.lhs_batch]),
        rhs_batch=tuple([a + 1 for a in prim.rhs_batch]),
    )
