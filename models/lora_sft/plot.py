"""The picture of a run's losses, ``loss.png``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vkjit_models.common.steplog import read_steplog

SMOOTHING = 10
"""Steps that the smooth line of the training loss is a mean of."""


def plot_losses(steps_csv: Path, held_out_csv: Path, target: Path) -> None:
    """Draws training loss, held-out loss and learning rate over the steps into a PNG file."""
    from matplotlib.backends.backend_agg import (  # noqa: PLC0415  slow to import, only for plots
        FigureCanvasAgg,
    )
    from matplotlib.figure import Figure  # noqa: PLC0415  slow to import, only for plots
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415  slow to import, only for plots

    steps, held_out = read_steplog(steps_csv), read_steplog(held_out_csv)
    figure = Figure(figsize=(8.0, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    losses = numbers(steps["loss"])
    axes.plot(numbers(steps["step"]), losses, color="tab:blue", alpha=0.35, linewidth=1,
              label="training, each step")  # fmt: skip
    axes.plot(numbers(steps["step"]), running_mean(losses, SMOOTHING), color="tab:blue",
              label=f"training, mean of {SMOOTHING} steps")  # fmt: skip
    axes.plot(numbers(held_out["step"]), numbers(held_out["loss"]), color="tab:orange",
              marker="o", label="held out")  # fmt: skip
    first, last = (numbers(held_out["perplexity"])[i] for i in (0, -1))
    axes.set_title(f"held-out perplexity {first:.2f} to {last:.2f}")
    axes.set_ylim(bottom=0.0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy (nats per token)")
    axes.grid(alpha=0.3)
    rate = axes.twinx()
    rate.plot(numbers(steps["step"]), numbers(steps["learning_rate"]), color="tab:grey",
              linestyle=":", label="learning rate")  # fmt: skip
    rate.set_ylabel("learning rate")
    rate.set_ylim(bottom=0.0)
    lines = [*axes.get_lines(), *rate.get_lines()]
    axes.legend(lines, [str(line.get_label()) for line in lines], loc="upper right")
    figure.savefig(target, dpi=120)


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of each value and up to ``width - 1`` before it."""
    windows = (values[max(0, i + 1 - width) : i + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def numbers(column: Sequence[float | str]) -> list[float]:
    """A column of a step log as numbers."""
    return [float(value) for value in column]
