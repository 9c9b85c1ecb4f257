"""A tiny Llama on every device against transformers and peft: every logit and every gradient.

The reference files are computed in float64 from the stored float32 weights. What plain float32
costs there (transformers in float32) is 6e-6 in logits, 4e-6 of each tensor's maximum in gradients
and 8e-7 in the losses of ten steps; the bounds below are three times that.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file

import vkjit as vj
import vkjit.numpy as jnp
from vkjit import optim
from vkjit.errors import ArgumentError
from vkjit_models.common.adapter_io import load_adapter
from vkjit_models.llama.config import check_params, from_hugging_face
from vkjit_models.llama.lora import LoraPair, from_peft, to_peft
from vkjit_models.llama.model import (
    Batch,
    Inputs,
    LlamaSpec,
    forward,
    loss_and_count,
    mean_loss,
    next_logits,
    target_rows,
)

DATA = Path(__file__).resolve().parents[2] / "data" / "llama"
EXPECTED = json.loads((DATA / "expected.json").read_text())
LOGITS = 3 * 6e-6
GRADIENT = 3 * 4e-6  # of the tensor's largest entry
LOSS = 3 * 8e-7


def as_arrays(tree: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {name: jnp.asarray(value) for name, value in tree.items()}


HYPER = from_hugging_face(json.loads((DATA / "config.json").read_text()))
CONFIG, TENSORS = load_adapter(DATA)
SPEC = LlamaSpec(HYPER, CONFIG.scale)


class Tiny(NamedTuple):
    params: dict[str, Any]
    adapters: dict[str, LoraPair]


@cache
def tiny_on(name: str) -> Tiny:
    with vj.default_device(name):
        return Tiny(as_arrays(load_file(DATA / "weights.safetensors")), from_peft(HYPER, TENSORS))


PARAMS, ADAPTERS = tiny_on("cpu")


@pytest.fixture
def tiny(device: str) -> Generator[Tiny]:
    """The model on the device, which is the default device meanwhile."""
    if device == "reference":
        pytest.skip("minutes in the interpreter, which runs one layer in test_interpreted.py")
    with vj.default_device(device):
        yield tiny_on(device)


def batch_of(name: str, row: int | None = None) -> Batch:
    data = load_file(DATA / f"{name}.safetensors")
    ids, labels = (data[k] if row is None else data[k][row] for k in ("input_ids", "labels"))
    plain = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    positions = data.get("position_ids", plain).reshape(ids.shape)
    segments = data.get("document_ids", np.zeros_like(ids)).reshape(ids.shape)
    return Batch(*(jnp.asarray(np.int32(x)) for x in (ids, labels, positions, segments)))


def assert_gradients(got: Mapping[str, Any], want: Mapping[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for name, reference in want.items():
        bound = GRADIENT * np.abs(reference).max()
        np.testing.assert_allclose(got[name], reference, rtol=0, atol=bound, err_msg=name)


@pytest.mark.parametrize("name", ["logits", "base_logits"])
def test_logits(name: str, tiny: Tiny) -> None:
    adapters = tiny.adapters if name == "logits" else {}
    want = load_file(DATA / "expected.safetensors")[name]
    real = load_file(DATA / "batch.safetensors")["attention_mask"] == 1
    run = vj.jit(partial(forward, SPEC))
    got = run(tiny.params, adapters, Inputs(batch_of("batch").tokens))
    np.testing.assert_allclose(np.asarray(got)[real], want[real], rtol=0, atol=LOGITS)


def test_logits_of_one_window_and_of_its_last_token(tiny: Tiny) -> None:
    want = load_file(DATA / "expected.safetensors")["logits"][0]
    tokens = batch_of("batch").tokens[0]
    got = vj.jit(partial(forward, SPEC))(*tiny, Inputs(tokens))
    np.testing.assert_allclose(got[:9], want[:9], rtol=0, atol=LOGITS)
    last = vj.jit(partial(next_logits, SPEC))(*tiny, tokens, np.int32(9))
    np.testing.assert_allclose(last, want[8], rtol=0, atol=LOGITS)


def test_loss_count_and_every_adapter_gradient(tiny: Tiny) -> None:
    batch = batch_of("batch")
    loss, grads = vj.jit(vj.value_and_grad(partial(mean_loss, SPEC), argnums=1))(*tiny, batch)
    np.testing.assert_allclose(loss, EXPECTED["loss"], rtol=0, atol=LOSS)
    assert_gradients(to_peft(grads), load_file(DATA / "lora_grads.safetensors"))
    total, count = loss_and_count(SPEC, *tiny, batch)
    assert float(count) == EXPECTED["n_loss_tokens"]
    np.testing.assert_allclose(total / count, EXPECTED["loss"], rtol=0, atol=LOSS)
    base = mean_loss(SPEC, tiny.params, {}, batch)
    np.testing.assert_allclose(base, EXPECTED["base_loss"], rtol=0, atol=LOSS)


def test_every_base_gradient_through_the_tied_head(tiny: Tiny) -> None:
    grads = vj.jit(vj.grad(partial(mean_loss, SPEC)))(*tiny, batch_of("batch"))
    assert_gradients(grads, load_file(DATA / "base_grads.safetensors"))


def test_rank_stabilised_scale(tiny: Tiny) -> None:
    want = load_file(DATA / "rslora_expected.safetensors")
    spec = LlamaSpec(HYPER, EXPECTED["rslora"]["scale"])
    loss, grads = vj.jit(vj.value_and_grad(partial(mean_loss, spec), argnums=1))(
        *tiny, batch_of("batch")
    )
    np.testing.assert_allclose(loss, EXPECTED["rslora"]["loss"], rtol=0, atol=LOSS)
    assert_gradients(to_peft(grads), gradients_in(want))


def test_packed_documents_equal_their_separate_runs(tiny: Tiny) -> None:
    want, batch = load_file(DATA / "packed.safetensors"), batch_of("packed")
    logits = vj.jit(partial(forward, SPEC))(*tiny, batch.inputs)
    np.testing.assert_allclose(logits, want["logits"].reshape(logits.shape), rtol=0, atol=LOGITS)
    grads = vj.jit(vj.grad(partial(mean_loss, SPEC), argnums=1))(*tiny, batch)
    assert_gradients(to_peft(grads), gradients_in(want))


def gradients_in(data: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {k.removeprefix("grad."): v for k, v in data.items() if k.startswith("grad.")}


def test_ten_steps_of_training(tiny: Tiny) -> None:
    """AdamW, decay 0.1, clip 1.0, warm-up 3 then cosine: losses and norms before clipping."""
    want = json.loads((DATA / "trajectory.json").read_text())
    schedule = optim.schedules.cosine(want["lr"], 10, 3)
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(schedule, weight_decay=0.1))

    @vj.jit
    def step(adapters: Any, state: Any, batch: Batch) -> Any:
        loss, grads = vj.value_and_grad(partial(mean_loss, SPEC, tiny.params))(adapters, batch)
        updates, state = optimizer.update(grads, state, adapters)
        adapters = optim.apply_updates(adapters, updates)
        return loss, optim.global_norm(grads), adapters, state

    adapters, state = tiny.adapters, optimizer.init(tiny.adapters)
    for i, row in enumerate(want["rows"]):
        np.testing.assert_allclose(schedule(i), row["lr"], rtol=2e-6, atol=1e-9)
        batch = batch_of("trajectory_batches", i)
        loss, norm, adapters, state = step(adapters, state, batch)
        np.testing.assert_allclose(loss, row["loss"], rtol=0, atol=LOSS)
        np.testing.assert_allclose(norm, row["grad_norm_before_clip"], rtol=1e-5)
    after = [
        float(mean_loss(SPEC, tiny.params, adapters, batch_of("trajectory_batches", i)))
        for i in range(3)
    ]
    np.testing.assert_allclose(after, want["loss_of_each_batch_after_training"][:3], rtol=2e-6)


def test_nothing_to_learn_gives_zero_loss_and_zero_gradients() -> None:
    batch = batch_of("batch")
    masked = batch._replace(labels=jnp.full(batch.labels.shape, -100, jnp.int32))
    loss, grads = vj.value_and_grad(partial(mean_loss, SPEC), argnums=1)(PARAMS, ADAPTERS, masked)
    assert float(loss) == 0.0
    assert not any(np.asarray(leaf).any() for leaf in vj.tree.leaves(grads))


def test_splitting_a_batch_gives_the_same_gradient() -> None:
    """Micro-batches with other numbers of targets, weighted by their counts."""
    batch = batch_of("batch")

    def summed(adapters: Any, part: Batch) -> Any:
        return loss_and_count(SPEC, PARAMS, adapters, part)

    grad = vj.value_and_grad(summed, has_aux=True)
    parts = [Batch(*(field[rows] for field in batch[:4])) for rows in (slice(0, 1), slice(1, 3))]
    results = [grad(ADAPTERS, part) for part in parts]
    count = sum(float(aux) for (_, aux), _ in results)
    assert count == EXPECTED["n_loss_tokens"]
    total = vj.tree.map(lambda a, b: (a + b) / count, results[0][1], results[1][1])
    assert_gradients(to_peft(total), load_file(DATA / "lora_grads.safetensors"))


def test_only_the_rows_with_a_target_need_to_meet_the_head(tiny: Tiny) -> None:
    batch = batch_of("batch")
    rows = target_rows(np.asarray(batch.labels), 64)
    assert (rows >= 0).sum() == EXPECTED["n_loss_tokens"]
    chosen = batch._replace(rows=jnp.asarray(rows))
    loss, grads = vj.jit(vj.value_and_grad(partial(mean_loss, SPEC), argnums=1))(*tiny, chosen)
    np.testing.assert_allclose(loss, EXPECTED["loss"], rtol=0, atol=LOSS)
    assert_gradients(to_peft(grads), load_file(DATA / "lora_grads.safetensors"))
    with pytest.raises(ArgumentError, match="42 targets, expected at most 8"):
        target_rows(np.asarray(batch.labels), 8)


def test_the_loss_depends_on_the_scale() -> None:
    batch = batch_of("batch")
    losses = [
        float(mean_loss(LlamaSpec(HYPER, scale), PARAMS, ADAPTERS, batch))
        for scale in (0.0, 2.0, 4.0)
    ]
    np.testing.assert_allclose(losses, [EXPECTED["base_loss"], 5.5650, 5.7687], atol=1e-4)


def test_parameters_are_checked() -> None:
    check_params(HYPER, PARAMS)
    with pytest.raises(Exception, match=r"model\.norm\.weight.*\(64,\)"):
        check_params(HYPER, {k: v for k, v in PARAMS.items() if k != "model.norm.weight"})
