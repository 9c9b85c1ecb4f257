"""One LoRA step of a Llama-like model of 1.5 billion weights in Q4_K, at context 4096.

28 blocks of width 1536, a vocabulary of 151936, rank 16 on all linear layers, bfloat16 activations,
each block computed again for its gradient. The weights are random blocks; vkjit reads them where
they lie, the peers get the numbers in bfloat16. vkjit attends in runs of queries and takes the loss
without the logits; JAX attends through cuDNN where a GPU is, PyTorch through its fused attention.
Blocks are a scan in vkjit and JAX, and compiled one by one in torch-compile.

The small case is compared with float64; losses of the full one are printed side by side.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks import lora_step
from benchmarks.case import Array, Case, Namespace, Tree, tree_map
from benchmarks.packed import Packed, random_blocks

FULL = {
    "layers": 28, "width": 1536, "heads": 12, "kv_heads": 2, "hidden": 8960,
    "vocabulary": 151936, "rank": 16, "tokens": 4096,
}  # fmt: skip
TINY = {
    "layers": 3, "width": 256, "heads": 4, "kv_heads": 2, "hidden": 256,
    "vocabulary": 97, "rank": 4, "tokens": 24,
}  # fmt: skip
KIND = "Q4_K"
SIZES = "VKJIT_BENCH_LLAMA"
"""Variable that tells layers and context to the participants' processes: ``28,4096``."""


def cases() -> tuple[Case, ...]:
    """The cases, of the sizes that `SIZES` tells."""
    layers, tokens = (int(n) for n in os.environ.get(SIZES, "28,4096").split(","))
    full = FULL | {"layers": layers, "tokens": tokens}
    low: dict[str, Any] = {"dtype": "bfloat16", "low": (1,), "blocks": (KIND, KIND)}
    return (
        Case("small, checked", "step", TINY, tolerance=1e-4, on="both", blocks=(KIND, KIND)),
        Case(
            "Llama 1.5B Q4_K",
            "step",
            full,
            flop=lora_step.least_flop(full),
            tokens=tokens,
            check=False,
            memory=True,
            quick=False,
            on="gpu",
            **low,
        ),
    )


CASES = cases()


def inputs(case: Case) -> tuple[Tree, ...]:
    """Adapters (argument 0), frozen weights, tokens i32[1,S+1], loss mask f32[1,S].

    Of the layers' arrays the first axis counts the layers.
    """
    s, generator = case.params, np.random.default_rng(9)
    layers, shapes = s["layers"], lora_step.linear_shapes(s)

    def normal(*shape: int, scale: float) -> np.ndarray:
        return generator.standard_normal(shape, dtype=np.float32) * np.float32(scale)

    def matrix(out: int, into: int, scale: float, layers: int = 0) -> Packed:
        return random_blocks(generator, KIND, (out, into), scale, layers)

    adapters = {
        n: {
            "a": normal(layers, s["rank"], i, scale=i**-0.5),
            "b": normal(layers, o, s["rank"], scale=0.01),
        }
        for n, (o, i) in shapes.items()
    }
    blocks: Tree = {n: matrix(o, i, i**-0.5, layers) for n, (o, i) in shapes.items()}
    blocks |= {n: 1 + normal(layers, s["width"], scale=0.1) for n in ("norm1", "norm2")}
    weights = {
        "embedding": matrix(s["vocabulary"], s["width"], 0.05),
        "norm": 1 + normal(s["width"], scale=0.1),
        "blocks": blocks,
    }
    tokens = generator.integers(0, s["vocabulary"], (1, s["tokens"] + 1)).astype(np.int32)
    mask = np.ones((1, s["tokens"]), np.float32)
    mask[:, : s["tokens"] // 4] = 0  # the prompt is not trained on
    return adapters, weights, tokens, mask


# ------------------------------------------------------------------- vkjit and JAX


def _attention(ns: Namespace, case: Case) -> lora_step.Attention:
    """What a user of the framework would take."""
    if ns.name == "vkjit":
        module = importlib.import_module("vkjit_models.llama.attention")
        return partial(module.causal_attention, segments=None)
    if ns.name == "jax" and case.dtype != "float32":
        backend = importlib.import_module("jax").default_backend()
        kind = "cudnn" if backend == "gpu" else None
        return partial(ns.nn.dot_product_attention, is_causal=True, implementation=kind)
    return partial(ns.nn.dot_product_attention, is_causal=True)


def _checkpointed(ns: Namespace, block: Callable[..., Any]) -> Callable[..., Any]:
    """The block, of whose values only what attention gave is kept in vkjit, nothing elsewhere."""
    if ns.name != "vkjit":
        return ns.checkpoint(block)
    module = importlib.import_module("vkjit_models.llama.attention")
    return ns.checkpoint(block, policy=module.KEEP_ATTENDED)


def _losses(ns: Namespace, case: Case, x: Array, embedding: Array, labels: Array) -> Array:
    if ns.name != "vkjit":
        return lora_step.array_losses(ns, case, x, embedding, labels)
    return ns.nn.linear_cross_entropy(x[0], embedding, labels[0])[None]


def program(ns: Namespace, case: Case) -> Callable[..., Array]:
    """The masked mean loss of the next tokens."""
    low, _ = lora_step.casts(ns, case.dtype)
    block = _checkpointed(ns, lora_step.array_block(ns, case, _attention(ns, case)))

    def turn(x: Array, layer: tuple[Tree, Tree]) -> tuple[Array, None]:
        return block(x, *layer), None

    def loss(adapters: Tree, weights: Tree, tokens: Array, mask: Array) -> Array:
        x = low(ns.np.take(weights["embedding"], tokens[:, :-1], axis=0))
        x, _ = ns.lax.scan(turn, x, (weights["blocks"], adapters))
        x = lora_step.array_norm(ns, case, x, weights["norm"])
        losses = _losses(ns, case, x, weights["embedding"], tokens[:, 1:])
        return ns.np.sum(losses * mask) / ns.np.sum(mask)

    return loss


# ------------------------------------------------------------------------- PyTorch


def _torch_loss(
    torch: Any, case: Case, given: tuple[Tree, ...], wrap: Callable[..., Any]
) -> tuple[Callable[[], Any], list[Any]]:
    """The loss and its parameters, in the order of the flattened adapters."""
    adapters, weights, tokens, mask = given
    functional, s = torch.nn.functional, case.params
    checkpoint = importlib.import_module("torch.utils.checkpoint").checkpoint
    block = wrap(lora_step.torch_block(torch, case))

    def frozen(x: np.ndarray | Packed) -> Any:
        return torch.from_numpy(x).to(getattr(torch, case.dtype))

    embedding, norm = frozen(weights["embedding"]), frozen(weights["norm"])
    stacks = {n: frozen(x).unbind(0) for n, x in weights["blocks"].items()}
    trained = tree_map(lambda x: torch.nn.Parameter(torch.from_numpy(x.copy())), adapters)
    tokens, mask = torch.from_numpy(tokens).long(), torch.from_numpy(mask)[0]

    def head(x: Any, labels: Any) -> Any:
        x = functional.rms_norm(x, (s["width"],), norm, lora_step.EPSILON)
        logits = functional.linear(x, embedding)[0].float()
        losses = functional.cross_entropy(logits, labels, reduction="none")
        return (losses * mask).sum() / mask.sum()

    head = wrap(head)

    def loss() -> Any:
        x = functional.embedding(tokens[:, :-1], embedding)
        layers = tree_map(lambda p: p.unbind(0), trained)
        for n in range(s["layers"]):
            pairs = {m: {k: stack[n] for k, stack in p.items()} for m, p in layers.items()}
            frozen_layer = {m: stack[n] for m, stack in stacks.items()}
            x = checkpoint(block, x, frozen_layer, pairs, use_reentrant=False)
        return head(x, tokens[0, 1:])

    return loss, [trained[n][m] for n in sorted(trained) for m in ("a", "b")]


def torch_program(
    torch: Any, case: Case, given: tuple[Tree, ...], wrap: Callable[..., Any]
) -> Callable[[], Any]:
    """A step with the fused AdamW; ``torch.compile`` by region, one program for all blocks."""
    return lora_step.torch_step(torch, *_torch_loss(torch, case, given, wrap))


def torch_gradient(torch: Any, case: Case, given: tuple[Tree, ...]) -> Callable[[], Any]:
    """Loss and gradient of the adapters, in the order of `inputs`."""
    found = _torch_loss(torch, case, given, lambda function: function)
    return lora_step.torch_value_and_gradient(torch, *found)


def main(arguments: list[str]) -> int:
    """Runs the benchmark; ``--layers`` and ``--context`` change the full case."""
    from benchmarks import harness  # noqa: PLC0415  needs llvmlite, which the peers' Python lacks

    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--layers", type=int, default=FULL["layers"])
    parser.add_argument("--context", type=int, default=FULL["tokens"])
    given, rest = parser.parse_known_args(arguments)
    os.environ[SIZES] = f"{given.layers},{given.context}"
    default = ("vkjit", "jax", "torch", "torch-compile")
    return harness.main("llama_1b5", cases(), rest, default)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
