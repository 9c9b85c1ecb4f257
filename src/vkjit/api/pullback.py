"""Derivatives at a point as values: what they read are the leaves of a pytree.

So the forward and the backward half of a step can be compiled apart, and what lies between can be
inspected, kept elsewhere and brought back::

    @vj.jit
    def forward(w, x):
        return vj.vjp(model, w, x)

    y, pullback = forward(w, x)
    pullback.args_res[0] = None            # the weights: not stored twice
    leaves, structure = vj.tree.flatten(pullback)
    np.savez("residuals.npz", *leaves)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, final

from vkjit import tree
from vkjit.api.flat import flatten_call, name_of
from vkjit.api.linearization import Derivative, Linearization, derivative_of
from vkjit.dtypes import is_float
from vkjit.errors import ArgumentError, DTypeError, ShapeError
from vkjit.ir.avals import Aval
from vkjit.ir.primitive import Value
from vkjit.ir.program import Program, Var
from vkjit.numpy import asarray
from vkjit.passes.dce import dce
from vkjit.trace import aval_of

Function = Callable[..., Any]


@final
class NotNeeded:
    """In the place of an argument that a derivative does not read; a tree without leaves."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NotNeeded)

    def __hash__(self) -> int:
        return hash(NotNeeded)

    def __repr__(self) -> str:
        return "NotNeeded()"


def _no_children(node: NotNeeded) -> tuple[tuple[()], None]:
    return (), None


def _not_needed(data: None, children: Any) -> NotNeeded:
    return NotNeeded()


tree.register_pytree_node(NotNeeded, _no_children, _not_needed)


class _AtPoint(ABC):
    """A derivative at a point: what it does and what it reads.

    Attributes:
        derivative: the same for every point; static under ``jit``.
        args_res: for each argument, what of it is read, ``NotNeeded()`` for the rest. May be set to
            None, and back before the call.
        opaque_residuals: all other arrays that are read.
    """

    __slots__ = ("args_res", "derivative", "opaque_residuals")

    def __init__(
        self, derivative: Derivative, args_res: Sequence[Any], opaque_residuals: Sequence[Any]
    ) -> None:
        self.derivative = derivative
        self.args_res = list(args_res)
        self.opaque_residuals = list(opaque_residuals)

    @property
    def program(self) -> Program:
        """The derivative as a program of residuals and tangents; print it to read it."""
        return self.derivative.program

    def _residuals(self) -> list[Value]:
        """The residuals in the order of the program's parameters.

        Raises:
            ArgumentError: one was left out.
            ShapeError, DTypeError: one is not of the shape or dtype that it had.
        """
        arguments = self._argument_leaves()
        opaque = iter(self.opaque_residuals)
        found: list[Value] = []
        for leaf, of in zip(self.derivative.arguments, self.program.in_avals, strict=False):
            if leaf is None:
                found.append(self._fitting(next(opaque), of, "opaque_residuals"))
            else:
                path, value = arguments[leaf]
                found.append(self._fitting(value, of, f"args_res{path}"))
        return found

    def _argument_leaves(self) -> list[tuple[str, Any]]:
        of = self.derivative.in_tree
        paths = tree.leaves_with_path(tree.unflatten(of, range(of.num_leaves)))
        try:
            values = tree.flatten_up_to(of, tuple(self.args_res))
        except ValueError as error:
            raise ArgumentError(
                f"{self._what()}: args_res has structure {tree.structure(self.args_res)}, expected "
                f"that of the arguments, {of}, or None in the place of a part"
            ) from error
        return [(tree.keystr(path), value) for (path, _), value in zip(paths, values, strict=True)]

    def _fitting(self, value: Any, of: Aval, where: str) -> Value:
        if value is None or isinstance(value, NotNeeded):
            raise ArgumentError(
                f"{self._what()}: the residual {where}, {of}, was left out; put it back before the "
                "call"
            )
        given = aval_of(value)
        if given.shape != of.shape:
            raise ShapeError(f"{self._what()}: the residual {where} is {given}, expected {of}")
        if given.dtype != of.dtype:
            raise DTypeError(f"{self._what()}: the residual {where} is {given}, expected {of}")
        return value

    @abstractmethod
    def _what(self) -> str:
        """What it is, for messages."""

    def __repr__(self) -> str:
        count = len(self.derivative.arguments)
        return f"{type(self).__name__}({self.derivative.name}, {count} residuals)"


@final
class Pullback(_AtPoint):
    """Cotangents of arguments from those of a value, at a point; a pytree. See ``vjp``."""

    __slots__ = ()

    def __call__(self, cotangent: Any) -> tuple[Any, ...]:
        """One cotangent for each argument.

        Args:
            cotangent: a pytree like the value; leaves in the place of what is no float are ignored.

        Raises:
            ShapeError, DTypeError: it is not.
            ArgumentError: a residual was left out.
        """
        derivative = self.derivative
        cts, ct_tree = tree.flatten(cotangent)
        if ct_tree != derivative.out_tree:
            raise ShapeError(
                f"vjp: the cotangent has structure {ct_tree}, expected {derivative.out_tree}"
            )
        fitting = [_cotangent(*pair) for pair in zip(cts, derivative.out_avals, strict=False)]
        grads = derivative.pull(self._residuals(), fitting)
        return tuple(tree.unflatten(derivative.in_tree, grads))

    def _what(self) -> str:
        return f"pullback of {self.derivative.name}"


def _cotangent(ct: Value, of: Aval) -> Value:
    """A cotangent of a result ``of``, in its dtype."""
    given = aval_of(ct)
    if given.shape != of.shape:
        raise ShapeError(f"vjp: a cotangent is {given}, expected {of}")
    if not is_float(of.dtype):
        return ct
    if given.dtype != of.dtype and not given.weak:
        raise DTypeError(f"vjp: a cotangent is {given}, expected {of}; cast it with .astype(...)")
    return asarray(ct, of.dtype)


@final
class Pushforward(_AtPoint):
    """Tangents of a value from those of arguments, at a point; a pytree. See ``linearize``."""

    __slots__ = ()

    def __call__(self, *tangents: Any) -> Any:
        """The tangent of the value.

        Args:
            tangents: a pytree like each argument.

        Raises:
            ShapeError, DTypeError: they do not fit the arguments.
            ArgumentError: a residual was left out.
        """
        derivative = self.derivative
        leaves, found = tree.flatten(tuple(tangents))
        if found != derivative.in_tree:
            raise ShapeError(
                f"linearize: tangents have structure {found}, expected that of the primals"
            )
        outs = derivative.push(self._residuals(), leaves)
        return tree.unflatten(derivative.out_tree, outs[: derivative.out_tree.num_leaves])

    def _what(self) -> str:
        return f"pushforward of {self.derivative.name}"


def _register(cls: type[_AtPoint]) -> None:
    def take_apart(node: Any) -> tuple[tuple[Any, ...], Derivative]:
        return (node.args_res, node.opaque_residuals), node.derivative

    def build(derivative: Derivative, children: Any) -> Any:
        made = cls.__new__(cls)
        made.derivative = derivative
        made.args_res, made.opaque_residuals = children
        return made

    tree.register_pytree_node(cls, take_apart, build)


_register(Pullback)
_register(Pushforward)


def linearize(fn: Function, *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """The value of ``fn`` and its derivative as a linear function of tangents.

    Returns:
        ``(value, pushforward)``, or ``(value, pushforward, aux)``: a ``Pushforward``, which is a
        pytree whose leaves are what the derivative reads.
    """
    flat, leaves = flatten_call(fn, primals, has_aux=has_aux)
    lin = Linearization(flat, leaves)
    pushforward = Pushforward(lin.derivative, *_parted(lin, leaves))
    value = flat.result(lin.outs[: flat.main])
    return (value, pushforward, flat.aux(lin.outs)) if has_aux else (value, pushforward)


def vjp(fn: Function, *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """The value of ``fn`` and the function that pulls cotangents back.

    Returns:
        ``(value, pullback)``, or ``(value, pullback, aux)``. ``pullback(cotangent)`` takes a pytree
        like the value and returns one cotangent for each primal. It is a ``Pullback``, a pytree
        whose leaves are the residuals: it can be returned from ``jit``, passed to it, moved to
        NumPy and back; its ``args_res`` can be left out in between.
    """
    flat, leaves = flatten_call(fn, primals, has_aux=has_aux)
    lin = Linearization(flat, leaves)
    pullback = Pullback(lin.derivative, *_parted(lin, leaves))
    value = flat.result(lin.outs[: flat.main])
    return (value, pullback, flat.aux(lin.outs)) if has_aux else (value, pullback)


def _parted(lin: Linearization, leaves: Sequence[Value]) -> tuple[list[Any], list[Value]]:
    """Residuals that are arguments, in the trees of these, and the others."""
    read = {i for i in lin.derivative.arguments if i is not None}
    kept = [v if i in read else NotNeeded() for i, v in enumerate(leaves)]
    pairs = zip(lin.residuals, lin.derivative.arguments, strict=True)
    opaque = [v for v, argument in pairs if argument is None]
    return list(tree.unflatten(lin.derivative.in_tree, kept)), opaque


def linear_transpose(fn: Function, *primals: Any) -> Pullback:
    """The transpose of ``fn``, which is linear in all its arguments; ``fn`` is not run.

    Args:
        fn: of pytrees of float arrays. Constants that it adds are ignored.
        primals: arrays, or anything with a shape and dtype, such as ``ShapeDtypeStruct``.

    Returns:
        a function of a pytree like the result of ``fn``; it returns a tuple of pytrees like
        ``primals``. It is a ``Pullback``, whose residuals are the arrays that ``fn`` closes over.

    Raises:
        ArgumentError: ``fn`` is not linear.
        DTypeError: an argument or result is not a float.
    """
    flat, leaves = flatten_call(fn, primals)
    what = f"linear_transpose of {name_of(fn)}"
    for path, leaf in tree.leaves_with_path(tuple(primals)):
        if not is_float(aval_of(leaf).dtype):
            raise DTypeError(
                f"{what}: argument {tree.keystr(path)} is {aval_of(leaf)}, expected a float"
            )
    traced = flat.trace(leaves)
    assert flat.out_tree is not None
    out_avals = traced.program.out_avals
    if any(not is_float(a.dtype) for a in out_avals):
        raise DTypeError(f"{what}: it returned {', '.join(map(str, out_avals))}, expected floats")
    floats = tuple(range(len(leaves)))
    lead = len(traced.captured)
    derived = derivative_of(traced, [lead + i for i in floats])
    both, lead = derived.program, len(derived.captured)
    tangents = dce(Program(both.params, both.eqns, both.results[len(out_avals) :], both.name))
    primal = tangents.params[lead : lead + len(leaves)]
    _require_unread(tangents, primal, what)
    program = Program(
        (*tangents.params[:lead], *tangents.params[lead + len(leaves) :]),
        tangents.eqns,
        tangents.results,
        f"{name_of(fn)}.linear",
    )
    in_avals = tuple(v.aval for v in primal)
    nothing = tree.unflatten(flat.in_tree.child(0), [NotNeeded()] * len(leaves))
    derivative = Derivative(
        program=program,
        in_avals=in_avals,
        out_avals=out_avals,
        floats=floats,
        arguments=(None,) * lead,
        taps=(),
        in_tree=flat.in_tree.child(0),
        out_tree=flat.out_tree,
        name=name_of(fn),
    )
    return Pullback(derivative, nothing, derived.captured)


def _require_unread(program: Program, params: Sequence[Var], what: str) -> None:
    """The derivative of a linear function does not depend on where it is taken."""
    read = {a for eqn in program.eqns for a in eqn.args}
    found = next((i for i, v in enumerate(params) if v in read), None)
    if found is not None:
        eqn = next(e for e in program.eqns if params[found] in e.args)
        raise ArgumentError(
            f"{what}: it is not linear: its derivative depends on argument leaf {found}, "
            f"{params[found].aval} ({eqn.prim.name}, {eqn.source}); use vjp"
        )
