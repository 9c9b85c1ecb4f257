"""vmap: a function of one example as a function of many."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import wraps
from typing import Any, cast, final

from vkjit import dtypes, tree
from vkjit.api.flat import FlatFunction, flatten_call, name_of
from vkjit.api.ref import Ref
from vkjit.control.collectives import named
from vkjit.errors import ArgumentError, ShapeError
from vkjit.ir.avals import Aval, aval
from vkjit.ir.primitive import Value
from vkjit.ops.movement import iota
from vkjit.ops.structural import broadcast, permute
from vkjit.passes.batch import Axis, along, batch
from vkjit.trace import aval_of, trace

Axes = Any
"""An axis, None, or a pytree prefix of them."""


def vmap(
    fn: Callable[..., Any],
    in_axes: Axes = 0,
    out_axes: Axes = 0,
    *,
    axis_name: Hashable = None,
    axis_size: int | None = None,
) -> Callable[..., Any]:
    """``fn`` over a batch: maps over axis ``in_axes`` of the arguments.

    A Ref that is mapped is one for each example; one that is not takes writes that are the same
    for all.

    Args:
        fn: of pytrees of arrays without the batch axis.
        in_axes: an axis for all arguments, or one for each (None: not mapped, given whole); an
            entry may be a pytree prefix of its argument. Arguments given by name are mapped over
            their first axis.
        out_axes: where the batch axis stands in the results; None for results that do not vary.
        axis_name: by which collectives of ``vkjit.lax``, such as ``psum``, know the axis.
        axis_size: of the batch, needed when nothing is mapped.

    Raises:
        ShapeError: the mapped axes have different sizes.
        ArgumentError: ``in_axes`` or ``out_axes`` does not fit, or the size is unknown.
    """

    @wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        axes = [*_in_prefix(in_axes, args, fn), *[0] * len(tree.leaves(kwargs))]
        flat, leaves = flatten_call(fn, args, kwargs)
        call = _Batch(flat, leaves, axes)
        size = _size(fn, call.values, axes, axis_size)
        return call.run(Axis(axis_name, size), out_axes)

    return wrapped


@final
class _Batch:
    """One call: its values and the axis of each that is mapped; Refs among the arguments."""

    def __init__(
        self, flat: FlatFunction, leaves: Sequence[Any], axes: Sequence[int | None]
    ) -> None:
        self.flat = flat
        self.axes = axes
        self.refs = {i: v for i, v in enumerate(leaves) if type(v) is Ref}
        self.values: list[Value] = [v.value if type(v) is Ref else v for v in leaves]

    def run(self, axis: Axis, out_axes: Axes) -> Any:
        """The results, with the batch axis where ``out_axes`` says."""
        name = name_of(self.flat.fn)
        front = [_to_front(v, a) for v, a in zip(self.values, self.axes, strict=True)]
        mapped = [a is not None for a in self.axes]
        if axis.name is not None:
            front.append(iota(dtypes.int32, (axis.size,), 0))
            mapped.append(True)
        avals = [_example(v, flag) for v, flag in zip(front, mapped, strict=True)]
        traced = trace(lambda *values: self._one(axis, values), avals, name)
        flags = [*[False] * len(traced.captured), *mapped]
        with along(axis):
            outs, spread = batch(traced.program, [*traced.captured, *front], flags)
        count = len(outs) - len(self.refs)
        self._write_back(axis, outs[count:], spread[count:])
        targets = _prefix(out_axes, self.flat.result(outs[:count]), f"vmap of {name}: out_axes")
        rows = zip(outs[:count], spread[:count], targets, strict=True)
        placed = [_place(o, s, t, axis.size, self.flat.fn) for o, s, t in rows]
        return self.flat.result(placed)

    def _one(self, axis: Axis, values: Sequence[Value]) -> list[Value]:
        """The function of one example, and the contents of its Refs afterwards."""
        leaves = list(values[: len(self.values)])
        for i in self.refs:
            leaves[i] = Ref(leaves[i])
        if axis.name is None:
            outs = self.flat(*leaves)
        else:
            with named(axis, values[-1]):
                outs = self.flat(*leaves)
        return [*outs, *[leaves[i].value for i in self.refs]]

    def _write_back(self, axis: Axis, after: Sequence[Value], spread: Sequence[bool]) -> None:
        for (i, ref), value, varies in zip(self.refs.items(), after, spread, strict=True):
            target = self.axes[i]
            if target is None and varies:
                raise ArgumentError(
                    f"vmap of {name_of(self.flat.fn)}: a Ref {aval_of(ref.value)} that is not "
                    "mapped was written with values that vary over the batch, expected equal ones; "
                    "map over the Ref, or reduce the values"
                )
            ref.replace(_place(value, varies, target, axis.size, self.flat.fn))


def _in_prefix(in_axes: Axes, args: Sequence[Any], fn: Callable[..., Any]) -> list[int | None]:
    """One axis for each leaf of ``args``."""
    what = f"vmap of {name_of(fn)}: in_axes"
    if in_axes is None or isinstance(in_axes, int):
        return [in_axes] * len(tree.leaves(tuple(args)))
    if not isinstance(in_axes, tuple | list):
        raise ArgumentError(
            f"{what} is a {type(in_axes).__name__}, expected an integer, None, or a tuple with an "
            "entry for each argument; put a pytree for one argument into a tuple: (axes,)"
        )
    entries = cast("Sequence[Any]", in_axes)
    if len(entries) != len(args):
        raise ArgumentError(
            f"{what} {in_axes} for {len(args)} arguments; expected one entry for each"
        )
    found: list[int | None] = []
    for number, (entry, arg) in enumerate(zip(entries, args, strict=True)):
        found.extend(_prefix(entry, arg, f"{what}[{number}]"))
    return found


def _prefix(entry: Axes, value: Any, what: str) -> list[int | None]:
    """``entry``, a prefix of the structure of ``value``, repeated for every leaf."""
    if entry is None or isinstance(entry, int):
        return [entry] * len(tree.leaves(value))
    level = tree.structure(value).one_level()
    try:
        if level is None:
            raise ValueError
        entries = level.flatten_up_to(entry)
        parts = level.flatten_up_to(value)
    except ValueError as error:
        raise ArgumentError(
            f"{what} has {tree.structure(entry)} for a value of structure {tree.structure(value)}, "
            "expected a prefix of that: an integer or None for each leaf or part"
        ) from error
    return [a for e, v in zip(entries, parts, strict=True) for a in _prefix(e, v, what)]


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


def _example(value: Value, mapped: bool) -> Aval:  # noqa: FBT001  a flag per value
    of = aval_of(value)
    return aval(of.shape[1:], of.dtype, of.weak) if mapped else of


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
    if not -rank <= target < rank:
        raise ShapeError(
            f"vmap of {name_of(fn)}: out_axes {target} for a result {of} of an example, expected "
            f"one from {-rank} to {rank - 1}"
        )
    order = list(range(1, rank))
    order.insert(target % rank, 0)
    return permute(value, tuple(order))
