"""Reading and changing parts of arrays: ``x[index]`` and ``x.at[index]``.

Basic indices become slices and pads. Index arrays become one gather or scatter_add over rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Literal, TypeAlias, final

import numpy as np

from vkjit import dtypes
from vkjit.errors import ArgumentError, DTypeError
from vkjit.ir.primitive import Value
from vkjit.numpy._core import (
    ArrayLike,
    Shape,
    broadcast_value,
    cast,
    lift,
    operand_aval,
    refuse_blocks,
    reshaped,
)
from vkjit.numpy._elementwise import add, maximum, minimum, multiply, remainder
from vkjit.numpy._index import (
    Layout,
    New,
    Pick,
    Run,
    Step,
    layout,
    parse,
    positions,
    result_shape,
)
from vkjit.numpy._reduce import max as max_
from vkjit.numpy._reduce import min as min_
from vkjit.numpy._reduce import prod
from vkjit.numpy._shape import broadcast_to, expand_dims
from vkjit.ops import compare, indexing, logical, movement, structural
from vkjit.trace import aval_of, is_numpy

Update: TypeAlias = Literal["set", "add", "multiply", "min", "max"]

_COMBINE: dict[str, Callable[[Value, Value], Value]] = {
    "add": add,
    "multiply": multiply,
    "min": minimum,
    "max": maximum,
}


@final
class GatherScatterMode(Enum):
    """What indices out of range do, by the names that ``mode`` has as well."""

    CLIP = "clip"
    FILL_OR_DROP = "fill"
    PROMISE_IN_BOUNDS = "promise_in_bounds"


Mode: TypeAlias = str | GatherScatterMode | None


def get(
    x: ArrayLike, index: Any, *, mode: Mode = None, fill_value: Any = None, wrap: bool = True
) -> Value:
    """``x[index]``.

    Args:
        x: array.
        index: NumPy's basic or advanced index.
        mode: for indices out of range: "clip", "fill" (or "drop") or "wrap"; None (or
            "promise_in_bounds"): index arrays clamp, and a static integer is refused.
        fill_value: for "fill"; None: NaN, or the lowest integer.
        wrap: negative indices count from the end; else they are out of range.
    """
    how = _mode("at.get", mode, "wrap")
    of = operand_aval("index", x)
    x, steps = lift("index", x), parse(of, index, strict=how is None, wrap=wrap)
    if how == "wrap":
        steps = _wrapped_steps(steps, aval_of(x).shape)
    region, at = _cut(x, steps), _layout(steps)
    if at is None:
        return reshaped(region, result_shape(steps, None))
    rows = _together(region, at)
    where = _positions(steps, aval_of(region).shape, at, drop=how == "fill", wrap=wrap)
    out = indexing.gather(rows, where, at.axis)
    if how == "fill":
        out = _filled(out, where, aval_of(rows).shape[at.axis], at.axis, fill_value)
    return reshaped(_placed(out, steps, at), result_shape(steps, at))


def update(  # noqa: PLR0913  what, where, with what, how, and two promises
    x: ArrayLike,
    index: Any,
    values: ArrayLike,
    how: Update,
    mode: Mode = None,
    *,
    unique: bool = False,
    wrap: bool = True,
) -> Value:
    """A copy of ``x`` with ``values`` set, added, multiplied... at ``index``.

    Args:
        x: array.
        index: NumPy's basic or advanced index.
        values: broadcast to the shape of ``x[index]``, cast to the dtype of ``x``.
        how: what happens where an index points.
        mode: for indices out of range: "drop" (or "fill") or "clip"; None (or
            "promise_in_bounds"): index arrays drop, and a static integer is refused.
        unique: promise that no index occurs twice.
        wrap: negative indices count from the end; else they are out of range.
    """
    of, outside = operand_aval("at", x), _mode(f"at.{how}", mode)
    refuse_blocks(f"at.{how}", of)
    x, steps = lift("at", x), parse(of, index, strict=outside is None, wrap=wrap)
    at = _layout(steps)
    values = cast(lift("at", values), of.dtype)
    one = values if how == "set" and not aval_of(values).shape else None
    values = broadcast_to(values, result_shape(steps, at))
    region = _cut(x, steps)
    if at is None:
        values = reshaped(values, aval_of(region).shape)
        return _pasted(x, steps, values if how == "set" else _COMBINE[how](region, values))
    rows = _together(region, at)
    clips = outside == "clip"
    where = _positions(steps, aval_of(region).shape, at, drop=not clips, wrap=wrap)
    if clips:
        last = max(aval_of(rows).shape[at.axis] - 1, 0)
        where = minimum(maximum(where, np.int32(0)), np.int32(last))
    if one is not None:  # repeated indices all write the same value
        changed = logical.select(_written(where, aval_of(rows).shape, at.axis), one, rows)
        return _pasted(x, steps, _apart(changed, aval_of(region).shape, at))
    updates = _unplaced(values, steps, at, aval_of(rows).shape)
    known = unique or _is_unique(steps, at, clips=clips)
    changed = _scattered(rows, where, updates, at.axis, how, unique=known)
    return _pasted(x, steps, _apart(changed, aval_of(region).shape, at))


def _mode(name: str, mode: Mode, *more: str) -> str | None:
    """A mode by its only name; None where nothing is said of indices out of range.

    Raises:
        ArgumentError: there is no such mode.
    """
    known = mode.value if isinstance(mode, GatherScatterMode) else mode
    refuse_mode(name, known, ("clip", "fill", "drop", "promise_in_bounds", *more))
    return {"drop": "fill", "promise_in_bounds": None}.get(known or "", known)


# -- basic indices --------------------------------------------------------------------------------


def _runs(steps: Sequence[Step], shape: Shape) -> list[Run]:
    """What each axis keeps; index arrays act later, on whole axes."""
    out: list[Run] = []
    for step in steps:
        if isinstance(step, New):
            continue
        axis = len(out)
        if isinstance(step, Run):
            out.append(step)
        elif isinstance(step, Pick):
            out.append(Run(0, 1, shape[axis]))
        else:
            out.append(Run(step.at, 1, 1))
    return out


def _bounds(run: Run) -> tuple[int, int, int]:
    """Start, limit and positive stride that cover a run in ascending order."""
    if not run.count:
        return 0, 0, 1
    ends = run.start, run.start + (run.count - 1) * run.step
    return min(ends), max(ends) + 1, abs(run.step)


def _cut(x: Value, steps: Sequence[Step]) -> Value:
    """The region that an index's slices and integers leave, with every axis still there."""
    runs = _runs(steps, aval_of(x).shape)
    if not runs:
        return x
    starts, limits, strides = zip(*map(_bounds, runs), strict=True)
    return movement.reverse(movement.slice_(x, starts, limits, strides), _backward(runs))


def _backward(runs: Sequence[Run]) -> tuple[int, ...]:
    return tuple(i for i, run in enumerate(runs) if run.step < 0 and run.count > 1)


def _pasted(x: Value, steps: Sequence[Step], region: Value) -> Value:
    """``x`` with the region that ``_cut`` takes replaced."""
    shape = aval_of(x).shape
    runs = _runs(steps, shape)
    if aval_of(region).size == 0:
        return x
    region = movement.reverse(region, _backward(runs))
    if aval_of(region).shape == shape:
        return region
    starts, limits, strides = zip(*map(_bounds, runs), strict=True)
    after = tuple(n - limit for n, limit in zip(shape, limits, strict=True))
    between = tuple(s - 1 for s in strides)
    inside = structural.full(aval_of(region).shape, np.True_)
    written = movement.pad(inside, np.False_, starts, after, between)
    zero = aval_of(x).dtype.type(0)
    return logical.select(written, movement.pad(region, zero, starts, after, between), x)


# -- index arrays ---------------------------------------------------------------------------------


def _layout(steps: Sequence[Step]) -> Layout | None:
    return layout(steps) if any(isinstance(s, Pick) for s in steps) else None


def _picks(steps: Sequence[Step]) -> list[Value]:
    return [s.indices for s in steps if isinstance(s, Pick)]


def _positions(steps: Sequence[Step], shape: Shape, at: Layout, *, drop: bool, wrap: bool) -> Value:
    sizes = tuple(shape[a] for a in at.picked)
    return positions(_picks(steps), sizes, at.broadcast, drop=drop, wrap=wrap)


def _wrapped_steps(steps: Sequence[Step], shape: Shape) -> list[Step]:
    out: list[Step] = []
    axis = 0
    for step in steps:
        if isinstance(step, Pick) and shape[axis]:
            out.append(Pick(remainder(step.indices, shape[axis])))
        else:
            out.append(step)
        axis += not isinstance(step, New)
    return out


def _together(region: Value, at: Layout) -> Value:
    """The picked axes moved next to each other and made one."""
    shape = aval_of(region).shape
    moved = structural.permute(region, at.order(len(shape)))
    others = [n for i, n in enumerate(shape) if i not in at.picked]
    count = int(np.prod([shape[a] for a in at.picked], dtype=np.int64))
    return reshaped(moved, (*others[: at.axis], count, *others[at.axis :]))


def _apart(rows: Value, shape: Shape, at: Layout) -> Value:
    """The inverse of ``_together``."""
    order = at.order(len(shape))
    back = tuple(order.index(i) for i in range(len(shape)))
    return structural.permute(reshaped(rows, tuple(shape[i] for i in order)), back)


def _span(steps: Sequence[Step], at: Layout) -> tuple[int, int, int]:
    """First axis of the indices among the runs alone: now, in the result; and their number."""
    axes = [s for s in steps if not isinstance(s, (New, Pick))]
    now = sum(isinstance(s, Run) for s in axes[: at.axis])
    return now, at.runs_before, len(at.broadcast)


def _moved(shape_len: int, start: int, to: int, count: int) -> tuple[int, ...]:
    """The permutation that moves ``count`` axes from ``start`` so that they begin at ``to``."""
    block = list(range(start, start + count))
    others = [i for i in range(shape_len) if i not in block]
    return (*others[:to], *block, *others[to:])


def _placed(out: Value, steps: Sequence[Step], at: Layout) -> Value:
    """A gather's result without points, the index axes where NumPy has them."""
    now, to, count = _span(steps, at)
    runs = [s.count for s in steps if isinstance(s, Run)]
    flat = reshaped(out, (*runs[:now], *at.broadcast, *runs[now:]))
    return structural.permute(flat, _moved(len(runs) + count, now, to, count))


def _unplaced(values: Value, steps: Sequence[Step], at: Layout, rows: Shape) -> Value:
    """Values in the shape of the result as updates for a scatter."""
    now, to, count = _span(steps, at)
    runs = [s.count for s in steps if isinstance(s, Run)]
    flat = reshaped(values, (*runs[:to], *at.broadcast, *runs[to:]))
    order = _moved(len(runs) + count, now, to, count)
    back = tuple(order.index(i) for i in range(len(order)))
    wanted = (*rows[: at.axis], *at.broadcast, *rows[at.axis + 1 :])
    return reshaped(structural.permute(flat, back), wanted)


def fill_of(dtype: dtypes.DType) -> np.generic[Any]:
    """What a missing element reads as: NaN, the lowest integer, the highest unsigned one, True."""
    if dtypes.is_float(dtype):
        return dtype.type(np.nan)
    if dtype == dtypes.bool_:
        return np.True_
    if dtypes.short(dtype) not in dtypes.BY_SHORT:
        raise DTypeError(
            f"take: operand of {dtypes.short(dtype)}, which has no value for places outside; pass "
            'mode="clip", or take from the result of quant.dequantize(x)'
        )
    info = np.iinfo(dtype)
    return dtype.type(info.min if dtypes.is_signed(dtype) else info.max)


def _filled(out: Value, where: Value, size: int, axis: int, fill_value: Any) -> Value:
    dtype = aval_of(out).dtype
    fill = fill_of(dtype) if fill_value is None else cast(fill_value, dtype)
    inside = logical.and_(compare.ge(where, np.int32(0)), compare.lt(where, np.int32(size)))
    return logical.select(_over(inside, aval_of(out).shape, axis), out, fill)


def _over(mask: Value, shape: Shape, axis: int) -> Value:
    """A mask over index axes, repeated over the others; they start at ``axis``."""
    axes = tuple(range(axis, axis + aval_of(mask).ndim))
    return structural.broadcast(mask, shape, axes)


def _is_unique(steps: Sequence[Step], at: Layout, *, clips: bool) -> bool:
    """Whether static indices (or a single one) are known not to repeat, also where they clip."""
    if int(np.prod(at.broadcast, dtype=np.int64)) <= 1:
        return True
    if clips:
        return False
    picks = _picks(steps)
    if not all(is_numpy(p) for p in picks) or any((p < 0).any() for p in picks):
        return False
    together = np.stack([np.broadcast_to(p, at.broadcast).ravel() for p in picks], 1)
    return len(np.unique(together, axis=0)) == len(together)


def _scattered(  # noqa: PLR0913  a scatter has this many parts
    rows: Value, where: Value, updates: Value, axis: int, how: Update, *, unique: bool
) -> Value:
    of = aval_of(rows)
    if how == "add" and of.dtype != dtypes.bool_:
        return indexing.scatter_add(rows, where, updates, axis)
    if how != "set":
        if not unique:
            updates = _combined(where, updates, axis, how)
        here = indexing.gather(rows, where, axis)
        updates = _COMBINE[how](here, updates)
    size = of.shape[axis]
    if not unique:
        where = last_only(where, size)
    written = _written(where, of.shape, axis)
    held = dtypes.uint8 if of.dtype == dtypes.bool_ else of.dtype
    blank = structural.full(of.shape, held.type(0))
    placed = indexing.scatter_add(blank, where, cast(updates, held), axis)
    return logical.select(written, cast(placed, of.dtype), rows)


def _written(where: Value, shape: Shape, axis: int) -> Value:
    """A mask of ``shape``: whether an index points to the position along ``axis``."""
    ones = structural.full(aval_of(where).shape, np.int32(1))
    none = structural.full((shape[axis],), np.int32(0))
    counts = indexing.scatter_add(none, where, ones, 0)
    return _over(compare.gt(counts, np.int32(0)), shape, axis)


def last_only(where: Value, size: int) -> Value:
    """Positions with -1 for all but the last occurrence of each.

    The largest occurrence number at each position is found bit by bit, from the highest: an
    occurrence without the bit leaves where another one at its position has it.
    """
    shape = aval_of(where).shape
    count = int(np.prod(shape, dtype=np.int64))
    flat = reshaped(where, (count,))
    number = movement.iota(dtypes.int32, (count,), 0)
    for bit in reversed(range((count - 1).bit_length())):
        has = logical.and_(logical.shift_right_logical(number, np.int32(bit)), np.int32(1))
        found = indexing.scatter_add(structural.full((size,), np.int32(0)), flat, has, 0)
        beaten = logical.and_(
            compare.gt(indexing.gather(found, flat, 0), np.int32(0)),
            compare.eq(has, np.int32(0)),
        )
        flat = logical.select(beaten, np.int32(-1), flat)
    return reshaped(flat, shape)


def _combined(where: Value, updates: Value, axis: int, how: str) -> Value:
    """Each update combined with all others at its position; compares every pair of positions."""
    of, shape = aval_of(updates), aval_of(where).shape
    count = int(np.prod(shape, dtype=np.int64))
    before, after = of.shape[:axis], of.shape[axis + len(shape) :]
    lined = reshaped(updates, (*before, 1, count, *after))
    flat = reshaped(where, (count,))
    same = compare.eq(*_crossed(flat, count))
    same = structural.broadcast(same, (*before, count, count, *after), (axis, axis + 1))
    wide = broadcast_value(lined, aval_of(same).shape)
    fold = {"multiply": prod, "min": min_, "max": max_, "add": max_}[how]
    neutral = _neutral(how, of.dtype)
    out = fold(logical.select(same, wide, neutral), axis=axis + 1)
    return reshaped(cast(out, of.dtype), of.shape)


def _crossed(flat: Value, count: int) -> list[Value]:
    full = (count, count)
    return [broadcast_value(expand_dims(flat, 1), full), broadcast_value(flat, full)]


def _neutral(how: str, dtype: dtypes.DType) -> np.generic[Any]:
    if dtype == dtypes.bool_:
        return np.bool_(how in ("multiply", "min"))
    if how == "multiply":
        return dtype.type(1)
    if dtypes.is_float(dtype):
        return dtype.type(np.inf if how == "min" else -np.inf)
    info = np.iinfo(dtype)
    return dtype.type(info.max if how == "min" else info.min)


def refuse_mode(name: str, mode: str | None, allowed: Sequence[str]) -> None:
    """Checks a ``mode`` argument.

    Raises:
        ArgumentError: it is not None and not allowed.
    """
    if mode is not None and mode not in allowed:
        raise ArgumentError(f"{name}: mode {mode!r}, expected one of {', '.join(allowed)}")
