"""Admission: the table, refusals that name the change that fits, and that it is true."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from vkjit.errors import ConfigError
from vkjit_models.cli import app
from vkjit_models.lora_sft.admission import Need, Room, room, smallest_change
from vkjit_models.lora_sft.config import MemorySection, RunConfig
from vkjit_models.lora_sft.train import plan

from .conftest import GGUF
from .runs import changed, run

MEASURE = """
import json, sys
from pathlib import Path
from rich.console import Console
import io, vkjit as vj
from vkjit_models.lora_sft.config import load_config
from vkjit_models.lora_sft.train import train
result = train(load_config(Path(sys.argv[1])), console=Console(file=io.StringIO()))
print(json.dumps([result.costs.predicted_bytes, result.costs.device_bytes]))
"""

GROWTH = """
import io, json, re, sys
from pathlib import Path
import numpy as np
import vkjit.numpy as jnp
from vkjit_models.lora_sft.base import load_base
from vkjit_models.lora_sft.config import load_config
from vkjit_models.lora_sft.data import load_data
from vkjit_models.lora_sft.start import start_adapters
from vkjit_models.lora_sft.step import compile_step, initial_state
from vkjit_models.llama.lora import plan_adapters
from vkjit import random

config = load_config(Path(sys.argv[1]))
base = load_base(config.model.path)
windows = load_data(config.data, base.tokenizer, 0).train
plan = plan_adapters(base.hyper, config.lora.spec)
adapters = start_adapters(plan, base.hyper, base.params, random.PRNGKey(0), None)
spec = plan.llama_spec(base.hyper)
state, step = initial_state(spec, config, adapters), compile_step(spec, base.params, config)
batch = windows.batch([i % len(windows) for i in range(config.train.micro_batch)])
totals, place = step.zero(adapters, state.loss_scale), jnp.zeros(2, jnp.int32)
lowered = step.accumulate.compile(adapters, totals, batch, place, None)

def kib(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

before = kib("VmRSS")
for _ in range(2):
    totals, losses = step.accumulate(adapters, totals, batch, place, None)
np.asarray(losses)
print(json.dumps([lowered.memory().temporaries, 1024 * (kib("VmHWM") - before)]))
"""


def planned(config: RunConfig) -> str:
    output = io.StringIO()
    plan(config, Console(file=output, width=100))
    return output.getvalue()


@pytest.fixture
def wide(settings: dict[str, Any]) -> dict[str, Any]:
    """A step whose activations are most of what it takes."""
    return {**settings, "train": {**settings["train"], "micro_batch": 4}}


def peak_of(text: str) -> float:
    found = re.search(r"predicted peak\W+([\d,.]+)", text)
    assert found is not None
    return float(found[1].replace(",", ""))


def test_the_table_is_printed_and_kept(wide: dict[str, Any]) -> None:
    config = changed(wide)
    shown = planned(config)
    for name in Need.__dataclass_fields__:
        assert name in shown
    assert not config.output.folder.exists()  # a plan leaves nothing
    result, output = run(config)
    stored = json.loads((config.output.folder / "memory.json").read_text())
    assert result.costs is not None
    assert stored["peak"] == result.costs.predicted_bytes == Need(**stored["need"]).peak
    assert peak_of(output) == peak_of(shown) == round(stored["peak"] / 2**20, 1)
    report = (config.output.folder / "report.html").read_text()
    assert "predicted: activations" in report


def refusal(settings: dict[str, Any], limit: int, **sections: dict[str, Any]) -> str:
    config = changed(settings, memory={"limit_mib": limit}, **sections)
    with pytest.raises(ConfigError, match="memory: the run needs") as caught:
        planned(config)
    return str(caught.value)


def followed(settings: dict[str, Any], message: str) -> dict[str, Any]:
    """The settings with the changes that a refusal names."""
    found = re.search(r"; set (.*): that needs", message)
    assert found is not None
    made = {name: dict(section) for name, section in settings.items()}
    for change in found[1].split(", "):
        key, value = change.split(" = ")
        section, name = key.split(".")
        made[section][name] = value == "true" if value in ("true", "false") else int(value)
    return made


@pytest.mark.parametrize(
    ("limit", "change"),
    [
        (16, "set train.micro_batch = 2, train.accumulation = 2: that"),
        (9, "set train.micro_batch = 1, train.accumulation = 4, data.context = 48: that"),
    ],
)
def test_a_refusal_names_a_change_that_fits(wide: dict[str, Any], limit: int, change: str) -> None:
    message = refusal(wide, limit)
    assert change in message
    told = re.search(r"that needs ([\d.]+) MiB", message)
    assert told is not None
    assert float(told[1]) <= limit
    fits = planned(changed(followed(wide, message), memory={"limit_mib": limit}))
    assert peak_of(fits) <= limit


def test_changes_are_tried_from_the_smallest(wide: dict[str, Any]) -> None:
    config, tried = changed(wide, train={"recompute": False}), list[dict[str, Any]]()

    def peak(changes: Mapping[str, Any]) -> int:
        tried.append(dict(changes))
        return 90 if "train.recompute" in changes else 100

    assert smallest_change(config, peak, 100, 50) is None
    again = {"train.recompute": True}
    portions = [{"train.micro_batch": n, "train.accumulation": 4 // n} for n in (2, 1)]
    least = again | portions[-1]
    assert tried == [
        again, *portions, *(again | one for one in portions), least | {"data.context": 48},
        least | {"data.context": 24}, *(least | {"loss.vocab_chunk": n} for n in (4096, 1024)),
    ]  # fmt: skip
    assert smallest_change(config, peak, 100, 95) == (again, 90)


def test_a_model_that_is_too_large_is_told_so(wide: dict[str, Any]) -> None:
    assert "no setting of the step changes" in refusal(wide, 2)


def test_a_run_is_refused_before_its_first_step(wide: dict[str, Any]) -> None:
    config = changed(wide, memory={"limit_mib": 12})
    with pytest.raises(ConfigError, match="memory: the run needs"):
        run(config)
    assert not list(config.output.folder.glob("checkpoints/*"))


def test_the_command_prints_the_plan_or_exits_with_2(conversations: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(toml(conversations, tmp_path))
    shown = CliRunner().invoke(app, ["train", str(path), "--plan"])
    assert shown.exit_code == 0
    assert "predicted peak" in shown.output
    path.write_text(toml(conversations, tmp_path) + "[memory]\nlimit_mib = 10\n")
    refused = CliRunner().invoke(app, ["train", str(path), "--plan"])
    assert refused.exit_code == 2
    assert "expected at most 10.0 MiB (memory.limit_mib); set train." in refused.stderr


def toml(conversations: Path, folder: Path, micro_batch: int = 6) -> str:
    return f"""
[model]
path = "{GGUF}"
[data]
jsonl = "{conversations}"
context = 96
held_out = 0.3
[lora]
rank = 2
[train]
steps = 2
micro_batch = {micro_batch}
[output]
folder = "{folder / "run"}"
sample_tokens = 0
plot = false
"""


@pytest.mark.slow
def test_what_is_predicted_is_what_is_measured(
    device: str, conversations: Path, tmp_path: Path
) -> None:
    if device == "reference" or "+" in device:
        pytest.skip("minutes in the interpreter; descriptors hold the same arrays")
    predicted, measured = in_process(MEASURE, device, tmp_path, toml(conversations, tmp_path))
    assert predicted == pytest.approx(measured, rel=0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="the resident size is read from /proc")
def test_the_process_grows_by_what_is_predicted(conversations: Path, tmp_path: Path) -> None:
    text = toml(conversations, tmp_path, 96)
    predicted, grown = in_process(GROWTH, "cpu", tmp_path, text)
    assert predicted > 200 * 2**20
    assert grown == pytest.approx(predicted, rel=0.03)


def in_process(program: str, device: str, folder: Path, config: str) -> tuple[int, int]:
    """What a program prints as a list of two numbers, in a process of its own."""
    path = folder / "run.toml"
    path.write_text(config)
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        env={**os.environ, "VKJIT_DEVICE": device}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    first, second = json.loads(done.stdout)
    return first, second


def test_a_device_tells_what_it_has() -> None:
    there = room(MemorySection(), "cpu")
    assert there.bytes > 2**28
    assert room(MemorySection(limit_mib=3), "cpu") == Room("cpu", 3 * 2**20, "memory.limit_mib")


def test_the_peak_is_that_of_the_largest_phase() -> None:
    parts = dict.fromkeys(asdict(Need(*[0] * 9)), 1)
    assert Need(**{**parts, "activations": 100}).peak == 6 + 1 + 100
    assert Need(**{**parts, "update": 100}).peak == 6 + 1 + 100
    assert Need(**{**parts, "evaluation": 100}).peak == 6 + 1 + 99
