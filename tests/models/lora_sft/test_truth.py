"""What the logs of a run say is true: sums, twins, the probe, windows seen again, resumes."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vkjit as vj
from vkjit_models.common.steplog import read_json_lines, read_steplog
from vkjit_models.lora_sft.config import RunConfig

from .runs import MEASURED, arrays, changed, run

LOGS = ("steps", "windows", "held_out", "probe", "adapters")


@pytest.fixture(scope="module")
def finished(conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run of ten steps over six windows, so that some are seen again."""
    config = settings_of(conversations, tmp_path_factory.mktemp("finished") / "run")
    run(config)
    return config


def settings_of(conversations: Path, folder: Path, **sections: dict[str, Any]) -> RunConfig:
    from .conftest import GGUF  # noqa: PLC0415  a fixture's module

    settings: dict[str, Any] = {
        "model": {"path": str(GGUF)},
        "data": {"jsonl": str(conversations), "context": 96, "held_out": 0.3},
        "lora": {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "down_proj"]},
        "optimizer": {"learning_rate": 0.01},
        "train": {"steps": 10, "seed": 3, "eval_every": 5, "checkpoint_every": 5},
        "log": {"probe_records": 5, "probe_every": 2},
        "output": {"folder": str(folder), "sample_tokens": 0, "plot": False},
    }
    return changed(settings, **sections)


def columns(folder: Path, name: str) -> dict[str, list[float | str]]:
    return read_steplog(folder / f"{name}.csv")


def floats(column: list[float | str]) -> np.ndarray:
    return np.array([float(x) for x in column])


def test_losses_by_category_weighted_by_tokens_are_the_loss(finished: RunConfig) -> None:
    steps = columns(finished.output.folder, "steps")
    names = ("product", "sum")
    counts = np.stack([floats(steps[f"targets_{name}"]) for name in names])
    losses = np.stack([floats(steps[f"loss_{name}"]) for name in names])
    assert (counts.sum(0) == floats(steps["targets"])).all()
    assert (np.isnan(losses) == (counts == 0)).all()
    summed = (np.nan_to_num(losses) * counts).sum(0) / counts.sum(0)
    np.testing.assert_allclose(summed, floats(steps["loss"]), rtol=1e-6)


def test_every_log_has_a_twin_in_json_lines(finished: RunConfig) -> None:
    folder = finished.output.folder
    for name in LOGS:
        table = columns(folder, name)
        rows = read_json_lines(folder / f"{name}.jsonl")
        assert len(rows) == len(table["step"])
        for i, row in enumerate(rows):
            assert list(row) == list(table)
            for key, value in row.items():
                want = table[key][i]
                if value is None:
                    assert math.isnan(float(want))
                elif isinstance(value, str):
                    assert str(value) == str(want) or float(value) == float(want)
                else:
                    assert value == want


def test_a_step_says_what_it_took(finished: RunConfig) -> None:
    steps = columns(finished.output.folder, "steps")
    tokens, seconds = floats(steps["tokens"]), floats(steps["seconds"])
    np.testing.assert_allclose(floats(steps["tokens_per_second"]), tokens / seconds)
    np.testing.assert_allclose(
        floats(steps["targets_per_second"]), floats(steps["targets"]) / seconds
    )
    assert (tokens < finished.data.context).all()  # padding does not count
    assert set(steps["loss_scale"]) == {1.0}
    assert set(steps["skipped"]) == {0.0}
    for column in ("predicted_bytes", "device_bytes", "process_bytes"):
        assert (floats(steps[column]) > 0).all()
    clipped = floats(steps["gradient_norm"]) > finished.optimizer.clip_norm
    assert (floats(steps["clipped"]) == clipped).all()
    assert clipped.sum() > 0


def test_a_window_seen_again_is_compared_with_its_first_loss(finished: RunConfig) -> None:
    windows = columns(finished.output.folder, "windows")
    steps = columns(finished.output.folder, "steps")
    first: dict[float | str, float | str] = {}
    for window, loss, then, change, epoch in zip(
        *(windows[k] for k in ("window", "loss", "first_loss", "change", "epoch")), strict=True
    ):
        if window in first:
            assert epoch == 1.0
            assert then == first[window]
            assert change == float(loss) - float(then)
            assert float(change) < 0.0  # it was learned
        else:
            assert epoch == 0.0
            assert math.isnan(float(change))
            first[window] = loss
    assert len(first) == 6
    np.testing.assert_allclose(floats(steps["loss_change"]), floats(windows["change"]), rtol=1e-12)


def test_the_probe_is_the_same_under_every_seed(
    finished: RunConfig, conversations: Path, tmp_path: Path
) -> None:
    other = settings_of(conversations, tmp_path / "run", train={"seed": 4, "steps": 4})
    run(other)
    one, two = (columns(c.output.folder, "probe") for c in (finished, other))
    assert one["step"] == [float(s) for s in (0, 2, 4, 6, 8, 10) for _ in range(5)]
    assert two["step"] == [float(s) for s in (0, 2, 4) for _ in range(5)]
    orders = [columns(c.output.folder, "windows")["window"][:4] for c in (finished, other)]
    assert orders[0] != orders[1]
    for key in ("record", "category", "targets"):
        assert one[key] == two[key] * 2
    assert one["loss"][:5] == two["loss"][:5]  # before the first step, to the bit
    first = one["loss"][:5]
    assert one["first_loss"] == first * 6
    changes = floats(one["loss"]) - floats(one["first_loss"])
    np.testing.assert_array_equal(floats(one["change"]), changes)
    assert (changes[:5] == 0.0).all()
    assert (changes[-5:] < 0.0).all()


def test_checksums_at_the_start_and_at_each_save(finished: RunConfig) -> None:
    table = columns(finished.output.folder, "adapters")
    tensors = dict.fromkeys(table["tensor"])
    hashes: dict[float | str, dict[float | str, float | str]] = {}
    for step, tensor, found in zip(table["step"], table["tensor"], table["sha256"], strict=True):
        hashes.setdefault(step, {})[tensor] = found
    assert {0.0, 5.0, 10.0} <= hashes.keys()
    for name in tensors:
        assert len({hashes[step][name] for step in (0.0, 5.0, 10.0)}) == 3
    last = [i for i, step in enumerate(table["step"]) if step == 10.0]
    assert all(0.0 < float(table["update_ratio"][i]) < 2.0 for i in last)
    assert all(float(table["change"][i]) > 0.0 for i in last)


def test_the_measured_losses_react_to_the_learning_rate(
    conversations: Path, tmp_path: Path
) -> None:
    seen = []
    for rate in (0.002, 0.004):
        folder = tmp_path / str(rate)
        rates = {"learning_rate": rate}
        run(settings_of(conversations, folder, optimizer=rates, train={"steps": 3}))
        held_out, probe = columns(folder, "held_out"), columns(folder, "probe")
        seen.append((held_out["loss"], probe["loss"][-5:], columns(folder, "steps")["loss"]))
        assert not [
            e
            for e in read_json_lines(folder / "events.jsonl")
            if e.get("kind") == "moved, loss flat"
        ]
    (held_a, probe_a, steps_a), (held_b, probe_b, steps_b) = seen
    assert held_a[0] == held_b[0]
    assert round(float(held_a[-1]), 4) != round(float(held_b[-1]), 4)
    assert all(
        round(float(a), 4) != round(float(b), 4) for a, b in zip(probe_a, probe_b, strict=True)
    )
    assert steps_a[0] == steps_b[0]
    assert round(float(steps_a[-1]), 4) != round(float(steps_b[-1]), 4)


def test_a_loss_scale_of_a_power_of_two_changes_no_bit(conversations: Path, tmp_path: Path) -> None:
    scaled = settings_of(
        conversations,
        tmp_path / "run",
        optimizer={"loss_scale": 1024.0, "loss_scale_growth": 4},
        train={"steps": 5},
        schedule={"name": "constant"},
    )
    plain = settings_of(
        conversations, tmp_path / "plain", train={"steps": 5}, schedule={"name": "constant"}
    )
    for config in (scaled, plain):
        run(config)
    one, two = (columns(c.output.folder, "steps") for c in (plain, scaled))
    assert two["loss_scale"] == [1024.0, 1024.0, 1024.0, 1024.0, 2048.0]
    for name in ("loss", "gradient_norm", "update_ratio", "adapter_norm"):
        assert one[name] == two[name]
    hashes = [columns(c.output.folder, "adapters")["sha256"] for c in (plain, scaled)]
    assert hashes[0] == hashes[1]


def comparable(folder: Path, name: str) -> dict[str, list[float | str]]:
    table = columns(folder, name)
    return {key: value for key, value in table.items() if key not in MEASURED}


RUNNER = """
import json, sys
from vkjit_models.lora_sft.config import parse_config
from vkjit_models.lora_sft.train import train
train(parse_config(json.loads(sys.argv[1])), resume=True)
"""


def test_a_run_killed_in_the_middle_loses_nothing(
    finished: RunConfig, conversations: Path, tmp_path: Path
) -> None:
    """SIGKILL at no particular moment; the resumed run equals the straight one in every log."""
    config = settings_of(conversations, tmp_path / "run")
    folder = config.output.folder
    command = [sys.executable, "-c", RUNNER, json.dumps(config.resolved())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        log = folder / "steps.csv"
        deadline = time.monotonic() + 200
        while not (log.exists() and log.read_text().count("\n") > 7):
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    for name in LOGS:  # both twins are whole, but for the rows that were being written
        steps = floats(columns(folder, name)["step"])
        written = steps[steps < steps[-1]]
        assert len(written) <= len(read_json_lines(folder / f"{name}.jsonl")) <= len(steps)
    result, _ = run(config, resume=True)
    assert result.step == 10
    for name in LOGS:
        want, got = (comparable(c.output.folder, name) for c in (finished, config))
        for key in want:
            np.testing.assert_array_equal(want[key], got[key], err_msg=f"{name}: {key}")
    for key, array in arrays(finished.output.folder, 10).items():
        np.testing.assert_array_equal(array, arrays(folder, 10)[key], err_msg=key)
    events = [event["event"] for event in read_json_lines(folder / "events.jsonl")]
    assert events[0] == "start"
    assert "resume" in events
    assert len(json.loads((folder / "run.json").read_text())["parts"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [name for name in vj.devices() if name == "vulkan:0"])
def test_a_vulkan_device_trains_as_the_cpu_does(
    gpu: str, conversations: Path, tmp_path: Path
) -> None:
    losses = []
    for name in ("cpu", gpu):
        config = settings_of(
            conversations,
            tmp_path / name.replace(":", "-"),
            train={"steps": 3},
            log={"probe_records": 0},
        )
        with vj.default_device(name):
            run(config)
        record = json.loads((config.output.folder / "run.json").read_text())
        assert record["parts"][0]["device"] == name
        steps = columns(config.output.folder, "steps")
        assert (floats(steps["device_bytes"]) > 0).all()
        losses.append(floats(steps["loss"]))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
