"""vmap: a function of one example as a function of many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, cast

from vkjit import tree
from vkjit.api.flat import flatten_call, name_of
from vkjit.errors import ArgumentError, ShapeError
from vkjit.ir.avals import aval
from vkjit.ir.primitive import Value
from vkjit.ops.structural import broadcast, permute
from vkjit.passes.batch import batch
from vkjit.trace import aval_of, trace

Axes = Any
"""An axis, None, or a pytree prefix of them."""


def vmap(
    fn: Callable[..., Any],
    in_axes: Axes = 0,
    out_axes: Axes = 0,
    *,
    axis_size: int | None = None,
) -> Callable[..., Any]:
    """``fn`` over a batch: maps over axis ``in_axes`` of the arguments.

    Args:
        fn: of pytrees of arrays without the batch axis.
        in_axes: an axis for all arguments, or one for each (None: not mapped, given whole); an
            entry may be a pytree prefix of its argument.
        out_axes: where the batch axis stands in the results; None for results that do not vary.
        axis_size: of the batch, needed when nothing is mapped.

    Raises:
        ShapeError: the mapped axes have different sizes.
        ArgumentError: ``in_axes`` does not fit the arguments, or the size is unknown.
    """

    @wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        axes = [*_prefix(in_axes, args, fn), *[0] * len(tree.leaves(kwargs))]
        flat, leaves = flatten_call(fn, args, kwargs)
        size = _size(fn, leaves, axes, axis_size)
        front = [_to_front(v, a) for v, a in zip(leaves, axes, strict=True)]
        avals = [_example(v, a) for v, a in zip(front, axes, strict=True)]
        traced = trace(flat, avals, name_of(fn))
        flags = [*[False] * len(traced.captured), *[a is not None for a in axes]]
        outs, spread = batch(traced.program, [*traced.captured, *front], flags)
        result = flat.result(outs)
        targets = _out_prefix(out_axes, result)
        placed = [_place(o, s, t, size, fn) for o, s, t in zip(outs, spread, targets, strict=True)]
        return flat.result(placed)

    return wrapped


def _prefix(in_axes: Axes, args: Sequence[Any], fn: Callable[..., Any]) -> list[int | None]:
    """One axis for each leaf of ``args``."""
    per_arg: Sequence[Any] = [in_axes] * len(args)
    if isinstance(in_axes, tuple | list):
        per_arg = cast("Sequence[Any]", in_axes)
    if len(per_arg) != len(args):
        raise ArgumentError(
            f"vmap of {name_of(fn)}: in_axes {in_axes} for {len(args)} arguments; expected "
            "one entry for each"
        )
    return [a for entry, arg in zip(per_arg, args, strict=True) for a in _spread(entry, arg)]


def _spread(entry: Axes, value: Any) -> list[int | None]:
    """``entry``, a prefix of the structure of ``value``, repeated for every leaf."""
    if entry is None or isinstance(entry, int):
        return [entry] * len(tree.leaves(value))
    if isinstance(entry, dict):
        return [a for key in sorted(entry) for a in _spread(entry[key], value[key])]  # type: ignore[type-var]
    return [a for e, v in zip(entry, value, strict=True) for a in _spread(e, v)]


def _out_prefix(out_axes: Axes, result: Any) -> list[int | None]:
    return _spread(out_axes, result)


def _size(
    fn: Callable[..., Any], leaves: Sequence[Value], axes: Sequence[int | None], given: int | None
) -> int:
    sizes: dict[int, str] = {}
    for leaf, axis in zip(leaves, axes, strict=True):
        if axis is None:
            continue
        of = aval_of(leaf)
        if not -of.ndim <= axis < of.ndim:
            raise ShapeError(f"vmap of {name_of(fn)}: axis {axis} of {of} does not exist")
        sizes.setdefault(of.shape[axis], f"{of} along axis {axis}")
    if given is not None:
        sizes.setdefault(given, f"axis_size={given}")
    if len(sizes) > 1:
        raise ShapeError(
            f"vmap of {name_of(fn)}: mapped axes differ in size: {'; '.join(sizes.values())}"
        )
    if not sizes:
        raise ArgumentError(
            f"vmap of {name_of(fn)}: no argument is mapped; expected an axis in in_axes "
            "or axis_size"
        )
    return next(iter(sizes))


def _to_front(value: Value, axis: int | None) -> Value:
    if axis is None:
        return value
    rank = aval_of(value).ndim
    axis %= rank
    return permute(value, (axis, *(i for i in range(rank) if i != axis)))


def _example(value: Value, axis: int | None) -> Any:
    of = aval_of(value)
    return of if axis is None else aval(of.shape[1:], of.dtype, of.weak)


def _place(
    value: Value,
    spread: bool,  # noqa: FBT001  a flag per result
    target: int | None,
    size: int,
    fn: Callable[..., Any],
) -> Value:
    """A result with its batch axis at ``target``."""
    of = aval_of(value)
    if target is None:
        if spread:
            raise ArgumentError(
                f"vmap of {name_of(fn)}: out_axes is None for a result that varies over the batch"
            )
        return value
    if not spread:
        value = broadcast(value, (size, *of.shape), tuple(range(1, of.ndim + 1)))
    rank = aval_of(value).ndim
    target %= rank
    order = list(range(1, rank))
    order.insert(target, 0)
    return permute(value, tuple(order))
