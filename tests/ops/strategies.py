"""Values and programs for the tests of primitives, grown from each primitive's samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from vkjit import dtypes
from vkjit.blocks import drawn
from vkjit.ir.avals import Aval, aval
from vkjit.ir.primitive import Primitive, Sample
from vkjit.ir.program import Program
from vkjit.ops.structural import zeros
from vkjit.passes.jvp import jvp
from vkjit.passes.linearize import linearize
from vkjit.passes.transpose import transpose
from vkjit.trace import apply_program, aval_of, bind, trace

Array = np.ndarray[Any, Any]

seeds = st.integers(0, 2**32 - 1)
"""What a generator starts from: shrinks to 0, and one integer reproduces an example."""


def draw(sample: Sample, seed: int) -> list[Array]:
    """One array for each operand, in the range of the sample."""
    rng = np.random.default_rng(seed)
    return [draw_one(a, rng, sample.low, sample.high) for a in sample.avals]


def draw_one(of: Aval, rng: np.random.Generator, low: float, high: float) -> Array:
    if of.block is not None:
        return drawn(of.block, of.shape, rng)
    if of.dtype == dtypes.bool_:
        return np.asarray(rng.random(of.shape) < 0.5)
    if dtypes.is_int(of.dtype):
        return np.asarray(rng.integers(int(low), int(high) + 1, of.shape)).astype(of.dtype)
    return np.asarray(rng.uniform(low, high, of.shape)).astype(of.dtype)


def special_values(of: Aval, seed: int) -> Array:
    """Edges of the dtype at random places: zeros of both signs, infinities, NaN, limits."""
    rng = np.random.default_rng(seed)
    if of.dtype == dtypes.bool_:
        return np.asarray(rng.random(of.shape) < 0.5)
    if dtypes.is_int(of.dtype):
        limits = np.iinfo(of.dtype)
        edges = [limits.min, limits.min + 1, 0, 1, 2, 7, limits.max // 2, limits.max]
        if dtypes.is_signed(of.dtype):
            edges += [-1, -2, -7]
        return np.asarray(rng.choice(np.array(edges, of.dtype), of.shape))
    edges = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.5, 100.0, -100.0, 1e4, -1e4]
    edges += [np.inf, -np.inf, np.nan, 1e-3, -1e-3]
    return np.asarray(rng.choice(np.array(edges).astype(of.dtype), of.shape))


def is_float64_sample(sample: Sample) -> bool:
    """Whether derivatives can be checked: smooth, and all floats are float32 (made float64)."""
    floats = [a.dtype for a in sample.avals if dtypes.is_float(a.dtype)]
    out = sample.prim.infer_outs(sample.avals)[0]
    return (
        sample.smooth
        and sample.prim.traits.differentiable
        and bool(floats)
        and out.dtype == dtypes.float32
        and all(d == dtypes.float32 for d in floats)
    )


def widened(sample: Sample) -> Sample:
    """The sample with float32 operands and parameters as float64; call it under enable_x64."""
    changed = {
        name: dtypes.float64
        for name, value in sample.prim.parameters().items()
        if value == dtypes.float32
    }
    prim: Primitive = dataclasses.replace(sample.prim, **changed)  # type: ignore[type-var]
    wide = tuple(
        aval(a.shape, dtypes.float64) if a.dtype == dtypes.float32 else a for a in sample.avals
    )
    return Sample(prim, wide, sample.low, sample.high, sample.smooth)


def program_of(sample: Sample) -> Program:
    """The program of one equation."""
    return trace(lambda *xs: [bind(sample.prim, *xs)], sample.avals).program


def float_positions(avals: Sequence[Aval]) -> tuple[int, ...]:
    return tuple(i for i, a in enumerate(avals) if dtypes.is_float(a.dtype))


def jvp_program(program: Program) -> Program:
    """(inputs, tangents of float inputs) to (results, tangents of float results)."""
    count, moving = len(program.params), float_positions(program.in_avals)
    outs = float_positions(program.out_avals)

    def both(*values: Any) -> list[Any]:
        tangents: list[Any] = [None] * count
        for position, value in zip(moving, values[count:], strict=True):
            tangents[position] = value
        results, moved = jvp(program, values[:count], tangents)
        filled = [zeros(aval_of(results[i])) if moved[i] is None else moved[i] for i in outs]
        return [*results, *filled]

    tangent_avals = [program.in_avals[i] for i in moving]
    return trace(both, [*program.in_avals, *tangent_avals]).program


def vjp_program(program: Program) -> Program:
    """(inputs, cotangents of float results) to cotangents of float inputs."""
    count, moving = len(program.params), float_positions(program.in_avals)
    outs = float_positions(program.out_avals)
    forward = jvp_program(program)
    split = linearize(forward, range(count, count + len(moving)), len(program.results))

    def pull(*values: Any) -> list[Any]:
        known = apply_program(split.known, values[:count])
        residuals = known[len(program.results) :]
        back = transpose(split.linear, residuals, values[count:])
        avals = [program.in_avals[i] for i in moving]
        return [zeros(a) if ct is None else ct for a, ct in zip(avals, back, strict=True)]

    cotangents = [program.out_avals[i] for i in outs]
    return trace(pull, [*program.in_avals, *cotangents]).program
