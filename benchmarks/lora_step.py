"""One LoRA fine-tuning step of a SmolLM2-135M shape: 512 tokens, rank 16 everywhere.

Frozen base, adapters on all seven linear layers of 30 blocks, masked next-token loss, AdamW. The
weights are random numbers of the right shape; speed and memory do not depend on their values. In
bfloat16 the base and the activations are; adapters, norms, softmax and the loss are float32. The
small case is compared with float64; the losses of the full one are printed side by side.

Packed cases have the base in the block types of SmolLM2's GGUF file, which vkjit reads in place:
Q4_1 in the layers, Q8_0 for the embedding, which is the head, too. The others get the numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from benchmarks import peft_step
from benchmarks.case import ADAMW, Array, Case, Namespace, Tree
from benchmarks.packed import Packed, random_blocks

EPSILON, ROPE_BASE, SCALE = 1e-5, 1e5, 2.0
Sizes = Mapping[str, int]

SMOL = {
    "layers": 30, "width": 576, "heads": 9, "kv_heads": 3, "hidden": 1536,
    "vocabulary": 49152, "rank": 16, "tokens": 512,
}  # fmt: skip
TINY = {
    "layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "hidden": 64,
    "vocabulary": 97, "rank": 4, "tokens": 16,
}  # fmt: skip
SMOL_BLOCKS = ("Q4_1", "Q8_0")
"""Of the layers' matrices and of the embedding."""


def linear_shapes(s: Sizes) -> dict[str, tuple[int, int]]:
    """(out, in) of the linear layers of a block."""
    d, f = s["width"], s["hidden"]
    kv = s["kv_heads"] * (d // s["heads"])
    return {
        "q": (d, d), "k": (kv, d), "v": (kv, d), "o": (d, d),
        "gate": (f, d), "up": (f, d), "down": (d, f),
    }  # fmt: skip


def least_flop(s: Sizes) -> float:
    """Multiply-adds times two: forward, input gradients (the base is frozen), adapters."""
    n = s["tokens"]
    shapes = linear_shapes(s).values()
    linear = s["layers"] * sum(o * i for o, i in shapes) + s["vocabulary"] * s["width"]
    attention = s["layers"] * n * n * s["width"]  # causal half of both products, forward
    adapters = s["layers"] * s["rank"] * sum(o + i for o, i in shapes)
    return 2.0 * linear * n * 2 + 2.0 * attention * 3 + 2.0 * adapters * n * 3


def _case(name: str, sizes: Sizes, **options: Any) -> Case:
    flop = least_flop(sizes)
    return Case(name, "step", sizes, flop=flop, tokens=sizes["tokens"], **options)


FULL: dict[str, Any] = {"check": False, "memory": True, "quick": False}
BFLOAT16: dict[str, Any] = {"on": "gpu", "dtype": "bfloat16", "low": (1,)}

CASES = (
    _case("small, checked", TINY, tolerance=1e-4, on="both"),
    _case("small, packed, checked", TINY, tolerance=1e-4, on="both", blocks=SMOL_BLOCKS),
    _case("SmolLM2-135M 512 tokens", SMOL, on="both", **FULL),
    _case("SmolLM2-135M 512 tokens bf16", SMOL, **FULL, **BFLOAT16),
    _case("SmolLM2-135M 512 tokens packed", SMOL, on="both", blocks=SMOL_BLOCKS, **FULL),
    _case("SmolLM2-135M 512 tokens packed bf16", SMOL, blocks=SMOL_BLOCKS, **FULL, **BFLOAT16),
)


def inputs(case: Case) -> tuple[Tree, ...]:
    """Adapters (argument 0), frozen weights, tokens i32[1,S+1], loss mask f32[1,S]."""
    s, generator = case.params, np.random.default_rng(8)

    def normal(*shape: int, scale: float) -> np.ndarray:
        return generator.standard_normal(shape, dtype=np.float32) * np.float32(scale)

    def matrix(out: int, into: int, scale: float, kind: str = "") -> np.ndarray | Packed:
        if kind:
            return random_blocks(generator, kind, (out, into), scale)
        return normal(out, into, scale=scale)

    of_layers, of_embedding = case.blocks or ("", "")
    blocks, adapters = [], []
    for _ in range(s["layers"]):
        block: dict[str, np.ndarray | Packed] = {
            n: matrix(o, i, i**-0.5, of_layers) for n, (o, i) in linear_shapes(s).items()
        }
        block |= {n: 1 + normal(s["width"], scale=0.1) for n in ("norm1", "norm2")}
        blocks.append(block)
        adapters.append(
            {
                n: {
                    "a": normal(s["rank"], i, scale=i**-0.5),
                    "b": normal(o, s["rank"], scale=0.01),
                }
                for n, (o, i) in linear_shapes(s).items()
            }
        )
    weights = {
        "embedding": matrix(s["vocabulary"], s["width"], 0.05, of_embedding),
        "norm": 1 + normal(s["width"], scale=0.1),
        "blocks": blocks,
    }
    tokens = generator.integers(0, s["vocabulary"], (1, s["tokens"] + 1)).astype(np.int32)
    mask = np.ones((1, s["tokens"]), np.float32)
    mask[:, : s["tokens"] // 4] = 0  # the prompt is not trained on
    return adapters, weights, tokens, mask


def rotary_tables(s: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines, f32[S, head/2]."""
    head = s["width"] // s["heads"]
    frequencies = ROPE_BASE ** (-np.arange(0, head, 2) / head)
    angles = np.outer(np.arange(s["tokens"]), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


# ------------------------------------------------------------------- vkjit and JAX


Cast = Callable[[Array], Array]
Attention = Callable[[Array, Array, Array], Array]
"""Causal, of [1,S,heads,head] and twice [1,S,kv_heads,head]."""


def casts(ns: Namespace, dtype: str) -> tuple[Cast, Cast]:
    """To the type of products, and to float32, where norms, rotations and the loss are computed.

    Where the types are one nothing is cast, so that the float64 reference stays in float64.
    """
    if dtype == "float32":
        return lambda x: x, lambda x: x
    return lambda x: x.astype(getattr(ns.np, dtype)), lambda x: x.astype(ns.np.float32)


def array_block(
    ns: Namespace, case: Case, attention: Attention | None = None
) -> Callable[[Array, Tree, Tree], Array]:
    """A block of the model: (states [1,S,d], its weights, its adapters) to states."""
    attend = attention or partial(ns.nn.dot_product_attention, is_causal=True)
    s, (low, wide) = case.params, casts(ns, case.dtype)
    n, d, heads, kv_heads = s["tokens"], s["width"], s["heads"], s["kv_heads"]
    head = d // heads
    cosines, sines = (ns.np.asarray(table)[None, :, None, :] for table in rotary_tables(s))

    def rotate(x: Array) -> Array:  # [1, S, heads, head]
        x = wide(x)
        first, second = x[..., : head // 2], x[..., head // 2 :]
        parts = [first * cosines - second * sines, second * cosines + first * sines]
        return low(ns.np.concatenate(parts, axis=-1))

    def block(x: Array, weights: Tree, adapters: Tree) -> Array:  # [1, S, d]
        def linear(name: str, y: Array) -> Array:
            a, b = low(adapters[name]["a"]), low(adapters[name]["b"])
            down = ns.np.matmul(ns.np.matmul(y, a.T), b.T)
            return ns.np.matmul(y, weights[name].T) + down * SCALE

        y = array_norm(ns, case, x, weights["norm1"])
        q = rotate(ns.np.reshape(linear("q", y), (1, n, heads, head)))
        k = rotate(ns.np.reshape(linear("k", y), (1, n, kv_heads, head)))
        v = ns.np.reshape(linear("v", y), (1, n, kv_heads, head))
        mixed = attend(q, k, v)
        x = x + linear("o", ns.np.reshape(mixed, (1, n, d)))
        y = array_norm(ns, case, x, weights["norm2"])
        return x + linear("down", ns.nn.silu(linear("gate", y)) * linear("up", y))

    return block


def array_norm(ns: Namespace, case: Case, x: Array, weight: Array) -> Array:
    """RMS norm, as products take it."""
    low, wide = casts(ns, case.dtype)
    x = wide(x)
    x = x * ns.lax.rsqrt(ns.np.mean(x * x, axis=-1, keepdims=True) + EPSILON)
    return low(x * wide(weight))


def array_losses(ns: Namespace, case: Case, x: Array, embedding: Array, labels: Array) -> Array:
    """Cross-entropies of normed states [1,S,d] with the embedding as the head, [1,S]."""
    _, wide = casts(ns, case.dtype)
    logits = wide(ns.np.matmul(x, embedding.T))
    top = ns.lax.stop_gradient(ns.np.max(logits, axis=-1, keepdims=True))
    total = ns.np.log(ns.np.sum(ns.np.exp(logits - top), axis=-1)) + top[..., 0]
    return total - ns.np.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]


def program(ns: Namespace, case: Case) -> Callable[..., Array]:
    """The masked mean loss of the next tokens."""
    block, (low, _) = array_block(ns, case), casts(ns, case.dtype)

    def loss(adapters: Tree, weights: Tree, tokens: Array, mask: Array) -> Array:
        x = low(ns.np.take(weights["embedding"], tokens[:, :-1], axis=0))
        for block_weights, block_adapters in zip(weights["blocks"], adapters, strict=True):
            x = block(x, block_weights, block_adapters)
        x = array_norm(ns, case, x, weights["norm"])
        losses = array_losses(ns, case, x, weights["embedding"], tokens[:, 1:])
        return ns.np.sum(losses * mask) / ns.np.sum(mask)

    return loss


# ------------------------------------------------------------------------- PyTorch


def torch_block(torch: Any, case: Case) -> Callable[[Any, Tree, Tree], Any]:
    """A block of the model, as `array_block`."""
    functional, s, dtype = torch.nn.functional, case.params, getattr(torch, case.dtype)
    n, d, head = s["tokens"], s["width"], s["width"] // s["heads"]
    cosines, sines = (torch.from_numpy(table)[None, None] for table in rotary_tables(s))

    def rotate(x: Any) -> Any:  # [1, heads, S, head]
        low, high = x.float()[..., : head // 2], x.float()[..., head // 2 :]
        return torch.cat([low * cosines - high * sines, high * cosines + low * sines], -1).to(dtype)

    def block(x: Any, weights: Tree, adapters: Tree) -> Any:
        def linear(name: str, y: Any) -> Any:
            a, b = (adapters[name][n].to(dtype) for n in ("a", "b"))
            low = functional.linear(functional.linear(y, a), b)
            return functional.linear(y, weights[name]) + low * SCALE

        y = functional.rms_norm(x, (d,), weights["norm1"], EPSILON)
        q = rotate(linear("q", y).view(1, n, s["heads"], head).transpose(1, 2))
        k = rotate(linear("k", y).view(1, n, s["kv_heads"], head).transpose(1, 2))
        v = linear("v", y).view(1, n, s["kv_heads"], head).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + linear("o", mixed.transpose(1, 2).reshape(1, n, d))
        y = functional.rms_norm(x, (d,), weights["norm2"], EPSILON)
        return x + linear("down", functional.silu(linear("gate", y)) * linear("up", y))

    return block


def _torch_loss(
    torch: Any, case: Case, given: tuple[Tree, ...], wrap: Callable[..., Any]
) -> tuple[Callable[[], Any], list[Any]]:
    """The loss and its parameters, in the order of the flattened adapters."""
    adapters_given, weights_given, tokens_given, mask_given = given
    functional, s = torch.nn.functional, case.params
    block = wrap(torch_block(torch, case))

    def frozen(x: np.ndarray | Packed) -> Any:
        return torch.from_numpy(x).to(getattr(torch, case.dtype))

    embedding, norm = (frozen(weights_given[n]) for n in ("embedding", "norm"))
    blocks = [{n: frozen(x) for n, x in b.items()} for b in weights_given["blocks"]]
    adapters = [
        {
            n: {m: torch.nn.Parameter(torch.from_numpy(x.copy())) for m, x in pair.items()}
            for n, pair in layer.items()
        }
        for layer in adapters_given
    ]
    tokens, mask = torch.from_numpy(tokens_given).long(), torch.from_numpy(mask_given)[0]

    def head(x: Any, labels: Any) -> Any:
        logits = functional.linear(functional.rms_norm(x, (s["width"],), norm, EPSILON), embedding)
        losses = functional.cross_entropy(logits[0].float(), labels, reduction="none")
        return (losses * mask).sum() / mask.sum()

    head = wrap(head)

    def loss() -> Any:
        x = functional.embedding(tokens[:, :-1], embedding)
        for weights, layer in zip(blocks, adapters, strict=True):
            x = block(x, weights, layer)
        return head(x, tokens[0, 1:])

    parameters = [x[n][m] for x in adapters for n in sorted(x) for m in ("a", "b")]
    return loss, parameters


def torch_program(
    torch: Any, case: Case, given: tuple[Tree, ...], wrap: Callable[..., Any]
) -> Callable[[], Any]:
    """A step with the fused AdamW; ``torch.compile`` by region, one program for all blocks."""
    return torch_step(torch, *_torch_loss(torch, case, given, wrap))


def torch_gradient(torch: Any, case: Case, given: tuple[Tree, ...]) -> Callable[[], Any]:
    """Loss and gradient of the adapters, in the order of `inputs`."""
    return torch_value_and_gradient(
        torch, *_torch_loss(torch, case, given, lambda function: function)
    )


def torch_step(torch: Any, loss: Callable[[], Any], parameters: list[Any]) -> Callable[[], Any]:
    """A step of ``loss`` with the fused AdamW."""
    optimizer = torch.optim.AdamW(parameters, lr=ADAMW.rate, weight_decay=ADAMW.decay, fused=True)

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        value = loss()
        value.backward()
        optimizer.step()
        return value.detach()

    return step


def torch_value_and_gradient(
    torch: Any, loss: Callable[[], Any], parameters: list[Any]
) -> Callable[[], Any]:
    """``loss`` and its gradient in ``parameters``."""

    def value_and_gradient() -> Any:
        value = loss()
        return [value, *torch.autograd.grad(value, parameters)]

    return value_and_gradient


def peft_program(torch: Any, case: Case, given: tuple[Tree, ...]) -> Callable[[], Any]:
    """The step of transformers and peft."""
    loss, parameters = peft_step.peft_loss(torch, case, given, (EPSILON, ROPE_BASE, SCALE))
    return peft_step.peft_step(torch, loss, parameters)


def peft_gradient(torch: Any, case: Case, given: tuple[Tree, ...]) -> Callable[[], Any]:
    """Loss and gradient of peft's adapters, in the order of `inputs`."""
    loss, parameters = peft_step.peft_loss(torch, case, given, (EPSILON, ROPE_BASE, SCALE))

    def value_and_gradient() -> Any:
        value = loss()
        return [value, *torch.autograd.grad(value, parameters)]

    return value_and_gradient


if __name__ == "__main__":
    from benchmarks import harness

    default = ("vkjit", "vkjit-numbers", "jax", "torch", "torch-compile")
    sys.exit(harness.main("lora_step", CASES, default=default))
