"""The gradient of a step: of cross-entropy, divergence and pull-back together, however split."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from vkjit import optim, random, tree
from vkjit_models.common.packing import Document, pack_best_fit
from vkjit_models.llama.lora import LoraSpec, init_adapters, plan_adapters
from vkjit_models.llama.loss import LossSpec, objective
from vkjit_models.lora_sft.base import BaseModel, load_base
from vkjit_models.lora_sft.config import parse_config
from vkjit_models.lora_sft.data import WindowSet, load_data
from vkjit_models.lora_sft.evaluate import Evaluator
from vkjit_models.lora_sft.step import (
    StepSpec,
    Totals,
    UpdateSpec,
    accumulate,
    start,
    update,
    zero_totals,
)

from .conftest import GGUF

EVERYTHING = LossSpec(label_smoothing=0.1, kl="tmkl", kl_weight=0.3, pullback_weight=0.05)
PLACE = np.zeros(2, np.int32)


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return load_base(str(GGUF), "float32")


@pytest.fixture(scope="module")
def windows(base: BaseModel, conversations: Path) -> WindowSet:
    """At least eight windows, most of them with two records."""
    data = {"jsonl": str(conversations), "context": 80, "held_out": 0.1}
    config = parse_config({"data": data, "train": {"steps": 1}, "output": {"folder": "unused"}})
    return load_data(config.data, base.tokenizer, 0).train


@pytest.fixture(scope="module")
def model(base: BaseModel) -> tuple[Any, Any, Any]:
    """Spec, adapters away from their initial values, and those values."""
    plan = plan_adapters(base.hyper, LoraSpec(2, 4.0, ("q_proj", "down_proj")))
    initial = init_adapters(plan, random.PRNGKey(0))
    noise = np.random.default_rng(5)

    def shaken(leaf: Any) -> Any:
        return leaf + jnp.asarray(noise.normal(0.0, 0.1, leaf.shape).astype(np.float32))

    return plan.llama_spec(base.hyper), tree.map(shaken, initial), initial


def totals_of(
    base: BaseModel, model: tuple[Any, Any, Any], windows: WindowSet, size: int
) -> Totals:
    """Totals over the first eight windows, ``size`` of them at once."""
    spec, adapters, initial = model
    add = vj.jit(partial(accumulate, StepSpec(spec, EVERYTHING), base.params))
    totals = zero_totals(adapters, jnp.asarray(np.float32(1.0)))
    for i in range(0, 8, size):
        totals, _ = add(adapters, totals, windows.batch(range(i, i + size)), PLACE, initial)
    return totals


def norm_of(totals: Totals) -> float:
    return float(optim.global_norm(tree.map(partial(_over, totals.count), totals.gradients)))


def _over(count: Any, leaf: Any) -> Any:
    return leaf / count


def test_gradient_norms_do_not_depend_on_the_split(
    base: BaseModel, model: tuple[Any, Any, Any], windows: WindowSet
) -> None:
    assert len(windows) >= 8
    counts = windows.windows.target_tokens[:8]
    assert len(set(counts.tolist())) > 1  # means of micro-batches would weigh them wrongly
    splits = [totals_of(base, model, windows, size) for size in (8, 4, 2, 1)]
    norms = [norm_of(totals) for totals in splits]
    np.testing.assert_allclose(norms, norms[0], rtol=1e-6)
    for totals in splits:
        assert float(totals.count) == counts.sum()
        np.testing.assert_allclose(float(totals.loss), float(splits[0].loss), rtol=1e-6)


def test_the_combined_gradient_goes_through_clipping_and_momentum(
    base: BaseModel, model: tuple[Any, Any, Any], windows: WindowSet
) -> None:
    """It is the gradient of the mean of the summed loss, clipped, then summed by the momentum."""
    spec, adapters, initial = model
    both = [windows.batch([0, 1]), windows.batch([2, 3])]
    targets = int(windows.windows.target_tokens[:4].sum())

    def mean(adapters: Any) -> Any:
        found = [
            objective(spec, EVERYTHING, base.params, adapters, batch, None, initial)
            for batch in both
        ]
        return sum(one.total for one in found) / targets

    value, gradient = vj.jit(vj.value_and_grad(mean))(adapters)
    norm = float(optim.global_norm(gradient))
    clip = 0.5 * norm
    optimizer = optim.sgd(0.1, 0.9)
    state = start(optimizer, adapters)._replace(initial=initial)
    add = vj.jit(partial(accumulate, StepSpec(spec, EVERYTHING), base.params))
    step = partial(update, optimizer, optim.schedules.constant(0.1), UpdateSpec(clip))
    totals = zero_totals(adapters, state.loss_scale)
    for batch in both:
        totals, _ = add(adapters, totals, batch, PLACE, initial)
    after, metrics = step(state, totals)
    np.testing.assert_allclose(float(metrics.objective), float(value), rtol=1e-5)
    np.testing.assert_allclose(float(metrics.gradient_norm), norm, rtol=1e-5)
    assert float(metrics.clipped) == 1.0
    again, _ = step(after._replace(adapters=adapters), totals)
    for moved, want in ((after, 1.0), (again, 1.9)):
        for got, whole, before in zip(
            *(tree.leaves(x) for x in (moved.adapters, gradient, adapters)), strict=True
        ):
            np.testing.assert_allclose(
                np.asarray(before) - np.asarray(got),
                0.1 * want * clip / (norm + 1e-6) * np.asarray(whole),
                rtol=2e-3,
                atol=2e-6,
            )
    parts = float(metrics.divergence), float(metrics.pullback)
    assert min(parts) > 0.0
    plain = [objective(spec, LossSpec(), base.params, adapters, batch).total for batch in both]
    np.testing.assert_allclose(
        float(metrics.loss) * targets, sum(float(one) for one in plain), rtol=1e-5
    )


def test_packed_records_lose_what_they_lose_alone(
    base: BaseModel, model: tuple[Any, Any, Any], windows: WindowSet
) -> None:
    spec, adapters, _ = model
    w = windows.windows
    alone: list[Document] = []
    for i in range(len(windows.records)):
        mine = w.segment_ids == i
        alone.append(Document(w.input_ids[mine], w.labels[mine]))
    evaluator = Evaluator(spec, base.params, windows.capacity)
    packed = evaluator.records(adapters, windows, range(len(windows)))
    assert len(windows) < len(alone)  # some windows hold several records
    for i, document in enumerate(alone):
        single = pack_best_fit([document], w.input_ids.shape[1], windows.pad_id)
        own = WindowSet(single, ("r",), (windows.categories[i],), windows.category_names, 0)
        sums = evaluator.records(adapters, own, [0])
        assert sums.targets[0] == packed.targets[i] > 0
        np.testing.assert_allclose(sums.losses[0], packed.losses[i], rtol=1e-5)
