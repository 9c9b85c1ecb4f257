"""The trained objective on the tiny Llama: golden gradients, sums over micro-batches, terms."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import vkjit as vj
import vkjit.numpy as jnp
from tests.nn.head import Head, divergence
from vkjit.errors import ArgumentError
from vkjit_models.llama.lora import to_peft
from vkjit_models.llama.loss import (
    Kl,
    LossSpec,
    half_squared_distance,
    objective,
    pullback_relative,
)
from vkjit_models.llama.model import Batch, LlamaSpec, LoraPair, loss_and_count, target_rows

from .test_golden import ADAPTERS, DATA, GRADIENT, HYPER, PARAMS, SPEC, tiny_on

CE, TMKL = 5.56503270102259, 0.5895784948132087
"""Of golden/tmkl/tmkl.json: CE + 0.25 * KL(adapted||base) without targets."""


def golden_batch() -> Batch:
    data = load_file(DATA / "batch.safetensors")
    tokens, labels = data["input_ids"], data["labels"]
    count = int((labels[:, 1:] >= 0).sum())
    return Batch(tokens, labels, None, None, target_rows(labels, count + 3))


BATCH = golden_batch()
EVERYTHING = LossSpec(0.1, 1e-3, "tmkl", 0.25, 0.5)


@cache
def compiled(loss: LossSpec, spec: LlamaSpec, device: str) -> Any:
    """The objective with its total divided by the number of targets, and that one's gradients."""
    params = tiny_on(device).params

    def run(adapters: Mapping[str, LoraPair], batch: Batch, initial: Any) -> Any:
        def mean(adapters: Any) -> Any:
            found = objective(spec, loss, params, adapters, batch, None, initial)
            count = jnp.maximum(found.counted.sum().astype(jnp.float32), 1.0)
            return found.total / count, found

        return vj.value_and_grad(mean, has_aux=True)(adapters)

    return vj.jit(run)


def mean_and_gradients(
    loss: LossSpec, batch: Batch = BATCH, initial: Any = ADAPTERS, device: str = "cpu"
) -> tuple[Any, dict[str, np.ndarray]]:
    with vj.default_device(device):
        adapters = tiny_on(device).adapters
        (mean, found), gradients = compiled(loss, SPEC, device)(adapters, batch, initial)
    return found._replace(total=mean), to_peft(gradients)


def close(got: Mapping[str, np.ndarray], want: Mapping[str, Any], bound: float = GRADIENT) -> None:
    assert got.keys() == want.keys()
    for name, expected in want.items():
        largest = np.abs(expected).max()
        np.testing.assert_allclose(got[name], expected, rtol=0, atol=bound * largest, err_msg=name)


def test_golden_masked_divergence(shared: Path, device: str) -> None:
    if device not in ("cpu", "vulkan:0"):
        pytest.skip("its operations are those of tests/nn/test_divergence.py, and it is slow here")
    want = load_file(shared / "golden" / "tmkl" / "model_llama_lora_grads.safetensors")
    terms = LossSpec(kl="tmkl", kl_weight=0.25)
    found, gradients = mean_and_gradients(terms, initial=None, device=device)
    count = np.asarray(found.counted).sum()
    np.testing.assert_allclose(found.total, CE + 0.25 * TMKL, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(found.losses).sum() / count, CE, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(found.divergences).sum() / count, TMKL, rtol=2e-6)
    close(gradients, want)


def test_cross_entropy_alone_is_that_of_the_model() -> None:
    found, gradients = mean_and_gradients(LossSpec())
    total, count = vj.jit(lambda a: loss_and_count(SPEC, PARAMS, a, BATCH))(ADAPTERS)
    np.testing.assert_allclose(found.total, total / count, rtol=1e-6)
    assert found.divergences is None
    assert found.pullback is None
    want = load_file(DATA / "lora_grads.safetensors")
    close(gradients, want)


def test_all_places_count_where_no_rows_are_named() -> None:
    whole, of_all = mean_and_gradients(LossSpec(), BATCH._replace(rows=None))
    found, of_rows = mean_and_gradients(LossSpec())
    assert whole.counted.shape == (np.asarray(BATCH.tokens).size,)
    np.testing.assert_allclose(whole.total, found.total, rtol=1e-6)
    close(of_all, of_rows)


def test_every_divergence_is_the_one_it_is_named_after() -> None:
    """Against float64, from the logits of both models that others computed."""
    kinds: tuple[Kl, ...] = ("tmkl", "tmkl_reverse", "kl", "kl_reverse")
    specs = [LossSpec(kl=kl, kl_weight=1.0) for kl in kinds]
    found = vj.jit(lambda a: [objective(SPEC, s, PARAMS, a, BATCH).divergences for s in specs])(
        ADAPTERS
    )
    expected = load_file(DATA / "expected.safetensors")
    rows, width = np.asarray(BATCH.rows), HYPER.vocab_size
    labels = np.roll(np.asarray(BATCH.labels), -1, axis=1).reshape(-1)
    targets = np.where(rows >= 0, labels[rows], -1)
    logits, base = (
        expected[x].astype(np.float64).reshape(-1, width)[rows] for x in ("logits", "base_logits")
    )
    head = Head(logits, base, np.eye(width), targets, np.ones(len(rows)))
    for kl, got in zip(kinds, found, strict=True):
        direction = "base||adapted" if kl.endswith("reverse") else "adapted||base"
        want, *_ = divergence(head, direction, masked=kl.startswith("tmkl"))
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * want.max(), err_msg=kl)


def test_a_switched_off_adapter_does_not_diverge() -> None:
    off, terms = LlamaSpec(HYPER, 0.0), LossSpec(kl="tmkl", kl_weight=1.0)
    found = vj.jit(lambda a: objective(off, terms, PARAMS, a, BATCH).divergences)(ADAPTERS)
    np.testing.assert_allclose(found, 0.0, atol=1e-6)


def test_micro_batches_add_up() -> None:
    """Two halves of the batch, one with many more targets, against the whole."""
    initial = vj.tree.map(lambda x: 0.9 * x, ADAPTERS)
    whole, want = mean_and_gradients(EVERYTHING, initial=initial)
    counted = float(np.asarray(whole.counted).sum())
    total, sums = 0.0, dict.fromkeys(want, 0.0)
    for row in range(len(BATCH.tokens)):
        labels = np.asarray(BATCH.labels)[row : row + 1]
        rows = target_rows(labels, labels.size)
        part = Batch(np.asarray(BATCH.tokens)[row : row + 1], labels, None, None, rows)
        found, gradients = mean_and_gradients(EVERYTHING, part, initial)
        share = float(np.asarray(found.counted).sum()) / counted
        total += share * float(found.total)
        sums = {name: sums[name] + share * g for name, g in gradients.items()}
    np.testing.assert_allclose(total, whole.total, rtol=1e-6)
    close({name: np.asarray(x) for name, x in sums.items()}, want)


def test_smoothing_and_z_loss_are_not_in_the_reported_losses() -> None:
    plain, _ = mean_and_gradients(LossSpec())
    found, _ = mean_and_gradients(EVERYTHING)
    np.testing.assert_allclose(found.losses, plain.losses, rtol=1e-6, atol=1e-6)
    assert float(found.total) > float(plain.total) + 1e-2
    assert float(found.pullback) == 0.0


def test_pullback_leads_to_the_initial_adapters() -> None:
    initial = vj.tree.map(lambda x: x - 0.25, ADAPTERS)
    found, gradients = mean_and_gradients(LossSpec(pullback_weight=2.0), initial=initial)
    _, plain = mean_and_gradients(LossSpec())
    count = sum(x.size for x in vj.tree.leaves(ADAPTERS))
    np.testing.assert_allclose(found.pullback, 0.5 * 0.0625 * count, rtol=1e-5)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient - plain[name], 0.5, atol=2e-6)


def test_no_targets_give_no_loss_and_no_gradient() -> None:
    none = np.full_like(np.asarray(BATCH.labels), -100)
    batch = BATCH._replace(labels=none, rows=target_rows(none, 4))
    initial = vj.tree.map(jnp.zeros_like, ADAPTERS)
    found, gradients = mean_and_gradients(EVERYTHING, batch, initial)
    assert float(found.total) == 0.0
    assert not any(x.any() for x in gradients.values())


def test_a_pullback_without_a_goal_is_refused() -> None:
    with pytest.raises(ArgumentError, match="pullback_weight was given without initial_adapters"):
        half_squared_distance(ADAPTERS, None)


def test_the_relative_size_of_the_pullback() -> None:
    move, warning = pullback_relative(1e-4, 1e-3)
    assert move == pytest.approx(1e-7)
    assert warning is not None
    assert "moves the adapters back by 1.0e-07 of their way per step" in warning
    assert "raise it to about 0.1 or more" in warning
    assert pullback_relative(1e-3, 0.1) == (pytest.approx(1e-4), None)
    assert pullback_relative(1e-3, 0.0) == (0.0, None)
