"""Programs made of programs inside a primitive: derivatives, transposes, zeros for what lacks.

Symbolic zeros are decided while such a program is traced; ``filled`` makes programs that decided
differently agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar, final

from vkjit.ir.avals import Aval, aval
from vkjit.ir.primitive import Tangent, Value
from vkjit.ir.program import Atom, Eqn, Literal, Program, Var
from vkjit.ops.logical import select
from vkjit.ops.structural import Broadcast, broadcast
from vkjit.passes.batch import batch
from vkjit.passes.dce import dce
from vkjit.passes.jvp import jvp
from vkjit.passes.transpose import transpose
from vkjit.trace import aval_of, trace

T = TypeVar("T")


@final
class Forward:
    """A program with its derivative: (values, tangents) to (results, tangents of some results).

    Args:
        program: what is differentiated.
        moving: which of its parameters have a tangent.

    Attributes:
        given: after a call, which results have a tangent.
    """

    def __init__(self, program: Program, moving: Sequence[bool]) -> None:
        self.program = program
        self.moving = moving
        self.given: tuple[bool, ...] = ()

    def __call__(self, *values: Value) -> list[Value]:
        """Binds the operations of results and tangents."""
        count = len(self.program.params)
        tangents = placed(values[count:], self.moving)
        outs, moved = jvp(self.program, values[:count], tangents)
        self.given = tuple(t is not None for t in moved)
        return [*outs, *present(moved)]


@final
class Backward:
    """The transpose of a program: (known values, cotangents) to cotangents of linear parameters.

    Args:
        program: linear in the parameters that ``linear`` names.
        linear: which parameters are linear.
        moving: which results have a cotangent; that of the others is zero.

    Attributes:
        given: after a call, which linear parameters have a cotangent.
    """

    def __init__(self, program: Program, linear: Sequence[bool], moving: Sequence[bool]) -> None:
        known, free = parted(program.params, linear)
        self.count = len(known)
        self.moving = moving
        self.program = Program((*known, *free), program.eqns, program.results, program.name)
        self.given: tuple[bool, ...] = ()

    def __call__(self, *values: Value) -> list[Value]:
        """Binds the operations of the cotangents."""
        cotangents = placed(values[self.count :], self.moving)
        outs = transpose(self.program, values[: self.count], cotangents)
        self.given = tuple(ct is not None for ct in outs)
        return present(outs)


def filled(
    program: Program, given: Sequence[bool], wanted: Sequence[bool], avals: Sequence[Aval]
) -> Program:
    """``program`` with zeros among its last results, for those that are wanted and not given.

    Args:
        program: its last results are those that ``given`` names.
        given: a flag for each possible result.
        wanted: likewise; true wherever ``given`` is.
        avals: of all possible results.
    """
    count = len(program.results) - sum(given)
    found = iter(program.results[count:])
    results: list[Atom] = list(program.results[:count])
    eqns = list(program.eqns)
    for has, wants, of in zip(given, wanted, avals, strict=True):
        if has:
            results.append(next(found))
        elif wants:
            zero, made = zero_of(of)
            results.append(zero)
            eqns.extend(made)
    return Program(program.params, tuple(eqns), tuple(results), program.name)


def zero_of(of: Aval) -> tuple[Atom, tuple[Eqn, ...]]:
    """Zeros of an aval, and the equations that make them."""
    literal = Literal(of.dtype.type(0), aval((), of.dtype, of.weak))
    if of.shape == ():
        return literal, ()
    var = Var(of)
    return var, (Eqn(Broadcast(of.shape, ()), (literal,), (var,)),)


def placed(values: Iterable[Value], flags: Sequence[bool]) -> list[Tangent]:
    """One of ``values`` where a flag is true, None elsewhere."""
    found = iter(values)
    return [next(found) if flag else None for flag in flags]


def present(values: Iterable[T | None]) -> list[T]:
    """The values that are not None."""
    return [v for v in values if v is not None]


def parted(items: Sequence[T], flags: Sequence[bool]) -> tuple[list[T], list[T]]:
    """Items whose flag is false, and those whose flag is true."""
    pairs = list(zip(items, flags, strict=True))
    return [item for item, flag in pairs if not flag], [item for item, flag in pairs if flag]


def joined(flags: Iterable[Sequence[bool]]) -> tuple[bool, ...]:
    """Position by position, whether any is true."""
    return tuple(any(column) for column in zip(*flags, strict=True))


def moves(atom: Atom, moving: set[Var]) -> bool:
    """Whether an atom is one of the moving variables."""
    return isinstance(atom, Var) and atom in moving


def same_type(left: Aval, right: Aval) -> bool:
    """Whether shapes and dtypes are equal, weak types aside."""
    return left.shape == right.shape and left.dtype == right.dtype


def types(avals: Sequence[Aval]) -> str:
    """Avals for messages."""
    return f"({', '.join(map(str, avals))})"


def reads(program: Program) -> list[bool]:
    """Which parameters a program reads."""
    atoms = [a for eqn in program.eqns for a in eqn.args]
    read = {a for a in (*atoms, *program.results) if isinstance(a, Var)}
    return [p in read for p in program.params]


def with_results(program: Program, results: Sequence[Atom]) -> Program:
    """A program that gives other results."""
    return dce(Program(program.params, program.eqns, tuple(results), program.name))


def with_params(program: Program, params: Sequence[Var]) -> Program:
    """A program that takes other parameters."""
    return Program(tuple(params), program.eqns, program.results, program.name)


def sources(program: Program) -> list[int | None]:
    """For each result, the position of the parameter that it is."""
    positions = {p: i for i, p in enumerate(program.params)}
    return [positions.get(r) if isinstance(r, Var) else None for r in program.results]


def spread_of(program: Program, avals: Sequence[Aval], batched: Sequence[bool]) -> list[bool]:
    """Which results of a program over a batch have the batch axis.

    Args:
        program: over one example.
        avals: of its arguments, with the axis in front where ``batched``.
        batched: which arguments have it.
    """
    found: list[bool] = []

    def over_batch(*values: Value) -> list[Value]:
        outs, spread = batch(program, values, batched)
        found[:] = spread
        return outs

    trace(over_batch, avals, program.name)
    return found


def with_axis(of: Aval, size: int) -> Aval:
    """The aval of a batch of ``size`` examples."""
    return aval((size, *of.shape), of.dtype, of.weak)


def where_each(taken: Value, on_true: Value, on_false: Value) -> Value:
    """One of two arrays for each example; ``taken`` has the batch axis only."""
    shape = aval_of(on_true).shape
    return select(broadcast(taken, shape, (0,)), on_true, on_false)
