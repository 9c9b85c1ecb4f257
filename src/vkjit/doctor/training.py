"""Stage ``training``: whole steps of a perceptron and of a Llama with low-rank adapters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np

import vkjit.numpy as jnp
from vkjit import nn, optim, tree
from vkjit.api.autodiff import value_and_grad
from vkjit.doctor.comparing import Array
from vkjit.doctor.session import Program, Session
from vkjit.doctor.tolerances import Kind, allowed
from vkjit.runtime.device import Device

HEADS, GROUPS, WIDTH, HIDDEN, RANK, VOCABULARY = 4, 2, 8, 48, 4, 64
_LEARNS = 0.9
"""Share of the first loss that the last one must be below."""


@final
@dataclass(frozen=True)
class Trainer:
    """A loss of (parameters, data), both, the update rule and the number of steps."""

    loss: Callable[[Any, Any], Any]
    params: Any
    data: Any
    rule: optim.GradientTransformation
    steps: int


def training(session: Session) -> None:
    """Losses and parameters after some steps, against the host; the loss must fall."""
    trainers = {"perceptron": perceptron(10)}
    if not session.quick:
        trainers["Llama with adapters"] = llama(5)
    for what, trainer in session.cases(trainers.items()):
        losses, end = trained(trainer, session.device)
        wanted, wanted_end = trained(trainer, session.host)
        length = sum(np.asarray(leaf).size for leaf in tree.leaves(trainer.params))
        limit = allowed(Kind.STEP, np.dtype(np.float32), length)
        session.figures[what] = [round(value, 6) for value in losses]
        got_losses, wanted_losses = (np.array(found, np.float32) for found in (losses, wanted))
        name = f"losses of the {what}, {trainer.steps} steps"
        session.compare(name, got_losses, wanted_losses, limit)
        pairs = zip(tree.leaves(end), tree.leaves(wanted_end), strict=True)
        for number, (got, want) in enumerate(pairs):
            # Adam divides by the root of a moment: where that is tiny, rounding decides the step.
            scale = np.maximum(np.abs(want).max(initial=0.0), 1.0)
            session.compare(
                f"parameters {number} of the {what}", got, want, trainer.steps * limit, scale
            )
        session.require(
            f"the {what} learns",
            holds=losses[-1] < _LEARNS * losses[0],
            got=f"losses {losses}",
            wanted="a falling loss",
        )


def trained(trainer: Trainer, device: Device) -> tuple[list[float], Any]:
    """The losses of all steps on one device, and the last parameters; state is donated."""

    def step(params: Any, moments: Any, data: Any) -> Any:
        loss, gradients = value_and_grad(trainer.loss)(params, data)
        updates, moments = trainer.rule.update(gradients, moments, params)
        return loss, (optim.apply_updates(params, updates), moments)

    moments = Program(device, trainer.rule.init, (trainer.params,))(trainer.params)
    state = (trainer.params, moments)
    count = len(tree.leaves(state))
    program = Program(device, step, (*state, trainer.data), tuple(range(count)))
    buffers, data = program.put(state), program.put(trainer.data)
    losses: list[Any] = []
    for _ in range(trainer.steps):
        loss, *buffers = program.run([*buffers, *data])
        losses.append(loss)
    values = [float(device.download(loss, np.float32, ())) for loss in losses]
    ends = program.get([losses[-1], *buffers])
    _, (params, _) = program.structured(ends)
    return values, params


def perceptron(steps: int) -> Trainer:
    """Two layers, softmax cross-entropy, AdamW."""
    rng = np.random.default_rng(0)
    params = {
        "w1": rng.normal(0, 0.2, (20, 32)).astype(np.float32),
        "b1": np.zeros(32, np.float32),
        "w2": rng.normal(0, 0.2, (32, 10)).astype(np.float32),
        "b2": np.zeros(10, np.float32),
    }
    data = rng.normal(size=(24, 20)).astype(np.float32), rng.integers(0, 10, 24).astype(np.int32)

    def loss(p: Any, data: Any) -> Any:
        x, y = data
        logits = jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]
        return -jnp.mean(jnp.sum(nn.log_softmax(logits) * nn.one_hot(y, 10), axis=-1))

    return Trainer(loss, params, data, optim.adamw(1e-2, weight_decay=0.01), steps)


def llama(steps: int) -> Trainer:
    """LoRA on all linear layers of one Llama block with a tied head, two rows of 16 tokens."""
    rng = np.random.default_rng(1)
    d, kv = HEADS * WIDTH, GROUPS * WIDTH
    shapes = {"q": (d, d), "k": (kv, d), "v": (kv, d), "o": (d, d)}
    shapes |= {"gate": (HIDDEN, d), "up": (HIDDEN, d), "down": (d, HIDDEN)}

    def normal(scale: float, *shape: int) -> Array:
        return rng.normal(0, scale, shape).astype(np.float32)

    weights = {name: normal(0.3, *shape) for name, shape in shapes.items()}
    weights["embedding"] = normal(0.3, VOCABULARY, d)
    weights |= {name: 1 + normal(0.1, d) for name in ("norm1", "norm2", "norm3")}
    adapters = {
        name: (normal(0.2, RANK, columns), normal(0.02, rows, RANK))
        for name, (rows, columns) in shapes.items()
    }
    tokens = rng.integers(0, VOCABULARY, (2, 16)).astype(np.int32)
    labels = np.where(rng.random((2, 16)) < 0.7, tokens, -1).astype(np.int32)
    rule = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))
    return Trainer(llama_loss, adapters, (weights, tokens, labels), rule, steps)


def llama_loss(adapters: Any, data: Any) -> Any:
    """Mean cross-entropy of the next token over the labels that are not negative."""
    weights, tokens, labels = data
    batch, length = tokens.shape

    def linear(name: str, x: Any) -> Any:
        a, b = adapters[name]
        return x @ weights[name].T + 2.0 * (x @ a.T) @ b.T

    def heads(name: str, x: Any, count: int) -> Any:
        return jnp.reshape(linear(name, x), (batch, length, count, WIDTH))

    x = jnp.take(weights["embedding"], tokens, axis=0)
    h = nn.rms_norm(x, weights["norm1"])
    query, key = rotated(heads("q", h, HEADS)), rotated(heads("k", h, GROUPS))
    mixed = nn.dot_product_attention(query, key, heads("v", h, GROUPS), is_causal=True)
    x = x + linear("o", jnp.reshape(mixed, x.shape))
    h = nn.rms_norm(x, weights["norm2"])
    x = x + linear("down", nn.silu(linear("gate", h)) * linear("up", h))
    logits = nn.rms_norm(x, weights["norm3"])[:, :-1] @ weights["embedding"].T
    targets = labels[:, 1:]
    picked = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    losses = jnp.where(targets >= 0, nn.logsumexp(logits, axis=-1) - picked, 0.0)
    return jnp.sum(losses) / jnp.sum((targets >= 0).astype(jnp.float32))


def rotated(x: Any) -> Any:
    """Rotary position embedding of [B,T,N,H], halves rotated against each other."""
    half = x.shape[-1] // 2
    rates = 1e4 ** (-np.arange(half, dtype=np.float32) / half)
    places = np.arange(x.shape[1], dtype=np.float32)
    angles: Array = (places[:, None] * rates)[None, :, None]
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
