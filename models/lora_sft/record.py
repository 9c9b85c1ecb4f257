"""``run.json``: what the run is, what it was made with, and how it ended. Written whole each time.

The file is there from before the first step, so that a killed run has its receipt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

from vkjit_models.common.atomic import write_atomic
from vkjit_models.common.steplog import json_text
from vkjit_models.llama.lora import LoraPlan

from .config import RunConfig
from .report import Costs

NAME = "run.json"


@final
class RunRecord:
    """The record of a run; every process that works on the run adds a part."""

    def __init__(
        self, folder: Path, config: RunConfig, plan: LoraPlan, facts: Mapping[str, Any]
    ) -> None:
        """Nothing is written yet.

        Args:
            folder: The run's.
            config: The run.
            plan: Its adapters.
            facts: The receipt of this process.
        """
        self._path, self._config = folder / NAME, config
        self._part: dict[str, Any] = {"from_step": 0, **facts}
        self._content: dict[str, Any] = {
            "status": "running",
            "steps": config.train.steps,
            "adapters": {
                "scale": plan.spec.scale,
                "parameters": plan.parameters,
                "adapted": [asdict(row) for row in plan.adapted],
                "skipped": [asdict(row) for row in plan.skipped],
            },
            "parts": [self._part],
        }

    @property
    def status(self) -> str:
        """How the run stands: "running" or how it ended."""
        return str(self._content["status"])

    def begin(self, step: int) -> None:
        """Writes ``config.json``; a run that goes on after ``step`` keeps its earlier parts."""
        text = json_text(self._config.resolved(), indent=2) + "\n"
        write_atomic(self._path.with_name("config.json"), text.encode())
        self._part["from_step"] = step
        if step and self._path.exists():
            before = json.loads(self._path.read_text(encoding="utf-8"))
            self._content["parts"] = [*before.get("parts", []), self._part]
            self._content["status"] = before.get("status", "running")

    def compiled(self, seconds: float, memory: Mapping[str, int], base: Mapping[str, Any]) -> None:
        """Adds what is known before the first step.

        Args:
            seconds: What compiling took.
            memory: Predicted bytes by kind.
            base: What loading the weights mapped, copied and uploaded.
        """
        self._part |= {
            "compile_seconds": seconds, "predicted_bytes": dict(memory), "base": dict(base),
        }  # fmt: skip
        self._content["status"] = "running"
        self._write()

    def ended(self, step: int, status: str, costs: Costs | None) -> None:
        """Says how the run stands after ``step``, and what it cost."""
        if costs is None and self._path.exists():
            return  # nothing was trained: the file of the process that did stays as it is
        self._content["status"] = status
        self._part |= {"to_step": step, "costs": None if costs is None else asdict(costs)}
        self._write()

    def _write(self) -> None:
        write_atomic(self._path, (json_text(self._content, indent=2) + "\n").encode())
