"""Adapters that a run starts from: a start of its own, or the values of an adapter's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vkjit.errors import ConfigError
from vkjit_models.common.adapter_gguf import load_any_adapter
from vkjit_models.common.gguf import LlamaHyper
from vkjit_models.llama.lora import LoraPlan, from_peft, init_adapters
from vkjit_models.llama.model import LoraPair, Params


def start_adapters(
    plan: LoraPlan, hyper: LlamaHyper, params: Params, key: Any, start: Path | None
) -> dict[str, LoraPair]:
    """The adapters before the first step.

    Args:
        plan: The layers and their ranks.
        hyper: Sizes of the model.
        params: The base weights; only DoRA reads them.
        key: A random key, for the layers that ``start`` lacks.
        start: A folder in PEFT's layout or a GGUF file; None: `init_adapters` alone.

    Raises:
        ConfigError: The file's layers, ranks, scales or magnitudes are not those of the plan.
        DataError: The file cannot be read or is of another model.
    """
    fresh = init_adapters(plan, key, params)
    if start is None:
        return fresh
    config, tensors = load_any_adapter(start, hyper)
    found = from_peft(hyper, tensors)
    rows = {row.module: row for row in plan.adapted}
    for name, pair in found.items():
        row = rows.get(name)
        if row is None:
            raise ConfigError(
                f"start: {start} adapts {name}, expected layers among the {len(rows)} that [lora] "
                "chooses; widen lora.targets or lora.layers"
            )
        rank, scale = pair.a.shape[0], config.scale_of(name)
        if rank != row.rank or abs(scale - row.scale) > 1e-6 * abs(row.scale):
            raise ConfigError(
                f"start: {start} has rank {rank} and scale {scale:g} for {name}, expected rank "
                f"{row.rank} and scale {row.scale:g}; set lora.rank, lora.alpha and lora.rslora to "
                "those of the adapter"
            )
        if (pair.magnitude is not None) != plan.spec.dora:
            raise ConfigError(
                f"start: {start} has {'no ' if plan.spec.dora else ''}magnitudes for {name}, "
                f"expected lora.dora = {str(not plan.spec.dora).lower()}; set it so"
            )
    return fresh | found
