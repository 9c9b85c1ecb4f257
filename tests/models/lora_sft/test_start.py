"""Runs that start from an adapter's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vkjit import random
from vkjit.errors import ConfigError
from vkjit_models.common.adapter_gguf import save_gguf_adapter
from vkjit_models.common.adapter_io import save_adapter
from vkjit_models.common.gguf import llama_hyper, open_gguf, read_llama
from vkjit_models.llama.lora import LoraPlan, LoraSpec, init_adapters, plan_adapters, to_peft
from vkjit_models.llama.model import LoraPair
from vkjit_models.lora_sft.start import start_adapters

from .conftest import GGUF

HYPER = llama_hyper(open_gguf(GGUF))
PARAMS: dict[str, Any] = read_llama(GGUF)[1]
Q, K = (f"model.layers.0.self_attn.{kind}_proj" for kind in "qk")


def plan_of(**changes: Any) -> LoraPlan:
    settings = {"rank": 2, "alpha": 4.0, "targets": (Q, K), **changes}
    return plan_adapters(HYPER, LoraSpec(**settings))


def moved(plan: LoraPlan) -> dict[str, LoraPair]:
    adapters = init_adapters(plan, random.key(5), PARAMS)
    return {name: pair._replace(b=pair.b + 0.25) for name, pair in adapters.items()}


def begin(plan: LoraPlan, path: Path) -> dict[str, LoraPair]:
    return start_adapters(plan, HYPER, PARAMS, random.key(1), path)


@pytest.mark.parametrize("kind", ["peft", "gguf"])
def test_values_come_from_the_file_where_it_has_them(tmp_path: Path, kind: str) -> None:
    only = plan_of(targets=(K,))
    written = moved(only)
    path = tmp_path / "adapter"
    if kind == "peft":
        save_adapter(path, only.peft_config(None), to_peft(written))
    else:
        save_gguf_adapter(path, HYPER, only.peft_config(None), to_peft(written))
    adapters = begin(plan_of(), path)
    np.testing.assert_array_equal(adapters[K].a, written[K].a)
    np.testing.assert_array_equal(adapters[K].b, written[K].b)
    assert not np.asarray(adapters[Q].b).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": (Q,)}, rf"adapts {K}, expected layers among the 1 that"),
        ({"rank": 3}, r"has rank 2 and scale 2 for .*, expected rank 3 and scale 1\.33333"),
        ({"rslora": True}, r"expected rank 2 and scale 2\.82843; set lora\.rank, lora\.alpha and"),
        ({"dora": True}, r"has no magnitudes for .*, expected lora\.dora = false"),
    ],
)
def test_a_file_that_does_not_fit_the_plan(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    plan = plan_of()
    save_adapter(tmp_path, plan.peft_config(None), to_peft(moved(plan)))
    with pytest.raises(ConfigError, match=message):
        begin(plan_of(**change), tmp_path)
