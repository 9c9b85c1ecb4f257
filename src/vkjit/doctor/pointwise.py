"""Stage ``pointwise``: every elementary function in units in the last place of the exact result."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import vkjit.numpy as jnp
from vkjit import lax
from vkjit.doctor.comparing import PLANTED, Array
from vkjit.doctor.session import Program, Session
from vkjit.doctor.tolerances import NARROW_ULPS, ULPS, DType, format_of
from vkjit.errors import MissingRuleError
from vkjit.lowering.kernel import interpret_ops

Exact = Callable[..., Any]


def _one_over_root(x: Array) -> Array:
    return 1.0 / np.sqrt(x)


UNARY: dict[str, tuple[Callable[[Any], Any], Exact]] = {
    "sqrt": (jnp.sqrt, np.sqrt),
    "rsqrt": (lax.rsqrt, _one_over_root),
    "reciprocal": (jnp.reciprocal, np.reciprocal),
    "exp": (jnp.exp, np.exp),
    "exp2": (jnp.exp2, np.exp2),
    "expm1": (jnp.expm1, np.expm1),
    "log": (jnp.log, np.log),
    "log1p": (jnp.log1p, np.log1p),
    "sin": (jnp.sin, np.sin),
    "cos": (jnp.cos, np.cos),
    "tan": (jnp.tan, np.tan),
    "arctan": (jnp.arctan, np.arctan),
    "tanh": (jnp.tanh, np.tanh),
    "erf": (lax.erf, interpret_ops.erf),
    "erf_inv": (lax.erf_inv, interpret_ops.erf_inv),
}
BINARY: dict[str, tuple[Callable[[Any, Any], Any], Exact]] = {
    "add": (jnp.add, np.add),
    "subtract": (jnp.subtract, np.subtract),
    "multiply": (jnp.multiply, np.multiply),
    "divide": (jnp.divide, np.divide),
    "power": (jnp.power, np.power),
    "arctan2": (jnp.arctan2, np.arctan2),
}
_INF, _NAN = np.inf, np.nan
_EDGES = (0.0, -0.0, _INF, -_INF, _NAN, 1.0, -1.0, 1e-45, 1.1754942e-38, 3.4e38, -3.4e38, 88.72283,
          88.7229, -103.97, -87.4, 128.0, -149.0, -126.5, 0.5, -0.5, 2.0, -3.0, 39800.0, 1e10, 1e30,
          0.99999994, 1.0000001, 3.1415927, 1.5707964)  # fmt: skip
_STEPS = {np.dtype(np.float32): 65_537, np.dtype(np.float16): 7, np.dtype(ml_dtypes.bfloat16): 7}
"""Distance of the bit patterns that are tried: all exponents, both signs, varied significands."""


def pointwise(session: Session) -> None:
    """The table of errors, dtype by dtype; figures hold the largest of each function."""
    dtypes = list(_STEPS)
    names = [(dtype, name) for dtype in dtypes for name in (*BINARY, *UNARY)]
    for dtype, name in session.cases(names):
        with session.missing_allowed(f"{name} {dtype}", MissingRuleError):
            _judge(session, name, dtype)


def _judge(session: Session, name: str, dtype: DType) -> None:
    """Compares one function in one dtype with float64."""
    function, exact = UNARY.get(name) or BINARY[name]
    inputs = _inputs(session, dtype, 1 if name in UNARY else 2)
    got = np.asarray(Program(session.device, function, inputs)(*inputs))
    if session.planted:
        with np.errstate(over="ignore"):
            got = (got.astype(np.float64) * (1 + PLANTED)).astype(dtype)
    limit = ULPS[name] if dtype == np.float32 else NARROW_ULPS
    # A driver may take each subnormal operand for a zero of either sign, or for what it is.
    readings = [(x, _flushed(x, keeps_sign=True), _flushed(x, keeps_sign=False)) for x in inputs]
    wanted = [_exactly(exact, list(read)) for read in itertools.product(*readings)]
    error = np.min([_ulps(got, want, dtype) for want in wanted], axis=0)
    worst = int(error.argmax())
    session.figures.setdefault(name, {})[dtype.name] = round(float(error[worst]), 2)
    session.worst = max(session.worst, float(error[worst]) / limit)
    at = ", ".join(repr(float(x[worst])) for x in inputs)
    session.require(
        f"{name} of {dtype} at {at}: {error[worst]:.2f} ULP, allowed {limit}",
        holds=bool(error[worst] <= limit + 1e-6),
        got=repr(float(got[worst])),
        wanted=repr(float(_exactly(exact, inputs)[worst])),
    )


def _inputs(session: Session, dtype: DType, count: int) -> list[Array]:
    """Bit patterns of all sizes, edges, and values where functions are used."""
    bits = 8 * dtype.itemsize
    step = _STEPS[dtype] * (4 if session.quick else 1)
    whole = np.arange(0, 1 << bits, step, dtype=np.uint64)
    patterns: Array = whole.astype(np.dtype(f"u{dtype.itemsize}")).view(dtype)
    with np.errstate(over="ignore"):  # the largest numbers become infinite in float16
        edges = np.array(_EDGES).astype(np.float32).astype(dtype)
    dense = np.concatenate([session.rng.uniform(-s, s, 2000) for s in (1.0, 10.0, 90.0)])
    dense = dense.astype(np.float32).astype(dtype)
    if count == 1:
        return [np.concatenate([patterns, edges, dense])]
    first = np.concatenate([patterns, np.repeat(edges, len(edges)), np.abs(dense)])
    shuffled = session.rng.permutation(patterns)
    second = np.concatenate([shuffled, np.tile(edges, len(edges)), session.rng.permutation(dense)])
    return [first, second]


def _exactly(exact: Exact, inputs: list[Array]) -> Array:
    with np.errstate(all="ignore"):
        return np.asarray(exact(*[x.astype(np.float64) for x in inputs]))


def _flushed(x: Array, *, keeps_sign: bool) -> Array:
    """Subnormals as zeros."""
    with np.errstate(invalid="ignore"):
        small = np.abs(x.astype(np.float64)) < format_of(x.dtype).tiny
    zero = np.zeros_like(x)
    return np.where(small, np.copysign(zero, x) if keeps_sign else zero, x)


def _ulps(got: Array, want: Array, dtype: DType) -> Array:
    """Distances from the exact results; subnormal results may be zero."""
    limits = format_of(dtype)
    with np.errstate(all="ignore"):
        wide, rounded = got.astype(np.float64), want.astype(dtype).astype(np.float64)
        size = np.clip(np.abs(want), limits.tiny, limits.largest)
        spacing = 2.0 ** np.floor(np.log2(size)) * limits.eps
        error = np.abs(wide - want) / spacing
        same = (wide == rounded) | (np.isnan(wide) & np.isnan(want))
        same |= (wide == 0.0) & (np.abs(want) < limits.tiny)
    error = np.where(same & ~(error < 1.0), 0.0, error)
    return np.where(np.isnan(error), np.inf, error)
