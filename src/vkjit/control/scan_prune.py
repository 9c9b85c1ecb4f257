"""What of a scan nobody needs, and what of it need not be in the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from vkjit.control.remembered import remembered
from vkjit.control.scan_form import outside, reordered, sections
from vkjit.ir.control import Scan as Form
from vkjit.ir.primitive import Kind, Primitive, Remat
from vkjit.ir.program import Atom, Eqn, Program, Var
from vkjit.passes.dce import dce
from vkjit.passes.residuals import once


@final
@dataclass(frozen=True)
class Pruned:
    """A smaller loop, and which operands and results of the larger one it has."""

    form: Form
    args: tuple[int, ...]
    outs: tuple[int, ...]


def unchanged(form: Form) -> list[int]:
    """The carries that every turn hands on as they are."""
    _, params, _ = sections(form, form.body.params)
    pairs = zip(params, form.body.results, strict=False)
    return [i for i, (param, result) in enumerate(pairs) if not form.length or result is param]


def pruned(form: Form, live: Sequence[bool]) -> Pruned | None:
    """The loop without what the results flagged in ``live`` do not depend on; None: all needed.

    Carries that no turn changes become constants where their last value is not read.
    """
    body = form.body
    fixed = [i for i in unchanged(form) if not live[i]]
    wanted = {i for i, flag in enumerate(live) if flag}
    constants, carries, slices = sections(form, range(len(body.params)))
    while True:
        read = _read(body, [body.results[i] for i in sorted(wanted)])
        carried = {i for i, p in enumerate(carries) if body.params[p] in read} - {*fixed}
        if carried <= wanted:
            break
        wanted |= carried
    first = [p for p in (*constants, *[carries[i] for i in fixed]) if body.params[p] in read]
    middle = [p for i, p in enumerate(carries) if i in wanted]
    args = (*first, *middle, *[p for p in slices if body.params[p] in read])
    outs = tuple(i for i in range(len(body.results)) if i in wanted)
    if len(args) == len(body.params) and len(outs) == len(body.results):
        return None
    smaller = dce(reordered(body, args, outs))
    return Pruned(Form(smaller, form.length, len(first), len(middle), form.reverse), args, outs)


def _read(body: Program, results: Iterable[Atom]) -> set[Var]:
    """The variables that ``results``, and what acts, depend on."""
    read = {r for r in results if isinstance(r, Var)}
    for eqn in reversed(body.eqns):
        if not read.isdisjoint(eqn.outs) or eqn.prim.acts():
            read.update([a for a in eqn.args if isinstance(a, Var)])
    return read


@final
@dataclass(frozen=True)
class Lifted:
    """A loop that takes as constants, after ``constants`` others, what ``before`` computes.

    ``before`` takes the operands of the loop at ``operands``.
    """

    before: Program
    operands: tuple[int, ...]
    constants: int
    form: Form

    def equations(self, eqn: Eqn, of: Callable[[Form], Primitive]) -> tuple[Eqn, ...]:
        """The equations in place of ``eqn``; the last one is the loop."""
        made, results = outside(self.before, [eqn.args[i] for i in self.operands], eqn)
        args = (*eqn.args[: self.constants], *results, *eqn.args[self.constants :])
        return (*made, Eqn(of(self.form), args, eqn.outs, eqn.source, eqn.region))


@remembered()
def lifted(form: Form, *, narrowed: bool) -> Lifted | None:
    """The loop without what is the same in each turn and better computed before it, or None.

    That is costly work on constants, and elementwise work whose result is no larger than what it
    reads. The rest, such as casts to wider types, is cheaper to repeat than to load.

    Args:
        form: the loop.
        narrowed: also results of a narrower type than what they are computed from. In a loop to
            be transposed these stay, because their cotangents would add up in that type.
    """
    body = form.body
    constants, carries, _ = sections(form, list(enumerate(body.params)))
    fixed = [*constants, *[carries[i] for i in unchanged(form)]]
    before = _before(body, [v for _, v in fixed], narrowed=narrowed) if form.length else []
    if not before:
        return None
    # What was needed only to compute the others is not loaded either: it is a view, or cheap.
    packed = _packed(before)
    gone = {e for e in before if _worthwhile(e, packed, narrowed=narrowed)}
    rest = tuple(e for e in body.eqns if e not in gone)
    read = {a for e in rest for a in e.args} | set(body.results)
    extra = tuple(v for e in before if e in gone for v in e.outs if v in read)
    program = Program(tuple(v for _, v in fixed), tuple(before), extra, f"{body.name}.before")
    params = (*body.params[: form.constants], *extra, *body.params[form.constants :])
    smaller = dce(Program(params, rest, body.results, body.name))
    count = form.constants + len(extra)
    loop = Form(smaller, form.length, count, form.carries, form.reverse)
    return Lifted(program, tuple(i for i, _ in fixed), form.constants, loop)


def _before(body: Program, constants: Sequence[Var], *, narrowed: bool) -> list[Eqn]:
    """The equations of the body to compute before the loop, in order."""
    reach = set(constants)
    fixed: list[Eqn] = []
    for eqn in body.eqns:
        variables = [a for a in eqn.args if isinstance(a, Var)]
        if all(a in reach for a in variables) and not once(eqn.prim):
            reach.update(eqn.outs)
            fixed.append(eqn)
    wanted: set[Var] = set()
    chosen: list[Eqn] = []
    packed = _packed(fixed)
    for eqn in reversed(fixed):
        if not wanted.isdisjoint(eqn.outs) or _worthwhile(eqn, packed, narrowed=narrowed):
            wanted.update([a for a in eqn.args if isinstance(a, Var)])
            chosen.append(eqn)
    return chosen[::-1]


def _packed(eqns: Sequence[Eqn]) -> dict[Var, int]:
    """Bytes of the blocks in which the numbers of a variable lie."""
    found: dict[Var, int] = {}
    for eqn in eqns:
        first = next((a for a in eqn.args if isinstance(a, Var)), None)
        if first is None or eqn.prim.traits.kind is not Kind.VIEW:
            continue
        nbytes = found.get(first) if first.aval.block is None else first.aval.nbytes
        if nbytes is not None and eqn.outs[0].aval.block is None:
            found[eqn.outs[0]] = nbytes
    return found


def _worthwhile(eqn: Eqn, packed: Mapping[Var, int], *, narrowed: bool) -> bool:
    """Whether to load the result of a fixed equation in each turn rather than compute it.

    Numbers in blocks count as the bytes of the blocks: they are not stored to be loaded.
    """
    traits = eqn.prim.traits
    operands = [a.aval for a in eqn.args if isinstance(a, Var)]
    read = sum(packed.get(a, a.aval.nbytes) for a in eqn.args if isinstance(a, Var))
    if traits.kind is not Kind.POINTWISE:
        return traits.remat is Remat.COSTLY and read > 0
    (out,) = eqn.outs
    narrows = any(a.dtype.itemsize > out.aval.dtype.itemsize for a in operands)
    return 0 < out.aval.nbytes <= read and (narrowed or not narrows)
