"""The result of a climb: plain data, as JSON and as text to paste into a bug report."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, cast, final

import numpy as np

SCHEMA = 1
"""Raised when a field changes its meaning or goes away."""


class Status(Enum):
    """How a stage ended."""

    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"


@final
@dataclass
class StageResult:
    """One stage.

    ``worst`` is the largest error in units of what is allowed; ``done`` of ``cases`` fitted into
    the time. ``faults`` counts mismatches, of which the first few are kept; ``error`` is a
    traceback or what is known about the death of the process.
    """

    number: int
    name: str
    title: str
    status: Status
    seconds: float = 0.0
    checks: int = 0
    faults: int = 0
    worst: float = 0.0
    done: int = 0
    cases: int = 0
    mismatches: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    error: str = ""
    device_lost: bool = False
    notes: list[str] = field(default_factory=list[str])
    figures: dict[str, Any] = field(default_factory=dict[str, Any])
    advice: list[str] = field(default_factory=list[str])

    @property
    def failed(self) -> bool:
        """Whether the stage ran and found a fault."""
        return self.status is Status.FAILED

    def plain(self) -> dict[str, Any]:
        """As JSON has it: no infinities, a word for the status."""
        worst = self.worst if np.isfinite(self.worst) else None
        figures = _finite(self.figures)
        return {**asdict(self), "status": self.status.value, "worst": worst, "figures": figures}

    @classmethod
    def parse(cls, plain: dict[str, Any]) -> StageResult:
        """What ``plain`` gave."""
        worst = np.inf if plain["worst"] is None else plain["worst"]
        fields: dict[str, Any] = {**plain, "status": Status(plain["status"]), "worst": worst}
        return cls(**fields)

    def line(self) -> str:
        """One row of the table."""
        share = "" if self.status is Status.SKIPPED else f"{self.worst:9.2g}"
        cut = f", {self.done} of {self.cases} cases in the time" if self.done < self.cases else ""
        extra = f"{self.checks} checks{cut}" if self.checks else ""
        word = self.status.value.upper() if self.failed else self.status.value
        return (
            f"{self.number:2} {self.name:<13} {word:<8} {self.seconds:7.2f} s {share:>9}  {extra}"
        ).rstrip()

    def figure_lines(self) -> list[str]:
        """Figures by name: times, errors in units in the last place."""
        return [f"{key}: {_plain(value)}" for key, value in self.figures.items()]

    def details(self) -> list[str]:
        """What is wrong and what to do; nothing for a stage that passed."""
        if not self.failed:
            return []
        lines = [_mismatch_line(m) for m in self.mismatches]
        more = self.faults - len(self.mismatches)
        lines += [f"... and {more} more"] if more > 0 else []
        lines += self.error.strip().splitlines()
        return lines + [f"> {sentence}" for sentence in self.advice]


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        pairs = cast("dict[str, Any]", value).items()
        return ", ".join(f"{key} {inner}" for key, inner in pairs)
    return str(value)


def _mismatch_line(m: dict[str, Any]) -> str:
    if m["size"] == 1 and m["error"] is None:
        return f"{m['what']}: got {m['got']}, wanted {m['wanted']}"
    error = "" if m["error"] is None else f", off by {m['error']:.2e}, allowed {m['allowed']:.2e}"
    return (
        f"{m['what']}: {m['differ']} of {m['size']} differ, worst at {tuple(m['at'])}: "
        f"got {m['got']}, wanted {m['wanted']}{error}"
    )


TABLE_HEAD = " # stage         result      time  err/allowed"


@final
@dataclass
class Report:
    """Everything that a bug report needs; ``device`` is the device's own description.

    ``running`` is the stage in which the climb is, or was when the machine stopped.
    """

    device: dict[str, Any]
    host: str
    system: dict[str, Any]
    options: dict[str, Any]
    stages: list[StageResult] = field(default_factory=list[StageResult])
    running: str = ""

    @property
    def passed(self) -> bool:
        """Whether no stage failed and none was interrupted."""
        return not self.running and not any(stage.failed for stage in self.stages)

    @property
    def failed_names(self) -> list[str]:
        """Names of the stages that failed."""
        return [stage.name for stage in self.stages if stage.failed]

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "schema": SCHEMA,
            "passed": self.passed,
            "interrupted_in": self.running or None,
            "device": self.device,
            "host": self.host,
            "system": self.system,
            "options": self.options,
            "stages": [stage.plain() for stage in self.stages],
        }

    def text(self) -> str:
        """Markdown to paste into a bug report."""
        verdict = "all stages passed" if self.passed else f"failed: {', '.join(self.failed_names)}"
        if self.running:
            verdict = f"interrupted in {self.running}"
        lines = [f"## vkjit doctor: {verdict}", "", "```text", *self.device["description"], ""]
        lines += [f"{key}: {value}" for key, value in self.system.items()]
        lines += [f"compared with: {self.host}", ""]
        lines += [TABLE_HEAD, *[stage.line() for stage in self.stages]]
        for stage in self.stages:
            lines += ["", f"{stage.name}:"] if stage.failed or stage.notes else []
            lines += [f"  {line}" for line in stage.details()]
            lines += [f"  note: {note}" for note in stage.notes]
        for stage in self.stages:
            lines += ["", f"{stage.name}:"] if stage.figures else []
            lines += [f"  {line}" for line in stage.figure_lines()]
        return "\n".join([*lines, "```", ""])

    def write(self, path: Path) -> list[Path]:
        """Writes JSON to ``path`` and the text beside it, each whole or not at all.

        Raises:
            OSError: the folder cannot be written.
        """
        beside = path.with_suffix(".md")
        _write(path, json.dumps(self.plain(), indent=1, allow_nan=False) + "\n")
        _write(beside, self.text())
        return [path, beside]


def _finite(value: Any) -> Any:
    """Figures with words for infinities and NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in cast("list[Any]", value)]
    return value if not isinstance(value, float) or np.isfinite(value) else str(value)


def _write(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent or Path(), prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)  # mkstemp's files are for their owner only
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
