"""Stage ``timing``: figures of speed. Slow is no fault; a wrong result of a large case is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import numpy as np

import vkjit.numpy as jnp
from vkjit import nn
from vkjit.doctor.comparing import Array
from vkjit.doctor.session import Program, Session
from vkjit.doctor.tolerances import Kind, SumBound, allowed
from vkjit.errors import MissingRuleError, OutOfMemoryError
from vkjit.lowering.artifact import Launch, leaves

_REPEATS = 7
_SAMPLE_SECONDS = 10e-3
"""One timing holds so many calls, queued behind each other, that it lasts this long."""
_MOST_CALLS = 256
_WARM_UP_SECONDS, _QUICK_WARM_UP_SECONDS = 0.5, 0.05
"""Work before the first timing: idle GPUs run at a fifth of their speed (H200), and take 0.3
seconds to change that."""


@final
@dataclass(frozen=True)
class _Timed:
    """Median seconds of one call, the result and the kernels."""

    seconds: float
    result: Array
    kernels: str


def timing(session: Session) -> None:
    """Bandwidth of x + 1 and of row softmax, rates of square products in float32 and float16."""
    sizes = (256,) if session.quick else (1024, 2048, 4096)
    halves = (128,) if session.quick else (1024, 4096)
    cases: list[partial[float]] = [
        partial(_add_one, 1 << 18 if session.quick else 1 << 26),
        partial(_softmax, 64 if session.quick else 8192),
        *[partial(_product, n, np.float32) for n in sizes],
        *[partial(_product, n, np.float16) for n in halves],
    ]
    ahead = 0.0
    for case in session.cases(cases):
        if ahead > session.left():
            session.notes.append(f"not timed, too slow: {case.args}")
            continue
        with session.missing_allowed(str(case.args), MissingRuleError, OutOfMemoryError):
            took = case(session)
            # A product of twice the size takes eight times as long.
            ahead = _WARM_UP_SECONDS + 8 * took * (_REPEATS + 2) if case.func is _product else 0.0


def _measured(session: Session, function: Callable[..., Any], *args: Array) -> _Timed:
    """Times calls with all arrays on the device, which is at full speed."""
    device = session.device
    program = Program(device, function, args)
    buffers = program.put(list(args))
    outs = program.run(buffers)
    device.synchronize()
    warm_up = _QUICK_WARM_UP_SECONDS if session.quick else _WARM_UP_SECONDS
    calls = _warmed_up(program, buffers, warm_up)
    times = [_seconds(program, buffers, calls) for _ in range(_REPEATS)]
    names = [s.kernel.name for s in leaves(program.lowered.plan.steps) if isinstance(s, Launch)]
    (result,) = program.get(outs)
    return _Timed(float(np.median(times)), result, ", ".join(names))


def _warmed_up(program: Program, buffers: Any, seconds: float) -> int:
    """Works for so long, and returns how many calls a timing has to hold."""
    started, calls = time.perf_counter(), 1
    while True:
        spent = calls * _seconds(program, buffers, calls)
        if spent < _SAMPLE_SECONDS and calls < _MOST_CALLS:
            calls *= 2
        elif time.perf_counter() - started >= seconds:
            return calls


def _seconds(program: Program, buffers: Any, calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        program.run(buffers)
    program.device.synchronize()
    return (time.perf_counter() - started) / calls


def _record(session: Session, what: str, found: _Timed, unit: str, amount: float) -> None:
    rate = amount / found.seconds / 1e9
    session.figures[what] = f"{found.seconds * 1e3:.4g} ms, {rate:.4g} {unit} ({found.kernels})"


def _add_one(count: int, session: Session) -> float:
    x = session.rng.random(count, np.float32)
    found = _measured(session, _plus_one, x)
    _record(session, f"x + 1 on {count}", found, "GB/s", 2 * x.nbytes)
    session.compare(f"x + 1 on {count}", found.result, x + np.float32(1))
    return found.seconds


def _plus_one(x: Any) -> Any:
    return x + 1


def _softmax(rows: int, session: Session) -> float:
    x = session.rng.standard_normal((rows, 2048), np.float32)
    found = _measured(session, nn.softmax, x)
    _record(session, f"softmax of {rows} x 2048", found, "GB/s", 2 * x.nbytes)
    some = slice(None, None, max(1, rows // 16))
    part = np.exp(x[some].astype(np.float64))
    want = (part / part.sum(axis=1, keepdims=True)).astype(np.float32)
    limit = allowed(Kind.LAYER, want.dtype, 2048)
    session.compare(f"softmax of {rows} x 2048", found.result[some], want, limit)
    return found.seconds


def _product(n: int, kind: type[Any], session: Session) -> float:
    x, y = (session.rng.standard_normal((n, n), np.float32).astype(kind) for _ in range(2))
    found = _measured(session, jnp.matmul, x, y)
    what = f"product of {n} in {np.dtype(kind)}"
    _record(session, what, found, "GF/s", 2.0 * n**3)
    rows = slice(None, None, max(1, n // 16))
    left, right = x[rows].astype(np.float64), y.astype(np.float64)
    of = np.abs(left) @ np.abs(right), SumBound(Kind.SUM, np.dtype(kind), n)
    session.compare_sums(what, found.result[rows], (left @ right).astype(kind), of)
    return found.seconds
