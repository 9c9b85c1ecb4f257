"""Sweeps of the tiny model: shared programs, planted divergence, kills, refusals."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from vkjit.errors import ConfigError, DataError
from vkjit_models.cli import app
from vkjit_models.lora_sft.sweep import SweepResult, sweep
from vkjit_models.lora_sft.sweep_config import load_sweep

from .conftest import GGUF
from .runs import arrays, changed, run

BASE = """
[model]
path = "{gguf}"
[data]
jsonl = "{data}"
context = 96
held_out = 0.3
[lora]
rank = 2
alpha = 4.0
targets = ["q_proj", "down_proj"]
[train]
steps = 8
checkpoint_every = 2
[stop]
factor = 1.1
patience = 2
smoothing = 2
[log]
probe_records = 5
report = false
[output]
folder = "unused"
sample_tokens = 0
plot = false
"""
GRID = """
[sweep.grid]
optimizer.learning_rate = [1e-3, 1e-2, 300.0]
optimizer.weight_decay = [0.0, 0.1]
"""


def written(folder: Path, data: Path, tables: str) -> Path:
    """A sweep's file, with that of its base beside it."""
    (folder / "base.toml").write_text(BASE.format(gguf=GGUF, data=data))
    path = folder / "sweep.toml"
    path.write_text(
        f'[sweep]\nbase = "{folder / "base.toml"}"\nfolder = "{folder / "out"}"\n{tables}'
    )
    return path


def made(path: Path, **options: Any) -> tuple[SweepResult, str]:
    output = io.StringIO()
    result = sweep(load_sweep(path), Console(file=output, width=200), **options)
    return result, output.getvalue()


@pytest.fixture(scope="module")
def planted(
    conversations: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, SweepResult, str]:
    """Two rates that learn and one that diverges, with two decays."""
    folder = tmp_path_factory.mktemp("planted")
    result, output = made(written(folder, conversations, GRID))
    return folder, result, output


def test_a_planted_rate_is_blamed_and_not_the_decay(
    planted: tuple[Path, SweepResult, str],
) -> None:
    _, result, output = planted
    assert [one.status for one in result.outcomes] == [*["finished"] * 4, *["diverged"] * 2]
    assert (
        "learning_rate=300 diverged in 2 of 2 runs, at every weight_decay; 0.001, 0.01 in 0 of 4."
        in output
    )
    assert "weight_decay did not matter for divergence" in output
    blames = {one.factor.rpartition(".")[2]: one for one in result.verdict.blames}
    assert blames["learning_rate"].separates
    assert (blames["weight_decay"].switched, blames["weight_decay"].matched) == (0, 3)
    assert all(one.steps < 8 for one in result.outcomes[4:])  # given up early


def test_the_files_say_the_same(planted: tuple[Path, SweepResult, str]) -> None:
    folder, result, _ = planted
    rows = list(csv.DictReader((folder / "out" / "sweep.csv").read_text().splitlines()))
    assert [row["status"] for row in rows] == [one.status for one in result.outcomes]
    assert float(rows[0]["loss"]) == result.outcomes[0].loss
    content = json.loads((folder / "out" / "sweep.json").read_text())
    assert content["verdict"]["sentences"] == list(result.verdict.sentences)
    text = (folder / "out" / "sweep.md").read_text()
    assert all(sentence in text for sentence in result.verdict.sentences)
    page = (folder / "out" / "sweep.html").read_text()
    assert page.count("<polyline") == 6
    assert page.count('class="heat"') == 2
    assert "diverged" in page
    assert not re.search(r"(src|href)=|https?://", page)
    names = {path.name for path in (folder / "out" / "runs").iterdir()}
    assert "learning_rate=300,weight_decay=0.1" in names


def test_a_run_of_a_sweep_is_the_run_alone(
    planted: tuple[Path, SweepResult, str], conversations: Path, tmp_path: Path
) -> None:
    folder, result, _ = planted
    alone = load_sweep(written(tmp_path, conversations, GRID)).runs[3].config
    single, _ = run(alone)
    assert single.after is not None
    assert single.after.loss == result.outcomes[3].loss
    inside = arrays(folder / "out" / "runs" / "learning_rate=0.01,weight_decay=0.1", 8)
    for name, array in arrays(alone.output.folder, 8).items():
        np.testing.assert_array_equal(array, inside[name])


def test_programs_are_compiled_once(planted: tuple[Path, SweepResult, str]) -> None:
    folder, _, _ = planted
    seconds = [
        json.loads(path.read_text())["parts"][-1]["compile_seconds"]
        for path in sorted((folder / "out" / "runs").glob("*/run.json"))
    ]
    assert max(sorted(seconds)[:-1]) < 0.5 * max(seconds)


def test_what_is_done_is_kept(planted: tuple[Path, SweepResult, str]) -> None:
    folder, result, _ = planted
    before = {p: p.stat().st_mtime_ns for p in (folder / "out").glob("runs/*/*")}
    again, output = made(folder / "sweep.toml")
    assert output.count("done before") == 6
    assert repr(again.outcomes) == repr(result.outcomes)  # NaN equals NaN
    assert {p: p.stat().st_mtime_ns for p in (folder / "out").glob("runs/*/*")} == before


@pytest.mark.slow
def test_a_killed_sweep_goes_on(conversations: Path, tmp_path: Path) -> None:
    tables = "[sweep.set]\ntrain.steps = 40\n" + GRID.replace(", 300.0", "").replace(", 0.1", "")
    path = written(tmp_path, conversations, tables)
    process = subprocess.Popen(
        [sys.executable, "-m", "vkjit_models.cli", "sweep", str(path)],
        stdout=subprocess.DEVNULL,
    )
    first, second = (one.config.output.folder for one in load_sweep(path).runs)
    deadline = time.monotonic() + 120.0
    while not any((second / "checkpoints").glob("*.safetensors")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = (first / "result.json").read_bytes()
    result, output = made(path)
    assert output.count("done before") == 1
    assert (first / "result.json").read_bytes() == kept
    assert [one.status for one in result.outcomes] == ["finished", "finished"]
    assert "resuming after step" in (second / "console.txt").read_text()
    steps = (second / "steps.csv").read_text().splitlines()[1:]
    assert [int(row.split(",")[0]) for row in steps] == list(range(1, 41))


def test_single_runs_seeds_and_what_all_share(conversations: Path, tmp_path: Path) -> None:
    tables = """
seeds = [0, 7]
[sweep.set]
lora.rank = 4
[[sweep.runs]]
optimizer.learning_rate = 1e-3
[[sweep.runs]]
loss.kl = "tmkl"
loss.kl_weight = 0.5
"""
    found = load_sweep(written(tmp_path, conversations, tables))
    assert len(found.runs) == 4
    assert {one.config.lora.rank for one in found.runs} == {4}
    assert [one.config.train.seed for one in found.runs] == [0, 0, 7, 7]
    assert found.runs[1].values == {
        "optimizer.learning_rate": 2e-4, "train.seed": 0, "loss.kl": "tmkl", "loss.kl_weight": 0.5,
    }  # fmt: skip
    assert found.runs[1].name == "learning_rate=0.0002,seed=0,kl=tmkl,kl_weight=0.5"


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ("[sweep.grid]\noptimizer.learning_rat = [1e-3]\n", "did you mean"),
        ("[sweep.grid]\noptimizer.learning_rate = 1e-3\n", "expected a list of values"),
        ("[sweep.grid]\noptimizer.learning_rate = [1e-3, 1e-3]\n", "expected each once"),
        ("[sweep.grid]\noptimizer.learning_rate = [1e-3, -1.0]\n", "greater than 0"),
        ("[sweep.grid]\nlearning_rate = [1e-3]\n", "names no section"),
        ("grids = 3\n", "unknown key sweep.grids"),
        ("", "there is no run"),
        ("seeds = 3\n[[sweep.runs]]\nlora.rank = 3\n", "expected a list of seeds"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    conversations: Path, tmp_path: Path, tables: str, message: str
) -> None:
    path = written(tmp_path, conversations, tables)
    with pytest.raises(ConfigError, match=message):
        load_sweep(path)
    result = CliRunner().invoke(app, ["sweep", str(path)])
    assert result.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_other_settings_do_not_go_on_from_old_checkpoints(
    conversations: Path, tmp_path: Path
) -> None:
    tables = "[sweep.set]\ntrain.steps = 2\n[[sweep.runs]]\nlora.rank = 3\n"
    path = written(tmp_path, conversations, tables)
    made(path)
    path.write_text(path.read_text().replace("steps = 2", "steps = 4"))
    with pytest.raises(ConfigError, match="checkpoint"):
        made(path)
    base = tmp_path / "base.toml"
    text = base.read_text()
    base.write_text(text.replace(str(conversations), str(tmp_path / "absent.jsonl")))
    with pytest.raises(DataError, match="absent"):
        made(path, overwrite=True)
    assert len(list((tmp_path / "out").rglob("steps.csv"))) == 1
    base.write_text(text)
    result, _ = made(path, overwrite=True)
    assert result.outcomes[0].steps == 4


def test_a_run_that_does_not_fit_fails_alone(conversations: Path, tmp_path: Path) -> None:
    tables = (
        "[sweep.set]\ntrain.steps = 2\nmemory.limit_mib = 12\n"
        "[sweep.grid]\ntrain.micro_batch = [1, 8]\n"
    )
    result, output = made(written(tmp_path, conversations, tables))
    assert [one.status for one in result.outcomes] == ["finished", "failed"]
    assert "the run needs" in result.outcomes[1].note
    assert "1 of 2 runs are missing or failed" in output


def test_changed_settings_are_other_settings(settings: dict[str, Any]) -> None:
    config = changed(settings, memory={"limit_mib": 10})
    assert config.identity() == changed(settings).identity()
