"""Derivatives of functions over pytrees.

Reverse mode is linearization followed by transposition, so every order of derivative and every
nesting of modes comes from the same three rules of a primitive. Functions are staged: they are
traced once per call, with abstract values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, final

import numpy as np

from vkjit import tree
from vkjit.api.batching import vmap
from vkjit.api.flat import FlatFunction, flatten_call, name_of, positions
from vkjit.dtypes import is_float
from vkjit.errors import DTypeError, ShapeError
from vkjit.ir.avals import Aval
from vkjit.ir.primitive import Tangent, Value
from vkjit.ir.program import Program
from vkjit.numpy import asarray, eye, reshape
from vkjit.ops.structural import zeros
from vkjit.passes import jvp as forward
from vkjit.passes import transpose as backward
from vkjit.passes.dce import dce
from vkjit.passes.linearize import linearize as split
from vkjit.trace import Traced, apply_program, aval_of, trace

Function = Callable[..., Any]


def jvp(fn: Function, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """The value of ``fn`` and its derivative along ``tangents``.

    Args:
        fn: of ``len(primals)`` pytrees of arrays.
        primals: where to evaluate.
        tangents: a pytree of the structure, shapes and dtypes of each primal.

    Returns:
        ``fn(*primals)`` and its directional derivative, of the same structure.

    Raises:
        ShapeError, DTypeError: a tangent does not fit its primal.
    """
    flat, leaves = flatten_call(fn, primals)
    dleaves, dtree = tree.flatten((tuple(tangents), {}))
    if dtree != flat.in_tree:
        raise ShapeError(f"jvp: tangents have structure {dtree}, expected that of the primals")
    dleaves = [_tangent(x, t) for x, t in zip(leaves, dleaves, strict=True)]
    traced = flat.trace(leaves)
    values = [*traced.captured, *leaves]
    moving: list[Tangent] = [*[None] * len(traced.captured), *dleaves]
    outs, douts = forward.jvp(traced.program, values, moving)
    filled = _filled(douts, traced.program.out_avals)
    return flat.result(outs), flat.result(filled)


def linearize(fn: Function, *primals: Any) -> tuple[Any, Function]:
    """The value of ``fn`` and its derivative as a linear function of tangents."""
    flat, leaves = flatten_call(fn, primals)
    lin = _Linear(flat, leaves)

    def apply(*tangents: Any) -> Any:
        dleaves, _ = tree.flatten((tangents, {}))
        pairs = zip(leaves, dleaves, strict=True)
        moving = [t for x, d in pairs if (t := _tangent(x, d)) is not None]
        return flat.result(apply_program(lin.linear, [*lin.residuals, *moving]))

    return flat.result(lin.outs), apply


def vjp(fn: Function, *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """The value of ``fn`` and the function that pulls cotangents back.

    Returns:
        ``(value, pullback)``, or ``(value, pullback, aux)``. ``pullback(cotangent)`` takes a pytree
        like the value and returns one cotangent for each primal.
    """
    flat, leaves = flatten_call(fn, primals, has_aux=has_aux)
    lin = _Linear(flat, leaves)
    out_avals = [aval_of(v) for v in lin.outs[: flat.main]]

    def pullback(cotangent: Any) -> tuple[Any, ...]:
        cts, ct_tree = tree.flatten(cotangent)
        if ct_tree != flat.out_tree:
            raise ShapeError(
                f"vjp: the cotangent has structure {ct_tree}, expected {flat.out_tree}"
            )
        for ct, of in zip(cts, out_avals, strict=True):
            if aval_of(ct).shape != of.shape:
                raise ShapeError(f"vjp: a cotangent is {aval_of(ct)}, expected {of}")
        grads = lin.pull([asarray(ct) for ct in cts])
        args, _ = tree.unflatten(flat.in_tree, grads)
        return tuple(args)

    value = flat.result(lin.outs[: flat.main])
    return (value, pullback, flat.aux(lin.outs)) if has_aux else (value, pullback)


def value_and_grad(
    fn: Function, argnums: int | Sequence[int] = 0, *, has_aux: bool = False
) -> Function:
    """A function that gives the value of ``fn`` and its gradient.

    Args:
        fn: returns a float of rank 0, or a pair of one and auxiliary data with ``has_aux``.
        argnums: positional arguments to differentiate with respect to; pytrees of float arrays.
        has_aux: whether ``fn`` returns auxiliary data.

    Returns:
        a function of the same arguments; its result is ``(value, gradient)``, or
        ``((value, aux), gradient)``. The gradient has the structure of the argument, and is a tuple
        when ``argnums`` is a sequence.

    Raises:
        ShapeError: the value is not of rank 0.
        DTypeError: the value or an argument is not a float.
    """

    @wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        chosen = positions(argnums, len(args), f"grad of {name_of(fn)}")
        diff = [args[i] for i in chosen]
        for number, arg in zip(chosen, diff, strict=True):
            _require_floats(fn, number, arg)

        def of_chosen(*parts: Any) -> Any:
            full = list(args)
            for i, part in zip(chosen, parts, strict=True):
                full[i] = part
            return fn(*full, **kwargs)

        of_chosen.__name__ = name_of(fn)
        flat, leaves = flatten_call(of_chosen, diff, has_aux=has_aux)
        lin = _Linear(flat, leaves)
        _require_scalar(fn, lin.outs[: flat.main])
        out = aval_of(lin.outs[0])
        grads = lin.pull([out.dtype.type(1)])
        parts, _ = tree.unflatten(flat.in_tree, grads)
        gradient = parts[0] if isinstance(argnums, int) else tuple(parts)
        value = flat.result(lin.outs[: flat.main])
        return ((value, flat.aux(lin.outs)) if has_aux else value), gradient

    return wrapped


def grad(fn: Function, argnums: int | Sequence[int] = 0, *, has_aux: bool = False) -> Function:
    """A function that gives the gradient of ``fn``; see ``value_and_grad``.

    With ``has_aux`` the result is ``(gradient, aux)``.
    """
    both = value_and_grad(fn, argnums, has_aux=has_aux)

    @wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        value, gradient = both(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return wrapped


def jacfwd(fn: Function, argnums: int | Sequence[int] = 0) -> Function:
    """The Jacobian of ``fn``, one column per input element, by forward mode.

    The result nests the structure of the output outside that of the argument; each leaf has the
    output's shape followed by the input's.
    """

    @wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        chosen, of_chosen, diff = _select(fn, argnums, args, kwargs)
        leaves, in_tree = tree.flatten(tuple(diff))

        def push(*tangents: Value) -> Any:
            return jvp(of_chosen, diff, tree.unflatten(in_tree, tangents))[1]

        columns = vmap(push, out_axes=-1)(*_basis(leaves))
        return _nested(columns, leaves, in_tree, isinstance(argnums, int), len(chosen))

    return wrapped


def jacrev(fn: Function, argnums: int | Sequence[int] = 0) -> Function:
    """The Jacobian of ``fn`` by reverse mode, one row per output element; shape as ``jacfwd``."""

    @wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        chosen, of_chosen, diff = _select(fn, argnums, args, kwargs)
        value, pullback = vjp(of_chosen, *diff)
        outs, out_tree = tree.flatten(value)
        rows = vmap(lambda *cts: pullback(tree.unflatten(out_tree, cts)))(*_basis(outs))
        flat_rows, in_tree = tree.flatten(rows)
        per_out: list[Any] = []
        start = 0
        for out in outs:
            of = aval_of(out)
            cut = [r[start : start + of.size] for r in flat_rows]
            parts = [reshape(c, (*of.shape, *aval_of(c).shape[1:])) for c in cut]
            nested = tree.unflatten(in_tree, parts)
            per_out.append(nested[0] if isinstance(argnums, int) else tuple(nested))
            start += of.size
        del chosen
        return tree.unflatten(out_tree, per_out)

    return wrapped


def hessian(fn: Function, argnums: int | Sequence[int] = 0) -> Function:
    """Second derivatives of ``fn``: forward over reverse."""
    return jacfwd(jacrev(fn, argnums), argnums)


@final
class _Linear:
    """A function at a point: its value, residuals and derivative as a program."""

    def __init__(self, flat: FlatFunction, leaves: Sequence[Value]) -> None:
        traced = flat.trace(leaves)
        self.leaves = list(leaves)
        self.floats = [i for i, v in enumerate(leaves) if is_float(aval_of(v).dtype)]
        self.out_avals = traced.program.out_avals
        program = _derivative(traced, self.floats)
        count = len(traced.program.params)
        main = len(self.out_avals)
        parts = split(program, range(count, count + len(self.floats)), main)
        values = apply_program(dce(parts.known), [*traced.captured, *leaves])
        self.outs = values[:main]
        self.residuals = values[main:]
        self.linear = dce(parts.linear)

    def pull(self, cotangents: Sequence[Value]) -> list[Value]:
        """A cotangent for each argument leaf; zeros where nothing flows back."""
        count = len(self.linear.results)
        cts: list[Tangent] = [
            ct if is_float(of.dtype) else None
            for ct, of in zip(cotangents, self.out_avals, strict=False)
        ]
        cts += [None] * (count - len(cts))
        grads = backward.transpose(self.linear, self.residuals, cts)
        found = dict(zip(self.floats, grads, strict=True))
        return [
            zeros(aval_of(v)) if (g := found.get(i)) is None else g
            for i, v in enumerate(self.leaves)
        ]


def _derivative(traced: Traced, floats: Sequence[int]) -> Program:
    """A program of all parameters and a tangent for each float leaf: results, then tangents."""
    program = traced.program
    lead = len(traced.captured)
    tangent_avals = [program.in_avals[lead + i] for i in floats]

    def both(*values: Value) -> list[Value]:
        primals = values[: len(program.params)]
        moving: list[Tangent] = [None] * len(program.params)
        for i, t in zip(floats, values[len(program.params) :], strict=True):
            moving[lead + i] = t
        outs, douts = forward.jvp(program, primals, moving)
        return [*outs, *_filled(douts, program.out_avals)]

    return trace(both, [*program.in_avals, *tangent_avals], program.name).program


def _filled(tangents: Sequence[Tangent], avals: Sequence[Aval]) -> list[Value]:
    return [zeros(of) if t is None else t for t, of in zip(tangents, avals, strict=True)]


def _tangent(primal: Value, tangent: Value) -> Tangent:
    """A tangent that fits its primal; None for primals that are not floats."""
    of, given = aval_of(primal), aval_of(tangent)
    if not is_float(of.dtype):
        return None
    if given.shape != of.shape:
        raise ShapeError(f"jvp: a tangent is {given}, its primal {of}; expected equal shapes")
    if given.dtype != of.dtype and not given.weak:
        raise DTypeError(f"jvp: a tangent is {given}, its primal {of}; expected equal dtypes")
    return asarray(tangent, of.dtype)


def _require_floats(fn: Function, number: int, arg: Any) -> None:
    for path, leaf in tree.leaves_with_path(arg):
        of = aval_of(leaf)
        if not is_float(of.dtype):
            raise DTypeError(
                f"grad of {name_of(fn)}: argument {number}{tree.keystr(path)} is {of}, expected a "
                "float; cast it, or leave it out of argnums"
            )


def _require_scalar(fn: Function, outs: Sequence[Value]) -> None:
    avals = [aval_of(v) for v in outs]
    if len(avals) != 1 or avals[0].shape != ():
        raise ShapeError(
            f"grad of {name_of(fn)}: the function returned {', '.join(map(str, avals))}, expected "
            "one float of rank 0; reduce it (.sum(), .mean()), or use vjp or jacrev"
        )
    if not is_float(avals[0].dtype):
        raise DTypeError(
            f"grad of {name_of(fn)}: the function returned {avals[0]}, expected a float"
        )


def _select(
    fn: Function, argnums: int | Sequence[int], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[tuple[int, ...], Function, list[Any]]:
    """Positions to differentiate, ``fn`` of those arguments alone, and their values."""
    chosen = positions(argnums, len(args), f"jacobian of {name_of(fn)}")

    def of_chosen(*parts: Any) -> Any:
        full = list(args)
        for i, part in zip(chosen, parts, strict=True):
            full[i] = part
        return fn(*full, **kwargs)

    return chosen, of_chosen, [args[i] for i in chosen]


def _basis(leaves: Sequence[Value]) -> list[Value]:
    """For each leaf, the unit vectors of all leaves together along a leading axis."""
    avals = [aval_of(v) for v in leaves]
    total = sum(a.size for a in avals)
    out: list[Value] = []
    start = 0
    for of in avals:
        block = eye(total, of.size, k=-start, dtype=of.dtype)
        out.append(reshape(block, (total, *of.shape)))
        start += of.size
    return out


def _nested(
    columns: Any,
    leaves: Sequence[Value],
    in_tree: tree.TreeDef,
    single: bool,  # noqa: FBT001  one caller
    count: int,
) -> Any:
    """Columns of a Jacobian split by input leaf, inside the structure of the output."""
    ends = np.cumsum([aval_of(v).size for v in leaves])

    def per_output(column: Value) -> Any:
        shape = aval_of(column).shape[:-1]
        parts = [
            reshape(column[..., end - aval_of(v).size : end], (*shape, *aval_of(v).shape))
            for v, end in zip(leaves, ends.tolist(), strict=True)
        ]
        nested = tree.unflatten(in_tree, parts)
        return nested[0] if single else tuple(nested[i] for i in range(count))

    return tree.map(per_output, columns)
