"""What runs of one process share, and what tells their programs apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.models.lora_sft.conftest import GGUF
from vkjit import random
from vkjit_models.llama.lora import init_adapters, plan_adapters, with_row_squares
from vkjit_models.lora_sft.base import load_base
from vkjit_models.lora_sft.config import RunConfig, parse_config
from vkjit_models.lora_sft.shared import Shared


def test_programs_are_of_the_weights_that_they_were_given(config: RunConfig) -> None:
    """A program of plain adapters would compute the row norms of DoRA in every step."""
    base, shared = load_base(str(GGUF)), Shared()
    plan = plan_adapters(base.hyper, replace(config.lora.spec, dora=True))
    adapters = init_adapters(plan, random.PRNGKey(0), base.params)
    params = with_row_squares(base.params, adapters)
    assert params.keys() > base.params.keys()
    plain = shared.evaluator(base.spec, base.params, 8)
    assert shared.evaluator(base.spec, params, 8) is not plain
    assert shared.evaluator(base.spec, base.params, 8) is plain
    steps = [shared.step(base.spec, p, config) for p in (base.params, params, base.params)]
    assert steps[0].accumulate is steps[2].accumulate
    assert steps[0].accumulate is not steps[1].accumulate


@pytest.mark.parametrize(
    ("section", "change", "shares"),
    [
        ("optimizer", {"learning_rate": 0.5}, True),
        ("optimizer", {"weight_decay": 0.1}, True),
        ("optimizer", {"b1": 0.5}, False),
        ("optimizer", {"clip_norm": 3.0}, False),
        ("schedule", {"warmup_steps": 2}, False),
        ("loss", {"label_smoothing": 0.1}, False),
        ("train", {"steps": 5}, False),
        ("train", {"seed": 9}, True),
    ],
)
def test_steps_are_shared_where_they_are_traced_alike(
    settings: dict[str, Any], section: str, change: dict[str, Any], *, shares: bool
) -> None:
    base, shared = load_base(str(GGUF)), Shared()
    other = {**settings, section: {**settings.get(section, {}), **change}}
    first, second = (
        shared.step(base.spec, base.params, parse_config(s)) for s in (settings, other)
    )
    assert (first.accumulate is second.accumulate) is shares
