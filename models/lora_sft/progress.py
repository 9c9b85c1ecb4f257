"""The running display, and the interrupt that waits for the end of a step."""

from __future__ import annotations

import math
import signal
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, Self, final

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from .receipt import MIB

_LINES = 20  # printed over a run where the output is no terminal
_BLOCKS = "▁▂▃▄▅▆▇█"
_CURVE = 48  # losses that the sparkline shows


@final
@dataclass(frozen=True)
class StepView:
    """What is shown of a step.

    Args:
        step: Steps done.
        loss: Of the step.
        learning_rate: Of the step.
        gradient_norm: Before clipping.
        tokens_per_second: Of the step.
        peak_bytes: Largest resident size of the process.
        notes: Short words such as "clipped".
        categories: Loss of the step's targets by category, NaN where there were none.
        held_out: The newest held-out loss, None before the first.
    """

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    tokens_per_second: float
    peak_bytes: int
    notes: Sequence[str] = ()
    categories: Mapping[str, float] = field(default_factory=dict)
    held_out: float | None = None


@final
class Display:
    """A live view of the run in a terminal; elsewhere plain lines, about twenty in all."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        """Shows ``done`` of ``total`` steps."""
        self._console, self._total = console, total
        self._every = max(1, total // _LINES)
        self._progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("left"),
            TimeRemainingColumn(), console=console,
        )  # fmt: skip
        self._task = self._progress.add_task("", total=total, completed=done)
        self._losses: deque[float] = deque(maxlen=_CURVE)
        self._categories: dict[str, float] = {}
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(self._progress, console=console, refresh_per_second=4)

    def show(self, view: StepView) -> None:
        """Shows the state after a step."""
        self._losses.append(view.loss)
        self._categories |= {n: x for n, x in view.categories.items() if math.isfinite(x)}
        self._progress.update(self._task, completed=view.step)
        if self._live is not None:
            self._live.update(Group(self._progress, self._table(view)))
        elif view.step % self._every == 0 or view.step == self._total:
            text = f"step {view.step}/{self._total}  {_summary(view)}"
            self._console.print(text, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        """Starts the live view."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stops the live view, leaving its last state."""
        if self._live is not None:
            self._live.stop()

    def _table(self, view: StepView) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_row("loss", f"{sparkline(self._losses)} {view.loss:.4f}")
        if view.held_out is not None:
            table.add_row("held out", f"{view.held_out:.4f}")
        for name, loss in sorted(self._categories.items()):
            table.add_row(f"  {name}", f"{loss:.4f}")
        table.add_row("learning rate", f"{view.learning_rate:.3g}")
        table.add_row("gradient norm", f"{view.gradient_norm:.3g} {' '.join(view.notes)}")
        table.add_row("speed", f"{view.tokens_per_second:,.0f} tok/s")
        table.add_row("peak memory", f"{view.peak_bytes / MIB:,.0f} MiB")
        return table


def sparkline(values: Sequence[float] | deque[float]) -> str:
    """Values as a row of blocks, the least as the lowest; ``x`` where one is not finite."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "x" * len(values)
    low, high = min(finite), max(finite)
    span = (high - low) or 1.0
    last = len(_BLOCKS) - 1
    return "".join(
        _BLOCKS[round((value - low) / span * last)] if math.isfinite(value) else "x"
        for value in values
    )


def _summary(view: StepView) -> str:
    parts = [
        f"loss {view.loss:.4f}",
        f"lr {view.learning_rate:.3g}",
        f"|g| {view.gradient_norm:.3g}",
        f"{view.tokens_per_second:.0f} tok/s",
        f"peak {view.peak_bytes / MIB:.0f} MiB",
        *view.notes,
    ]
    return "  ".join(parts)


@final
class Interrupt:
    """Turns the first Ctrl-C into a request to stop after the step; the second one is at once."""

    def __init__(self) -> None:
        """Nothing is requested yet."""
        self.requested = False
        self._previous: Any = None

    def __enter__(self) -> Self:
        """Takes SIGINT over; only the main thread can."""
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Gives SIGINT back."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
