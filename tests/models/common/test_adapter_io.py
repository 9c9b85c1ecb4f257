"""Adapters: PEFT's own file read, the same written back, and files that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from vkjit.errors import DataError
from vkjit_models.common.adapter_config import pattern_key
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
        ({"use_dora": True}, "has A, B of .*q_proj, expected A, B, magnitude with use_dora = True"),
        ({"bias": "all"}, "has bias = 'all', expected 'none'"),
        ({"r": 0}, "has r = 0 and lora_alpha = 6"),
        ({"r": 3}, r"has shape \(2, 5\), expected rank 3 at axis 0"),
        ({"lora_alpha": "6"}, "has r = 2 and lora_alpha = '6', expected a positive integer"),
        ({"target_modules": 3}, "has target_modules = 3, expected a list of names"),
        ({"rank_pattern": {"q_proj": 3}}, r"has shape \(2, 5\), expected rank 3 at axis 0"),
        ({"rank_pattern": {"q_proj": 0}}, "has rank_pattern = .*expected names with positive int"),
        ({"alpha_pattern": ["q_proj"]}, "has alpha_pattern = .*expected names with numbers"),
        ({"alpha_pattern": {"(q": 1}}, r"alpha_pattern has the key '\(q', expected a regular exp"),
        ({"layers_to_transform": [-1]}, r"has layers_to_transform = \[-1\], expected indices"),
        ({"modules_to_save": ["lm_head"]}, r"has modules_to_save = \['lm_head'\].*merge it with"),
        ({"lora_bias": True}, "has lora_bias = True, expected False"),
        ({"trainable_token_indices": [1]}, r"has trainable_token_indices = \[1\]"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights = 'pissa_niter_4', which also"),
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
    with pytest.raises(DataError, match=r"has A of model\.layers\.0.*expected A, B"):
        load_adapter(tmp_path)
    with pytest.raises(DataError, match="has no tensors"):
        save_adapter(tmp_path, CONFIG, {})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("base_model.model.model.embed_tokens.lora_embedding_A", "an adapter of an embedding"),
        ("base_model.model.lm_head.modules_to_save.weight", "a layer trained as a whole"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", r"expected base_model\.model\.<module>"),
        (f"base_model.model.{MODULE}.lora_A.default.weight", "PEFT's save_pretrained"),
    ],
)
def test_tensors_that_are_no_adapter_of_a_linear_layer_say_what_they_are(
    tmp_path: Path, pair: dict[str, NDArray[np.float32]], name: str, message: str
) -> None:
    save_adapter(tmp_path, CONFIG, pair)
    save_file({**pair, name: np.zeros(2, np.float32)}, tmp_path / WEIGHTS_NAME)
    with pytest.raises(DataError, match=message):
        load_adapter(tmp_path)


def test_every_key_survives_a_round_trip(
    tmp_path: Path, pair: dict[str, NDArray[np.float32]]
) -> None:
    config = AdapterConfig(
        r=8,
        lora_alpha=16.0,
        target_modules=r".*\.q_proj",
        use_rslora=True,
        lora_dropout=0.25,
        use_dora=True,
        rank_pattern={"layers.0.self_attn.q_proj": 2},
        alpha_pattern={r"layers\.[0-3]\..*": 6.5},
        layers_to_transform=(0, 3),
        layers_pattern=("layers",),
        exclude_modules=("v_proj",),
    )
    pair[peft_name(MODULE, "magnitude")] = np.ones(3, np.float32)
    save_adapter(tmp_path, config, pair)
    loaded, tensors = load_adapter(tmp_path)
    assert loaded == config
    assert tensors.keys() == pair.keys()
    assert (loaded.rank_of(MODULE), loaded.scale_of(MODULE)) == (2, 6.5 / 2**0.5)
    assert loaded.scales([MODULE, "model.layers.9.mlp.up_proj"]) == ((MODULE, 6.5 / 2**0.5),)
    # As PEFT holds them in memory, and as its versions before 0.11 stored them.
    other = {name.replace("_vector", "_vector.weight"): array for name, array in pair.items()}
    save_file(other, tmp_path / WEIGHTS_NAME)
    assert load_adapter(tmp_path)[1].keys() == pair.keys()
    pair[peft_name(MODULE, "magnitude")] = np.ones(4, np.float32)
    with pytest.raises(DataError, match=r"lora_magnitude_vector' of .* has shape \(4,\)"):
        save_adapter(tmp_path, config, pair)


def test_half_precision_files_are_read_as_float32(
    tmp_path: Path, pair: dict[str, NDArray[np.float32]]
) -> None:
    save_adapter(tmp_path, CONFIG, pair)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        half = {name: array.astype(dtype) for name, array in pair.items()}
        save_file(half, tmp_path / WEIGHTS_NAME)
        for name, array in load_adapter(tmp_path)[1].items():
            assert array.dtype == np.float32
            np.testing.assert_array_equal(array, half[name].astype(np.float32))


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        ("q_proj", True),
        ("self_attn.q_proj", True),
        ("proj", False),  # the name's parts are whole
        ("layers.0", False),  # the end has to fit
        (r"layers\.0\..*", True),
        ("^model.layers.0.self_attn.q_proj", True),
        ("^layers.0.self_attn.q_proj", False),
        ("up_proj|q_proj", True),
    ],
)
def test_pattern_keys_fit_as_in_peft(pattern: str, fits: bool) -> None:  # noqa: FBT001  a case
    assert (pattern_key(["k_proj", pattern], MODULE) == pattern) is fits
