"""Stage ``memory``: what is taken is given back, and a call takes what was predicted."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np

import vkjit.numpy as jnp
from vkjit.api.autodiff import value_and_grad
from vkjit.doctor.session import Judge, Program, Session
from vkjit.doctor.tolerances import Kind
from vkjit.runtime import open_device
from vkjit.runtime.device import Device

_SIZES = (0, 1, 255, 4096, (1 << 20) + 1, 64 << 20)
_ROUNDING = 7e-3
"""Share that alignment of the arrays may add to what was predicted."""


def memory(session: Session) -> None:
    """Allocations and releases, prediction against measurement, nothing alive after closing."""
    device = session.device
    gc.collect()  # what earlier stages left in cycles must not go during a measurement
    for size in session.cases(_SIZES):
        before = device.memory_stats().live_bytes
        buffer = device.allocate(size)
        taken = device.memory_stats().live_bytes - before
        session.require(
            f"allocation of {size} bytes", holds=taken >= size, got=f"{taken}", wanted=f"{size}"
        )
        buffer.release()
        device.synchronize()
        left = np.int64(device.memory_stats().live_bytes - before)
        session.compare(f"bytes left by an allocation of {size}", left, np.int64(0))
    # Where memory comes in pages, small arrays would take a larger share than is allowed.
    small = 256 if device.name.startswith("vulkan") else 512
    for width in session.cases((small,) if session.quick else (small, 1024)):
        _prediction(session, width)
    stats = device.memory_stats()
    session.figures["peak MiB"] = round(stats.peak_bytes / (1 << 20), 1)
    session.figures["limit MiB"] = stats.limit_bytes >> 20


def _prediction(session: Session, width: int) -> None:
    """The peak of a device of its own after a call against the plan's, and what closing leaves."""
    fresh = open_device(session.device.name)
    try:
        _run_a_step(session, fresh, width)
    finally:
        fresh.close()
    counts: dict[str, int] = getattr(fresh, "live_objects", dict[str, int])()
    session.require(
        f"objects alive after closing, width {width}",
        holds=not counts,
        got=f"{counts}",
        wanted="none",
    )


def _run_a_step(session: Session, fresh: Device, width: int) -> None:
    args = [session.rng.standard_normal((width, width)).astype(np.float32) for _ in range(3)]

    def step(w: Any, x: Any, y: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean((jnp.tanh(x @ w) - y) ** 2)

        return value_and_grad(loss)(w)

    program = Program(fresh, step, args)
    held = program.put(args)
    got = program.get(program.run(held))
    measured = fresh.memory_stats().peak_bytes
    predicted = program.lowered.memory().peak
    session.compare(
        f"bytes of a step of width {width}",
        np.float64(measured),
        np.float64(predicted),
        _ROUNDING,
    )
    want = Program(session.host, step, args)(*args)
    session.trees(f"a step of width {width}", got, want, Judge(Kind.LAYER, width * width))
