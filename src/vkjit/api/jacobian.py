"""Jacobians and Hessians: derivatives along all unit vectors at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np

from vkjit import tree
from vkjit.api.autodiff import jvp, require_floats
from vkjit.api.batching import vmap
from vkjit.api.flat import name_of, positions
from vkjit.api.pullback import vjp
from vkjit.dtypes import is_float
from vkjit.errors import DTypeError
from vkjit.ir.primitive import Value
from vkjit.numpy import eye, reshape
from vkjit.trace import aval_of

Function = Callable[..., Any]


def jacfwd(fn: Function, argnums: int | Sequence[int] = 0, *, has_aux: bool = False) -> Function:
    """The Jacobian of ``fn``, one column per input element, by forward mode.

    The result nests the structure of the output outside that of the argument; each leaf has the
    output's shape followed by the input's.

    Args:
        fn: returns a pytree of floats, or a pair of one and auxiliary data with ``has_aux``.
        argnums: positional arguments to differentiate with respect to; pytrees of float arrays.
        has_aux: whether ``fn`` returns auxiliary data; the result is then ``(jacobian, aux)``.

    Raises:
        DTypeError: an argument is not a float.
    """

    @wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        chosen, of_chosen, diff = _select(fn, argnums, args, kwargs)
        leaves, in_tree = tree.flatten(tuple(diff))

        def push(*tangents: Value) -> Any:
            moved = jvp(of_chosen, diff, tree.unflatten(in_tree, tangents), has_aux=has_aux)
            return moved[1], moved[2:]

        columns, aux = vmap(push, out_axes=(-1, None))(*_basis(leaves))
        found = _nested(columns, leaves, in_tree, isinstance(argnums, int), len(chosen))
        return (found, *aux) if has_aux else found

    return wrapped


def jacrev(fn: Function, argnums: int | Sequence[int] = 0, *, has_aux: bool = False) -> Function:
    """The Jacobian of ``fn`` by reverse mode, one row per output element.

    Arguments, result and errors are those of ``jacfwd``; the values must be floats, too.
    """

    @wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        chosen, of_chosen, diff = _select(fn, argnums, args, kwargs)
        value, pullback, *aux = vjp(of_chosen, *diff, has_aux=has_aux)
        outs, out_tree = tree.flatten(value)
        _require_float_values(fn, outs)
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
        found = tree.unflatten(out_tree, per_out)
        return (found, *aux) if has_aux else found

    return wrapped


def hessian(fn: Function, argnums: int | Sequence[int] = 0, *, has_aux: bool = False) -> Function:
    """Second derivatives of ``fn``: forward over reverse; see ``jacfwd``."""
    return jacfwd(jacrev(fn, argnums, has_aux=has_aux), argnums, has_aux=has_aux)


def _require_float_values(fn: Function, outs: Sequence[Value]) -> None:
    avals = [aval_of(v) for v in outs]
    if not all(is_float(a.dtype) for a in avals):
        raise DTypeError(
            f"jacrev of {name_of(fn)}: it returned {', '.join(map(str, avals))}, expected floats; "
            "cast them, or use jacfwd"
        )


def _select(
    fn: Function, argnums: int | Sequence[int], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[tuple[int, ...], Function, list[Any]]:
    """Positions to differentiate, ``fn`` of those arguments alone, and their values."""
    what = f"jacobian of {name_of(fn)}"
    chosen = positions(argnums, len(args), what)
    for number in chosen:
        require_floats(what, number, args[number])

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
