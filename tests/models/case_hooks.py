"""The project's functions under the names that ``../shared/cases`` asks for; adapters only.

python ../shared/cases/run_cases.py --module vkjit --hooks tests/models/case_hooks.py
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import vkjit as vj
import vkjit.numpy as jnp
from vkjit import nn, optim, quant
from vkjit_models.common import tokenizer
from vkjit_models.common.adapter_config import AdapterConfig
from vkjit_models.common.adapter_gguf import stored_scale
from vkjit_models.common.packing import Document, pack_sequential
from vkjit_models.common.tensor_rows import decode_rows, row_bytes
from vkjit_models.llama.lora import LoraSpec
from vkjit_models.llama.model import LoraPair, low_rank, project, shifted_targets
from vkjit_models.lora_sft.merge import Delta
from vkjit_models.lora_sft.step import Totals, UpdateSpec, start, update
from vkjit_models.lora_sft.step import unscale_and_clip as clipped


def token_losses(logits: Any, labels: Any) -> tuple[Any, Any]:
    """Losses and targets [B*T]; given logits are hidden states of a head that is the identity."""
    targets = jnp.reshape(shifted_targets(jnp.asarray(np.int32(labels))), (-1,))
    width = logits.shape[-1]
    hidden, eye = jnp.reshape(logits, (-1, width)), jnp.eye(width)
    return nn.linear_cross_entropy(hidden, eye, targets), targets


def causal_lm_loss(logits: Any, labels: Any) -> tuple[float, int]:
    losses, targets = token_losses(jnp.asarray(logits), labels)
    return float(losses.sum()), int((targets >= 0).sum())


def causal_lm_mean_and_grad(logits: Any, labels: Any) -> tuple[float, np.ndarray]:
    def mean(logits: Any) -> Any:
        losses, targets = token_losses(logits, labels)
        return losses.sum() / jnp.maximum((targets >= 0).sum().astype(jnp.float32), 1.0)

    loss, grad = vj.value_and_grad(mean)(jnp.asarray(logits))
    return float(loss), np.asarray(grad)


def combine_microbatches(parts: Any) -> tuple[float, np.ndarray]:
    """By one step of plain descent with rate 1 from 0, whose move is minus the gradient."""
    gradient = sum(jnp.asarray(np.float32(g)) for _, _, g in parts)
    loss, count = (jnp.asarray(np.float32(sum(p[i] for p in parts))) for i in (0, 1))
    one = jnp.asarray(np.float32(1.0))
    totals = Totals(gradient, loss, count, one, *[one] * 3)
    optimizer, zero = optim.sgd(1.0), jnp.zeros_like(gradient)
    state, schedule = start(optimizer, zero), optim.schedules.constant(1.0)
    state, metrics = update(optimizer, schedule, UpdateSpec(), state, totals)
    return float(metrics.loss), -np.asarray(state.adapters)


def tmkl(base_logits: Any, logits: Any, target: int) -> tuple[float, np.ndarray]:
    targets = jnp.asarray(np.array([target], np.int32))

    def divergence(logits: Any) -> Any:
        return nn.target_masked_kl(logits[None], jnp.asarray(base_logits)[None], targets)[0]

    loss, grad = vj.value_and_grad(divergence)(jnp.asarray(logits))
    return float(loss), np.asarray(grad)


def pack(lengths: Any, total: int) -> dict[str, np.ndarray]:
    ones = [np.ones(length, np.int32) for length in lengths]
    packed = pack_sequential([Document(one, one) for one in ones], total, 0)
    segments = packed.segment_ids[0]
    same = (segments[:, None] == segments[None]) & (segments[:, None] >= 0)
    return {
        "attention": same & np.tri(total, dtype=bool),
        "positions": packed.position_ids[0],
        "targets": packed.labels[0] >= 0,
    }


def encode_rendered(text: str, encode: Any, bos_text: str, bos_id: int) -> Any:
    del bos_id
    return tokenizer.encode_rendered(text, encode, bos_text)


def attention(vj: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
    del vj
    one_head = (x[:, None] for x in (q, k, v))
    return nn.dot_product_attention(*one_head, mask=mask[None, None])[:, 0]


def causal_mask(queries: int, keys: int) -> np.ndarray:
    return np.tri(queries, keys, keys - queries, dtype=bool)


def rms_norm(vj: Any, x: Any, weight: Any, eps: float) -> Any:
    del vj
    return nn.rms_norm(x, weight, eps=eps)


def lora_scale(alpha: float, r: int, rslora: bool) -> float:  # noqa: FBT001  the cases' signature
    return LoraSpec(r, alpha, rslora=rslora).scale


def exported_alpha(alpha: float, r: int, rslora: bool) -> float:  # noqa: FBT001  as above
    return stored_scale(AdapterConfig(r, alpha, (), rslora), ["any"]).alpha


def lora_forward(vj: Any, x: Any, w: Any, a: Any, b: Any, scale: float) -> Any:  # noqa: PLR0913  ditto
    del vj
    return project(x, w) + low_rank(x, LoraPair(a, b), scale)


def _f32(x: Any) -> NDArray[np.float32]:
    return np.asarray(x, np.float32)


def lora_merge(w: Any, a: Any, b: Any, scale: float) -> np.ndarray:
    return Delta(_f32(a), _f32(b), scale).merged(_f32(w))


def dequantize(qtype: str, data: bytes, shape: Any) -> np.ndarray:
    return np.asarray(vj.jit(quant.dequantize)(quant.from_bytes(data, qtype, shape)))


def quantize(qtype: str, x: Any) -> bytes:
    return np.asarray(vj.jit(partial(quant.quantize, block_type=qtype))(x).blocks).tobytes()


def quant_matmul(qtype: str, data: bytes, shape: Any, x: Any) -> np.ndarray:
    return np.asarray(vj.jit(project)(x, quant.from_bytes(data, qtype, shape)))


def merge_into_quantized(qtype: str, data: bytes, shape: Any, delta: Any) -> np.ndarray:
    rows = np.frombuffer(data, np.uint8).reshape(-1, row_bytes(qtype, shape[-1]))
    identity = np.eye(shape[-1], dtype=np.float32)
    return Delta(identity, _f32(delta), 1.0).merged(decode_rows(qtype, rows))


def adamw_init(param: Any) -> Any:
    return optim.adamw(1.0).init(jnp.asarray(param))


def adamw_step(  # noqa: PLR0913  the cases' signature
    param: Any, grad: Any, state: Any, lr: float, b1: float, b2: float, eps: float, wd: float
) -> tuple[Any, Any]:
    param, grad = jnp.asarray(param), jnp.asarray(grad)
    updates, state = optim.adamw(lr, b1, b2, eps, wd).update(grad, state, param)
    return optim.apply_updates(param, updates), state


def guarded_adamw_step(  # noqa: PLR0913  the cases' signature
    param: Any, grad: Any, state: Any, lr: float, b1: float, b2: float, eps: float, wd: float
) -> tuple[Any, Any, bool]:
    optimizer = optim.adamw(lr, b1, b2, eps, wd)
    step = partial(update, optimizer, optim.schedules.constant(lr), UpdateSpec())
    before = start(optimizer, jnp.asarray(param))._replace(optimizer=state)
    one = jnp.asarray(np.float32(1.0))
    after, metrics = step(before, Totals(jnp.asarray(grad), *[one] * 6))
    return after.adapters, after.optimizer, bool(metrics.skipped)


def unscale_and_clip(grads: Any, loss_scale: float, max_norm: float) -> tuple[Any, Any, bool]:
    gradients, norm, _ = clipped([jnp.asarray(g) for g in grads], loss_scale, max_norm)
    return gradients, norm, bool(jnp.isfinite(norm))
