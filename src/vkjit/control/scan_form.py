"""What the rules of scan share: the sections of its arguments, and tracing of new bodies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, final

from vkjit.ir.avals import Aval, aval
from vkjit.ir.control import Scan as Form
from vkjit.ir.primitive import Value
from vkjit.ir.program import Atom, Eqn, Program, Var
from vkjit.passes.dce import dce
from vkjit.trace import trace

T = TypeVar("T")


def sections(form: Form, items: Sequence[T]) -> tuple[Sequence[T], Sequence[T], Sequence[T]]:
    """Constants, carries and slices out of one item for each argument."""
    first, second = form.constants, form.constants + form.carries
    return items[:first], items[first:second], items[second:]


def stacked(of: Aval, length: int) -> Aval:
    """The aval of ``length`` values along a new leading axis."""
    return aval((length, *of.shape), of.dtype, of.weak)


@final
@dataclass(frozen=True)
class Derived:
    """A scan that a rule made of another, as long and in the same direction or the opposite.

    ``captured`` are the values to pass for its first constants: what the rule closed over.
    """

    form: Form
    captured: tuple[Value, ...]

    @property
    def closed(self) -> bool:
        """Whether it stands by itself: then it may be used in another trace."""
        return not self.captured


def derive(
    form: Form,
    run: Callable[..., Sequence[Value]],
    avals: tuple[Sequence[Aval], Sequence[Aval], Sequence[Aval]],
    rule: str,
    *,
    backward: bool = False,
) -> Derived:
    """A scan of ``form``'s length with the body ``run`` of (constants, carries, slices)."""
    constants, carries, slices = avals
    traced = trace(run, [*constants, *carries, *slices], f"{form.body.name}.{rule}")
    count = len(traced.captured) + len(constants)
    reverse = form.reverse != backward
    made = Form(dce(traced.program), form.length, count, len(carries), reverse)
    return Derived(made, traced.captured)


def reordered(program: Program, params: Sequence[int], results: Sequence[int]) -> Program:
    """``program`` with the parameters and results at these positions."""
    return Program(
        tuple(program.params[i] for i in params),
        program.eqns,
        tuple(program.results[i] for i in results),
        program.name,
    )


def outside(program: Program, args: Sequence[Atom], eqn: Eqn) -> tuple[list[Eqn], list[Atom]]:
    """The equations of ``program`` on ``args``, beside ``eqn``, and its results.

    Variables are new, so that a program can stand in several places.
    """
    env: dict[Var, Atom] = dict(zip(program.params, args, strict=True))
    made: list[Eqn] = []
    for inner in program.eqns:
        outs = tuple(Var(v.aval) for v in inner.outs)
        operands = tuple(env[a] if isinstance(a, Var) else a for a in inner.args)
        made.append(Eqn(inner.prim, operands, outs, inner.source, eqn.region))
        env.update(zip(inner.outs, outs, strict=True))
    return made, [env[r] if isinstance(r, Var) else r for r in program.results]
