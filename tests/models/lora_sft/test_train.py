"""Whole runs on a tiny model: results, resuming bit for bit, accumulation, refusals."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from vkjit.errors import ConfigError, DataError
from vkjit_models.common.adapter_io import load_adapter
from vkjit_models.common.steplog import read_steplog
from vkjit_models.lora_sft.config import RunConfig, parse_config
from vkjit_models.lora_sft.data import training_rows
from vkjit_models.lora_sft.train import RunResult, train


def run(config: RunConfig, **options: Any) -> tuple[RunResult, str]:
    output = io.StringIO()
    result = train(config, console=Console(file=output, width=100), **options)
    return result, output.getvalue()


def changed(settings: dict[str, Any], **sections: dict[str, Any]) -> RunConfig:
    return parse_config({name: {**settings[name], **sections.get(name, {})} for name in settings})


def arrays(folder: Path, step: int) -> dict[str, np.ndarray]:
    return load_file(folder / "checkpoints" / f"step-{step:08d}.safetensors")


def test_a_run_leaves_everything_that_it_promises(config: RunConfig) -> None:
    result, output = run(config)
    folder = config.output.folder
    assert result.step == 4
    assert result.before is not None
    assert result.after is not None
    assert result.after.loss < result.before.loss
    assert set(result.before.by_category) == {"sum", "product"}
    for text in (
        "effective scale 2", "alpha/rank", "training step:", "Memory on cpu, planned",
        "Before and after", "reply after", "measured peak of the process",
    ):  # fmt: skip
        assert text in output
    assert result.costs is not None
    assert 0 < result.costs.predicted_bytes < result.costs.process_bytes
    assert result.costs.device_bytes > 0
    steps = read_steplog(folder / "steps.csv")
    assert steps["step"] == [1, 2, 3, 4]
    assert steps["learning_rate"][0] == 0.0
    assert read_steplog(folder / "held_out.csv")["step"] == [0, 2, 4]
    stored, _ = load_adapter(folder / "adapter")
    assert (stored.r, stored.scale, stored.target_modules) == (2, 2.0, ("q_proj", "down_proj"))
    assert json.loads((folder / "config.json").read_text()) == config.resolved()
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "result.json").read_text())["after"]["loss"] == result.after.loss


def test_a_finished_run_shows_its_results_again_and_keeps_its_files(config: RunConfig) -> None:
    first, _ = run(config, resume=True)  # nothing to resume: the run begins
    stored = (config.output.folder / "result.json").read_bytes()
    again, output = run(config, resume=True)
    assert "all 4 steps are done" in output
    assert "--overwrite begins anew" in output
    assert (again.before, again.after, again.replies) == (first.before, first.after, first.replies)
    assert (config.output.folder / "result.json").read_bytes() == stored
    assert read_steplog(config.output.folder / "steps.csv")["step"] == [1, 2, 3, 4]


def test_the_start_is_the_base_model(config: RunConfig) -> None:
    result, _ = run(config)
    first = read_steplog(config.output.folder / "held_out.csv")["loss"][0]
    assert result.before is not None
    np.testing.assert_allclose(float(first), result.before.loss, rtol=1e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_resumed_run_equals_a_straight_one_bit_for_bit(
    settings: dict[str, Any], tmp_path: Path, dropout: float
) -> None:
    lora = {"dropout": dropout}
    straight = changed(settings, lora=lora, output={"folder": str(tmp_path / "straight")})
    broken = changed(settings, lora=lora, output={"folder": str(tmp_path / "broken")})
    run(straight)
    stopped, output = run(broken, stop_after=2)
    assert stopped.interrupted
    assert "stopped after step 2" in output
    resumed, output = run(broken, resume=True)
    assert resumed.step == 4
    assert "resuming after step 2" in output
    want, got = (arrays(c.output.folder, 4) for c in (straight, broken))
    assert want.keys() == got.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(array, got[name], err_msg=name)
    losses = [read_steplog(c.output.folder / "steps.csv")["loss"] for c in (straight, broken)]
    assert losses[0] == losses[1]


def test_splitting_a_step_into_micro_batches_gives_the_same_run(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    results = []
    for micro_batch, accumulation in ((2, 1), (1, 2)):
        train_section = {"micro_batch": micro_batch, "accumulation": accumulation, "steps": 2}
        folder = tmp_path / f"{micro_batch}x{accumulation}"
        run(changed(settings, train=train_section, output={"folder": str(folder)}))
        results.append(read_steplog(folder / "steps.csv"))
    for column in ("loss", "targets", "gradient_norm"):
        np.testing.assert_allclose(*([float(x) for x in r[column]] for r in results), rtol=2e-5)


def test_resuming_under_another_config_names_the_key(settings: dict[str, Any]) -> None:
    run(changed(settings), stop_after=1)
    with pytest.raises(ConfigError, match=r"lora\.alpha: 4\.0 there, 8\.0 here"):
        run(changed(settings, lora={"alpha": 8.0}), resume=True)
    with pytest.raises(ConfigError, match="pass --resume to go on from it, --overwrite"):
        run(changed(settings))
    with pytest.raises(ConfigError, match="--resume and --overwrite were given"):
        run(changed(settings), resume=True, overwrite=True)
    result, _ = run(changed(settings), overwrite=True)
    assert result.step == 4


def test_no_label_to_learn(settings: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "masked.jsonl"
    lines = [
        {"id": f"{i}", "category": "c", "messages": [{"role": "user", "content": "hello"}]}
        for i in range(9)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(DataError, match="nothing to learn"):
        run(changed(settings, data={"jsonl": str(path)}))


def test_an_empty_data_set(settings: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("")
    with pytest.raises(DataError, match="is empty"):
        run(changed(settings, data={"jsonl": str(path)}))


def test_a_run_whose_gradients_are_not_finite_is_given_up(settings: dict[str, Any]) -> None:
    """A scale of 5e37 makes the squares of the gradients overflow."""
    wild = changed(settings, lora={"alpha": 1e38}, train={"steps": 9})
    result, output = run(wild)
    assert result.stop is not None
    assert (result.stop.kind, result.stop.step, result.step) == ("not finite", 5, 5)
    assert "NaN or infinite in the 5 steps up to 5; lower" in output
    assert not result.interrupted
    assert arrays(wild.output.folder, 5)
    assert read_steplog(wild.output.folder / "steps.csv")["skipped"] == [1.0] * 5


@pytest.mark.parametrize("name", ["lion", "sgd"])
def test_other_optimizers_and_schedules_learn(settings: dict[str, Any], name: str) -> None:
    rate = {"lion": 1e-3, "sgd": 0.5}[name]
    config = changed(
        settings,
        optimizer={"name": name, "learning_rate": rate},
        schedule={"name": "linear"},
        output={"sample_tokens": 0, "plot": False},
    )
    result, _ = run(config)
    assert result.before is not None
    assert result.after is not None
    assert result.after.loss < result.before.loss
    assert result.replies is None


def test_every_epoch_visits_every_window_once() -> None:
    rows = [int(r) for step in range(10) for r in training_rows(5, 2, 7, step)]
    for epoch in range(4):
        assert sorted(rows[5 * epoch : 5 * epoch + 5]) == list(range(5))
    assert rows[:5] != rows[5:10]
    assert rows == [int(r) for step in range(10) for r in training_rows(5, 2, 7, step)]
    assert rows != [int(r) for step in range(10) for r in training_rows(5, 2, 8, step)]
