"""Adapters: PEFT's own file read, the same written back, and files that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from vkjit.errors import DataError
from vkjit_models.common.adapter_io import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    AdapterConfig,
    load_adapter,
    peft_name,
    save_adapter,
)

CONFIG = AdapterConfig(r=2, lora_alpha=6.0, target_modules=("q_proj",))
MODULE = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def pair() -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(0)
    return {
        peft_name(MODULE, "A"): rng.standard_normal((2, 5)).astype(np.float32),
        peft_name(MODULE, "B"): rng.standard_normal((3, 2)).astype(np.float32),
    }


def test_reads_what_peft_wrote(data: Path) -> None:
    config, tensors = load_adapter(data / "llama")
    assert config == AdapterConfig(
        r=4,
        lora_alpha=8,
        target_modules=(
            "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
        ),
    )  # fmt: skip
    assert config.scale == 2.0
    assert len(tensors) == 3 * 7 * 2
    assert tensors[peft_name(MODULE, "A")].shape == (4, 64)


def test_writes_what_peft_wrote(data: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path / "out", *load_adapter(data / "llama"))
    folders = (data / "llama", tmp_path / "out")
    theirs, ours = (json.loads((folder / CONFIG_NAME).read_text()) for folder in folders)
    assert ours == theirs
    expected, found = (load_file(folder / WEIGHTS_NAME) for folder in folders)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {CONFIG_NAME, WEIGHTS_NAME}


def test_round_trip_of_a_view(tmp_path: Path, pair: dict[str, NDArray[np.float32]]) -> None:
    name = peft_name(MODULE, "B")
    pair[name] = np.asfortranarray(pair[name])
    config = AdapterConfig(
        2, 6.5, ("q_proj",), use_rslora=True, lora_dropout=0.1, base_model_name_or_path="base"
    )
    save_adapter(tmp_path, config, pair)
    loaded, tensors = load_adapter(tmp_path)
    assert loaded == config
    assert loaded.scale == pytest.approx(6.5 / 2**0.5)
    for key, array in pair.items():
        np.testing.assert_array_equal(tensors[key], array)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "is not a LoRA config, expected peft_type LORA"),
        ({"use_dora": True}, "has use_dora = True, expected False"),
        ({"bias": "all"}, "has bias = 'all', expected 'none'"),
        ({"r": 0}, "has r = 0 and lora_alpha = 6"),
        ({"r": 3}, r"has shape \(2, 5\), expected rank 3 at axis 0"),
        ({"target_modules": "all-linear"}, "expected a list of names"),
    ],
)
def test_config_that_does_not_fit(
    tmp_path: Path, pair: dict[str, NDArray[np.float32]], change: dict[str, Any], message: str
) -> None:
    save_adapter(tmp_path, CONFIG, pair)
    data = json.loads((tmp_path / CONFIG_NAME).read_text())
    (tmp_path / CONFIG_NAME).write_text(json.dumps(data | change))
    with pytest.raises(DataError, match=message):
        load_adapter(tmp_path)


def test_missing_and_damaged_files(tmp_path: Path, pair: dict[str, NDArray[np.float32]]) -> None:
    with pytest.raises(DataError, match=r"cannot read .*adapter_config\.json"):
        load_adapter(tmp_path)
    save_adapter(tmp_path, CONFIG, pair)
    whole = (tmp_path / WEIGHTS_NAME).read_bytes()
    (tmp_path / WEIGHTS_NAME).write_bytes(whole[:-8])
    with pytest.raises(DataError, match=r"cannot read .*expected safetensors"):
        load_adapter(tmp_path)
    save_file({peft_name(MODULE, "A"): pair[peft_name(MODULE, "A")]}, tmp_path / WEIGHTS_NAME)
    with pytest.raises(DataError, match=r"lora_A\.weight' without its other half"):
        load_adapter(tmp_path)
    with pytest.raises(DataError, match="has no tensors"):
        save_adapter(tmp_path, CONFIG, {})
