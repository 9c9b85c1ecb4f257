"""Stage ``primitives``: samples of every primitive against their NumPy definition."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from vkjit import dtypes
from vkjit.blocks import drawn
from vkjit.doctor.comparing import Array, Mismatch
from vkjit.doctor.session import Judge, Session
from vkjit.doctor.tolerances import Kind
from vkjit.errors import MissingRuleError
from vkjit.ir.avals import Aval
from vkjit.ir.evaluate import evaluate
from vkjit.ir.primitive import Sample
from vkjit.lowering.compile import compile_program
from vkjit.ops.registry import PRIMITIVES
from vkjit.trace import bind, trace


def primitives(session: Session) -> None:
    """The first sample of every primitive, then the second ones, and so on."""
    for sample in session.cases(list(_in_turns())):
        name = f"{sample.prim} of {', '.join(map(str, sample.avals))}"
        with session.missing_allowed(name, MissingRuleError):
            _check(session, name, sample)


def _in_turns() -> Iterator[Sample]:
    waiting = [prim.samples() for prim in PRIMITIVES]
    for turn in range(max(map(len, waiting))):
        for samples in waiting:
            if turn < len(samples):
                yield samples[turn]


def _check(session: Session, name: str, sample: Sample) -> None:
    """One sample; an exception counts as a mismatch, and the others go on."""
    device = session.device
    arrays = [_drawn(of, sample, session.rng) for of in sample.avals]
    program = trace(partial(_bound, sample), sample.avals).program
    plan = compile_program(program, device.target).plan
    outs = device.load(plan).run([device.upload(np.ascontiguousarray(a)) for a in arrays])
    wanted = evaluate(program, arrays)
    judge = Judge(Kind.ELEMENT, max([a.size for a in arrays], default=1))
    for number, (buffer, of, want) in enumerate(zip(outs, program.out_avals, wanted, strict=True)):
        got = device.download(buffer, of.dtype, of.shape)
        if want.dtype != of.dtype:
            session.report(Mismatch(name, 1, 1, (), str(of.dtype), str(want.dtype), np.inf, 0.0))
        got, want = _plain(got, of), _plain(want, of)
        session.compare(f"{name}, result {number}", got, want, judge.limit(got.dtype))


def _drawn(of: Aval, sample: Sample, rng: np.random.Generator) -> Array:
    """Values for one operand in the range of the sample."""
    low, high = sample.low, sample.high
    if of.block is not None:
        return drawn(of.block, of.shape, rng)
    if of.dtype == dtypes.bool_:
        return np.asarray(rng.random(of.shape) < 0.5)
    if dtypes.is_int(of.dtype):
        info = np.iinfo(of.dtype)
        first, last = max(int(low), info.min), min(int(high), info.max)
        return np.asarray(rng.integers(first, last + 1, of.shape)).astype(of.dtype)
    values = np.asarray(rng.random(of.shape) * (high - low) + low)
    return values.astype(np.float32).astype(of.dtype)


def _plain(values: Array, of: Aval) -> Array:
    """Blocks as their bytes; numbers as they are."""
    if of.block is None:
        return values
    return np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8)


def _bound(sample: Sample, *values: Any) -> list[Any]:
    return [bind(sample.prim, *values)]
