"""Stages ``reduction of gradients``, ``optimizer`` and ``precision``."""

from __future__ import annotations

from typing import Any

import numpy as np

import vkjit.numpy as jnp
from vkjit import optim, tree
from vkjit.api.autodiff import grad
from vkjit.doctor.session import Judge, Program, Session
from vkjit.doctor.tolerances import Kind, allowed
from vkjit.errors import MissingRuleError

LOSS_SCALE = 128.0
"""The factor of the loss that keeps small gradients representable in float16."""
_OVERFLOWING = 2.0**20
"""A factor that makes gradients in float16 infinite."""


def accumulation(session: Session) -> None:
    """Bias gradients over many rows; gradients of microbatches add up to those of the batch."""
    rows, width, parts = (1000, 9, 4) if session.quick else (30_000, 33, 8)
    x, y = (session.rng.standard_normal((rows, width)).astype(np.float32) for _ in range(2))
    w = (session.rng.standard_normal((width, width)) * width**-0.5).astype(np.float32)
    bias = np.zeros(width, np.float32)

    def gradients(w: Any, bias: Any, x: Any, y: Any) -> Any:
        def loss(w: Any, bias: Any) -> Any:
            return jnp.sum((jnp.tanh(x @ w + bias) - y) ** 2)

        return grad(loss, (0, 1))(w, bias)

    judge = Judge(Kind.LAYER, rows)
    whole = session.both(f"gradients over {rows} rows", gradients, (w, bias, x, y), judge)
    size = rows // parts
    program = Program(session.device, gradients, (w, bias, x[:size], y[:size]))
    total: Any = tree.map(np.zeros_like, whole)
    for start in range(0, rows, size):
        part = program(w, bias, x[start : start + size], y[start : start + size])
        total = tree.map(np.add, total, part)
    session.trees(f"{parts} microbatches against the batch", total, whole, judge)


def optimizer(session: Session) -> None:
    """AdamW with clipping by the global norm: parameters and moments after some steps."""
    rng, steps = session.rng, 3 if session.quick else 10
    shapes = {"w": (33, 65), "b": (65,), "scale": (9,)}
    params = {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}
    rule = optim.chain(
        optim.clip_by_global_norm(1.0), optim.adamw(1e-2, weight_decay=0.1), optim.scale(1.0)
    )

    def update(params: Any, moments: Any, gradients: Any) -> Any:
        updates, moments = rule.update(gradients, moments, params)
        return optim.apply_updates(params, updates), moments

    for size in session.cases((1e-3, 1.0, 1e3)):
        gradients = [
            {k: np.float32(size) * rng.standard_normal(s).astype(np.float32) for k, s in
             shapes.items()} for _ in range(steps)
        ]  # fmt: skip
        ends: list[Any] = []
        for device in (session.device, session.host):
            state = params, Program(device, rule.init, (params,))(params)
            program = Program(device, update, (*state, gradients[0]))
            for gradient in gradients:
                state = program(*state, gradient)
            ends.append(state)
        judge = Judge(Kind.STEP, sum(p.size for p in params.values()))
        session.trees(f"AdamW, gradients of {size:g}, {steps} steps", ends[0], ends[1], judge)


def precision(session: Session) -> None:
    """Gradients of a float16 network under a loss scale against those in float32.

    The scaled loss and the backward pass are float16 (sums float32); unscaled gradients must be
    finite, equal on both devices and close to float32 ones.
    """
    rng, width, rows = session.rng, 24, 16
    params = [
        (rng.standard_normal((width, width)) * width**-0.5).astype(np.float32) for _ in range(2)
    ]
    x = rng.standard_normal((rows, width)).astype(np.float32)
    y = (rng.standard_normal((rows, width)) * 0.1).astype(np.float32)
    scale = _OVERFLOWING if session.overflow_planted else LOSS_SCALE
    for _ in session.cases((LOSS_SCALE,)):
        with session.missing_allowed("float16", MissingRuleError):
            half = [
                Program(d, _scaled_gradients, (params, x, y, np.float32(scale)))(
                    params, x, y, np.float32(scale)
                )
                for d in (session.device, session.host)
            ]
            single = Program(session.host, _gradients, (params, x, y))(params, x, y)
            _judge(session, half, single, width * rows)


def _judge(session: Session, half: list[Any], single: Any, length: int) -> None:
    """Finite; the same on both devices; close to float32."""
    flat = np.concatenate([np.asarray(g).ravel() for g in tree.leaves(half[0])])
    lost = int(np.sum(~np.isfinite(flat)))
    session.require(
        f"gradients in float16 at loss scale {LOSS_SCALE:g}",
        holds=lost == 0,
        got=f"{lost} of {flat.size} overflowed",
        wanted="finite numbers",
    )
    # Four roundings to float16 stand in a row: two layers, the loss, its scale.
    roundings = 4
    bound = roundings * allowed(Kind.SUM, np.dtype(np.float16), length)
    for number, (got, same, exact) in enumerate(zip(half[0], half[1], single, strict=True)):
        session.compare(f"float16 gradient {number} on both devices", got, same, bound)
        session.compare(f"float16 gradient {number} against float32", got, exact, bound)


def _scaled_gradients(params: Any, x: Any, y: Any, scale: Any) -> Any:
    """Unscaled float32 gradients of the loss computed in float16 and multiplied by ``scale``."""

    def loss(params: Any) -> Any:
        half = [p.astype(jnp.float16) for p in params]
        out = _network(half, x.astype(jnp.float16))
        return jnp.sum(out * y.astype(jnp.float16)) * scale.astype(jnp.float16)

    return [g / scale for g in grad(loss)(params)]


def _gradients(params: Any, x: Any, y: Any) -> Any:
    def loss(params: Any) -> Any:
        return jnp.sum(_network(params, x) * y)

    return grad(loss)(params)


def _network(params: Any, x: Any) -> Any:
    first, second = params
    return jnp.tanh(x @ first) @ second
