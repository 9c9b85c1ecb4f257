"""When a run is given up: its loss has left the best one far behind, or is no number."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

from .config import StopSection


@final
@dataclass(frozen=True)
class Stop:
    """Why a run ended before its last step.

    Args:
        kind: What was seen.
        step: The step it was seen after.
        message: For people.
    """

    kind: Literal["diverged", "not finite", "did not move", "evaluation blind"]
    step: int
    message: str


@final
class DivergenceGuard:
    """Follows the loss of each step.

    The best loss is the least mean of ``smoothing`` steps in a row. Before there are as many it is
    the held-out loss of the untrained model, or without one the largest loss seen: windows differ,
    and one that starts easy makes no level. A step counts against the run where its own loss is
    above ``factor`` times the best and above ``floor``; ``patience`` of them in a row end it, as do
    ``non_finite`` steps in a row that were skipped.
    """

    def __init__(self, section: StopSection, stored: Mapping[str, Any] | None = None) -> None:
        """Takes the limits, and what `stored` gave when a run goes on."""
        state = dict(stored or {})
        self._section = section
        self._recent: deque[float] = deque(state.get("recent", ()), section.smoothing)
        self._best = float(state.get("best") or math.inf)
        self._high, self._bad = int(state.get("high", 0)), int(state.get("bad", 0))

    @property
    def best(self) -> float:
        """What losses are compared with; infinity before the first step."""
        return self._best if math.isfinite(self._best) else max(self._recent, default=math.inf)

    def expect(self, loss: float) -> None:
        """Takes the held-out loss of the untrained model as the best so far."""
        if math.isfinite(loss):
            self._best = min(self._best, loss)

    def see(self, step: int, loss: float, *, skipped: bool) -> Stop | None:
        """Takes the loss of a step; says why the run should end, if it should."""
        self._bad = self._bad + 1 if skipped or not math.isfinite(loss) else 0
        if self._bad >= self._section.non_finite:
            return Stop("not finite", step, (
                f"the gradient was NaN or infinite in the {self._bad} steps up to {step}; lower "
                "optimizer.learning_rate or raise the warm-up"
            ))  # fmt: skip
        if self._bad:
            return None
        best = self.best
        limit = max(self._section.factor * best, self._section.floor)
        self._high = self._high + 1 if self._section.factor and loss > limit else 0
        if self._high >= self._section.patience:
            return Stop("diverged", step, (
                f"the loss was above {self._section.factor:g} times the best smoothed one "
                f"({best:.4f}) in the {self._high} steps up to {step}, last {loss:.4f}; "
                "lower optimizer.learning_rate, or raise stop.factor if the data are that uneven"
            ))  # fmt: skip
        self._recent.append(loss)
        if len(self._recent) == self._section.smoothing:
            self._best = min(self._best, math.fsum(self._recent) / len(self._recent))
        return None

    def stored(self) -> dict[str, Any]:
        """JSON values that the constructor takes."""
        best = self._best if math.isfinite(self._best) else None
        return {"recent": list(self._recent), "best": best, "high": self._high, "bad": self._bad}
