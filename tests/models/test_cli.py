"""The command line: messages, exit codes, flags."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import vkjit as vj
from vkjit_models.cli import _clear_errors, app
from vkjit_models.tune import lora_step


def test_a_wrong_config_is_one_message_and_code_2(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[train]\nsteps = 3\n[lora]\nrang = 2\n[output]\nfolder = "x"\n')
    result = CliRunner().invoke(app, ["train", str(path)])
    assert result.exit_code == 2
    assert "did you mean 'lora.rank'?" in result.stderr
    assert "Traceback" not in result.output


def test_a_missing_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", str(tmp_path / "absent.toml")])
    assert result.exit_code == 2
    assert "cannot read" in result.stderr


def test_a_model_that_is_no_gguf(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"not a model")
    result = CliRunner().invoke(app, ["sample", "hello", "--model", str(model)])
    assert result.exit_code == 2
    assert "not a GGUF" in result.stderr


def test_a_full_disk_is_one_message_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    @_clear_errors
    def write() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run/steps.csv")

    with pytest.raises(typer.Exit) as ended:
        write()
    assert ended.value.exit_code == 2
    told = capsys.readouterr().err
    assert "run/steps.csv: No space left on device, expected" in told
    assert "--resume" in told


def test_info_names_a_device() -> None:
    result = CliRunner().invoke(app, ["info"])
    assert result.exit_code == 0
    assert "cpu" in result.output.lower()


def test_doctor_hands_its_options_on(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ["--device", "cpu", "--quick", "--box", "0.1", "--only", "norm", "--in-process"]
    result = CliRunner().invoke(app, ["doctor", *options, "--report", str(report)])
    assert result.exit_code == 0, result.output
    assert report.is_file()
    planted = CliRunner().invoke(app, ["doctor", *options, "--no-report", "--plant", "norm"])
    assert planted.exit_code == 1
    assert "FAILED: norm" in planted.output
    assert CliRunner().invoke(app, ["doctor", "--only", "nothing"]).exit_code == 2
    assert "stages, in order" in CliRunner().invoke(app, ["doctor", "--help"]).output


@pytest.mark.parametrize("command", ["train", "sample", "info"])
def test_help(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert command in result.output


def test_tune_refuses_what_names_no_product() -> None:
    result = CliRunner().invoke(app, ["tune", "--shapes", "64x64"])
    assert result.exit_code == 2
    assert "expected MxNxK, MxNxK:TYPE" in result.stderr


def test_tune_asks_what_to_tune() -> None:
    result = CliRunner().invoke(app, ["tune"])
    assert result.exit_code == 2
    assert "pass a program, --shapes, --lora or --list" in result.stderr


def test_tune_has_nothing_to_do_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKJIT_CACHE_DIR", str(tmp_path))
    written = tmp_path / "all.json"
    flags = ["--device", "cpu", "--shapes", "8x8x8:f16:tn", "--list", "--export", str(written)]
    result = CliRunner().invoke(app, ["tune", *flags])
    assert result.exit_code == 0, result.stderr
    assert "cpu: 0 groups" in result.output
    assert written.exists()
    assert CliRunner().invoke(app, ["tune", "--import", str(written)]).exit_code == 0


def test_tune_knows_the_step_of_smollm2() -> None:
    function, arguments = lora_step("smollm2", 16)
    assert not isinstance(function, str)
    totals = vj.eval_shape(function, *arguments)
    assert totals.loss.shape == ()
    assert len(totals.gradients) == 7 * 3
