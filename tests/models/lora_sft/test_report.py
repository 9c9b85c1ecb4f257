"""The page of a run: complete, self-contained, and made from the files alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from vkjit.errors import DataError
from vkjit_models.cli import app
from vkjit_models.lora_sft.page import write_report

from .runs import changed, run


@pytest.fixture
def folder(settings: dict[str, Any]) -> Path:
    """A finished run's, with every term of the loss."""
    config = changed(
        settings,
        loss={"kl": "kl", "kl_weight": 0.1, "pullback_weight": 1e-5},
        output={"sample_tokens": 0},
    )
    run(config)
    return config.output.folder


def test_a_report_has_every_part_and_needs_nothing_else(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    for heading in (
        "Alarms", "Curves", "Categories", "Probe", "Memory", "Adapters", "Configuration",
        "Receipts",
    ):  # fmt: skip
        assert f"<h2>{heading}</h2>" in page
    for title in (
        "Loss (nats per labelled token)", "Learning rate", "Gradient norm before clipping",
        "Divergence from the base model", "Pull-back (half the squared distance)",
        "Training loss by category", "Probe: mean change of the loss",
    ):  # fmt: skip
        assert f"<figcaption>{title}" in page
    assert not re.search(r"<script|<link|<img|\bsrc=|\bhref=|https?://|@import|url\(", page)
    figures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(figures) >= 8
    for figure in figures:
        ElementTree.fromstring(figure)
    config = json.loads((folder / "config.json").read_text())
    assert f"learning_rate = {config['optimizer']['learning_rate']}" in page
    record = json.loads((folder / "run.json").read_text())
    part = record["parts"][0]
    for text in (part["commit"], part["device"], part["data_sha256"], "4 of 4"):
        assert str(text) in page
    assert "cpu: " in page  # the driver's own description
    assert "tokens per second, median (10% to 90%)" in page
    assert "loss.pullback_weight = 1e-05 with learning rate 0.01 moves" in page  # an alarm
    for tensor in ("self_attn.q_proj.A", "mlp.down_proj.B"):
        assert f"model.layers.0.{tensor}" in page
    assert "no target" in page  # why other modules have no adapter
    assert "did not move" not in page


def test_a_report_of_a_killed_run_is_made_from_what_is_there(folder: Path) -> None:
    (folder / "result.json").unlink()
    (folder / "report.html").unlink()
    record = json.loads((folder / "run.json").read_text())
    record["status"] = "running"
    del record["parts"][0]["to_step"]
    (folder / "run.json").write_text(json.dumps(record))
    for name in ("steps", "probe"):
        path = folder / f"{name}.csv"
        path.write_text(path.read_text()[:-7])  # torn by the kill
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert result.exit_code == 0, result.output
    page = (folder / "report.html").read_text()
    assert "<b>3 of 4</b>" in page
    assert "<b>running, or killed</b>" in page
    assert "after 0 to killed" in page


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="give the folder of a run"):
        write_report(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(DataError, match="is no JSON"):
        write_report(tmp_path)
