"""What came of the runs of a sweep, read from their folders, and the table of it."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from vkjit_models.common.steplog import read_steplog

from .plot import SMOOTHING, numbers
from .record import NAME as RECORD
from .sweep_config import SweepConfig, SweepRun

STOPPED = ("diverged", "not finite")


@final
@dataclass(frozen=True)
class Outcome:
    """What came of one run. Numbers that a run did not come to are NaN.

    Args:
        name: Of the run.
        values: Level of each factor.
        status: "finished", "diverged", "not finite", another kind of stop, "failed" or "missing".
        steps: Optimizer steps done.
        before: Held-out loss of the base model.
        loss: Held-out loss after the last step; NaN for a run that ended before.
        train_loss: Mean loss of the last steps.
        probe_change: Mean change of the probe's losses, weighted by tokens.
        gradient_norm: The largest.
        tokens_per_second: Median.
        note: Why it failed.
    """

    name: str
    values: Mapping[str, Any]
    status: str
    steps: int = 0
    before: float = math.nan
    loss: float = math.nan
    train_loss: float = math.nan
    probe_change: float = math.nan
    gradient_norm: float = math.nan
    tokens_per_second: float = math.nan
    note: str = ""

    @property
    def diverged(self) -> bool:
        """Whether the run gave itself up, or ended with a loss that is no number."""
        return self.status in STOPPED or (
            self.status == "finished" and not math.isfinite(self.loss)
        )

    @property
    def ended(self) -> bool:
        """Whether it is known what came of the run."""
        return self.status not in ("missing", "failed", "interrupted", "running")


MEASURED = (
    "status", "steps", "before", "loss", "train_loss", "probe_change", "gradient_norm",
    "tokens_per_second", "note",
)  # fmt: skip


def read_outcome(run: SweepRun, note: str = "") -> Outcome:
    """The outcome of ``run`` from its folder; ``note`` says why it failed, if it did."""
    folder = run.config.output.folder
    record, result = folder / RECORD, folder / "result.json"
    if note or not record.exists():
        return Outcome(run.name, run.values, "failed" if note else "missing", note=note)
    status = str(json.loads(record.read_text(encoding="utf-8"))["status"])
    steps, held_out = read_steplog(folder / "steps.csv"), read_steplog(folder / "held_out.csv")
    losses = numbers(steps["loss"])[-SMOOTHING:]
    rates = sorted(numbers(steps["tokens_per_second"]))
    finished = status == "finished" and result.exists()
    return Outcome(
        run.name,
        run.values,
        status,
        len(steps["step"]),
        numbers(held_out["loss_off"])[0] if held_out["step"] else math.nan,
        numbers(held_out["loss"])[-1] if finished else math.nan,
        sum(losses) / len(losses) if losses else math.nan,
        _probe_change(folder) if finished else math.nan,
        max(numbers(steps["gradient_norm"]), default=math.nan),
        rates[len(rates) // 2] if rates else math.nan,
    )


def is_done(run: SweepRun) -> bool:
    """Whether the folder holds this very run, come to an end."""
    folder = run.config.output.folder
    record, config = folder / RECORD, folder / "config.json"
    if not (record.exists() and config.exists() and (folder / "result.json").exists()):
        return False
    if json.loads(config.read_text(encoding="utf-8")) != run.config.resolved():
        return False
    status = json.loads(record.read_text(encoding="utf-8"))["status"]
    return status not in ("running", "interrupted")


def csv_text(sweep: SweepConfig, outcomes: list[Outcome]) -> str:
    """The table, a line for each run."""
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(("run", *sweep.factors, *MEASURED))
    for one in outcomes:
        levels = [one.values[key] for key in sweep.factors]
        writer.writerow((one.name, *levels, *(getattr(one, name) for name in MEASURED)))
    return buffer.getvalue()


def _probe_change(folder: Path) -> float:
    """Mean change of the newest evaluation of the probe, weighted by tokens."""
    log = read_steplog(folder / "probe.csv")
    if not log["step"]:
        return math.nan
    last = log["step"][-1]
    rows = zip(log["step"], numbers(log["change"]), numbers(log["targets"]), strict=True)
    newest = [(change, count) for step, change, count in rows if step == last]
    return sum(change * count for change, count in newest) / sum(count for _, count in newest)
