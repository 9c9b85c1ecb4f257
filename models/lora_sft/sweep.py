"""A sweep: one run after the other in one process, sharing weights, data and programs.

The folder holds ``runs/NAME`` with everything that a run of its own leaves, and ``sweep.csv``,
``sweep.json``, ``sweep.md`` and ``sweep.html``, which are written anew after every run.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import IO, TextIO, cast, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from vkjit.errors import ConfigError, VkjitError
from vkjit_models.common.atomic import write_atomic
from vkjit_models.common.steplog import json_text

from .alarms import AlarmError
from .config import parse_config
from .shared import Shared
from .sweep_config import SweepConfig, SweepRun
from .sweep_outcome import Outcome, csv_text, is_done, read_outcome
from .sweep_page import markdown, page
from .train import train
from .verdict import Verdict, judge, short
from .verdict_text import level_text

LOG = "console.txt"
"""What a run printed, in its folder."""


@final
class SweepResult:
    """What came of a sweep.

    Attributes:
        outcomes: Of all runs, in order.
        verdict: Which factor caused what.
        interrupted: It was stopped from outside; the same command goes on.
        failed: No run could be made.
    """

    def __init__(self, outcomes: Sequence[Outcome], verdict: Verdict, stopped: str) -> None:
        """Takes the outcomes, the verdict, and the run that was interrupted or no text."""
        self.outcomes = tuple(outcomes)
        self.verdict = verdict
        self.interrupted = bool(stopped)
        self.failed = all(one.status == "failed" for one in outcomes)


def sweep(config: SweepConfig, console: Console, *, overwrite: bool = False) -> SweepResult:
    """Makes the runs that are not done yet, then writes tables, pages and the verdict.

    Runs that ended are kept; one that was killed goes on from its newest checkpoint.

    Args:
        config: The sweep.
        console: Where the progress goes.
        overwrite: Begin anew: the folder's runs are deleted.

    Raises:
        ConfigError: A run's folder holds a run with other settings. Whatever else a run raises is
            noted as its failure, and the others go on.
        DataError: The runs were to be deleted, but model or data of the first cannot be read.
    """
    shared, notes, stopped = Shared(), dict[str, str](), ""
    if overwrite:
        _begin_anew(config, shared)
    for run in config.runs:
        _check_folder(run)
    began, seconds = time.perf_counter(), dict[str, float]()
    with _progress(console, len(config.runs)) as bar:
        for number, run in enumerate(config.runs):
            bar.update(bar.task_ids[0], completed=number, description=run.name, last="")
            if is_done(run):
                console.print(f"{run.name}: done before", markup=False, highlight=False)
                continue
            start = time.perf_counter()
            stopped = _make(run, shared, notes, bar)
            seconds[run.name] = time.perf_counter() - start
            _tell(console, read_outcome(run, notes.get(run.name, "")), seconds[run.name])
            _write(config, notes, seconds)
            if stopped:
                break
        else:
            bar.update(bar.task_ids[0], completed=len(config.runs), description="all", last="")
    outcomes, verdict = _write(config, notes, seconds)
    console.print(_table(config, outcomes))
    for sentence in verdict.sentences:
        console.print(sentence, markup=False, highlight=False)
    for alarm in verdict.alarms:
        console.print(f"alarm: {alarm}", style="red", markup=False, highlight=False)
    took = f"{len(seconds)} runs in {time.perf_counter() - began:.0f} s"
    console.print(f"{took}; the results are in {config.folder}", markup=False, highlight=False)
    return SweepResult(outcomes, verdict, stopped)


def _begin_anew(config: SweepConfig, shared: Shared) -> None:
    """Deletes the runs, once model and data of the first new one could be read."""
    first = config.runs[0].config
    shared.data(first.data, shared.base(first.model), first.train.seed)
    shutil.rmtree(config.folder / "runs", ignore_errors=True)


def _check_folder(run: SweepRun) -> None:
    """Refuses a folder whose run had other settings.

    Raises:
        ConfigError: It has a checkpoint or a result of another config.
    """
    folder = run.config.output.folder
    config = folder / "config.json"
    begun = any((folder / "checkpoints").glob("*")) or (folder / "result.json").exists()
    if not (begun and config.exists()):
        return
    before = parse_config(json.loads(config.read_text(encoding="utf-8")), str(config)).identity()
    now = run.config.identity()
    if before != now:
        sections = [name for name in now if before.get(name) != now[name]]
        raise ConfigError(
            f"sweep: {folder} holds a run with checkpoints of other settings in "
            f"{', '.join(sections)}, expected the same; pass --overwrite to begin the sweep anew, "
            "or set another sweep.folder"
        )


def _make(run: SweepRun, shared: Shared, notes: dict[str, str], bar: Progress) -> str:
    """Makes one run; the name of the run where it was interrupted."""
    folder = run.config.output.folder
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOG).open("a", encoding="utf-8") as file:
        console = Console(file=cast("IO[str]", _Watched(file, bar)), width=100)
        try:
            # Goes on from a checkpoint, and begins where there is none.
            result = train(run.config, resume=True, console=console, shared=shared)
        except AlarmError:
            return ""  # the run is on the disk with its alarm
        except VkjitError as error:
            notes[run.name] = str(error).split("\n  at ")[0]
        else:
            return run.name if result.interrupted else ""
    return ""


@final
class _Watched:
    """A text file whose lines about steps are shown in the progress bar, too."""

    def __init__(self, file: TextIO, bar: Progress) -> None:
        self._file, self._bar = file, bar

    def write(self, text: str, /) -> int:
        """Writes to the file; shows the newest line about a step."""
        self._file.write(text)
        steps = [line for line in text.splitlines() if line.startswith("step ")]
        if steps:
            self._bar.update(self._bar.task_ids[0], last="  ".join(steps[-1].split("  ")[:2]))
        return len(text)

    def flush(self) -> None:
        """Flushes the file."""
        self._file.flush()


def _progress(console: Console, total: int) -> Progress:
    bar = Progress(
        TextColumn("run"), MofNCompleteColumn(), BarColumn(bar_width=20), TimeElapsedColumn(),
        TextColumn("{task.description}  {task.fields[last]}", markup=False), console=console,
    )  # fmt: skip
    bar.add_task("", total=total, last="")
    return bar


def _tell(console: Console, one: Outcome, seconds: float) -> None:
    parts = [one.name, one.status]
    if one.steps:
        parts.append(f"step {one.steps}, held-out loss {one.before:.4f} to {one.loss:.4f}")
    text = "  ".join([*parts, f"{seconds:.1f} s", one.note])
    console.print(text.strip(), markup=False, highlight=False, soft_wrap=True)


def _write(
    config: SweepConfig, notes: Mapping[str, str], seconds: Mapping[str, float]
) -> tuple[list[Outcome], Verdict]:
    """Writes the four files from what is on the disk."""
    outcomes = [read_outcome(run, notes.get(run.name, "")) for run in config.runs]
    verdict = judge(outcomes, config.factors)
    content = {
        "name": config.name,
        "factors": list(config.factors),
        "runs": [asdict(one) | {"seconds": seconds.get(one.name)} for one in outcomes],
        "verdict": asdict(verdict),
    }
    config.folder.mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("sweep.csv", csv_text(config, outcomes)),
        ("sweep.json", json_text(content, indent=2) + "\n"),
        ("sweep.md", markdown(config, outcomes, verdict)),
        ("sweep.html", page(config, outcomes, verdict)),
    ):
        write_atomic(config.folder / name, text.encode())
    return outcomes, verdict


def _table(config: SweepConfig, outcomes: Sequence[Outcome]) -> Table:
    table = Table(
        *map(short, config.factors), "status", "steps", "held-out loss", "probe change", "tok/s",
        title="Runs", title_justify="left",
    )  # fmt: skip
    for one in outcomes:
        table.add_row(
            *(level_text(one.values[key]) for key in config.factors), one.status, str(one.steps),
            f"{one.loss:.4f}", f"{one.probe_change:+.4f}", f"{one.tokens_per_second:,.0f}",
        )  # fmt: skip
    return table
