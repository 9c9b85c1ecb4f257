"""Independent ways to the values of a program: the evaluator, devices, and noise on every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from vkjit import dtypes
from vkjit.ir.evaluate import Evaluator, evaluate
from vkjit.ir.primitive import Kind
from vkjit.ir.program import Eqn, Literal, Program, Var
from vkjit.lowering.compile import compile_program
from vkjit.runtime import get_device

Array = np.ndarray[Any, Any]

EXACT = frozenset(
    {"neg", "abs", "sign", "max", "min", "select", "floor", "ceil", "round", "trunc", "iota"}
    | {"stop_gradient", "bitcast_convert_type", "reduce_max", "reduce_min", "cummax", "cummin"}
)
"""Pointwise operations and reductions that never round; views and moves do not either."""
SUMS = frozenset({"reduce_sum", "cumsum", "dot_general", "scatter_add"})
"""Operations that round after every term: where terms cancel, more than the result shows."""
_SHAKEN = (Kind.POINTWISE, Kind.REDUCE, Kind.CONTRACT)


def on_device(program: Program, inputs: Sequence[Array], name: str) -> list[Array]:
    """The results of ``program`` compiled for the device ``name``."""
    device = get_device(name)
    loaded = device.load(compile_program(program, device.target).plan)
    outs = loaded.run([device.upload(np.ascontiguousarray(x)) for x in inputs])
    avals = program.out_avals
    return [device.download(o, a.dtype, a.shape) for o, a in zip(outs, avals, strict=True)]


def shaken(program: Program, inputs: Sequence[Array], rng: np.random.Generator) -> list[Array]:
    """The evaluator with a random relative error of up to 8 u after every rounded operation."""

    def run(inner: Evaluator, given: Sequence[Array]) -> list[Array]:
        return _shaken(inner.program, given, rng)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluator, "run", run)  # programs inside equations are shaken, too
        return _shaken(program, inputs, rng)


def _shaken(program: Program, inputs: Sequence[Array], rng: np.random.Generator) -> list[Array]:
    env: dict[Var, Array] = dict(zip(program.params, inputs, strict=True))
    for eqn in program.eqns:
        args = [np.asarray(a.value) if isinstance(a, Literal) else env[a] for a in eqn.args]
        terms = [_moved(a, rng) for a in args] if eqn.prim.name in SUMS else args
        outs = eqn.prim.evaluate_outs(*terms)
        for var, value in zip(eqn.outs, outs, strict=True):
            made = np.asarray(value, var.aval.dtype)
            env[var] = _moved(made, rng) if _rounds(eqn, args) else made
    return [np.asarray(r.value) if isinstance(r, Literal) else env[r] for r in program.results]


def _rounds(eqn: Eqn, args: Sequence[Array]) -> bool:
    scatters = eqn.prim.name == "scatter_add"
    if eqn.prim.name == "cast" and not dtypes.is_float(args[0].dtype):
        return False
    return (eqn.prim.traits.kind in _SHAKEN or scatters) and eqn.prim.name not in EXACT


def _moved(value: Array, rng: np.random.Generator) -> Array:
    if not dtypes.is_float(value.dtype) or value.size == 0:
        return value
    by = 4 * float(ml_dtypes.finfo(value.dtype).eps)
    with np.errstate(all="ignore"):
        moved = value.astype(np.float64) * (1 + by * rng.uniform(-1, 1, value.shape))
        return np.asarray(moved).astype(value.dtype)


def spread(program: Program, inputs: Sequence[Array], runs: int = 6) -> list[Array]:
    """How far each result moves, at most, under rounding errors: infinite where it is undetermined.

    Monte Carlo arithmetic (D. Parker, 1997): the deviation of runs with random rounding estimates
    the error of any evaluation order. A comparison, rounding or index that falls on its edge shows
    as a large deviation and asks for nothing there.
    """
    base = evaluate(program, inputs)
    rng = np.random.default_rng(0)
    found = [np.zeros(b.shape) for b in base]
    for _ in range(runs):
        for worst, value, want in zip(found, shaken(program, inputs, rng), base, strict=True):
            with np.errstate(all="ignore"):
                a, b = value.astype(np.float64), want.astype(np.float64)
                moved = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
            np.maximum(worst, np.where(np.isnan(moved), np.inf, moved), out=worst)
    return found


def assert_agrees(
    program: Program, inputs: Sequence[Array], got: Sequence[Array], *, slack: float = 8.0
) -> None:
    """``got`` equals the evaluator's results up to ``slack`` times their ``spread``.

    Integers and booleans must be equal wherever rounding cannot change them.
    """
    base = evaluate(program, inputs)
    for position, (g, want, moved) in enumerate(
        zip(got, base, spread(program, inputs), strict=True)
    ):
        assert g.shape == want.shape
        assert g.dtype == want.dtype
        a, b = np.atleast_1d(g.astype(np.float64)), np.atleast_1d(want.astype(np.float64))
        allowed = np.atleast_1d(slack * moved)
        if dtypes.is_float(want.dtype):
            info = ml_dtypes.finfo(want.dtype)
            with np.errstate(all="ignore"):
                allowed = allowed + 8 * float(info.eps) * np.abs(b) + float(info.smallest_normal)
        else:
            allowed = np.where(allowed > 0, np.inf, 0.0)
        with np.errstate(all="ignore"):
            fine = (np.abs(a - b) <= allowed) | (a == b) | (np.isnan(a) & np.isnan(b))
            fine |= np.isinf(allowed) | ~np.isfinite(b) & (np.atleast_1d(moved) > 0)
        if not fine.all():
            at = tuple(int(i) for i in np.argwhere(~fine)[0])
            raise AssertionError(
                f"result {position} at {at}: got {a[at]!r}, wanted {b[at]!r}, allowed "
                f"{allowed[at]:.3e}\n{program}"
            )


def arrays_of(program: Program, seed: int) -> list[Array]:
    """Values for the parameters: floats in [-2, 2], integers in [-3, 3] or [0, 6]."""
    rng = np.random.default_rng(seed)
    made: list[Array] = []
    for of in program.in_avals:
        if of.dtype == dtypes.bool_:
            made.append(np.asarray(rng.random(of.shape) < 0.5))
        elif dtypes.is_int(of.dtype):
            low = -3 if dtypes.is_signed(of.dtype) else 0
            made.append(np.asarray(rng.integers(low, low + 7, of.shape)).astype(of.dtype))
        else:
            made.append(np.asarray(rng.uniform(-2, 2, of.shape)).astype(of.dtype))
    return made
