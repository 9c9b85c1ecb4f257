"""One optimizer step: gradients summed over micro-batches, then one update. Pure functions.

The gradient of a step is that of the mean over all its targets, however they are spread over the
micro-batches: sums of losses and gradients are added up and divided once, by the number of targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, assert_never, final

import vkjit as vj
import vkjit.numpy as jnp
from vkjit import optim, random, tree
from vkjit_models.llama.lora import decays
from vkjit_models.llama.loss import LossSpec, objective
from vkjit_models.llama.model import Adapters, Batch, LlamaSpec, LoraPair, Params

from .config import OptimizerSection, RunConfig

LARGEST_SCALE = 2.0**24
"""What a growing loss scale stops at: more gains nothing, float32 sums are exact up to here."""


class TrainState(NamedTuple):
    """What a run carries from step to step.

    Args:
        adapters: The trained weights.
        optimizer: The optimizer's state.
        step: Steps done, int32 scalar.
        loss_scale: Factor on the loss that gradients are computed with, f32 scalar.
        finite_steps: Steps in a row whose gradient was finite, since the scale changed; int32.
        initial: The adapters before the first step where the loss pulls back to them, else None.
    """

    adapters: Any
    optimizer: Any
    step: Any
    loss_scale: Any
    finite_steps: Any
    initial: Any = None


class Totals(NamedTuple):
    """Sums over the micro-batches of a step.

    Args:
        gradients: Of the summed objective, times ``scale``; a pytree like the adapters.
        loss: Sum of the targets' cross-entropies, f32.
        count: Number of targets, f32.
        scale: The loss scale of the step, f32.
        objective: Sum of what is minimised, f32.
        divergence: Sum of the targets' divergences from the base model; NaN without that term.
        pullback: Half the squared distance from the initial adapters; NaN without that term.
    """

    gradients: Any
    loss: Any
    count: Any
    scale: Any
    objective: Any
    divergence: Any
    pullback: Any


class Metrics(NamedTuple):
    """What is reported of a step; f32 scalars.

    Args:
        loss: Mean cross-entropy of the step's targets, before the update.
        objective: Mean of what is minimised: `loss` (smoothed, with z-loss, as configured) plus
            the weighted divergence and pull-back.
        divergence: Mean divergence from the base model, without its weight; NaN without the term.
        pullback: Half the squared distance from the initial adapters, without its weight; NaN
            without the term.
        targets: Number of targets.
        learning_rate: The rate of this step.
        gradient_norm: Norm over all adapter gradients, unscaled, before clipping.
        clipped: 1 if the gradient was scaled down.
        loss_scale: The loss scale that the gradient was computed with.
        skipped: 1 if the gradient was not finite and no weight was changed.
        adapter_norm: Norm over all adapter weights, after the update.
        update_ratio: Norm of the step over `adapter_norm`, 0 where it was skipped.
    """

    loss: Any
    objective: Any
    divergence: Any
    pullback: Any
    targets: Any
    learning_rate: Any
    gradient_norm: Any
    clipped: Any
    loss_scale: Any
    skipped: Any
    adapter_norm: Any
    update_ratio: Any


@final
@dataclass(frozen=True)
class StepSpec:
    """What is constant when the sum of a micro-batch is traced.

    Args:
        model: Sizes, scale and dropout.
        loss: The terms of the loss.
        seed: Of the dropout keys.
    """

    model: LlamaSpec
    loss: LossSpec = field(default_factory=LossSpec)
    seed: int = 0


@final
@dataclass(frozen=True)
class UpdateSpec:
    """What an update does beside the optimizer's rule.

    Args:
        clip_norm: Largest norm of the gradient; 0: no clipping.
        scale_growth: Finite steps after which the loss scale doubles; a step that is not finite
            halves it. 0: it is constant.
    """

    clip_norm: float = 0.0
    scale_growth: int = 0


class Rates(NamedTuple):
    """What an update is scaled by: data of its program, so that runs differing in it share one.

    Args:
        learning_rate: The largest of the schedule, f32 scalar.
        weight_decay: Factor of the decay, f32 scalar.
    """

    learning_rate: Any
    weight_decay: Any


@final
@dataclass(frozen=True)
class StepFunctions:
    """The compiled parts of a step.

    Args:
        zero: ``(adapters, loss_scale) -> Totals`` of nothing.
        accumulate: ``(adapters, totals, batch, place, initial) -> (totals, losses)``; ``place`` is
            the int32 pair (step, micro-batch) that the dropout key is made of. Donates ``totals``.
            ``losses`` are the cross-entropies of the targets in ``batch.rows``, f32 [K], 0 for a
            fill row.
        update: ``(state, totals, rates) -> (state, Metrics)``. Donates ``state``.
        rates: The run's.
    """

    zero: Any
    accumulate: Any
    update: Any
    rates: Rates


def compile_step(spec: LlamaSpec, params: Params, config: RunConfig) -> StepFunctions:
    """The step of a run, compiled at its first call; ``params`` are constants of it."""
    summed = partial(accumulate, StepSpec(spec, config.loss.spec, config.train.seed), params)
    return StepFunctions(
        zero=vj.jit(zero_totals),
        accumulate=vj.jit(summed, donate_argnums=(1,)),
        update=vj.jit(partial(scaled_update, config, spec.lora_frozen), donate_argnums=(0,)),
        rates=rates_of(config.optimizer),
    )


def rates_of(section: OptimizerSection) -> Rates:
    """The scalars of ``section`` that are data of the update."""
    rates = (section.learning_rate, section.weight_decay)
    return Rates(*(jnp.asarray(rate, jnp.float32) for rate in rates))


def initial_state(spec: LlamaSpec, config: RunConfig, adapters: Adapters) -> TrainState:
    """The state before the first step."""
    rates = rates_of(config.optimizer)
    optimizer = make_optimizer(
        config.optimizer, make_schedule(config, rates.learning_rate), rates, spec.lora_frozen
    )
    state = start(optimizer, adapters, config.optimizer.loss_scale)
    if not config.loss.pullback_weight:
        return state
    # Copies: an update that takes the state over must not be handed one array twice.
    return state._replace(initial=tree.map(_copy, adapters))


def start(
    optimizer: optim.GradientTransformation, adapters: Any, loss_scale: float = 1.0
) -> TrainState:
    """The state before the first step of ``optimizer``."""
    none = jnp.zeros((), jnp.int32)
    scale = jnp.asarray(loss_scale, jnp.float32)
    return TrainState(adapters, optimizer.init(adapters), none, scale, jnp.zeros((), jnp.int32))


def zero_totals(adapters: Adapters, loss_scale: Any) -> Totals:
    """Sums over no micro-batch."""
    zeros = [jnp.zeros((), jnp.float32) for _ in range(5)]
    loss, count, *others = zeros
    return Totals(tree.map(jnp.zeros_like, adapters), loss, count, loss_scale, *others)


def accumulate(  # noqa: PLR0913  two constants, then the arguments of the compiled function
    spec: StepSpec,
    params: Params,
    adapters: Adapters,
    totals: Totals,
    batch: Batch,
    place: Any,
    initial: Adapters | None = None,
) -> tuple[Totals, Any]:
    """Adds one micro-batch to the totals; returns them and the loss of each target."""
    key = None
    if spec.model.lora_dropout:
        key = random.fold_in(random.fold_in(random.PRNGKey(spec.seed), place[0]), place[1])

    def summed(adapters: Adapters) -> Any:
        found = objective(spec.model, spec.loss, params, adapters, batch, key, initial)
        return found.total * totals.scale, found

    (_, found), gradients = vj.value_and_grad(summed, has_aux=True)(adapters)
    absent = jnp.full((), jnp.nan, jnp.float32)
    divergence = absent if found.divergences is None else jnp.sum(found.divergences)
    return Totals(
        gradients=tree.map(jnp.add, totals.gradients, gradients),
        loss=totals.loss + jnp.sum(found.losses),
        count=totals.count + jnp.sum(found.counted.astype(jnp.float32)),
        scale=totals.scale,
        objective=totals.objective + found.total,
        divergence=totals.divergence + divergence,
        pullback=absent if found.pullback is None else found.pullback,
    ), found.losses


def unscale_and_clip(gradients: Any, divisor: Any, clip_norm: float) -> tuple[Any, Any, Any]:
    """Divides gradients by ``divisor``, then clips them by one norm over all of them.

    The factor is ``min(1, clip_norm / (norm + 1e-6))``, as in `optim.clip_by_global_norm`; 1
    where ``clip_norm`` is 0.

    Returns:
        The gradients, their norm before clipping (f32 scalar; not finite where any number of them
        is not) and the factor.
    """
    unscaled = tree.map(partial(_divide, divisor), gradients)
    norm = optim.global_norm(unscaled)
    if not clip_norm:
        return unscaled, norm, jnp.ones((), jnp.float32)
    factor = optim.clip_factor(norm, clip_norm)
    return tree.map(partial(_times, factor), unscaled), norm, factor


def scaled_update(
    config: RunConfig, frozen: Sequence[str], state: TrainState, totals: Totals, rates: Rates
) -> tuple[TrainState, Metrics]:
    """`update` by the rule of ``config``, with the learning rate and the decay of ``rates``."""
    section, rate = config.optimizer, make_schedule(config, rates.learning_rate)(state.step)

    # The optimizer's own count stands still in skipped steps, the run's schedule does not.
    def now(_: Any) -> Any:
        return rate

    optimizer = make_optimizer(section, now, rates, frozen)
    rule = UpdateSpec(section.clip_norm, section.loss_scale_growth)
    return update(optimizer, now, rule, state, totals)


def update(
    optimizer: optim.GradientTransformation,
    schedule: optim.Schedule,
    rule: UpdateSpec,
    state: TrainState,
    totals: Totals,
) -> tuple[TrainState, Metrics]:
    """One step from the totals.

    A gradient that is not finite changes nothing but the count of steps and the loss scale.
    """
    count = jnp.maximum(totals.count, 1.0)
    gradients, norm, factor = unscale_and_clip(
        totals.gradients, count * totals.scale, rule.clip_norm
    )
    finite = jnp.isfinite(norm)
    updates, moved = optimizer.update(gradients, state.optimizer, state.adapters)
    choose = partial(jnp.where, finite)
    adapters = tree.map(choose, optim.apply_updates(state.adapters, updates), state.adapters)
    moved = tree.map(choose, moved, state.optimizer)
    size = optim.global_norm(adapters)
    way = optim.global_norm(tree.map(jnp.subtract, adapters, state.adapters))
    metrics = Metrics(
        loss=totals.loss / count,
        objective=totals.objective / count,
        divergence=totals.divergence / count,
        pullback=totals.pullback,
        targets=totals.count,
        learning_rate=schedule(state.step),
        gradient_norm=norm,
        clipped=jnp.logical_and(finite, factor < 1.0).astype(jnp.float32),
        loss_scale=totals.scale,
        skipped=1.0 - finite.astype(jnp.float32),
        adapter_norm=size,
        update_ratio=way / jnp.maximum(size, 1e-30),
    )
    scale, steps = _next_scale(rule.scale_growth, state, finite)
    after = TrainState(adapters, moved, state.step + 1, scale, steps, state.initial)
    return after, metrics


def _next_scale(growth: int, state: TrainState, finite: Any) -> tuple[Any, Any]:
    """Loss scale and finite steps in a row after a step. Micikevicius 2018, arXiv:1710.03740."""
    if not growth:
        return state.loss_scale, state.finite_steps
    steps = jnp.where(finite, state.finite_steps + 1, 0)
    grown = jnp.where(steps >= growth, 2.0 * state.loss_scale, state.loss_scale)
    scale = jnp.where(finite, jnp.minimum(grown, LARGEST_SCALE), 0.5 * state.loss_scale)
    return jnp.maximum(scale, 1.0), jnp.where(steps >= growth, 0, steps)


def make_schedule(config: RunConfig, peak: Any) -> optim.Schedule:
    """The learning rate over the run's steps; ``peak`` is its largest value, f32 scalar."""
    section, steps = config.schedule, config.train.steps
    warmup, end = section.warmup_steps, section.end_share
    match section.name:
        case "cosine":
            shape = optim.schedules.cosine(1.0, steps, warmup, end)
        case "linear":
            shape = optim.schedules.linear(1.0, steps, warmup, end)
        case "constant":
            shape = optim.schedules.constant(1.0, warmup)
        case _:
            assert_never(section.name)

    def schedule(count: Any, /) -> Any:
        return peak * shape(count)

    return schedule


def make_optimizer(
    section: OptimizerSection, schedule: optim.Schedule, rates: Rates, frozen: Sequence[str] = ()
) -> optim.GradientTransformation:
    """The update rule; clipping comes before it, in `unscale_and_clip`.

    Args:
        section: The rule and its settings.
        schedule: The learning rate.
        rates: The factor of the decay.
        frozen: Modules whose adapters do not move, whatever decay says.
    """
    given = {"b1": section.b1, "b2": section.b2}
    betas = {name: value for name, value in given.items() if value is not None}
    decay, toward = rates.weight_decay, section.decay_toward
    mask = decays if toward == "zero" else None
    match section.name:
        case "adamw":
            rule = optim.adamw(
                schedule, eps=section.eps, weight_decay=decay, mask=mask, toward=toward, **betas
            )
        case "lion":
            rule = optim.lion(schedule, weight_decay=decay, mask=mask, toward=toward, **betas)
        case "sgd":
            decayed = optim.add_decayed_weights(decay, mask, toward=toward)
            rule = optim.chain(decayed, optim.sgd(schedule, section.b1 or 0.0))
        case _:
            assert_never(section.name)
    if not frozen:
        return rule
    return optim.chain(rule, optim.freeze(partial(_chosen, frozenset(frozen))))


def _chosen(modules: frozenset[str], adapters: Adapters) -> dict[str, LoraPair]:
    """A bool for each array of ``adapters``: whether its module is one of ``modules``."""
    chosen: dict[str, LoraPair] = {}
    for name, pair in adapters.items():
        flags = (None if array is None else name in modules for array in pair)
        chosen[name] = LoraPair(*flags)
    return chosen


def _divide(divisor: Any, leaf: Any) -> Any:
    return leaf / divisor


def _copy(leaf: Any) -> Any:
    return leaf + jnp.zeros_like(leaf)


def _times(factor: Any, leaf: Any) -> Any:
    return (leaf * factor).astype(leaf.dtype)
