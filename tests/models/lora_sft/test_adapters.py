"""A run that goes on from an adapter: DoRA, a frozen kind of layer, decay toward the start."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from vkjit import random, tree
from vkjit_models.common.adapter_io import load_adapter, save_adapter
from vkjit_models.common.gguf import read_llama
from vkjit_models.llama.lora import init_adapters, plan_adapters, to_peft
from vkjit_models.lora_sft.config import parse_config
from vkjit_models.lora_sft.train import train

from .conftest import GGUF


def test_frozen_layers_keep_their_bits_and_the_others_learn(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    settings["lora"] |= {"dora": True, "layers": "0", "rank_pattern": {"down_proj": 1}}
    settings["optimizer"] |= {"weight_decay": 0.5, "decay_toward": "init"}
    settings["train"] |= {"steps": 2, "eval_every": 0}
    settings["output"] |= {"sample_tokens": 0, "plot": False}
    hyper, weights = read_llama(GGUF)
    plan = plan_adapters(hyper, parse_config(settings).lora.spec)
    before = tree.map(lambda x: x + 0.01, init_adapters(plan, random.key(9), weights))
    save_adapter(tmp_path / "start", plan.peft_config(None), to_peft(before))

    settings["lora"] |= {"start": str(tmp_path / "start"), "frozen": ["q_proj"]}
    text = io.StringIO()
    train(parse_config(settings), console=Console(file=text, width=200))
    assert "frozen, by 'q_proj'" in text.getvalue()
    config, after = load_adapter(tmp_path / "run" / "adapter")
    assert (config.use_dora, config.layers_to_transform) == (True, (0,))
    assert config.rank_of("model.layers.0.mlp.down_proj") == 1
    for name, array in to_peft(before).items():
        assert np.array_equal(after[name], array) is ("q_proj" in name), name
        assert np.abs(after[name] - array).max() < 0.05
