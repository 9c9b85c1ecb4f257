"""The logs in a run's folder: which there are, their columns, and how they go on after a resume.

| file | a row is |
| --- | --- |
| ``steps.csv`` | an optimizer step |
| ``windows.csv`` | a training window in a step, with its loss when it was first seen |
| ``held_out.csv`` | an evaluation of the held-out windows |
| ``probe.csv`` | a record of the probe in an evaluation of it |
| ``adapters.csv`` | an adapter tensor, at the start, at each save and at each evaluation |
| ``events.jsonl`` | a start, a resume, an alarm, a checkpoint, an end |

Each CSV has a twin in JSON lines. Every row of a step is on the disk before its checkpoint is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from vkjit_models.common.steplog import JsonLines, StepLog

from . import movement
from .evaluate import HeldOut
from .step import Metrics

STEP_COLUMNS = (
    "step", "epoch", *Metrics._fields, "tokens", "seconds", "tokens_per_second",
    "targets_per_second", "predicted_bytes", "device_bytes", "process_bytes", "loss_change",
)  # fmt: skip
WINDOW_COLUMNS = ("step", "window", "epoch", "targets", "loss", "first_loss", "change")
PROBE_COLUMNS = ("step", "record", "category", "targets", "loss", "first_loss", "change")
HELD_OUT_COLUMNS = (
    "step", "loss", "loss_low", "loss_high", "perplexity", "perplexity_low", "perplexity_high",
    "targets", "records", "loss_off",
)  # fmt: skip


@final
class RunLogs:
    """All logs of a run, open for appending."""

    def __init__(
        self, folder: Path, categories: Sequence[str], resume_step: int | None = None
    ) -> None:
        """Opens them.

        Args:
            folder: The run's.
            categories: Names of the data set's categories.
            resume_step: None starts anew; a number keeps the rows up to and including that step.
        """
        self._categories = tuple(categories)
        by_category = [f"{what}_{name}" for name in categories for what in ("loss", "targets")]
        self._files = ExitStack()

        def opened(name: str, columns: Sequence[str], *, repeats: bool = False) -> StepLog:
            path = folder / f"{name}.csv"
            log = StepLog(path, columns, resume_step=resume_step, repeats=repeats)
            self._files.callback(log.close)
            return log

        self.steps = opened("steps", (*STEP_COLUMNS, *by_category))
        self.windows = opened("windows", WINDOW_COLUMNS, repeats=True)
        self.held_out = opened("held_out", (*HELD_OUT_COLUMNS, *by_category))
        self.probe = opened("probe", PROBE_COLUMNS, repeats=True)
        self.adapters = opened("adapters", movement.COLUMNS, repeats=True)
        self._events = JsonLines(folder / "events.jsonl", resume_step=resume_step)
        self._files.callback(self._events.close)

    def event(self, step: int, event: str, **facts: Any) -> None:
        """Writes a line of ``events.jsonl``."""
        self._events.append({"step": step, "event": event, **facts})

    def held_out_row(self, step: int, on: HeldOut, off: HeldOut) -> Mapping[str, Any]:
        """The row of ``held_out.csv`` for an evaluation with the adapters on and off."""
        low, high = on.perplexity_range
        row: dict[str, Any] = {
            "step": step, "loss": on.loss, "loss_low": on.low, "loss_high": on.high,
            "perplexity": on.perplexity, "perplexity_low": low, "perplexity_high": high,
            "targets": on.targets, "records": on.records, "loss_off": off.loss,
        }  # fmt: skip
        for name in self._categories:
            row[f"loss_{name}"] = on.by_category.get(name, math.nan)
            row[f"targets_{name}"] = on.targets_by_category.get(name, 0)
        return row

    def __enter__(self) -> Self:
        """Leaving the block closes the files."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes the files."""
        self._files.close()
