"""The probe: the same few training records, evaluated again and again.

They are chosen by their content and packed in windows of their own, so neither the seed nor the
order of training has a say in which they are or what is computed for them: what changes is the
adapter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from vkjit_models.llama.model import Adapters

from .data import WindowSet
from .evaluate import Evaluator


@final
@dataclass(frozen=True)
class ProbeLoss:
    """One evaluation of the probe: its rows of ``probe.csv`` and the mean over its targets."""

    rows: list[dict[str, Any]]
    loss: float


@final
class Probe:
    """Records that are followed from the first step on."""

    def __init__(self, windows: WindowSet, stored: Mapping[str, Any] | None = None) -> None:
        """Follows the records in ``windows``; ``stored`` is what `stored` gave."""
        self._windows = windows
        self._first: dict[str, float] = dict((stored or {}).get("first", {}))
        self.last: float | None = (stored or {}).get("last")

    def evaluate(self, step: int, evaluator: Evaluator, adapters: Adapters) -> ProbeLoss:
        """Loss of every record, and its change against the first evaluation."""
        data = self._windows
        sums = evaluator.records(adapters, data, range(len(data)))
        rows: list[dict[str, Any]] = []
        for i, (record, mean) in enumerate(zip(data.records, sums.means, strict=True)):
            loss, targets = float(mean), int(sums.targets[i])
            first = self._first.setdefault(record, loss)
            rows.append({
                "step": step, "record": record, "category": data.categories[i],
                "targets": targets, "loss": loss, "first_loss": first, "change": loss - first,
            })  # fmt: skip
        total = math.fsum(sums.losses) / max(int(sums.targets.sum()), 1)
        return ProbeLoss(rows, total)

    def stored(self) -> dict[str, Any]:
        """JSON values that the constructor takes."""
        return {"first": self._first, "last": self.last}
