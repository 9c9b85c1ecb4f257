"""The configuration file: what is accepted, and what every mistake is told."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from vkjit.errors import ConfigError
from vkjit_models.llama.loss import LossSpec
from vkjit_models.lora_sft.config import load_config, parse_config
from vkjit_models.lora_sft.sweep_config import load_sweep

MINIMAL: dict[str, Any] = {"train": {"steps": 3}, "output": {"folder": "runs/x"}}
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda p: p.name)
def test_the_configs_of_the_repository_are_valid(path: Path) -> None:
    if "[sweep]" in path.read_text(encoding="utf-8"):
        assert load_sweep(path).runs
    else:
        assert load_config(path).train.steps > 0


def test_defaults_are_filled_in_and_stored_as_json_values() -> None:
    resolved = parse_config(MINIMAL).resolved()
    assert resolved["lora"]["targets"] == ["all-linear"]
    assert resolved["model"]["path"] == "smollm2"
    assert resolved["output"]["folder"] == "runs/x"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"lora": {"rang": 8}}, r"unknown key 'lora\.rang'; did you mean 'lora\.rank'\?"),
        ({"lorra": {}}, r"unknown key 'lorra'; did you mean 'lora'\?"),
        ({"lora": {"learning_rate": 1}}, r"did you mean 'optimizer\.learning_rate'\?"),
        ({"lora": {"zzz": 8}}, r"unknown key 'lora\.zzz'; valid here: lora\.rank, lora\.alpha"),
        ({"lora": {"frozen": ["q_proj"]}}, r"lora\.frozen was given without lora\.start"),
        ({"lora": {"rank_pattern": {"q_proj": "x"}}}, r"lora\.rank_pattern\.q_proj = 'x'"),
        ({"optimizer": {"decay_toward": "start"}}, r"decay_toward = 'start'.*'zero' or 'init'"),
        (
            {"lora": {"rank": 0}},
            r"lora\.rank = 0 was given, expected greater than .* 1; correct it",
        ),
        (
            {"optimizer": {"learning_rate": float("inf")}},
            r"inf was given, expected a finite number",
        ),
        ({"data": {"jsonl": 3}}, r"data\.jsonl = 3 was given, expected a path or a list of paths"),
        ({"optimizer": {"name": "adamax"}}, r"optimizer\.name = 'adamax'.*'adamw', 'lion'"),
        ({"train": {}}, r"key 'train\.steps' is missing"),
        ({"schedule": {"warmup_steps": 9}}, r"warmup_steps=9 was given with train\.steps=3"),
        ({"data": {"source": "a", "jsonl": "b"}}, r"data\.source and data\.jsonl were given"),
        ({"loss": {"kl": "tmkl"}}, r"loss\.kl='tmkl' was given with loss\.kl_weight=0"),
        ({"loss": {"kl_weight": 0.1}}, r"loss\.kl='none' was given with loss\.kl_weight=0\.1"),
        ({"loss": {"kl": "tmlk"}}, r"loss\.kl = 'tmlk'.*'tmkl', 'tmkl_reverse'"),
        (
            {"loss": {"label_smoothing": 1.0}},
            r"loss\.label_smoothing = 1\.0 was given, expected less than 1",
        ),
        ({"loss": {"pullback": 1.0}}, r"did you mean 'loss\.pullback_weight'\?"),
    ],
)
def test_mistakes_are_named(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({**MINIMAL, **section})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "absent.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("[train\nsteps = 3")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(bad)


def test_steps_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[train]\nsteps = 9\n[schedule]\nwarmup_steps = 5\n[output]\nfolder = "runs/x"\n'
    )
    longer, shorter = load_config(path, steps=12), load_config(path, steps=3)
    assert (longer.train.steps, longer.schedule.warmup_steps) == (12, 5)
    assert (shorter.train.steps, shorter.schedule.warmup_steps) == (3, 3)


def test_identity_leaves_out_what_does_not_change_the_numbers() -> None:
    one = parse_config(MINIMAL)
    other = parse_config({"train": {"steps": 3, "eval_every": 2}, "output": {"folder": "y"}})
    assert one.identity() == other.identity()
    assert parse_config({**MINIMAL, "lora": {"rank": 3}}).identity() != one.identity()


def test_the_loss_as_the_model_library_takes_it() -> None:
    assert parse_config(MINIMAL).loss.spec == LossSpec()
    given = {"label_smoothing": 0.1, "z_loss": 1e-4, "kl": "tmkl", "kl_weight": 0.25}
    found = parse_config({**MINIMAL, "loss": given})
    assert found.loss.spec == LossSpec(0.1, 1e-4, "tmkl", 0.25, 0.0)
    assert parse_config(found.resolved()) == found
    assert found.identity() != parse_config(MINIMAL).identity()


def test_every_key_of_the_adapters_reaches_their_spec() -> None:
    section = {
        "rank": 4, "alpha": 2.0, "rslora": True, "dora": True, "dropout": 0.1,
        "targets": ["q_proj"], "exclude": ["k_proj"], "layers": "1-", "attention": True,
        "mlp": False, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 1.5},
        "frozen": ["v_proj"],
    }  # fmt: skip
    spec = parse_config({**MINIMAL, "lora": {**section, "start": "a"}}).lora.spec
    listed = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(spec).items()}
    assert listed == section
    assert spec.scale == 1.0
