"""Derivatives of functions over pytrees.

Reverse mode is linearization followed by transposition, so every order of derivative and every
nesting of modes comes from the same three rules of a primitive. Functions are staged: they are
traced once per call, with abstract values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from vkjit import tree
from vkjit.api.flat import flatten_call, name_of, positions
from vkjit.api.linearization import Linearization, filled, fitting_tangent
from vkjit.dtypes import is_float
from vkjit.errors import DTypeError, ShapeError
from vkjit.ir.primitive import Tangent, Value
from vkjit.passes import jvp as forward
from vkjit.trace import aval_of

Function = Callable[..., Any]


def jvp(
    fn: Function, primals: Sequence[Any], tangents: Sequence[Any], *, has_aux: bool = False
) -> tuple[Any, ...]:
    """The value of ``fn`` and its derivative along ``tangents``.

    Args:
        fn: of ``len(primals)`` pytrees of arrays.
        primals: where to evaluate.
        tangents: a pytree of the structure, shapes and dtypes of each primal.
        has_aux: whether ``fn`` returns a pair of a value and auxiliary data.

    Returns:
        ``fn(*primals)`` and its directional derivative, of the same structure; with ``has_aux``
        these of the value, and the auxiliary data.

    Raises:
        ShapeError, DTypeError: a tangent does not fit its primal.
    """
    flat, leaves = flatten_call(fn, primals, has_aux=has_aux)
    dleaves, dtree = tree.flatten((tuple(tangents), {}))
    if dtree != flat.in_tree:
        raise ShapeError(f"jvp: tangents have structure {dtree}, expected that of the primals")
    dleaves = [_tangent(x, t) for x, t in zip(leaves, dleaves, strict=True)]
    traced = flat.trace(leaves)
    values = [*traced.captured, *leaves]
    moving: list[Tangent] = [*[None] * len(traced.captured), *dleaves]
    outs, douts = forward.jvp(traced.program, values, moving)
    moved = filled(douts, traced.program.out_avals)
    pair = flat.result(outs[: flat.main]), flat.result(moved[: flat.main])
    return (*pair, flat.aux(outs)) if has_aux else pair


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
            require_floats(f"grad of {name_of(fn)}", number, arg)

        def of_chosen(*parts: Any) -> Any:
            full = list(args)
            for i, part in zip(chosen, parts, strict=True):
                full[i] = part
            return fn(*full, **kwargs)

        of_chosen.__name__ = name_of(fn)
        flat, leaves = flatten_call(of_chosen, diff, has_aux=has_aux)
        lin = Linearization(flat, leaves)
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


def _tangent(primal: Value, tangent: Value) -> Tangent:
    """A tangent that fits its primal; None for primals that are not floats."""
    of = aval_of(primal)
    return fitting_tangent(of, tangent) if is_float(of.dtype) else None


def require_floats(what: str, number: int, arg: Any) -> None:
    """Refuses an argument that cannot be differentiated.

    Args:
        what: the transformation and the function, for the message.
        number: position of the argument.
        arg: a pytree of arrays.

    Raises:
        DTypeError: a leaf is not a float.
    """
    for path, leaf in tree.leaves_with_path(arg):
        of = aval_of(leaf)
        if not is_float(of.dtype):
            raise DTypeError(
                f"{what}: argument {number}{tree.keystr(path)} is {of}, expected a float; cast it, "
                "or leave it out of argnums"
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
