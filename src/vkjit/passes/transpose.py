"""Transposition of a linear program: from tangents forward to cotangents backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from vkjit.ir.primitive import Kind, Linear, Pulled, Tangent, Value
from vkjit.ir.program import Atom, Eqn, Program, Var
from vkjit.ops.structural import zeros
from vkjit.passes.cotangents import Cotangents
from vkjit.trace import bind_outs, in_region, new_region, source_of


def transpose(
    program: Program, residuals: Sequence[Value], cotangents: Sequence[Tangent]
) -> list[Tangent]:
    """Evaluates the transpose of a program that is linear in its last parameters.

    Args:
        program: parameters are ``len(residuals)`` known values, then the linear ones.
        residuals: values of the known parameters.
        cotangents: one for each result; None is zero.

    Returns:
        a cotangent for each linear parameter; None is zero.
    """
    sums = Cotangents()
    pull(program, residuals, cotangents, sums, new_region())
    return [sums.take(v) for v in program.params[len(residuals) :]]


def pull(
    program: Program,
    residuals: Sequence[Value],
    cotangents: Sequence[Tangent],
    sums: Cotangents,
    region: int,
) -> None:
    """Adds the cotangents of the linear parameters to ``sums``.

    Args:
        program: as that of ``transpose``, like ``residuals`` and ``cotangents``.
        residuals: values of the known parameters.
        cotangents: one for each result; None is zero.
        sums: may hold cotangents of linear parameters already.
        region: of equations that compute known values.
    """
    known = _Known(program, residuals, region)
    for result, ct in zip(program.results, cotangents, strict=True):
        if isinstance(result, Var) and result in known.linear and ct is not None:
            sums.add(result, ct)
    for eqn in reversed(known.pending):
        with source_of(eqn, backward=True):
            _pull_one(eqn, known, sums)


def _pull_one(eqn: Eqn, known: _Known, sums: Cotangents) -> None:
    cts = [sums.take(v) for v in eqn.outs]
    if all(ct is None for ct in cts):
        return
    if eqn.prim.traits.joins_cotangents and isinstance(eqn.args[0], Var):
        sums.add_part(eqn.args[0], eqn.prim, _filled(eqn, cts)[0])
        return
    args = [known.argument(a) for a in eqn.args]
    if eqn.prim.traits.kind is Kind.CONTROL:
        before = [sums.sum_of(a) if isinstance(a, Var) else None for a in eqn.args]
        pulled = eqn.prim.transpose_onto(cts, args, before)
        if pulled is not None:
            _accept(pulled, eqn, sums)
            return
    outs = eqn.prim.transpose(cts if eqn.prim.traits.takes_zeros else _filled(eqn, cts), args)
    for arg, ct in zip(eqn.args, outs, strict=True):
        if ct is not None and isinstance(arg, Var):
            sums.add(arg, ct)


def _accept(pulled: Pulled, eqn: Eqn, sums: Cotangents) -> None:
    for arg, ct in zip(eqn.args, pulled.sums, strict=True):
        if ct is not None and isinstance(arg, Var):
            sums.put(arg, ct)
    for position, prim, ct in pulled.parts:
        arg = eqn.args[position]
        assert isinstance(arg, Var)
        sums.add_part(arg, prim, ct)


def _filled(eqn: Eqn, cts: Sequence[Tangent]) -> list[Value]:
    return [zeros(v.aval) if ct is None else ct for v, ct in zip(eqn.outs, cts, strict=True)]


@final
class _Known:
    """Values that do not depend on the linear parameters, computed where they are first needed.

    ``pending`` are the linear equations in order, ``linear`` the variables they involve.
    """

    def __init__(self, program: Program, residuals: Sequence[Value], region: int) -> None:
        count = len(residuals)
        self.values: dict[Var, Value] = dict(zip(program.params[:count], residuals, strict=True))
        self.linear = set(program.params[count:])
        self.pending: list[Eqn] = []
        self.made: dict[Var, Eqn] = {}
        self.region = region
        self.holders: dict[Var, Linear] = {}
        for eqn in program.eqns:
            if any([a in self.linear for a in eqn.args if isinstance(a, Var)]):
                self.linear.update(eqn.outs)
                self.pending.append(eqn)
            else:
                self.made.update(dict.fromkeys(eqn.outs, eqn))

    def argument(self, atom: Atom) -> Value | Linear:
        """The value of an argument, or the placeholder of a linear one."""
        if not isinstance(atom, Var):
            return atom.value
        if atom not in self.linear:
            return self.value(atom)
        return self.holders.setdefault(atom, Linear(atom.aval))

    def value(self, var: Var) -> Value:
        """The value of a known variable."""
        todo = [var]
        while todo:
            current = todo[-1]
            if current in self.values:
                todo.pop()
                continue
            eqn = self.made[current]
            missing = [a for a in eqn.args if isinstance(a, Var) and a not in self.values]
            if missing:
                todo.extend(missing)
                continue
            args = [self.values[a] if isinstance(a, Var) else a.value for a in eqn.args]
            with source_of(eqn), in_region(self.region):
                self.values.update(zip(eqn.outs, bind_outs(eqn.prim, *args), strict=True))
        return self.values[var]
