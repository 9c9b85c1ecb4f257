"""The running display, the interrupt that waits for the end of a step, and peak memory."""

from __future__ import annotations

import resource
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, Self, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

MIB = 2**20
_LINES = 20  # printed over a run where the output is no terminal


def peak_memory_mib() -> float:
    """Largest resident size that this process has had, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)  # bytes there, KiB elsewhere


@final
class Display:
    """A bar with loss, tokens per second and peak memory; plain lines without a terminal."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        """Shows ``done`` of ``total`` steps."""
        self._console, self._total = console, total
        self._every = max(1, total // _LINES)
        self._progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"),
            TimeRemainingColumn(), console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._progress.add_task("", total=total, completed=done)

    def show(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Shows the state after ``step``."""
        text = f"loss {loss:.4f}  {tokens_per_second:.0f} tok/s  peak {peak_memory_mib():.0f} MiB"
        self._progress.update(self._task, completed=step, description=text)
        if not self._console.is_terminal and (step % self._every == 0 or step == self._total):
            self._console.print(f"step {step}/{self._total}  {text}", highlight=False)

    def __enter__(self) -> Self:
        """Starts the bar."""
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stops the bar."""
        self._progress.stop()


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
