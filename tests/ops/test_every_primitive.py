"""What every primitive must satisfy, whatever it computes; samples come from the classes."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

from vkjit import dtypes
from vkjit.blocks import block_of
from vkjit.errors import UserError
from vkjit.ir.avals import aval
from vkjit.ir.check import check
from vkjit.ir.evaluate import evaluate
from vkjit.ir.parse import parse
from vkjit.ir.primitive import Kind, Op, Sample
from vkjit.ir.program import Program
from vkjit.ir.text import text
from vkjit.ops.registry import PRIMITIVES
from vkjit.trace import trace

from .strategies import (
    draw,
    draw_one,
    float_positions,
    is_float64_sample,
    jvp_program,
    program_of,
    seeds,
    vjp_program,
    widened,
)

Array = np.ndarray[Any, Any]

every = pytest.mark.parametrize("prim", PRIMITIVES, ids=lambda p: p.name)
few = settings(max_examples=2)

SMOOTH = [p for p in PRIMITIVES if any(is_float64_sample(s) for s in p.samples())]
smooth = pytest.mark.parametrize("prim", SMOOTH, ids=lambda p: p.name)

STEP = 1e-5
"""Of central differences in float64: their error is about 1e-10 of the third derivative."""


def assert_close(got: Array, want: Array, of: Sample) -> None:
    """Equal up to the order of float operations; exactly equal for other dtypes."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    if block_of(got.dtype) is not None:
        assert got.tobytes() == want.tobytes()
        return
    if not dtypes.is_float(got.dtype):
        np.testing.assert_array_equal(got, want, err_msg=str(of))
        return
    unit = float(ml_dtypes.finfo(got.dtype).eps)
    np.testing.assert_allclose(
        got.astype(np.float64), want.astype(np.float64), 8 * unit, 8 * unit, err_msg=str(of)
    )


@every
def test_has_samples_with_distinct_parameters(prim: type[Op]) -> None:
    assert prim.samples()
    assert all(type(s.prim) is prim for s in prim.samples())


@every
@few
@given(seed=seeds)
def test_infer_agrees_with_evaluate(prim: type[Op], seed: int) -> None:
    for sample in prim.samples():
        program = program_of(sample)
        check(program)
        evaluate(program, draw(sample, seed))  # raises where shape or dtype differ


@every
def test_text_round_trip(prim: type[Op]) -> None:
    for sample in prim.samples():
        source = text(program_of(sample))
        assert text(parse(source, [prim])) == source


@every
@few
@given(seed=seeds)
def test_batch_equals_a_loop(prim: type[Op], seed: int) -> None:
    size = 3
    rng = np.random.default_rng(seed)
    for sample in prim.samples():
        flag_sets = list(itertools.product((False, True), repeat=len(sample.avals)))
        for flags in flag_sets[1:] if len(flag_sets) <= 8 else flag_sets[-1:]:
            avals = [
                aval((size, *a.shape), a.dtype) if is_batched else a
                for a, is_batched in zip(sample.avals, flags, strict=True)
            ]
            values = [draw_one(a, rng, sample.low, sample.high) for a in avals]
            program = trace(lambda *xs, p=sample.prim, f=flags: p.batch_outs(xs, f), avals).program
            (got,) = evaluate(program, values)
            rows = [
                sample.prim.evaluate_outs(
                    *[v[i] if f else v for v, f in zip(values, flags, strict=True)]
                )[0]
                for i in range(size)
            ]
            assert_close(got, np.stack([np.asarray(r) for r in rows]), sample)


def assert_derivative(program: Program, seed: int, low: float, high: float, of: Sample) -> None:
    """The jvp of ``program`` against central differences, in float64."""
    rng = np.random.default_rng(seed)
    moving = float_positions(program.in_avals)
    inputs = [draw_one(a, rng, low, high) for a in program.in_avals]
    tangents = [draw_one(program.in_avals[i], rng, -1.0, 1.0) for i in moving]
    forward = jvp_program(program)
    check(forward)
    made = evaluate(forward, [*inputs, *tangents])
    got = made[len(program.results) :]
    ends: list[list[Array]] = []
    for step in (STEP, -STEP):
        moved = list(inputs)
        for i, t in zip(moving, tangents, strict=True):
            moved[i] = np.asarray(inputs[i] + step * t)
        ends.append([r for r in evaluate(program, moved) if dtypes.is_float(r.dtype)])
    for tangent, ahead, behind in zip(got, *ends, strict=True):
        want = (ahead - behind) / (2 * STEP)
        np.testing.assert_allclose(tangent, want, 2e-6, 2e-6, err_msg=str(of))


@smooth
@few
@given(seed=seeds)
def test_jvp_agrees_with_differences_to_second_order(prim: type[Op], seed: int) -> None:
    with dtypes.enable_x64():
        for sample in map(widened, filter(is_float64_sample, prim.samples())):
            program = program_of(sample)
            assert_derivative(program, seed, sample.low, sample.high, sample)
            assert_derivative(jvp_program(program), seed, sample.low, sample.high, sample)


@smooth
@few
@given(seed=seeds)
def test_vjp_agrees_with_jvp_to_second_order(prim: type[Op], seed: int) -> None:
    rng = np.random.default_rng(seed)
    with dtypes.enable_x64():
        for sample in map(widened, filter(is_float64_sample, prim.samples())):
            program = program_of(sample)
            inputs = draw(sample, seed)
            moving = float_positions(program.in_avals)
            tangents = [draw_one(program.in_avals[i], rng, -1.0, 1.0) for i in moving]
            cotangent = draw_one(program.out_avals[0], rng, -1.0, 1.0)
            _, moved = evaluate(jvp_program(program), [*inputs, *tangents])
            backward = vjp_program(program)
            check(backward)
            pulled = evaluate(backward, [*inputs, cotangent])
            ahead = float(np.vdot(cotangent, moved))
            back = sum(float(np.vdot(c, t)) for c, t in zip(pulled, tangents, strict=True))
            assert back == pytest.approx(ahead, rel=1e-10, abs=1e-10), sample
            assert_derivative(backward, seed, sample.low, sample.high, sample)


def test_every_differentiable_float_primitive_has_a_smooth_sample() -> None:
    rough = {"cast", "rem", "max", "min"}  # tested by themselves in test_gradients.py
    for prim in PRIMITIVES:
        if prim.traits.differentiable and prim not in SMOOTH:
            assert prim.name in rough, prim


@every
def test_foreign_dtypes_are_refused_with_their_names(prim: type[Op]) -> None:
    """Operands of a dtype the primitive does not take raise, and the message shows the aval."""
    sample = prim.samples()[0]
    if prim.traits.kind is not Kind.POINTWISE or len(sample.avals) < 2:
        return
    mixed = (aval((3, 5), dtypes.int16), *sample.avals[1:])
    if sample.avals[0].dtype == dtypes.int16:
        return
    with pytest.raises(UserError, match=r"i16\[3,5\]|int16"):
        sample.prim.infer_outs(mixed)
