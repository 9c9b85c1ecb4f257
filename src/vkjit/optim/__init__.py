"""Optimizers as pairs of pure functions, composed with `chain`.

    optimizer = chain(clip_by_global_norm(1.0), adamw(schedules.cosine(3e-4, 1000, 50)))
    state = optimizer.init(params)
    updates, state = optimizer.update(gradients, state, params)
    params = apply_updates(params, updates)

Names, argument order and semantics are Optax's where Optax has the thing; the differences are
`clip_by_global_norm` (PyTorch's 1e-6) and the schedules (warm-up as an argument).
"""

from __future__ import annotations

from vkjit.optim import schedules
from vkjit.optim.adam import AdamState, adam, adamw, scale_by_adam
from vkjit.optim.base import (
    EmptyState,
    GradientTransformation,
    Params,
    State,
    apply_updates,
    chain,
    identity,
)
from vkjit.optim.clipping import clip_by_global_norm, clip_factor, global_norm
from vkjit.optim.decay import DecayState, Mask, Toward, add_decayed_weights, freeze
from vkjit.optim.lion import LionState, lion, scale_by_lion
from vkjit.optim.scaling import (
    ScheduleState,
    scale,
    scale_by_learning_rate,
    scale_by_schedule,
)
from vkjit.optim.schedules import Schedule
from vkjit.optim.sgd import MomentumState, momentum, scale_by_momentum, sgd

__all__ = [
    "AdamState",
    "DecayState",
    "EmptyState",
    "GradientTransformation",
    "LionState",
    "Mask",
    "MomentumState",
    "Params",
    "Schedule",
    "ScheduleState",
    "State",
    "Toward",
    "adam",
    "adamw",
    "add_decayed_weights",
    "apply_updates",
    "chain",
    "clip_by_global_norm",
    "clip_factor",
    "freeze",
    "global_norm",
    "identity",
    "lion",
    "momentum",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_momentum",
    "scale_by_schedule",
    "schedules",
    "sgd",
]
