"""What of a scan nobody needs, and what of it need not be in the loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from vkjit.control.scan_form import sections
from vkjit.ir.control import Scan as Form
from vkjit.ir.primitive import Kind, Remat
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


def pruned(form: Form, live: Sequence[bool]) -> Pruned | None:
    """The loop without what the results flagged in ``live`` do not depend on; None: all needed."""
    body = form.body
    start = form.constants
    wanted = {i for i, flag in enumerate(live) if flag}
    while True:
        read = _read(body, [body.results[i] for i in sorted(wanted)])
        carried = {i for i in range(form.carries) if body.params[start + i] in read}
        if carried <= wanted:
            break
        wanted |= carried
    outs = tuple(i for i in range(len(body.results)) if i in wanted)
    params = enumerate(body.params)
    keep = {start + i for i in range(form.carries) if i in wanted}
    args = tuple(i for i, p in params if i in keep or (p in read and not _carry(form, i)))
    if len(args) == len(body.params) and len(outs) == len(body.results):
        return None
    inputs = tuple(body.params[i] for i in args)
    smaller = dce(Program(inputs, body.eqns, tuple(body.results[i] for i in outs), body.name))
    constants = sum(i < start for i in args)
    return Pruned(Form(smaller, form.length, constants, len(keep), form.reverse), args, outs)


def _carry(form: Form, position: int) -> bool:
    return form.constants <= position < form.constants + form.carries


def _read(body: Program, results: Iterable[Atom]) -> set[Var]:
    """The variables that ``results``, and what acts, depend on."""
    read = {r for r in results if isinstance(r, Var)}
    for eqn in reversed(body.eqns):
        if not read.isdisjoint(eqn.outs) or eqn.prim.acts():
            read.update([a for a in eqn.args if isinstance(a, Var)])
    return read


def lifted(form: Form, eqn: Eqn) -> tuple[Form, tuple[Atom, ...], tuple[Eqn, ...]] | None:
    """The loop without what is the same in each turn and better computed before it.

    That is costly work on constants, and elementwise work whose result is no larger than what it
    reads. The rest, such as casts to wider types, is cheaper to repeat than to load.

    Returns:
        the loop, its arguments in place of those of ``eqn``, and the equations before it; or None.
    """
    body = form.body
    constants = sections(form, body.params)[0]
    before = _before(body, constants)
    if not before:
        return None
    env: dict[Var, Atom] = dict(zip(constants, eqn.args, strict=False))
    made: list[Eqn] = []
    for inner in before:
        outs = tuple(Var(v.aval) for v in inner.outs)
        args = tuple(env[a] if isinstance(a, Var) else a for a in inner.args)
        made.append(Eqn(inner.prim, args, outs, inner.source, eqn.region))
        env.update(zip(inner.outs, outs, strict=True))
    # What was needed only to compute the others is not loaded either: it is a view, or cheap.
    gone = {e for e in before if _worthwhile(e)}
    rest = tuple(e for e in body.eqns if e not in gone)
    read = {a for e in rest for a in e.args} | set(body.results)
    extra = [v for e in before if e in gone for v in e.outs if v in read]
    params = (*constants, *extra, *body.params[form.constants :])
    smaller = dce(Program(params, rest, body.results, body.name))
    count = form.constants + len(extra)
    loop = Form(smaller, form.length, count, form.carries, form.reverse)
    args = (*eqn.args[: form.constants], *[env[v] for v in extra], *eqn.args[form.constants :])
    return loop, args, tuple(made)


def _before(body: Program, constants: Sequence[Var]) -> list[Eqn]:
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
    for eqn in reversed(fixed):
        if not wanted.isdisjoint(eqn.outs) or _worthwhile(eqn):
            wanted.update([a for a in eqn.args if isinstance(a, Var)])
            chosen.append(eqn)
    return chosen[::-1]


def _worthwhile(eqn: Eqn) -> bool:
    """Whether to load the result of a fixed equation in each turn rather than compute it."""
    traits = eqn.prim.traits
    read = sum(a.aval.nbytes for a in eqn.args if isinstance(a, Var))
    if traits.kind is not Kind.POINTWISE:
        return traits.remat is Remat.COSTLY and read > 0
    return 0 < sum(v.aval.nbytes for v in eqn.outs) <= read
