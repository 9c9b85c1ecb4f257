"""A function at a point: its value, what its derivative needs, and the derivative as a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from vkjit import tree
from vkjit.api.flat import FlatFunction, name_of
from vkjit.control.tap import Sink, Token
from vkjit.dtypes import is_float
from vkjit.errors import DTypeError, ShapeError
from vkjit.ir.avals import Aval
from vkjit.ir.primitive import Tangent, Value
from vkjit.ir.program import Atom, Literal, Program, Var
from vkjit.numpy import asarray
from vkjit.ops.structural import zeros
from vkjit.passes import jvp as forward
from vkjit.passes import transpose as backward
from vkjit.passes.dce import dce
from vkjit.passes.linearize import linearize as split
from vkjit.trace import Traced, apply_program, aval_of, trace


@final
@dataclass(frozen=True, eq=False)
class Derivative:
    """A linear program and how it fits a function; what it reads is kept elsewhere.

    Two are equal when they compute the same, so a function compiled for one serves the other.

    Attributes:
        program: (residuals, tangents of ``floats``, of taps) to tangents of all results.
        in_avals: of the leaves of the arguments.
        out_avals: of all results, auxiliary ones included.
        floats: positions of the leaves that have tangents.
        arguments: for each residual, the leaf that it is, or None.
        taps: who receives the cotangents of the last tangents, those of taps.
        in_tree: structure of the positional arguments.
        out_tree: structure of the value.
        name: of the function.
    """

    program: Program
    in_avals: tuple[Aval, ...]
    out_avals: tuple[Aval, ...]
    floats: tuple[int, ...]
    arguments: tuple[int | None, ...]
    taps: tuple[Sink, ...]
    in_tree: tree.TreeDef
    out_tree: tree.TreeDef
    name: str

    def pull(self, residuals: Sequence[Value], cotangents: Sequence[Value]) -> list[Value]:
        """A cotangent for each argument leaf; zeros where nothing flows back; taps get theirs.

        ``cotangents`` are those of the value; auxiliary results have none.
        """
        cts: list[Tangent] = [
            ct if is_float(of.dtype) else None
            for ct, of in zip(cotangents, self.out_avals, strict=False)
        ]
        cts += [None] * (len(self.out_avals) - len(cts))
        grads = backward.transpose(self.program, residuals, cts)
        count = len(self.floats)
        found = dict(zip(self.floats, grads[:count], strict=True))
        for sink, ct in zip(self.taps, grads[count:], strict=True):
            if ct is not None:
                sink.receive(ct)
        return [
            zeros(of) if (g := found.get(i)) is None else g for i, of in enumerate(self.in_avals)
        ]

    def push(self, residuals: Sequence[Value], tangents: Sequence[Value]) -> list[Value]:
        """The tangents of the results for those of all argument leaves."""
        moving = [fitting_tangent(self.in_avals[i], tangents[i]) for i in self.floats]
        still = [zeros(v.aval) for v in self.program.params[len(residuals) + len(moving) :]]
        return apply_program(self.program, [*residuals, *moving, *still])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Derivative) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        avals = (self.in_avals, self.out_avals, self.floats, self.arguments, self.taps)
        return (*avals, self.in_tree, self.out_tree, _key_of(self.program))


def _key_of(program: Program) -> tuple[object, ...]:
    """A program without the identities of its variables."""
    numbers: dict[Var, int] = {v: i for i, v in enumerate(program.params)}

    def key(atom: Atom) -> object:
        if isinstance(atom, Literal):
            return (atom.aval, atom.value.tobytes())
        return numbers[atom]

    eqns: list[object] = []
    for eqn in program.eqns:
        eqns.append((eqn.prim, eqn.region, *map(key, eqn.args)))
        for out in eqn.outs:
            numbers[out] = len(numbers)
    return (program.in_avals, *eqns, *map(key, program.results))


@final
class Linearization:
    """A function at a point.

    Attributes:
        outs: leaves of the value, then of auxiliary results.
        residuals: values that the derivative reads.
        derivative: what it does with them.
    """

    __slots__ = ("derivative", "outs", "residuals")

    def __init__(self, flat: FlatFunction, leaves: Sequence[Value]) -> None:
        traced = flat.trace(leaves)
        assert flat.out_tree is not None
        in_avals = tuple(traced.program.in_avals[len(traced.captured) :])
        floats = tuple(i for i, a in enumerate(in_avals) if is_float(a.dtype))
        out_avals = traced.program.out_avals
        main = len(out_avals)
        known, linear = separated(traced, floats)
        lead = len(known.captured)
        leaf = {v: i for i, v in enumerate(known.program.params[lead:])}
        saved = known.program.results[main:]
        values = apply_program(known.program, [*known.captured, *leaves])
        self.outs = values[:main]
        self.residuals = values[main:]
        self.derivative = Derivative(
            program=linear,
            in_avals=in_avals,
            out_avals=out_avals,
            floats=floats,
            arguments=tuple(leaf.get(v) if isinstance(v, Var) else None for v in saved),
            taps=tuple(traced.captured[i].sink for i in _tokens(traced)),
            in_tree=flat.in_tree.child(0),
            out_tree=flat.out_tree,
            name=name_of(flat.fn),
        )

    def pull(self, cotangents: Sequence[Value]) -> list[Value]:
        """A cotangent for each argument leaf."""
        return self.derivative.pull(self.residuals, cotangents)


def separated(traced: Traced, floats: Sequence[int]) -> tuple[Traced, Program]:
    """The known and the linear program of a function; results of the former end in residuals.

    Args:
        traced: the function.
        floats: leaves of its arguments that have a tangent. So have the tokens of taps, after them.
    """
    main, lead = len(traced.program.results), len(traced.captured)
    moving = [*[lead + i for i in floats], *_tokens(traced)]
    both = derivative_of(traced, moving)
    count = len(both.program.params)
    parts = split(both.program, range(count - len(moving), count), main)
    return Traced(dce(parts.known), both.captured), dce(parts.linear)


def _tokens(traced: Traced) -> list[int]:
    """Which of the captured values are tokens of taps."""
    return [i for i, v in enumerate(traced.captured) if isinstance(v, Token)]


def derivative_of(traced: Traced, positions: Sequence[int]) -> Traced:
    """A program of all parameters and tangents at ``positions``: results, then tangents.

    It captures what ``traced`` does, after what only rules of the derivative read.
    """
    program = traced.program
    tangent_avals = [program.in_avals[i] for i in positions]

    def both(*values: Value) -> list[Value]:
        primals = values[: len(program.params)]
        moving: list[Tangent] = [None] * len(program.params)
        for i, t in zip(positions, values[len(program.params) :], strict=True):
            moving[i] = t
        outs, douts = forward.jvp(program, primals, moving)
        return [*outs, *filled(douts, program.out_avals)]

    made = trace(both, [*program.in_avals, *tangent_avals], program.name)
    return Traced(made.program, (*made.captured, *traced.captured))


def filled(tangents: Sequence[Tangent], avals: Sequence[Aval]) -> list[Value]:
    """Zeros in the place of None."""
    return [zeros(of) if t is None else t for t, of in zip(tangents, avals, strict=True)]


def fitting_tangent(of: Aval, tangent: Value) -> Value:
    """A tangent in the dtype of its primal ``of``, a float.

    Raises:
        ShapeError, DTypeError: it does not fit.
    """
    given = aval_of(tangent)
    if given.shape != of.shape:
        raise ShapeError(f"jvp: a tangent is {given}, its primal {of}; expected equal shapes")
    if given.dtype != of.dtype and not given.weak:
        raise DTypeError(f"jvp: a tangent is {given}, its primal {of}; expected equal dtypes")
    return asarray(tangent, of.dtype)
