"""The command: its own processes, reports, exit codes; the command line is not needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from vkjit.doctor import STAGES, Options, apart, cli, diagnose, main
from vkjit.doctor.report import Report, StageResult, Status
from vkjit.errors import ArgumentError

ROOT = Path(__file__).resolve().parents[2]
BLOCKED = """\
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"typer", "rich", "pydantic", "click", "matplotlib", "tokenizers"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
"""


def run(arguments: list[str], folder: Path, setup: str = "") -> subprocess.CompletedProcess[str]:
    """``python -m vkjit.doctor`` in a folder, with code that runs at the start of each process."""
    (folder / "site").mkdir(exist_ok=True)
    (folder / "site" / "sitecustomize.py").write_text(setup)
    paths = [str(folder / "site"), str(ROOT / "src")]
    return subprocess.run(
        [sys.executable, "-m", "vkjit.doctor", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_it_runs_without_the_packages_of_the_command_line(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--quick", "--box", "0.5", "--only", "transfer,norm,optimizer"]
    done = run(arguments, tmp_path, BLOCKED)
    assert (done.returncode, done.stderr) == (0, "")
    assert "all stages passed" in done.stdout
    report = json.loads((tmp_path / "vkjit-doctor-report.json").read_text())
    assert report["schema"] == 1
    assert report["passed"] is True
    assert report["host"] == "reference"
    assert report["device"]["name"] == "cpu"
    assert [s["name"] for s in report["stages"]] == ["transfer", "norm", "optimizer"]
    assert all(s["status"] == "ok" and s["checks"] > 0 for s in report["stages"])
    assert {"vkjit", "python", "platform", "packages", "commit", "date", "environment"} <= set(
        report["system"]
    )
    text = (tmp_path / "vkjit-doctor-report.md").read_text()
    assert "9 norm          ok" in text


def test_a_crash_fails_its_stage_and_the_rest_goes_on(tmp_path: Path) -> None:
    crash = (
        "import os, sys\n"
        "if '--worker' in sys.orig_argv:\n"
        "    import vkjit.doctor.transfers as module\n"
        "    module.transfer.__code__ = (lambda session: os.abort()).__code__\n"
        "    module.os = os\n"
    )
    arguments = ["--device", "cpu", "--quick", "--box", "0.5", "--only", "transfer,norm"]
    done = run(arguments, tmp_path, crash)
    assert done.returncode == 1
    assert "FAILED: transfer" in done.stdout
    report = json.loads((tmp_path / "vkjit-doctor-report.json").read_text())
    first, second = report["stages"]
    assert "signal SIGABRT" in first["error"]
    assert second["status"] == "ok"


def test_a_hang_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = "import sys, time\nif '--worker' in sys.orig_argv: time.sleep(60)\n"
    (tmp_path / "sitecustomize.py").write_text(reader)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(apart, "PATIENCE", 0.3)
    options = Options(device="cpu", only=("transfer",), box=0.2, report=None)
    report = diagnose(options, lambda line: None)
    assert report.failed_names == ["transfer"]
    assert "no answer for" in report.stages[0].error


def test_a_planted_error_gives_exit_code_1(tmp_path: Path, capsys) -> None:
    arguments = ["--device", "cpu", "--quick", "--box", "0.2", "--only", "norm", "--in-process"]
    path = tmp_path / "report.json"
    assert main([*arguments, "--plant", "norm", "--report", str(path)]) == 1
    printed = capsys.readouterr().out
    assert "FAILED: norm" in printed
    assert "worst at" in printed
    assert "> " in printed
    assert str(path) in printed
    plain = json.loads(path.read_text())
    assert plain["passed"] is False
    assert plain["stages"][0]["mismatches"][0]["allowed"] < 0.01
    assert "RMSNorm" in path.with_suffix(".md").read_text()
    assert main([*arguments, "--no-report"]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.json", "report.md"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--only", "gemm"],
        ["--plant", "norms"],
        ["--device", "vulkan:99"],
        ["--skip", "x"],
        ["--only", "norm", "--skip", "norm"],
    ],
)
def test_a_wrong_call_gives_exit_code_2(arguments: list[str], tmp_path: Path, capsys) -> None:
    assert main([*arguments, "--report", str(tmp_path / "r.json"), "--in-process"]) == 2
    assert "expected one of" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    lines: list[str] = []
    options = Options(
        device="cpu", only=("norm",), quick=True, box=0.1, apart=False,
        report=tmp_path / "absent" / "report.json",
    )  # fmt: skip
    assert diagnose(options, lines.append).passed
    assert any("could not be written" in line for line in lines)


def test_an_interrupted_climb_leaves_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def freeze(session: object) -> None:
        raise KeyboardInterrupt

    stages = tuple(replace(s, run=freeze) if s.name == "norm" else s for s in STAGES)
    monkeypatch.setattr(cli, "STAGES", stages)
    path = tmp_path / "r.json"
    arguments = ["--device", "cpu", "--quick", "--only", "transfer,norm", "--in-process"]
    assert main([*arguments, "--report", str(path)]) == 130
    plain = json.loads(path.read_text())
    assert plain["interrupted_in"] == "norm"
    assert plain["passed"] is False
    assert [s["name"] for s in plain["stages"]] == ["transfer"]
    assert "interrupted in norm" in path.with_suffix(".md").read_text()


def test_options_choose_the_stages() -> None:
    assert [s.name for s in Options(only=("norm", "transfer")).stages] == ["transfer", "norm"]
    assert "timing" not in [s.name for s in Options(skip=("timing",)).stages]
    with pytest.raises(ArgumentError, match="--only 'nothing'"):
        Options(only=("nothing",))


def test_a_result_survives_the_pipe() -> None:
    result = StageResult(3, "norm", "t", Status.FAILED, worst=float("inf"), error="x")
    again = StageResult.parse(json.loads(json.dumps(result.plain())))
    assert again == result
    report = Report({"description": ["d"]}, "cpu", {}, {}, [result])
    assert report.failed_names == ["norm"]
    assert "failed: norm" in report.text()
