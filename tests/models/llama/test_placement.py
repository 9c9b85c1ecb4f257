"""Which layers get adapters, of what rank and scale, and what every mistake is told."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from vkjit.errors import ConfigError
from vkjit_models.common.adapter_config import AdapterConfig
from vkjit_models.llama.lora import LoraSpec, plan_adapters, with_adapter
from vkjit_models.llama.model import LlamaSpec, LoraPair, forward
from vkjit_models.llama.placement import parse_layers

from .tiny import HYPER, INPUTS, random_adapters, random_params

PARAMS = random_params()
spec_of = partial(LoraSpec, 4, 8.0)


def modules(spec: LoraSpec) -> list[str]:
    return [row.module for row in plan_adapters(HYPER, spec).adapted]


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("0-7,28-", [*range(8), 28, 29]),
        ("-2", [0, 1, 2]),
        ("3, 5", [3, 5]),
        ("4-4", [4]),
        ("0-", range(30)),
    ],
)
def test_ranges_of_layers(text: str, chosen: list[int]) -> None:
    assert parse_layers(text, 30) == set(chosen)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a", "has the item 'a', expected an index or a range"),
        ("", "has the item ''"),
        ("-", "has the item '-'"),
        ("1,,2", "has the item ''"),
        ("7-3", "names blocks 7 to 3, expected a range within 0 to 29"),
        ("0-30", "names blocks 0 to 30.*the model has 30 blocks"),
    ],
)
def test_ranges_that_make_no_sense(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_layers(text, 30)


def test_excludes_ranges_and_parts_narrow_the_targets_and_say_so() -> None:
    assert modules(spec_of(("q_proj",), layers="1-")) == ["model.layers.1.self_attn.q_proj"]
    assert len(modules(spec_of(exclude=("q_proj", "re:.*up_proj")))) == 2 * 5
    assert all(".mlp." in name for name in modules(spec_of(attention=False)))
    assert all(".self_attn." in name for name in modules(spec_of(mlp=False)))
    plan = plan_adapters(
        HYPER, spec_of(("*_proj",), exclude=("q_proj",), layers="0", attention=False)
    )
    reasons = {row.module: row.reason for row in plan.skipped}
    assert reasons["model.layers.0.self_attn.q_proj"] == "excluded by 'q_proj'"
    assert reasons["model.layers.1.mlp.up_proj"] == "block is not in layers = '0'"
    assert reasons["model.layers.0.self_attn.v_proj"] == "attention = false"
    assert len(plan.adapted) + len(plan.skipped) == 2 * 9 + 2


def test_ranks_and_scales_of_single_layers() -> None:
    spec = spec_of(
        rslora=True,
        rank_pattern={"layers.1.mlp.down_proj": 1, "down_proj|up_proj": 16},
        alpha_pattern={"down_proj": 2.0},
    )
    rows = {row.module: row for row in plan_adapters(HYPER, spec).adapted}
    of = {name: (row.rank, row.alpha, row.scale) for name, row in rows.items()}
    assert of["model.layers.1.mlp.down_proj"] == (1, 2.0, 2.0)  # the first key that fits
    assert of["model.layers.0.mlp.down_proj"] == (16, 2.0, 0.5)
    assert of["model.layers.0.mlp.up_proj"] == (16, 8.0, 2.0)
    assert of["model.layers.0.mlp.gate_proj"] == (4, 8.0, 4.0)
    plan = plan_adapters(HYPER, spec)
    adapters = random_adapters(plan)
    assert plan.parameters == sum(np.asarray(pair.a).size + np.asarray(pair.b).size
                                  for pair in adapters.values())  # fmt: skip
    # The plan's constants are those that the written config gives back.
    config = plan.peft_config(None)
    assert with_adapter(LlamaSpec(HYPER), config, adapters) == plan.llama_spec(HYPER)
    assert dict(plan.llama_spec(HYPER).lora_scales)["model.layers.1.mlp.down_proj"] == 2.0


def test_the_scale_of_a_layer_reaches_its_product() -> None:
    name = "model.layers.0.mlp.up_proj"
    plan = plan_adapters(HYPER, LoraSpec(2, 1.0, (name,), alpha_pattern={"up_proj": 3.0}))
    pair = random_adapters(plan)[name]
    got = forward(plan.llama_spec(HYPER), PARAMS, {name: pair}, INPUTS)
    weight = jnp.asarray(np.asarray(PARAMS[f"{name}.weight"]) + 1.5 * np.asarray(pair.b @ pair.a))
    want = forward(plan.llama_spec(HYPER), {**PARAMS, f"{name}.weight": weight}, {}, INPUTS)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "targets", "layers"),
    [
        (spec_of(), 7, None),
        (spec_of(("q_proj", "up_proj"), layers="1"), 2, (1,)),
        (spec_of(("q_proj", "model.layers.1.*")), 8, None),  # no product: whole names
    ],
)
def test_the_placement_is_written_as_peft_reads_it(
    spec: LoraSpec, targets: int, layers: tuple[int, ...] | None
) -> None:
    plan = plan_adapters(HYPER, spec)
    config = plan.peft_config(None)
    assert (len(config.target_modules), config.layers_to_transform) == (targets, layers)
    everything = [row.module for row in (*plan.adapted, *plan.skipped)]
    chosen = [name for name in everything if peft_chooses(config, name)]
    assert sorted(chosen) == sorted(row.module for row in plan.adapted)


def peft_chooses(config: AdapterConfig, name: str) -> bool:
    """PEFT's ``check_target_module_exists`` for lists of names."""
    if not any(name == t or name.endswith(f".{t}") for t in config.target_modules):
        return False
    blocks = config.layers_to_transform
    return blocks is None or int(name.split(".")[2]) in blocks


def loss(spec: Any, adapters: Any) -> Any:
    return jnp.sum(jnp.sin(forward(spec, PARAMS, adapters, INPUTS)))


@pytest.mark.parametrize("flags", [{"attention": False}, {"mlp": False}, {"layers": "0"}])
def test_placement_changes_the_list_of_adapters_and_no_gradient(flags: dict[str, Any]) -> None:
    """Gradients pass through layers without an adapter as through layers with one."""
    everywhere, some = plan_adapters(HYPER, spec_of()), plan_adapters(HYPER, spec_of(**flags))
    here = random_adapters(some)

    off = {
        name: LoraPair(pair.a, 0.0 * pair.b) for name, pair in random_adapters(everywhere).items()
    }
    got = vj.jit(vj.grad(partial(loss, some.llama_spec(HYPER))))(here)
    want = vj.jit(vj.grad(partial(loss, everywhere.llama_spec(HYPER))))({**off, **here})
    for name, pair in got.items():
        for found, expected in zip(pair[:2], want[name][:2], strict=True):
            bound = 1e-5 * np.abs(np.asarray(expected)).max()
            assert np.abs(np.asarray(expected)).max() > 0.0
            np.testing.assert_allclose(found, expected, rtol=0, atol=bound, err_msg=name)


def test_frozen_adapters_act_and_have_no_gradient() -> None:
    plan = plan_adapters(HYPER, spec_of(frozen=("*.mlp.*_proj", "re:.*0.*_proj")))
    free = plan_adapters(HYPER, spec_of())
    adapters = random_adapters(plan)
    got = vj.grad(partial(loss, plan.llama_spec(HYPER)))(adapters)
    want = vj.grad(partial(loss, free.llama_spec(HYPER)))(adapters)
    frozen = plan.frozen(adapters)
    for row in plan.adapted:
        trained = "layers.1." in row.module and "mlp" not in row.module
        assert row.trained is trained
        assert frozen[row.module] == LoraPair(not trained, not trained)
        for found, expected in zip(got[row.module][:2], want[row.module][:2], strict=True):
            reference = np.asarray(expected) if trained else np.zeros(expected.shape)
            np.testing.assert_allclose(found, reference, rtol=0, atol=1e-5)
    assert plan.parameters < free.parameters


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (spec_of(exclude=("k_porj",)), r"exclude 'k_porj' matches no linear layer.*'k_proj'"),
        (spec_of(("q_proj",), exclude=("q_proj",)), "leave no layer, expected at least one"),
        (spec_of(attention=False, mlp=False), "leave no layer"),
        (spec_of(frozen=("all-linear",)), "chooses every adapted layer, expected at least one to"),
        (spec_of(("q_proj",), frozen=("up_proj",)), "frozen 'up_proj' matches no linear layer"),
        (spec_of(rank_pattern={"q_prj": 3}), r"rank_pattern 'q_prj' matches no.*'q_proj'"),
        (spec_of(rank_pattern={"q_proj": 0}), "rank_pattern gives 'q_proj' the value 0"),
        (spec_of(alpha_pattern={"q_proj": -1.0}), "alpha_pattern gives 'q_proj' the value -1"),
        (spec_of(alpha_pattern={"(q": 1.0}), r"alpha_pattern '\(q' is no regular expression"),
        (spec_of(("re:(q",)), r"target 're:\(q' is no regular expression"),
        (spec_of(layers="2"), "names blocks 2 to 2, expected a range within 0 to 1"),
    ],
)
def test_mistakes_are_named(spec: LoraSpec, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_adapters(HYPER, spec)
