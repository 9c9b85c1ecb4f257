"""The step log: exact numbers, resume, and files that are not its own."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from vkjit.errors import DataError
from vkjit_models.common.steplog import StepLog, read_json_lines, read_steplog

COLUMNS = ["step", "loss", "note"]


def _write(path: Path, steps: range, resume_step: int | None = None) -> None:
    with StepLog(path, COLUMNS, resume_step=resume_step) as log:
        for step in steps:
            log.append({"step": step, "loss": 1.0 / step, "note": 'a "b", c'})


def test_numbers_come_back_exactly(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "log.csv"
    _write(path, range(1, 6))
    read = read_steplog(path)
    assert list(read) == COLUMNS
    assert read["step"] == [1, 2, 3, 4, 5]
    assert read["loss"] == [1.0 / step for step in range(1, 6)]
    assert read["note"] == ['a "b", c'] * 5
    with StepLog(path, ["step", "loss"]) as log:
        log.append({"step": 1, "loss": math.nan})
    assert math.isnan(float(read_steplog(path)["loss"][0]))


def test_rows_are_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    log = StepLog(path, ["step", "loss"])
    for step in range(3):
        log.append({"step": step, "loss": 0.5})
        assert path.read_text().splitlines()[-1] == f"{step},0.5"
    log.close()


def test_resume_equals_the_straight_run(tmp_path: Path) -> None:
    straight, resumed = tmp_path / "straight.csv", tmp_path / "resumed.csv"
    _write(straight, range(1, 9))
    _write(resumed, range(1, 7))
    with resumed.open("a") as file:
        file.write("7,0.1")  # torn by a kill in the middle of the row
    _write(resumed, range(5, 9), resume_step=4)
    assert resumed.read_bytes() == straight.read_bytes()


def test_resume_without_a_file_starts_one(tmp_path: Path) -> None:
    _write(tmp_path / "log.csv", range(3, 5), resume_step=2)
    assert read_steplog(tmp_path / "log.csv")["step"] == [3, 4]


def test_a_new_run_replaces_the_old_log(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    _write(path, range(1, 9))
    _write(path, range(1, 3))
    assert read_steplog(path)["step"] == [1, 2]


def test_another_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    _write(path, range(1, 3))
    before = path.read_bytes()
    with pytest.raises(DataError, match=r"has the columns \['step', 'loss', 'note'\], exp"):
        StepLog(path, ["step", "loss"], resume_step=1)
    assert path.read_bytes() == before


@pytest.mark.parametrize("columns", [[], ["loss"], ["step", "loss", "loss"]])
def test_columns_must_begin_with_step(tmp_path: Path, columns: list[str]) -> None:
    with pytest.raises(DataError, match="expected distinct names that begin with 'step'"):
        StepLog(tmp_path / "log.csv", columns)


def test_rows_that_do_not_fit(tmp_path: Path) -> None:
    with StepLog(tmp_path / "log.csv", ["step", "loss"]) as log:
        log.append({"step": 3, "loss": 1.0})
        with pytest.raises(DataError, match="step 3 after 3, expected a later one"):
            log.append({"step": 3, "loss": 1.0})
        with pytest.raises(DataError, match=r"row with keys \['step'\], expected \['loss'"):
            log.append({"step": 4})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no header"),
        ("step,loss", "has no header"),
        ("step,loss\n1\n", r"log\.csv:2 has 1 fields, expected 2"),
        ("step,loss\nx,1\n", r"log\.csv:2 has 2 fields, expected 2 with a step first"),
    ],
)
def test_damaged_log(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "log.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_steplog(path)
    with pytest.raises(DataError, match="cannot read"):
        read_steplog(tmp_path / "absent.csv")


def test_json_lines_hold_the_same_rows(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "loss": 1 / 3, "note": "a, b"},
        {"step": 2, "loss": math.nan, "note": '"'},
        {"step": 3, "loss": -math.inf, "note": ""},
    ]
    with StepLog(tmp_path / "log.csv", ["step", "loss", "note"]) as log:
        log.append(*rows)
    text = (tmp_path / "log.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    got = read_json_lines(tmp_path / "log.jsonl")
    assert got == [rows[0], {**rows[1], "loss": None}, rows[2]]


def test_steps_with_several_rows(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    with StepLog(path, ["step", "x"], repeats=True) as log:
        log.append({"step": 1, "x": 1}, {"step": 1, "x": 2})
        log.append({"step": 2, "x": 3})
        with pytest.raises(DataError, match="step 1 after 2"):
            log.append({"step": 1, "x": 4})
    StepLog(path, ["step", "x"], repeats=True, resume_step=1).close()
    assert read_steplog(path)["x"] == [1.0, 2.0]
    assert [row["x"] for row in read_json_lines(tmp_path / "log.jsonl")] == [1, 2]


def test_damaged_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n[1]\n')
    with pytest.raises(DataError, match=r"log\.jsonl:2 is no object with a step"):
        read_json_lines(path)
    path.write_text("{\n")
    with pytest.raises(DataError, match=r"log\.jsonl:1 is no JSON"):
        read_json_lines(path)


WRITER = """
import sys
from pathlib import Path
from vkjit_models.common.steplog import StepLog
start = int(sys.argv[2])
with StepLog(Path(sys.argv[1]), ["step", "loss"], resume_step=start or None) as log:
    print("ready", flush=True)
    for step in range(start + 1, 10**6):
        log.append({"step": step, "loss": 1.0 / step})
        print(step, flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_what_it_had_logged(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    moments, start = np.random.default_rng(5), 0
    for _ in range(2):
        command = [sys.executable, "-c", WRITER, str(path), str(start)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(float(moments.uniform(0.01, 0.1)))
            process.kill()
            logged = [int(line) for line in process.stdout.read().splitlines()]
        last = logged[-1] if logged else start
        steps = [int(float(x)) for x in read_steplog(path)["step"]]
        assert steps[:last] == list(range(1, last + 1))
        assert [row["step"] for row in read_json_lines(path.with_suffix(".jsonl"))][:last] == steps[
            :last
        ]
        start = max(0, last - 2)  # as if the newest checkpoint were two steps old


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_names_the_file_and_keeps_what_was_written(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps.csv", ["step"])
    log.append({"step": 1})
    log._file.close()
    log._file = Path("/dev/full").open("ab", buffering=0)  # noqa: SIM115  the log closes it
    with pytest.raises(OSError, match="No space left") as failed:
        log.append({"step": 2})
    log.close()
    assert failed.value.filename == "/dev/full"
    assert read_steplog(tmp_path / "steps.csv") == {"step": [1.0]}
