"""Short runs on the tiny model, for tests."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from safetensors.numpy import load_file

from vkjit_models.lora_sft.config import RunConfig, parse_config
from vkjit_models.lora_sft.train import RunResult, train

MEASURED = {
    "seconds", "tokens_per_second", "targets_per_second", "predicted_bytes", "device_bytes",
    "process_bytes",
}  # fmt: skip
"""Columns of ``steps.csv`` that differ between equal runs."""


def run(config: RunConfig, **options: Any) -> tuple[RunResult, str]:
    """A run's result and what it printed."""
    output = io.StringIO()
    result = train(config, console=Console(file=output, width=100), **options)
    return result, output.getvalue()


def changed(settings: dict[str, Any], **sections: dict[str, Any]) -> RunConfig:
    """``settings`` with other values in some sections."""
    names = dict.fromkeys([*settings, *sections])
    return parse_config(
        {name: {**settings.get(name, {}), **sections.get(name, {})} for name in names}
    )


def arrays(folder: Path, step: int) -> dict[str, np.ndarray]:
    """What the checkpoint of a step holds."""
    return load_file(folder / "checkpoints" / f"step-{step:08d}.safetensors")
