"""Stages ``reductions`` and ``indexing``: sums, extrema and scans; gather and scatter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import vkjit.numpy as jnp
from vkjit import nn
from vkjit.api.autodiff import grad
from vkjit.doctor.comparing import Array
from vkjit.doctor.session import EXACT, Judge, Program, Session
from vkjit.doctor.tolerances import Kind, SumBound, is_float
from vkjit.errors import MissingRuleError
from vkjit.lax import dynamic_slice

Function = Callable[..., Any]

_SHAPES = ((1, 1), (3, 1), (1, 7), (33, 45), (257, 64), (5, 1025), (2, 20_000), (20_000, 2))
_QUICK_SHAPES = ((33, 45),)
_FOLDS: dict[str, Function] = {
    "max": jnp.max,
    "min": jnp.min,
    "argmax": jnp.argmax,
    "argmin": jnp.argmin,
}
_AXES = (0, 1, None)


def reductions(session: Session) -> None:
    """Rows, columns and everything, by sums, extrema and positions; scans; NaN and infinity."""
    shapes = _QUICK_SHAPES if session.quick else _SHAPES
    cases = [(shape, kind) for shape in shapes for kind in (np.float32, np.int32, np.float16)]
    for shape, kind in session.cases(cases):
        with session.missing_allowed(f"reductions of {np.dtype(kind)}", MissingRuleError):
            _folds(session, (session.rng.standard_normal(shape) * 50).astype(kind))
    for shape in session.cases(shapes):
        _scans(session, session.rng.standard_normal(shape).astype(np.float32))
    for place in session.cases((700,) if session.quick else (0, 700, -1)):
        _not_a_number(session, place)


def _folds(session: Session, x: Array) -> None:
    """All reductions over every choice of axes, in one program."""
    what = f"{x.dtype}[{x.shape[0]},{x.shape[1]}]"

    def folded(x: Any) -> Any:
        sums = [jnp.sum(x, axis=axis) for axis in _AXES]
        others = [fold(x, axis=axis) for fold in _FOLDS.values() for axis in _AXES]
        return sums, others

    sums, others = Program(session.device, folded, (x,))(x)
    wanted = Program(session.host, folded, (x,))(x)
    wide = np.abs(x.astype(np.float64))
    for axis, got, want in zip(_AXES, sums, wanted[0], strict=True):
        name = f"sum of {what} over {_over(axis)}"
        if not is_float(x.dtype):
            session.compare(name, got, want)
            continue
        length = x.size if axis is None else x.shape[axis]
        terms = np.asarray(np.sum(wide, axis=axis))
        bound = SumBound(Kind.SUM, x.dtype, length)
        session.compare_sums(name, got, np.asarray(want), (terms, bound))
    names = [f"{name} of {what} over {_over(axis)}" for name in _FOLDS for axis in _AXES]
    for name, got, want in zip(names, others, wanted[1], strict=True):
        session.compare(name, got, want)


def _over(axis: int | None) -> str:
    return {0: "rows", 1: "columns", None: "all"}[axis]


def _scans(session: Session, x: Array) -> None:
    """Running sums along both axes, and a stable softmax denominator, mean and variance."""

    def scanned(x: Any) -> Any:
        return jnp.cumsum(x, axis=0), jnp.cumsum(x, axis=1)

    what = f"f32[{x.shape[0]},{x.shape[1]}]"
    got, want = (Program(d, scanned, (x,))(x) for d in (session.device, session.host))
    for axis in (0, 1):
        terms = np.cumsum(np.abs(x.astype(np.float64)), axis=axis)
        of = terms, SumBound(Kind.SUM, x.dtype, x.shape[axis])
        session.compare_sums(f"cumsum of {what} along {axis}", got[axis], want[axis], of)

    def statistics(x: Any) -> Any:
        return nn.logsumexp(x, axis=-1), jnp.mean(x, axis=-1), jnp.var(x, axis=0)

    session.both(f"statistics of {what}", statistics, (x,), Judge(Kind.LAYER, max(x.shape)))


def _not_a_number(session: Session, place: int) -> None:
    """A NaN anywhere in a row makes its extrema NaN and is where argmax points."""
    x = session.rng.standard_normal((3, 1500)).astype(np.float32)
    x[1, place] = np.nan
    x[2, place] = np.inf

    def folded(x: Any) -> Any:
        every = [fold(x, axis=-1) for fold in _FOLDS.values()]
        return [*every, jnp.isnan(jnp.sum(x, axis=-1)), jnp.cumsum(x, axis=-1)[:, -1] > 1e30]

    session.both(f"NaN and infinity at {place}", folded, (x,), EXACT)


# -- indexing -------------------------------------------------------------------------------------


def indexing(session: Session) -> None:
    """Gathers, scatters with repeated indices, indices out of range, gradients of both."""
    rows, width = (50, 7) if session.quick else (3000, 65)
    rng = session.rng
    table = rng.standard_normal((rows, width)).astype(np.float32)
    ids = rng.integers(-3, rows + 3, (11, 13)).astype(np.int32)
    inside = np.clip(ids, 0, rows - 1)
    updates = rng.integers(-4, 5, (11, 13, width)).astype(np.float32)
    whole = np.round(table * 4)
    cases: list[tuple[str, Function, tuple[Any, ...], Judge]] = [
        ("take", _take, (table, inside), EXACT),
        ("take, out of range", _take, (table, ids), EXACT),
        ("take along an axis", _along, (table, np.resize(inside, width)), EXACT),
        # Whole numbers: the sums are exact in any order.
        ("scatter-add, repeated indices", _scattered, (whole, inside, updates), EXACT),
        ("scatter-add, out of range", _scattered, (whole, ids, updates), EXACT),
        ("scatter, set", _set, (table, np.int32(rows // 2)), EXACT),
        ("slice at a computed place", _sliced, (table, np.int32(rows)), EXACT),
        ("one-hot", _one_hot, (inside,), EXACT),
        ("gradient of take", _embedding_gradient, (whole, inside, updates), EXACT),
    ]
    for what, function, args, judge in session.cases(cases):
        session.both(what, function, args, judge)


def _take(table: Any, ids: Any) -> Any:
    return jnp.take(table, ids, axis=0), jnp.take(table.T, ids[0], axis=1)


def _along(table: Any, ids: Any) -> Any:
    return jnp.take_along_axis(table, ids[None, :], axis=0)


def _scattered(table: Any, ids: Any, updates: Any) -> Any:
    return table.at[ids].add(updates)


def _set(table: Any, row: Any) -> Any:
    return table.at[row].set(table[0] + 1.0), table.at[::2].set(0.0)


def _sliced(table: Any, row: Any) -> Any:
    return dynamic_slice(table, (row - 5, 1), (4, 5))


def _one_hot(ids: Any) -> Any:
    return nn.one_hot(ids, 40)


def _embedding_gradient(table: Any, ids: Any, weights: Any) -> Any:
    def loss(table: Any) -> Any:
        return jnp.sum(jnp.take(table, ids, axis=0) * weights)

    return grad(loss)(table)
