"""Division and square root against NumPy's, with the driver's estimates off by some ULP."""

from __future__ import annotations

import numpy as np
import pytest

from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.interpret import run
from vkjit.lowering.kernel.nodes import Kernel, Value
from vkjit.lowering.kernel.types import (
    F16,
    F32,
    I32,
    Access,
    BinOp,
    ScalarType,
    UnOp,
    lanes_of,
    with_elem,
)
from vkjit.lowering.legalize.division import exact_division, exact_sqrt
from vkjit.lowering.legalize.fused import fused_division, fused_sqrt

ERRORS = [0, 1, -1, 3, -4]
SPECIAL = np.array(
    [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        1.0,
        -1.0,
        3.0,
        1e-45,
        -3e-45,
        1.1754942e-38,
        1.1754944e-38,
        2.3509887e-38,
        3.4028235e38,
        -3.4028235e38,
        1.0000001,
        0.99999994,
        0.1,
    ],
    np.float32,
)


def noisy_builder(error: int) -> Builder:
    """A builder whose DIV and SQRT give floats that are ``error`` ULP away."""
    b = Builder("noisy")
    binary, unary = b.binary, b.unary

    def off(value: Value) -> Value:
        bits = with_elem(value.type, I32)
        by = b.splat(b.const(I32, error), lanes_of(value.type))
        return b.bitcast(b.add(b.bitcast(value, bits), by), value.type)

    def noisy_binary(op: BinOp, x: Value, y: Value) -> Value:
        value = binary(op, x, y)
        return off(value) if op is BinOp.DIV else value

    def noisy_unary(op: UnOp, x: Value) -> Value:
        value = unary(op, x)
        return off(value) if op is UnOp.SQRT else value

    for name, replacement in (("binary", noisy_binary), ("unary", noisy_unary)):
        setattr(b, name, replacement)
    return b


def division(error: int, count: int, elem: ScalarType, lanes: int = 1) -> Kernel:
    b = noisy_builder(error)
    x = b.buffer("x", elem, count, Access.READ)
    y = b.buffer("y", elem, count, Access.READ)
    z = b.buffer("z", elem, count, Access.WRITE)
    i = b.scaled(b.workgroup_id(), lanes)
    b.store(z, i, exact_division(b, b.load(x, i, lanes), b.load(y, i, lanes)))
    return b.finish((count // lanes, 1, 1))


def root(error: int, count: int) -> Kernel:
    b = noisy_builder(error)
    x = b.buffer("x", F32, count, Access.READ)
    z = b.buffer("z", F32, count, Access.WRITE)
    i = b.workgroup_id()
    b.store(z, i, exact_sqrt(b, b.load(x, i)))
    return b.finish((count, 1, 1))


def random_bits(count: int, seed: int) -> np.ndarray:
    """Floats of every size, subnormals, infinities and NaN among them."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, 1 << 32, count, np.uint32).view(np.float32)


def operands() -> tuple[np.ndarray, np.ndarray]:
    """All pairs of special values, random patterns, and quotients at the edge of subnormals."""
    x, y = (a.ravel() for a in np.meshgrid(SPECIAL, SPECIAL))
    generator = np.random.default_rng(2)
    near = generator.uniform(1, 2, (2, 4000)).astype(np.float32)
    tiny = (near[0] * np.float32(1.2e-38)).astype(np.float32)
    ties = (np.arange(1, 2001, dtype=np.float32) * np.float32(1e-45)).astype(np.float32)
    x = np.concatenate([x, random_bits(8000, 0), near[0], tiny, ties])
    y = np.concatenate([y, random_bits(8000, 1), near[1], near[1] * 4, np.full_like(ties, 2)])
    return x[: len(x) // 4 * 4].copy(), y[: len(x) // 4 * 4].copy()


def same_bits(found: np.ndarray, wanted: np.ndarray) -> None:
    nan = np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(found), nan)
    uint = np.uint32 if wanted.dtype == np.float32 else np.uint16
    np.testing.assert_array_equal(found[~nan].view(uint), wanted[~nan].view(uint))


@pytest.mark.parametrize("error", ERRORS)
def test_division_is_correctly_rounded(error: int):
    x, y = operands()
    z = np.empty_like(x)
    run(division(error, len(x), F32), [x, y, z])
    with np.errstate(all="ignore"):
        same_bits(z, x / y)


def test_division_of_vectors_and_halves():
    x, y = operands()
    z = np.empty_like(x)
    run(division(-2, len(x), F32, lanes=4), [x, y, z])
    with np.errstate(all="ignore"):
        same_bits(z, x / y)
        half_x, half_y = x.astype(np.float16), y.astype(np.float16)
        wanted = half_x / half_y
    half_z = np.empty_like(half_x)
    run(division(2, len(x), F16), [half_x, half_y, half_z])
    same_bits(half_z, wanted)


@pytest.mark.parametrize("error", ERRORS)
def test_square_root_is_correctly_rounded(error: int):
    generator = np.random.default_rng(3)
    squares = np.arange(1, 2000, dtype=np.float32) ** 2
    near = generator.uniform(1, 4, 8000).astype(np.float32)
    x = np.concatenate([SPECIAL, squares, near, np.nextafter(squares, 0), random_bits(8000, 4)])
    z = np.empty_like(x)
    run(root(error, len(x)), [x, z])
    with np.errstate(all="ignore"):
        same_bits(z, np.sqrt(x))


def fused(error: int, count: int, elem: ScalarType, lanes: int = 1) -> Kernel:
    """Quotients, and roots of the first operand, by a step with a fused multiply-add."""
    b = noisy_builder(error)
    x = b.buffer("x", elem, count, Access.READ)
    y = b.buffer("y", elem, count, Access.READ)
    z = b.buffer("z", elem, count, Access.WRITE)
    r = b.buffer("r", elem, count, Access.WRITE)
    i = b.scaled(b.workgroup_id(), lanes)
    first = b.load(x, i, lanes)
    b.store(z, i, fused_division(b, first, b.load(y, i, lanes)))
    b.store(r, i, fused_sqrt(b, first))
    return b.finish((count // lanes, 1, 1))


def in_ulp(found: np.ndarray, exact: np.ndarray) -> float:
    rounded = np.abs(exact).astype(np.float32)
    return float(np.max(np.abs(found.astype(np.float64) - exact) / np.spacing(rounded)))


@pytest.mark.parametrize("error", [0, 1, -1, 2, -2])
@pytest.mark.parametrize("lanes", [1, 4])
def test_a_fused_step_leaves_half_an_ulp(error: int, lanes: int):
    generator = np.random.default_rng(5)
    x, y = (2.0 ** generator.uniform(-60, 60, (2, 20000))).astype(np.float32)
    quotient, root_ = np.empty_like(x), np.empty_like(x)
    run(fused(error, len(x), F32, lanes), [x, y, quotient, root_])
    assert in_ulp(quotient, x.astype(np.float64) / y) <= 0.51
    assert in_ulp(root_, np.sqrt(x.astype(np.float64))) <= 0.51


def test_a_fused_step_keeps_what_the_driver_says_of_special_values():
    x, y = operands()
    quotient, root_ = np.empty_like(x), np.empty_like(x)
    run(fused(0, len(x), F32), [x, y, quotient, root_])
    with np.errstate(all="ignore"):
        pairs = ((quotient, x / y), (root_, np.sqrt(x)))
    for found, wanted in pairs:
        ordinary = np.isfinite(wanted) & (wanted != 0)
        same_bits(found[~ordinary], wanted[~ordinary])
        bits = [v[ordinary].view(np.int32).astype(np.int64) for v in (found, wanted)]
        assert np.max(np.abs(bits[0] - bits[1])) <= 1


def test_a_fused_step_of_halves():
    generator = np.random.default_rng(6)
    x, y = (2.0 ** generator.uniform(-4, 4, (2, 4000))).astype(np.float16)
    quotient, root_ = np.empty_like(x), np.empty_like(x)
    run(fused(-2, len(x), F16, 4), [x, y, quotient, root_])
    same_bits(quotient, x / y)
    same_bits(root_, np.sqrt(x))
