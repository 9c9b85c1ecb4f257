"""Adapter placement, start values, storage, dropout."""

from __future__ import annotations

import math

import numpy as np
import pytest

import vkjit.numpy as jnp
from vkjit import random
from vkjit.errors import ConfigError, DataError
from vkjit_models.llama.config import from_hugging_face, linear_shapes
from vkjit_models.llama.lora import (
    LoraSpec,
    from_peft,
    init_adapters,
    matches,
    plan_adapters,
    to_peft,
)
from vkjit_models.llama.model import Inputs, LlamaSpec, LoraPair, forward, rope_tables

from .tiny import HYPER


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("all-linear", 14),
        ("q_proj", 2),
        ("mlp.up_proj", 2),
        ("model.layers.1.*", 7),
        (r"re:.*\.[qv]_proj", 4),
        ("proj", 0),
    ],
)
def test_patterns(pattern: str, count: int) -> None:
    assert sum(matches(pattern, name) for name in linear_shapes(HYPER)) == count


def test_plan_says_what_is_adapted_and_why_the_rest_is_not() -> None:
    plan = plan_adapters(HYPER, LoraSpec(4, 8.0, ("q_proj", "v_proj")))
    assert [row.module.rpartition(".")[2] for row in plan.adapted] == ["q_proj", "v_proj"] * 2
    reasons = {row.module: row.reason for row in plan.skipped}
    assert "vector" in reasons["model.norm"]
    assert "embedding" in reasons["model.embed_tokens"]
    assert reasons["model.layers.0.mlp.up_proj"] == "no target pattern matches"
    assert plan.parameters == 2 * 4 * ((8 + 8) + (4 + 8))


def test_a_pattern_without_a_layer_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'q_prj' matches no linear layer.*'q_proj'"):
        plan_adapters(HYPER, LoraSpec(4, 8.0, ("q_prj",)))


@pytest.mark.parametrize("spec", [LoraSpec(0, 1.0), LoraSpec(1, 1.0, dropout=1.0)])
def test_invalid_specs(spec: LoraSpec) -> None:
    with pytest.raises(ConfigError, match="expected rank >= 1"):
        plan_adapters(HYPER, spec)


def test_scales() -> None:
    assert LoraSpec(4, 8.0).scale == 2.0
    assert LoraSpec(4, 8.0, rslora=True).scale == 4.0


def test_start_leaves_the_model_unchanged_and_fills_the_bound() -> None:
    plan = plan_adapters(HYPER, LoraSpec(4, 8.0))
    adapters = init_adapters(plan, random.PRNGKey(0))
    for row in plan.adapted:
        pair = adapters[row.module]
        bound = 1 / math.sqrt(row.shape[1])
        largest = np.abs(np.asarray(pair.a)).max()
        assert 0.8 * bound < largest <= bound
        assert not np.asarray(pair.b).any()
    first, second = (np.asarray(adapters[f"model.layers.{i}.mlp.up_proj"].a) for i in (0, 1))
    assert not np.array_equal(first, second)


def test_peft_names_round_trip() -> None:
    adapters = init_adapters(plan_adapters(HYPER, LoraSpec(2, 2.0)), random.PRNGKey(1))
    tensors = to_peft(adapters)
    assert "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight" in tensors
    back = from_peft(HYPER, tensors)
    for name, pair in adapters.items():
        np.testing.assert_array_equal(pair.a, back[name].a)
    del tensors["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"]
    with pytest.raises(DataError, match=r"down_proj has A and B of shapes \[None, \(8, 2\)\]"):
        from_peft(HYPER, tensors)


def test_foreign_tensors_are_refused() -> None:
    with pytest.raises(DataError, match="belong to no layer"):
        from_peft(HYPER, {"base_model.model.lm_head.lora_A.weight": np.zeros((2, 8), np.float32)})


def test_dropout_is_unbiased_and_off_without_a_key() -> None:
    rng = np.random.default_rng(0)
    params = {
        f"{name}.weight": jnp.asarray(np.float32(rng.normal(size=shape) * 0.2))
        for name, shape in linear_shapes(HYPER).items()
    }
    params |= {
        f"model.layers.{i}.{kind}.weight": jnp.ones(8, jnp.float32)
        for i in (0, 1)
        for kind in ("input_layernorm", "post_attention_layernorm")
    }
    params["model.norm.weight"] = jnp.ones(8, jnp.float32)
    params["model.embed_tokens.weight"] = jnp.asarray(np.float32(rng.normal(size=(11, 8))))
    name = "model.layers.1.mlp.down_proj"
    pair = LoraPair(*(jnp.asarray(np.float32(rng.normal(size=s))) for s in ((2, 12), (8, 2))))
    inputs = Inputs(jnp.asarray(np.array([1, 2, 3], np.int32)))

    def run(dropout: float, key: object = None) -> np.ndarray:
        spec = LlamaSpec(HYPER, 0.01, dropout)
        return np.asarray(forward(spec, params, {name: pair}, inputs, key))

    plain = run(0.0)
    np.testing.assert_array_equal(run(0.5), plain)
    drops = [run(0.5, random.PRNGKey(i)) for i in range(40)]
    assert not np.array_equal(drops[0], drops[1])
    np.testing.assert_array_equal(drops[0], run(0.5, random.PRNGKey(0)))
    base = np.asarray(forward(LlamaSpec(HYPER, 0.0), params, {}, inputs))
    shift, mean_shift = plain - base, np.mean(drops, axis=0) - base
    assert np.abs(mean_shift - shift).max() < 0.5 * np.abs(shift).max()


def test_rope_angles_are_exact_at_far_positions() -> None:
    cos, _ = rope_tables(8192, 64, 1e5)
    np.testing.assert_allclose(cos[8191, 0], math.cos(8191.0), rtol=0, atol=1e-7)


def test_config_of_another_architecture_is_refused() -> None:
    with pytest.raises(DataError, match="Qwen2ForCausalLM"):
        from_hugging_face({"architectures": ["Qwen2ForCausalLM"]})
