"""Runs that end before their last step: what is left of them, and the exit code of the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vkjit_models.cli import app
from vkjit_models.common.adapter_io import load_adapter
from vkjit_models.common.steplog import read_json_lines, read_steplog
from vkjit_models.lora_sft.alarms import AlarmError
from vkjit_models.lora_sft.evaluate import Evaluator, HeldOut
from vkjit_models.lora_sft.tally import Sums

from .runs import arrays, changed, run

QUIET = {"sample_tokens": 0, "plot": False}


def alarms_of(folder: Path) -> list[tuple[str, str, int]]:
    events = read_json_lines(folder / "events.jsonl")
    return [
        (event["kind"], event["level"], event["step"])
        for event in events
        if event["event"] == "alarm" and event["kind"] != "few targets"
    ]


def left_behind(folder: Path, step: int) -> None:
    """Checkpoint, adapter, logs and report of a run that ended at ``step``."""
    assert arrays(folder, step)
    load_adapter(folder / "adapter")
    assert read_steplog(folder / "steps.csv")["step"] == [float(i + 1) for i in range(step)]
    assert "<svg" in (folder / "report.html").read_text()


def toml_of(settings: dict[str, Any]) -> str:
    lines: list[str] = []
    for section, values in settings.items():
        lines.append(f"[{section}]")
        for key, value in values.items():
            shown = (
                {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
            )
            lines.append(f"{key} = {shown}")
    return "\n".join(lines)


def test_a_run_that_diverges_is_stopped_and_leaves_its_files(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    settings |= {
        "optimizer": {"learning_rate": 0.3},
        "schedule": {"name": "constant"},
        "stop": {"factor": 1.3, "patience": 2, "smoothing": 1},
        "train": {"steps": 30, "seed": 3},
    }
    settings["output"] |= QUIET
    config = tmp_path / "run.toml"
    config.write_text(toml_of(settings))
    result = CliRunner().invoke(app, ["train", str(config)])
    assert result.exit_code == 3, result.output
    folder = Path(settings["output"]["folder"])
    losses = [float(x) for x in read_steplog(folder / "steps.csv")["loss"]]
    assert len(losses) < 30
    high = [loss > 1.3 * min(losses[:i], default=loss) for i, loss in enumerate(losses)]
    assert high == [*[False] * (len(losses) - 2), True, True]
    left_behind(folder, len(losses))
    assert alarms_of(folder) == [("diverged", "error", len(losses))]
    report = (folder / "report.html").read_text()
    assert "<b>diverged</b>" in report
    assert "above 1.3 times the best smoothed one" in report


def test_adapters_that_do_not_move_end_the_run(settings: dict[str, Any], tmp_path: Path) -> None:
    """A rate so small that no float32 weight of A changes."""
    settings |= {
        "optimizer": {"learning_rate": 1e-30},
        "log": {"still_steps": 3, "probe_records": 0},
        "train": {"steps": 9, "seed": 3},
    }
    settings["output"] |= QUIET
    config = tmp_path / "run.toml"
    config.write_text(toml_of(settings))
    result = CliRunner().invoke(app, ["train", str(config)])
    assert result.exit_code == 4, result.output
    assert "adapter tensors did not move in 3 steps" in " ".join(result.output.split())
    folder = Path(settings["output"]["folder"])
    left_behind(folder, 3)
    assert alarms_of(folder) == [("did not move", "error", 3)]
    again = CliRunner().invoke(app, ["train", str(config), "--resume"])
    assert again.exit_code == 4, again.output
    left_behind(folder, 4)
    assert alarms_of(folder) == [("did not move", "error", 3), ("did not move", "error", 4)]


def test_an_evaluation_that_does_not_see_the_adapter_ends_the_run(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the loss of the base model were measured, or one number printed again and again."""
    cached: dict[str, HeldOut] = {}
    real = Evaluator.held_out

    def blind(self: Evaluator, *arguments: Any) -> HeldOut:
        return cached.setdefault("loss", real(self, *arguments))

    monkeypatch.setattr(Evaluator, "held_out", blind)
    config = changed(settings, output=QUIET)
    with pytest.raises(AlarmError, match="evaluation does not see them"):
        run(config)
    folder = config.output.folder
    left_behind(folder, 2)
    assert alarms_of(folder) == [
        ("evaluation blind", "error", 2),
        ("moved, loss flat", "warning", 2),
    ]


def test_a_probe_that_stays_the_same_although_the_adapters_moved_is_told(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cached: dict[int, Sums] = {}
    real = Evaluator.records

    def stale(self: Evaluator, adapters: Any, data: Any, rows: Any) -> Sums:
        found = real(self, adapters, data, rows)
        return cached.setdefault(id(data), found) if rows == range(len(data)) else found

    monkeypatch.setattr(Evaluator, "records", stale)
    config = changed(settings, output=QUIET)
    result, output = run(config)
    assert result.step == 4
    assert alarms_of(config.output.folder) == [("moved, loss flat", "warning", 2)]
    assert "warning: the adapters moved by" in output
    assert any("probe loss is the same to 4 decimals" in one for one in result.warnings)


def test_alarms_are_told_once_also_across_a_resume(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = changed(settings, output=QUIET, log={"few_targets": 10**6})
    run(config, stop_after=2)
    result, output = run(config, resume=True)
    told = [e for e in read_json_lines(config.output.folder / "events.jsonl") if e.get("kind")]
    assert [event["kind"] for event in told] == ["few targets"]
    assert "few" not in " ".join(result.warnings)
    assert "uncertain" not in output
