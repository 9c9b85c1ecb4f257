"""What a run prints: the adapter's plan, memory, the table before and after, replies, costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from vkjit_models.llama.lora import LoraPlan

from .evaluate import HeldOut, perplexity
from .receipt import MIB


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
        predicted_bytes: Arrays that the training step holds, known before it ran.
        device_bytes: Arrays that the device held at most, also in evaluations.
        process_bytes: Largest resident size of the process: the same, where the device is the CPU,
            plus Python, its libraries, the compiler, and what evaluation needed beyond the step.
    """

    compile_seconds: float
    tokens_per_second: float
    predicted_bytes: int
    device_bytes: int
    process_bytes: int


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
    table = Table(
        "modules", "shape", "count", "rank", "alpha", "scale", "adapter",
        title="Tensors", title_justify="left",
    )  # fmt: skip
    groups = Counter(_plan_rows(plan))
    for row, count in groups.items():
        table.add_row(*row[:2], str(count), *row[2:])
    console.print(table)


def _plan_rows(plan: LoraPlan) -> Iterator[tuple[str, ...]]:
    """A row for each module; those of the same kind are equal."""
    for one in plan.adapted:
        what = f"{'trained' if one.trained else 'frozen'}, by {one.pattern!r}"
        numbers = (str(one.rank), f"{one.alpha:g}", f"{one.scale:g}", what)
        yield _kind(one.module), "x".join(map(str, one.shape)), *numbers
    for one in plan.skipped:
        shape = "x".join(map(str, one.shape))
        yield _kind(one.module), shape, "", "", "", f"no: {one.reason}"


def _kind(module: str) -> str:
    parts = (part for part in module.split(".") if not part.isdigit())
    return ".".join(parts).removeprefix("model.").removeprefix("layers.")


def show_costs(console: Console, costs: Costs) -> None:
    """Prints time and memory, the predicted peak beside the measured one."""
    table = Table("", "", title="Time and memory", title_justify="left", show_header=False)
    table.columns[1].justify = "right"
    table.add_row("compiling the training step", f"{costs.compile_seconds:.1f} s")
    table.add_row("training, median step", f"{costs.tokens_per_second:,.0f} tok/s")
    for what, size in (
        ("predicted peak of the step's arrays", costs.predicted_bytes),
        ("measured peak of the device's arrays", costs.device_bytes),
        ("measured peak of the process", costs.process_bytes),
    ):
        table.add_row(what, f"{size / MIB:,.0f} MiB")
    console.print(table)


def show_comparison(console: Console, off: HeldOut, on: HeldOut) -> None:
    """Prints loss and perplexity, adapter off and on, overall and by category."""
    table = Table(
        "held out", "targets", "loss off", "loss on", "perplexity off", "perplexity on",
        title="Before and after", title_justify="left",
    )  # fmt: skip
    for column in table.columns[1:]:
        column.justify = "right"
    losses = {"all": (off.loss, on.loss, on.targets)} | {
        name: (off.by_category[name], loss, on.targets_by_category.get(name, 0))
        for name, loss in on.by_category.items()
    }
    for name, (before, after, targets) in losses.items():
        numbers = (f"{before:.4f}", f"{after:.4f}")
        sizes = (f"{perplexity(before):.2f}", f"{perplexity(after):.2f}")
        table.add_row(name, f"{targets:,}", *numbers, *sizes)
    console.print(table)
    low, high = on.perplexity_range
    console.print(
        f"perplexity with the adapter {on.perplexity:.2f}, 95% range {low:.2f} to {high:.2f} "
        f"(Student's t over {on.records} records, {on.targets:,} labelled tokens)",
        highlight=False,
    )


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
