"""checkpoint: inner values of a function are computed again for its derivative, not kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from vkjit import tree
from vkjit.api.flat import flatten_call, name_of, positions
from vkjit.control.cells import OuterWrites, contents_of, observed, put_all, threaded
from vkjit.control.checkpoint import checkpointed
from vkjit.control.policies import Policy, nothing_saveable
from vkjit.errors import ArgumentError
from vkjit.ir.primitive import Value
from vkjit.numpy import asarray
from vkjit.ops import naming

Function = Callable[..., Any]


def checkpoint(
    fn: Function | None = None,
    *,
    policy: Policy | None = None,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
) -> Any:
    """``fn``, whose derivative keeps arguments and computes inner values again.

    Values and first derivatives are those of ``fn``, bit for bit; only memory and time change.
    (Reverse over reverse differentiates originals and recomputations apart, and so adds in another
    order.) Random operations give the same bits again. Writes and calls of the host happen once: in
    the computation of values, never in the one for the derivative. Checkpoints nest, and may stand
    inside and around loops, branches and other transformations.

    Args:
        fn: a function of pytrees of arrays; without it ``checkpoint`` returns a decorator.
        policy: which inner values may be saved nevertheless: one of ``checkpoint_policies``, or a
            hashable function of a primitive, avals and parameters. None saves nothing.
        prevent_cse: taken for JAX's sake. Recomputations are never merged with what they repeat,
            here at no cost.
        static_argnums: positional arguments that are Python values, not arrays.

    Returns:
        a function of the same arguments and results.

    Raises:
        ArgumentError: ``fn`` or ``policy`` is not a function.
        TracerError: ``fn`` needs a traced value as a Python value; see ``static_argnums``.
    """
    if fn is None:

        def decorate(inner: Function) -> Any:
            return checkpoint(
                inner, policy=policy, prevent_cse=prevent_cse, static_argnums=static_argnums
            )

        return decorate
    if not callable(fn):
        raise ArgumentError(f"checkpoint: given {type(fn).__name__}, expected a function")
    if policy is not None and not callable(policy):
        raise ArgumentError(
            f"checkpoint of {name_of(fn)}: policy {policy!r} is not callable; expected one of "
            "checkpoint_policies"
        )

    @wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        static = positions(static_argnums, len(args), f"checkpoint of {name_of(fn)}")
        dynamic = [a for i, a in enumerate(args) if i not in static]

        def of_dynamic(*parts: Any, **named: Any) -> Any:
            rest = iter(parts)
            return fn(*[a if i in static else next(rest) for i, a in enumerate(args)], **named)

        of_dynamic.__name__ = name_of(fn)
        return _checkpointed(of_dynamic, dynamic, kwargs, policy or nothing_saveable)

    return wrapped


def _checkpointed(fn: Function, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Any:
    """``fn`` as a checkpoint; the contents of Refs of outside that it writes are results of it."""
    flat, leaves = flatten_call(observed(fn), args, kwargs)
    try:
        return flat.result(checkpointed(flat, leaves, policy, name_of(fn)))
    except OuterWrites as writes:
        cells = writes.cells
    contents, result = _checkpointed(
        threaded(fn, cells), (contents_of(cells), *args), kwargs, policy
    )
    put_all(cells, contents)
    return result


def checkpoint_name(x: Any, name: str) -> Any:
    """``x``, under a name that policies know: see ``save_only_these_names``.

    Args:
        x: a pytree of arrays.
        name: for all its leaves.
    """

    def named(leaf: Value) -> Value:
        return naming.name(asarray(leaf), name)

    return tree.map(named, x)
