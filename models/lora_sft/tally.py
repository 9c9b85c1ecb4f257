"""Losses of single targets, summed by category, by window and by record. Host arithmetic, float64.

A training step hands out the loss of each of its targets, so these sums are of the numbers that the
gradient was computed from: no second pass, no other batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from vkjit_models.llama.model import Batch


@final
@dataclass(frozen=True)
class Sums:
    """Sum of losses and number of targets by key: f64 (keys,) and int64 (keys,)."""

    losses: NDArray[np.float64]
    targets: NDArray[np.int64]

    @staticmethod
    def of(keys: NDArray[Any], losses: NDArray[Any], count: int) -> Sums:
        """Sums of ``losses`` [n] by ``keys`` [n], which are 0 up to ``count``."""
        return Sums(
            np.bincount(keys, losses, minlength=count).astype(np.float64),
            np.bincount(keys, minlength=count),
        )

    @property
    def means(self) -> NDArray[np.float64]:
        """Mean loss of each key; NaN where it has no target."""
        empty = np.full(self.losses.shape, np.nan)
        return np.divide(self.losses, self.targets, out=empty, where=self.targets > 0)


@final
@dataclass(frozen=True)
class WindowLoss:
    """A window's mean loss over its targets, in one step."""

    window: int
    loss: float
    targets: int


@final
class StepTally:
    """What one optimizer step's targets lost, by category and by window."""

    def __init__(self, categories: Sequence[str]) -> None:
        """Nothing is added yet; ``categories`` are the names by id."""
        self._names = tuple(categories)
        self._by_category = np.zeros(len(self._names)), np.zeros(len(self._names), np.int64)
        self.windows: list[WindowLoss] = []
        self.tokens = 0

    def add(self, rows: Sequence[int], batch: Batch, losses: Any) -> None:
        """Adds a micro-batch.

        Args:
            rows: The windows in it.
            batch: What was computed; it has ``rows``, ``categories`` and ``segments``.
            losses: Of each entry of ``batch.rows``, f32 [K].
        """
        places, values = np.asarray(batch.rows), np.asarray(losses)
        real = places >= 0
        places, values = places[real], values[real]
        sums = Sums.of(np.asarray(batch.categories)[real], values, len(self._names))
        self._by_category[0][:] += sums.losses
        self._by_category[1][:] += sums.targets
        segments = np.asarray(batch.segments)
        self.tokens += int((segments >= 0).sum())
        windows = Sums.of(places // segments.shape[1], values, len(rows))
        for row, loss, count in zip(rows, windows.means, windows.targets, strict=True):
            self.windows.append(WindowLoss(int(row), float(loss), int(count)))

    @property
    def targets(self) -> int:
        """Targets of the step."""
        return int(self._by_category[1].sum())

    @property
    def loss(self) -> float:
        """Mean over all targets: the token-weighted mean of the categories'; 0 without a target."""
        return math.fsum(self._by_category[0]) / max(self.targets, 1)

    def columns(self) -> dict[str, float | int]:
        """``loss_<category>`` (NaN where the step has none of it) and ``targets_<category>``."""
        means = Sums(*self._by_category).means
        row: dict[str, float | int] = {}
        for name, mean, count in zip(self._names, means, self._by_category[1], strict=True):
            row[f"loss_{name}"] = float(mean)
            row[f"targets_{name}"] = int(count)
        return row


@final
class FirstLosses:
    """The loss of each window when it was first seen, for the change since then.

    A window comes back in every epoch in another place of the order; its own change does not
    depend on the order.
    """

    def __init__(self, stored: Mapping[str, float] | None = None) -> None:
        """Takes what `stored` gave, as a checkpoint keeps it."""
        self._first = {int(window): loss for window, loss in (stored or {}).items()}

    def changes(self, step: int, epoch: int, windows: Sequence[WindowLoss]) -> list[dict[str, Any]]:
        """A row of ``windows.csv`` for each window; first sights are remembered."""
        rows: list[dict[str, Any]] = []
        for one in windows:
            first = self._first.get(one.window, math.nan)
            if one.targets:
                self._first.setdefault(one.window, one.loss)
            rows.append({
                "step": step, "window": one.window, "epoch": epoch, "targets": one.targets,
                "loss": one.loss, "first_loss": first, "change": one.loss - first,
            })  # fmt: skip
        return rows

    def stored(self) -> dict[str, float]:
        """JSON values that the constructor takes."""
        return {str(window): loss for window, loss in self._first.items()}


def mean_change(rows: Sequence[Mapping[str, Any]]) -> float:
    """Target-weighted mean change of windows seen before; NaN where none was."""
    again = [(row["change"], row["targets"]) for row in rows if math.isfinite(row["change"])]
    targets = sum(count for _, count in again)
    if not targets:
        return math.nan
    return math.fsum(change * count for change, count in again) / targets
