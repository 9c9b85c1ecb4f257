"""Largest errors of the float32 expansions, in ULP of the exact result: the table is the promise.

The measure is NumPy in float64 (libm for erf) over a grid of all bit patterns, dense samples where
functions are used, and edges. The interpreter divides and takes roots exactly; a GPU whose division
is off by 2.5 ULP adds that to RSQRT, TAN, ATAN, TANH, ERF and ATAN2. A driver that rounds ``Fma``
twice (lavapipe) differs in the last bit and reaches 1.2 for EXP and EXP2, 6.0 for TANH and 6.3 for
ERF; the others stay within the table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from vkjit.lowering.kernel import interpret_ops as ops
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.check import verify
from vkjit.lowering.kernel.interpret import run
from vkjit.lowering.kernel.nodes import Kernel
from vkjit.lowering.kernel.types import F32, I32, I64, Access, BinOp, UnOp
from vkjit.lowering.legalize import legalize
from vkjit.lowering.target import MINIMAL_GPU, REFERENCE

CPU = dataclasses.replace(REFERENCE, name="cpu-test")
INF, NAN = np.inf, np.nan

# operation: (largest error in ULP, exact function)
UNARY: dict[UnOp, tuple[float, Callable[[np.ndarray], np.ndarray]]] = {
    UnOp.EXP: (1.0, np.exp),
    UnOp.EXP2: (1.0, np.exp2),
    UnOp.EXPM1: (1.5, np.expm1),
    UnOp.LOG: (1.0, np.log),
    UnOp.LOG1P: (1.5, np.log1p),
    UnOp.SIN: (1.6, np.sin),
    UnOp.COS: (1.6, np.cos),
    UnOp.TAN: (3.5, np.tan),
    UnOp.ATAN: (1.5, np.arctan),
    # One rational function of few operations: what rounds off near 1 is the price of its speed.
    UnOp.TANH: (5.5, np.tanh),
    UnOp.ERF: (6.0, ops.erf),
    UnOp.ERF_INV: (2.0, ops.erf_inv),
    UnOp.RSQRT: (1.5, lambda x: 1.0 / np.sqrt(x)),
}
BINARY: dict[BinOp, tuple[float, Callable[[np.ndarray, np.ndarray], np.ndarray]]] = {
    BinOp.POW: (1.5, np.power),
    BinOp.ATAN2: (2.0, np.arctan2),
}
EDGES = np.array(
    [0.0, -0.0, INF, -INF, NAN, 1.0, -1.0, 1e-45, -1e-45, 1.1754942e-38, 3.4028235e38,
     -3.4028235e38, 88.72283, 88.7229, -103.97, -103.98, -87.4, 128.0, 127.99999, -149.0, -150.0,
     -126.5, np.pi / 2, np.pi, 3.1415927, 1e5, 39800.0, 1e9, 1e10, 1e30, 0.99999994, 1.0000001,
     0.5, -0.5, 2.0, -2.0, 3.0, -3.0, 16777218.0],
    np.float32,
)  # fmt: skip


def kernel_of(op: UnOp | BinOp, count: int) -> Kernel:
    b = Builder("f", index_type=I64)
    x, y = (b.buffer(name, F32, count, Access.READ) for name in "xy")
    out = b.buffer("out", F32, count, Access.WRITE)
    i = b.workgroup_id()
    a, c = b.load(x, i), b.load(y, i)
    b.store(out, i, b.unary(op, a) if isinstance(op, UnOp) else b.binary(op, a, c))
    return b.finish(grid=(count, 1, 1))


def computed(op: UnOp | BinOp, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    made = legalize(kernel_of(op, len(x)), CPU)
    verify(made)
    out = np.empty_like(x)
    run(made, [x, y, out])
    return out


def ulps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Distance from the exact result in units of the last place of a float32 of that size."""
    size = np.clip(np.abs(want), 2.0**-126, 2.0**127.5).astype(np.float32)
    with np.errstate(all="ignore"):
        error = np.abs(got.astype(np.float64) - want) / np.spacing(size).astype(np.float64)
        agree = (got == want.astype(np.float32)) | (np.isnan(got) & np.isnan(want))
    error = np.where(agree & (~np.isfinite(error) | np.isinf(got)), 0.0, error)
    return np.where(np.isnan(error), np.inf, error)


def grid() -> np.ndarray:
    step = 16411  # a prime: all exponents and both signs, varied significands
    return np.arange(0, 1 << 32, step, dtype=np.uint64).astype(np.uint32).view(np.float32)


def assert_accurate(got: np.ndarray, want: np.ndarray, limit: float, *inputs: np.ndarray) -> None:
    error = ulps(got, want)
    worst = int(error.argmax())
    at = [float(x[worst]) for x in inputs]
    assert error[worst] <= limit, f"{error[worst]:.2f} ULP at {at}: {got[worst]}, {want[worst]}"
    zero = want == 0.0
    np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(want[zero]))


@pytest.mark.parametrize("op", UNARY, ids=lambda op: op.value)
def test_unary(op: UnOp) -> None:
    limit, exact = UNARY[op]
    rng = np.random.default_rng(1)
    dense = [rng.uniform(-s, s, 50_000) for s in (1.0, 10.0, 150.0)]
    x = np.concatenate([grid(), EDGES, *(d.astype(np.float32) for d in dense)])
    with np.errstate(all="ignore"):
        want = exact(x.astype(np.float64))
    assert_accurate(computed(op, x, x), want, limit, x)


@pytest.mark.parametrize("op", BINARY, ids=lambda op: op.value)
def test_binary(op: BinOp) -> None:
    limit, exact = BINARY[op]
    rng = np.random.default_rng(2)
    n = 60_000
    bits = grid()
    pairs = [
        (rng.permutation(bits)[:n], rng.permutation(bits)[:n]),
        (rng.uniform(0.0, 4.0, n), rng.uniform(-150.0, 150.0, n)),
        (rng.uniform(0.5, 2.0, n), rng.uniform(-300.0, 300.0, n)),
        (np.exp(rng.uniform(-80.0, 80.0, n)), rng.uniform(-2.0, 2.0, n)),
        (-np.exp(rng.normal(size=n)), rng.integers(-20, 20, n)),
        (np.repeat(EDGES, len(EDGES)), np.tile(EDGES, len(EDGES))),
    ]
    x, y = (np.concatenate([np.asarray(p[side], np.float32) for p in pairs]) for side in (0, 1))
    with np.errstate(all="ignore"):
        want = exact(x.astype(np.float64), y.astype(np.float64))
    assert_accurate(computed(op, x, y), want, limit, x, y)


@pytest.mark.parametrize(
    ("op", "x", "want"),
    [
        (UnOp.EXP, [0.0, 100.0, -200.0, INF, -INF], [1.0, INF, 0.0, INF, 0.0]),
        (UnOp.EXP2, [3.0, -149.0, 127.0, 128.0], [8.0, 2.0**-149, 2.0**127, INF]),
        (UnOp.LOG, [1.0, 0.0, -0.0, INF], [0.0, -INF, -INF, INF]),
        (UnOp.LOG1P, [-1.0, INF, 1e-8], [-INF, INF, 1e-8]),
        (UnOp.EXPM1, [-200.0, 200.0, 1e-30], [-1.0, INF, 1e-30]),
        (UnOp.TANH, [20.0, -20.0, INF, 1e-30], [1.0, -1.0, 1.0, 1e-30]),
        (UnOp.ERF, [10.0, -10.0, INF], [1.0, -1.0, 1.0]),
        (UnOp.ERF_INV, [1.0, -1.0, 0.0], [INF, -INF, 0.0]),
    ],
)
def test_exact_values(op: UnOp, x: list[float], want: list[float]) -> None:
    values = np.array(x).astype(np.float32)
    np.testing.assert_array_equal(computed(op, values, values), np.array(want, np.float32))


@pytest.mark.parametrize("op", [UnOp.TANH, UnOp.ERF, UnOp.SIN, UnOp.COS])
def test_never_beyond_one(op: UnOp) -> None:
    x = np.concatenate([np.linspace(0.0, 12.0, 200_000, dtype=np.float32), grid()])
    assert np.nanmax(np.abs(computed(op, x, x))) <= 1.0


@pytest.mark.parametrize("op", [*UNARY, *BINARY])
def test_nan_goes_through(op: UnOp | BinOp) -> None:
    x = np.array([NAN, NAN, 2.0], np.float32)
    y = np.array([NAN, 2.0, NAN], np.float32)
    count = 2 if isinstance(op, UnOp) else 3
    assert np.isnan(computed(op, x[:count], y[:count])).all()


def test_expansions_need_nothing_beyond_float32_and_32_bit_integers() -> None:
    for op in (*UNARY, *BINARY):
        facts = verify(legalize(_in_32_bits(op), MINIMAL_GPU))
        assert {t.name for t in facts.types} <= {"i1", "i32", "f32"}


def _in_32_bits(op: UnOp | BinOp) -> Kernel:
    b = Builder("f", index_type=I32)
    x = b.buffer("x", F32, 4, Access.READ_WRITE)
    a = b.load(x, b.workgroup_id())
    b.store(x, b.workgroup_id(), b.unary(op, a) if isinstance(op, UnOp) else b.binary(op, a, a))
    return b.finish(grid=(4, 1, 1))


def test_vectors_give_the_same_bits_as_scalars() -> None:
    x = np.random.default_rng(3).normal(scale=4.0, size=64).astype(np.float32)
    for op in UNARY:
        b = Builder("f", index_type=I64)
        source = b.buffer("x", F32, 64, Access.READ)
        out = b.buffer("out", F32, 64, Access.WRITE)
        place = b.scaled(b.workgroup_id(), 16)
        b.store(out, place, b.unary(op, b.load(source, place, lanes=16)))
        got = np.empty_like(x)
        run(legalize(b.finish(grid=(4, 1, 1)), CPU), [x, got])
        np.testing.assert_array_equal(got, computed(op, x, x))
