"""The sweep of budgets on a small model: its points are what the plans said."""

from __future__ import annotations

from pathlib import Path

import pytest

import vkjit as vj
from benchmarks import budget
from benchmarks.frameworks import array_namespace

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


def test_nothing_is_kept_longer_than_it_is_used() -> None:
    """24 layers: what the arena takes is little more than what is ever alive at once."""
    sizes = {**budget.SIZES, "width": 32, "heads": 2, "hidden": 64, "tokens": 64}
    step = budget.make_step(array_namespace("vkjit"), sizes, lambda block: block, "float32")
    arguments = budget.inputs(sizes)
    plain = vj.jit(step, donate_argnums=0).lower(*arguments)
    limit = plain.plan.peak_bytes - plain.plan.arena_bytes // 2
    bounded = vj.jit(step, donate_argnums=0, memory_budget=limit).lower(*arguments)
    assert bounded.memory().peak <= limit
    for lowered in (plain, bounded):
        assert lowered.memory().temporaries <= 1.1 * lowered.memory().live_temporaries
