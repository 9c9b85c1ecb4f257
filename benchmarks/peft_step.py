"""The LoRA step as users of Hugging Face write it: transformers' Llama under peft's adapters.

Adapters are float32 beside a base of the case's dtype, which is peft's default.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.case import ADAMW, Case, Tree
from benchmarks.packed import Packed

_NAMES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
    "o": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
    "down": "mlp.down_proj", "norm1": "input_layernorm", "norm2": "post_attention_layernorm",
}  # fmt: skip
_LINEAR = ("down", "gate", "k", "o", "q", "up", "v")


def peft_loss(
    torch: Any, case: Case, given: tuple[Tree, ...], constants: tuple[float, float, float]
) -> tuple[Callable[[], Any], list[Any]]:
    """The loss and its parameters, in the order of the flattened adapters.

    Args:
        torch: The module.
        case: Sizes as in ``lora_step``.
        given: Its inputs.
        constants: Epsilon of the norms, base of the rotations, scale of the adapters.
    """
    transformers, peft = (importlib.import_module(n) for n in ("transformers", "peft"))
    adapters, weights, tokens, mask = given
    s, (epsilon, theta, scale), functional = case.params, constants, torch.nn.functional
    config = transformers.LlamaConfig(
        vocab_size=s["vocabulary"],
        hidden_size=s["width"],
        intermediate_size=s["hidden"],
        num_hidden_layers=s["layers"],
        num_attention_heads=s["heads"],
        num_key_value_heads=s["kv_heads"],
        rms_norm_eps=epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        max_position_embeddings=s["tokens"],
        tie_word_embeddings=True,
        use_cache=False,
    )
    ids = torch.from_numpy(tokens).long()
    model = transformers.LlamaForCausalLM(config).to(getattr(torch, case.dtype)).to(ids.device)
    model.load_state_dict(_state(torch, weights), strict=False)
    lora = peft.LoraConfig(
        r=s["rank"],
        lora_alpha=scale * s["rank"],
        target_modules=[_NAMES[n].rpartition(".")[2] for n in _LINEAR],
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(model, lora)
    parameters = _set_adapters(torch, model.base_model.model.model.layers, adapters)
    trained = torch.from_numpy(mask)[0]

    def loss() -> Any:
        logits = model(input_ids=ids[:, :-1]).logits[0].float()
        losses = functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        return (losses * trained).sum() / trained.sum()

    return loss, parameters


def _state(torch: Any, weights: Tree) -> dict[str, Any]:
    def on_device(x: np.ndarray | Packed) -> Any:
        return torch.from_numpy(x)

    state = {
        "model.embed_tokens.weight": on_device(weights["embedding"]),
        "model.norm.weight": on_device(weights["norm"]),
    }
    for n, block in enumerate(weights["blocks"]):
        state |= {f"model.layers.{n}.{_NAMES[k]}.weight": on_device(x) for k, x in block.items()}
    return state


def _set_adapters(torch: Any, layers: Any, adapters: Tree) -> list[Any]:
    parameters: list[Any] = []
    for layer, pairs in zip(layers, adapters, strict=True):
        for name in _LINEAR:
            module = layer.get_submodule(_NAMES[name])
            for half, values in (
                (module.lora_A, pairs[name]["a"]),
                (module.lora_B, pairs[name]["b"]),
            ):
                weight = half["default"].weight
                with torch.no_grad():
                    weight.copy_(torch.from_numpy(values))
                parameters.append(weight)
    return parameters


def peft_step(torch: Any, loss: Callable[[], Any], parameters: list[Any]) -> Callable[[], Any]:
    """A step with the fused AdamW."""
    optimizer = torch.optim.AdamW(parameters, lr=ADAMW.rate, weight_decay=ADAMW.decay, fused=True)

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        value = loss()
        value.backward()
        optimizer.step()
        return value.detach()

    return step
