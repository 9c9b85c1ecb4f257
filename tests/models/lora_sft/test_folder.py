"""The folder of a run: one process at a time, nothing deleted before it can be replaced."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from vkjit.errors import ConfigError, DataError
from vkjit_models.common.lock import sole_user
from vkjit_models.lora_sft.alarms import outcome
from vkjit_models.lora_sft.evaluate import HeldOut
from vkjit_models.lora_sft.movement import Movement, TensorState

from .conftest import GGUF
from .runs import changed, run


def test_a_second_run_in_the_folder_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    told = r"set another output\.folder"
    with sole_user(tmp_path / "run"), pytest.raises(ConfigError, match=told):
        run(changed(settings))


def test_overwriting_deletes_nothing_before_the_new_run_can_begin(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    quick = {"train": {"steps": 1, "eval_every": 0}, "output": {"plot": False, "sample_tokens": 0}}
    run(changed(settings, **quick))
    folder = tmp_path / "run"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    missing = {"data": {"jsonl": str(tmp_path / "absent.jsonl")}}
    with pytest.raises(DataError, match=r"absent\.jsonl"):
        run(changed(settings, **quick, **missing), overwrite=True)
    with pytest.raises(ConfigError, match="memory: the run needs"):
        run(changed(settings, **quick, memory={"limit_mib": 1}), overwrite=True)
    del before[folder / ".lock"]
    assert before == {path: path.read_bytes() for path in before}


def test_a_finished_run_whose_held_out_loss_is_no_number_is_told() -> None:
    tensor = TensorState("m.A", "0", 1.0, 1.0, 1.0, 0, 1.0)
    moved = Movement(4, (tensor,), (), 1.0)
    off, on = HeldOut(2.0, 10, {}), HeldOut(math.nan, 10, {})
    (found,) = outcome(moved, off, on, 1e-4)
    assert (found.kind, found.level) == ("not finite", "error")
    assert "lower optimizer.learning_rate" in found.message


def test_a_run_does_not_go_on_from_another_file_of_the_same_name(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    content = bytearray(GGUF.read_bytes())
    path.write_bytes(content)
    quick = {
        "model": {"path": str(path)},
        "train": {"steps": 2, "eval_every": 0},
        "output": {"plot": False, "sample_tokens": 0},
    }
    run(changed(settings, **quick), stop_after=1)
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.gguf is not the file that .* was trained on"):
        run(changed(settings, **quick), resume=True)
