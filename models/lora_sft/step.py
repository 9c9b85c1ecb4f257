"""One optimizer step: gradients summed over micro-batches, then one update. Pure functions.

The gradient of a step is that of the mean over all its targets, however they are spread over the
micro-batches: sums of losses and gradients are added up and divided once, by the number of targets.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, assert_never, final

import vkjit as vj
import vkjit.numpy as jnp
from vkjit import optim, random, tree
from vkjit_models.llama.model import Adapters, Batch, LlamaSpec, Params, loss_and_count

from .config import OptimizerSection, RunConfig


class TrainState(NamedTuple):
    """What a run carries from step to step.

    Args:
        adapters: The trained weights.
        optimizer: The optimizer's state.
        step: Steps done, int32 scalar.
    """

    adapters: Any
    optimizer: Any
    step: Any


class Totals(NamedTuple):
    """Sums over the micro-batches of a step.

    Args:
        gradients: Of the summed loss; a pytree like the adapters.
        loss: Sum of the targets' cross-entropies, f32.
        count: Number of targets, f32.
    """

    gradients: Any
    loss: Any
    count: Any


class Metrics(NamedTuple):
    """What is reported of a step; f32 scalars.

    Args:
        loss: Mean cross-entropy of the step's targets, before the update.
        targets: Number of targets.
        learning_rate: The rate of this step.
        gradient_norm: Norm over all adapter gradients, before clipping.
        clipped: 1 if the gradient was scaled down.
        skipped: 1 if the gradient was not finite and nothing was changed.
        adapter_norm: Norm over all adapter weights, after the update.
    """

    loss: Any
    targets: Any
    learning_rate: Any
    gradient_norm: Any
    clipped: Any
    skipped: Any
    adapter_norm: Any


@final
@dataclass(frozen=True)
class StepFunctions:
    """The compiled parts of a step.

    Args:
        zero: ``adapters -> Totals`` of nothing.
        accumulate: ``(adapters, totals, batch, place) -> totals``; ``place`` is the int32 pair
            (step, micro-batch) that the dropout key is made of. Donates ``totals``.
        update: ``(state, totals) -> (state, Metrics)``. Donates ``state``.
    """

    zero: Any
    accumulate: Any
    update: Any


def compile_step(spec: LlamaSpec, params: Params, config: RunConfig) -> StepFunctions:
    """The step of a run, compiled at its first call; ``params`` are constants of it."""
    schedule = make_schedule(config)
    optimizer = make_optimizer(config.optimizer, schedule)
    summed = partial(accumulate, spec, params, config.train.seed)
    return StepFunctions(
        zero=vj.jit(zero_totals),
        accumulate=vj.jit(summed, donate_argnums=(1,)),
        update=vj.jit(
            partial(update, optimizer, schedule, config.optimizer.clip_norm),
            donate_argnums=(0,),
        ),
    )


def initial_state(config: RunConfig, adapters: Adapters) -> TrainState:
    """The state before the first step."""
    optimizer = make_optimizer(config.optimizer, make_schedule(config))
    return TrainState(adapters, optimizer.init(adapters), jnp.zeros((), jnp.int32))


def zero_totals(adapters: Adapters) -> Totals:
    """Sums over no micro-batch."""
    zero = jnp.zeros((), jnp.float32)
    return Totals(tree.map(jnp.zeros_like, adapters), zero, zero)


def accumulate(  # noqa: PLR0913  three constants, then the arguments of the compiled function
    spec: LlamaSpec,
    params: Params,
    seed: int,
    adapters: Adapters,
    totals: Totals,
    batch: Batch,
    place: Any,
) -> Totals:
    """Adds one micro-batch to the totals."""
    key = None
    if spec.lora_dropout:
        key = random.fold_in(random.fold_in(random.PRNGKey(seed), place[0]), place[1])

    def summed(adapters: Adapters) -> Any:
        return loss_and_count(spec, params, adapters, batch, key)

    (loss, count), gradients = vj.value_and_grad(summed, has_aux=True)(adapters)
    return Totals(
        tree.map(jnp.add, totals.gradients, gradients), totals.loss + loss, totals.count + count
    )


def update(
    optimizer: optim.GradientTransformation,
    schedule: optim.Schedule,
    clip_norm: float,
    state: TrainState,
    totals: Totals,
) -> tuple[TrainState, Metrics]:
    """One step from the totals; a gradient that is not finite changes nothing but the count."""
    count = jnp.maximum(totals.count, 1.0)
    gradients = tree.map(partial(_divide, count), totals.gradients)
    norm = optim.global_norm(gradients)
    finite = jnp.isfinite(norm)
    updates, moved = optimizer.update(gradients, state.optimizer, state.adapters)
    adapters = optim.apply_updates(state.adapters, updates)
    choose = partial(jnp.where, finite)
    adapters = tree.map(choose, adapters, state.adapters)
    moved = tree.map(choose, moved, state.optimizer)
    clips = jnp.zeros((), jnp.float32)
    if clip_norm:
        clips = (optim.clip_factor(norm, clip_norm) < 1.0).astype(jnp.float32)
    metrics = Metrics(
        loss=totals.loss / count,
        targets=totals.count,
        learning_rate=schedule(state.step),
        gradient_norm=norm,
        clipped=clips,
        skipped=1.0 - finite.astype(jnp.float32),
        adapter_norm=optim.global_norm(adapters),
    )
    return TrainState(adapters, moved, state.step + 1), metrics


def make_schedule(config: RunConfig) -> optim.Schedule:
    """The learning rate over the run's steps."""
    peak, steps = config.optimizer.learning_rate, config.train.steps
    section = config.schedule
    warmup, end = section.warmup_steps, peak * section.end_share
    match section.name:
        case "cosine":
            return optim.schedules.cosine(peak, steps, warmup, end)
        case "linear":
            return optim.schedules.linear(peak, steps, warmup, end)
        case "constant":
            return optim.schedules.constant(peak, warmup)
        case _:
            assert_never(section.name)


def make_optimizer(
    section: OptimizerSection, schedule: optim.Schedule
) -> optim.GradientTransformation:
    """Clipping, then the update rule."""
    given = {"b1": section.b1, "b2": section.b2}
    betas = {name: value for name, value in given.items() if value is not None}
    match section.name:
        case "adamw":
            rule = optim.adamw(
                schedule, eps=section.eps, weight_decay=section.weight_decay, **betas
            )
        case "lion":
            rule = optim.lion(schedule, weight_decay=section.weight_decay, **betas)
        case "sgd":
            decay = optim.add_decayed_weights(section.weight_decay)
            rule = optim.chain(decay, optim.sgd(schedule, section.b1 or 0.0))
        case _:
            assert_never(section.name)
    if not section.clip_norm:
        return rule
    return optim.chain(optim.clip_by_global_norm(section.clip_norm), rule)


def _divide(count: Any, leaf: Any) -> Any:
    return leaf / count
