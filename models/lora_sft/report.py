"""What a run shows: the adapter's plan, the table before and after, the plot, the warnings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from vkjit import Lowered
from vkjit_models.common.steplog import read_steplog
from vkjit_models.llama.lora import LoraPlan

from .evaluate import HeldOut
from .progress import MIB

SMOOTHING = 10
"""Steps that the plot's smooth line of the training loss is a mean of."""
FLAT = 1e-3
"""Relative change of the held-out loss below which a trained run is called flat."""


@final
@dataclass(frozen=True)
class Replies:
    """One question and the replies without and with the adapter."""

    question: str
    before: str
    after: str


@final
@dataclass(frozen=True)
class Costs:
    """What a run took.

    Args:
        compile_seconds: From the call to a training step that is ready to run.
        tokens_per_second: Median over the steps of this process.
        predicted_mib: Arrays that the training step holds, known before it ran.
        peak_mib: Largest resident size of the process: the same plus Python, its libraries, the
            compiler, and what evaluation and replies needed beyond the step.
    """

    compile_seconds: float
    tokens_per_second: float
    predicted_mib: float
    peak_mib: float


def show_plan(console: Console, plan: LoraPlan, base_parameters: int) -> None:
    """Prints the scale, the adapted layers by kind, and what was skipped and why."""
    spec = plan.spec
    formula = "alpha/sqrt(rank)" if spec.rslora else "alpha/rank"
    console.print(
        f"LoRA: rank {spec.rank}, alpha {spec.alpha:g}, effective scale {spec.scale:g} "
        f"({formula}), {len(plan.adapted)} layers, {plan.parameters:,} trained parameters "
        f"({100 * plan.parameters / base_parameters:.2f}% of {base_parameters:,})",
        highlight=False,
    )
    table = Table("modules", "shape", "count", "adapter", title="Tensors", title_justify="left")
    groups: dict[tuple[str, str, str], int] = {}
    rows = [(r.module, r.shape, f"yes, by {r.pattern!r}") for r in plan.adapted]
    rows += [(r.module, r.shape, f"no: {r.reason}") for r in plan.skipped]
    for module, shape, what in rows:
        parts = (part for part in module.split(".") if not part.isdigit())
        kind = ".".join(parts).removeprefix("model.").removeprefix("layers.")
        group = (kind, "x".join(map(str, shape)), what)
        groups[group] = groups.get(group, 0) + 1
    for (kind, shape, what), count in groups.items():
        table.add_row(kind, shape, str(count), what)
    console.print(table)


def show_step(console: Console, seconds: float, lowered: Lowered, optimizer_bytes: int) -> None:
    """Prints what the compiled training step is made of and the memory that it will need.

    Args:
        console: Where to.
        seconds: What compiling took.
        lowered: The compiled step.
        optimizer_bytes: The optimizer's state, which is no argument of it.
    """
    memory = lowered.memory()
    parts = {
        "weights": memory.constants,
        "activations": memory.temporaries,
        "adapters and gradients": memory.inputs + memory.outputs,
        "optimizer": optimizer_bytes,
    }
    listed = ", ".join(f"{name} {size / MIB:,.0f}" for name, size in parts.items())
    console.print(
        f"training step: {len(lowered.plan.steps):,} kernel launches, ready after {seconds:.1f} s\n"
        f"predicted peak: {sum(parts.values()) / MIB:,.0f} MiB of arrays ({listed})",
        highlight=False,
        markup=False,
    )


def show_costs(console: Console, costs: Costs) -> None:
    """Prints time and memory, the predicted peak beside the measured one."""
    table = Table("", "", title="Time and memory", title_justify="left", show_header=False)
    table.columns[1].justify = "right"
    table.add_row("compiling the training step", f"{costs.compile_seconds:.1f} s")
    table.add_row("training, median step", f"{costs.tokens_per_second:,.0f} tok/s")
    table.add_row("predicted peak of the step's arrays", f"{costs.predicted_mib:,.0f} MiB")
    table.add_row("measured peak of the process", f"{costs.peak_mib:,.0f} MiB")
    console.print(table)


def show_comparison(console: Console, off: HeldOut, on: HeldOut) -> None:
    """Prints loss and perplexity, adapter off and on, overall and by category."""
    table = Table(
        "held out", "loss off", "loss on", "perplexity off", "perplexity on",
        title="Before and after", title_justify="left",
    )  # fmt: skip
    for column in table.columns[1:]:
        column.justify = "right"
    rows = [(f"all ({off.targets:,} targets)", off, on)]
    for name in off.by_category:
        sides = (HeldOut(side.by_category[name], 0, {}) for side in (off, on))
        rows.append((name, next(sides), next(sides)))
    for name, before, after in rows:
        numbers = (before.loss, after.loss, before.perplexity, after.perplexity)
        table.add_row(name, *(f"{x:.4f}" if i < 2 else f"{x:.2f}" for i, x in enumerate(numbers)))
    console.print(table)


def show_replies(console: Console, replies: Replies) -> None:
    """Prints the sample question and both replies, as plain text."""
    for title, text in (
        ("question", replies.question),
        ("reply before", replies.before),
        ("reply after", replies.after),
    ):
        console.print(
            Panel(text.strip() or "(nothing)", title=title, title_align="left"), markup=False
        )


def warnings_of(first_norm: float, last_norm: float, off: HeldOut, on: HeldOut) -> list[str]:
    """Signs that a run did not learn.

    Args:
        first_norm: Norm of all adapter weights before the first step.
        last_norm: The same after the last one.
        off: Held-out loss without the adapter.
        on: Held-out loss with it.
    """
    change = (off.loss - on.loss) / off.loss if off.loss else 0.0
    if first_norm == last_norm:
        return [
            "the adapter did not move: its weights have the norm they started with; check "
            "optimizer.learning_rate, the targets and the number of steps"
        ]
    if abs(change) < FLAT:
        return [
            f"the adapter moved, but the held-out loss is flat ({100 * change:+.3f}%); train "
            "longer or raise optimizer.learning_rate"
        ]
    if change < 0:
        return [f"the held-out loss rose by {-100 * change:.1f}%; lower optimizer.learning_rate"]
    return []


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
    losses = _numbers(steps["loss"])
    axes.plot(_numbers(steps["step"]), losses, color="tab:blue", alpha=0.35, linewidth=1,
              label="training, each step")  # fmt: skip
    axes.plot(_numbers(steps["step"]), _running_mean(losses, SMOOTHING), color="tab:blue",
              label=f"training, mean of {SMOOTHING} steps")  # fmt: skip
    axes.plot(_numbers(held_out["step"]), _numbers(held_out["loss"]), color="tab:orange",
              marker="o", label="held out")  # fmt: skip
    first, last = (_numbers(held_out["perplexity"])[i] for i in (0, -1))
    axes.set_title(f"held-out perplexity {first:.2f} to {last:.2f}")
    axes.set_ylim(bottom=0.0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy (nats per token)")
    axes.grid(alpha=0.3)
    rate = axes.twinx()
    rate.plot(_numbers(steps["step"]), _numbers(steps["learning_rate"]), color="tab:grey",
              linestyle=":", label="learning rate")  # fmt: skip
    rate.set_ylabel("learning rate")
    rate.set_ylim(bottom=0.0)
    lines = [*axes.get_lines(), *rate.get_lines()]
    axes.legend(lines, [str(line.get_label()) for line in lines], loc="upper right")
    figure.savefig(target, dpi=120)


def _running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of each value and up to ``width - 1`` before it."""
    windows = (values[max(0, i + 1 - width) : i + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _numbers(column: Sequence[float | str]) -> list[float]:
    return [float(value) for value in column]
