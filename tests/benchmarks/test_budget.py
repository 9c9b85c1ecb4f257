"""The sweep of budgets on a small model: its points are what the plans said."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import budget

SMALL = ("--layers=4", "--width=32", "--heads=2", "--hidden=64", "--vocabulary=64", "--tokens=128")


def test_a_sweep_counts_what_was_planned(tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    options = budget.parse([*SMALL, "--parts=0.6", "--calls=1", f"--picture={picture}"])
    options.peers_python = ""
    first, second = budget.sweep(options)
    assert first["losses"] == second["losses"]
    assert second["predicted"] <= second["budget"] < first["predicted"]
    for point in (first, second):
        # Blocks of the CPU's pool are up to 1/16 larger than what was asked for.
        assert point["measured"] == pytest.approx(point["predicted"], rel=1 / 16)
    assert picture.stat().st_size > 10_000
    budget.draw([first, second], "small", str(tmp_path / "sweep.png"))
    assert (tmp_path / "sweep.png").stat().st_size > 10_000
