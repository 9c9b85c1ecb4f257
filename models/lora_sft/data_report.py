"""Tables about a run's data: both sides, categories, what the context cost; and warnings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.status import Status
from rich.table import Table

from .config import DataSection
from .data import Progress, TrainingData, WindowSet
from .gather import origin

FEW_TARGETS = 500
"""Labelled tokens of a category below which its loss says little."""

MANY_CATEGORIES = 50
"""Categories beyond which tables and logs are of no use."""
_NAMED = 8  # categories that a warning names


def show_data(console: Console, data: TrainingData, section: DataSection) -> None:
    """Prints all tables and warnings."""
    for table in (_sides(data, section), _categories(data)):
        console.print(table)
    if any(fit.total.removed or fit.total.too_long for fit in data.fits):
        console.print(_losses(data, section))
    else:
        console.print(
            f"no record is longer than the context of {section.context} tokens", highlight=False
        )
    show_warnings(console, data_warnings(data))


def tokenising(status: Status) -> Progress:
    """What makes ``status`` count the records tokenised, for `load_data`."""

    def show(done: int, total: int) -> None:
        status.update(f"tokenising: {done:,} of {total:,} records")

    return show


def show_warnings(console: Console, warnings: Iterable[str]) -> None:
    """Prints each on a line of its own."""
    for warning in warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False)


def data_warnings(data: TrainingData) -> Iterator[str]:
    """What about the data makes a result doubtful, one sentence each."""
    sides = (("train on", data.train), ("evaluate", data.held_out))
    for purpose, side in sides:
        few = {name: n for name, (_, n) in side.counts().items() if n < FEW_TARGETS}
        if few:
            named = ", ".join(f"{name} ({n})" for name, n in list(few.items())[:_NAMED])
            named += f" and {len(few) - _NAMED} more" if len(few) > _NAMED else ""
            yield (
                f"fewer than {FEW_TARGETS} labelled tokens to {purpose} in {named}: the loss of "
                f"such a category says little; use more records"
            )
    if len(data.train.category_names) > MANY_CATEGORIES:
        yield (
            f"{len(data.train.category_names)} categories: each is a line of every table and a "
            f"column of the logs; use a few"
        )
    for fit in data.fits:
        total = fit.total
        if total.unlabelled:
            yield (
                f"{_plural(total.unlabelled, 'record')} left out because the context cuts all of "
                f"their labels; raise data.context or put less before the replies"
            )
    if data.leaked:
        yield (
            f"{_plural(data.leaked, 'held-out record')} also among the training records, token for "
            f"token: the held-out loss is too good by that; remove the copies"
        )


def context_warnings(section: DataSection, trained: int) -> Iterator[str]:
    """Whether windows are longer than the ``trained`` tokens that the model knows."""
    if section.context > trained:
        yield (
            f"data.context = {section.context} is more than the {trained} tokens that the model "
            f"was trained for: positions beyond are new to it; lower data.context"
        )


def _sides(data: TrainingData, section: DataSection) -> Table:
    table = Table(title=f"Data: {origin(section)}", title_style="bold", title_justify="left")
    table.add_column("side")
    for name in ("records", "sources", "windows", "tokens", "labelled", "filled"):
        table.add_column(name, justify="right")
    for name, side in (("training", data.train), ("held out", data.held_out)):
        table.add_row(
            name,
            f"{len(side.records):,}",
            f"{_sources(side):,}",
            f"{len(side):,} x {section.context}",
            f"{int(side.windows.used_tokens.sum()):,}",
            f"{int(side.windows.target_tokens.sum()):,}",
            f"{side.windows.utilisation:.2%}",
        )
    return table


def _categories(data: TrainingData) -> Table:
    table = Table(title="Categories", title_style="bold", title_justify="left")
    table.add_column("category")
    for name in ("training records", "labelled", "share", "held-out records", "labelled"):
        table.add_column(name, justify="right")
    train, held_out = data.train.counts(), data.held_out.counts()
    total = sum(targets for _, targets in train.values())
    for name, (records, targets) in train.items():
        style = "yellow" if targets < FEW_TARGETS else None
        table.add_row(
            name,
            f"{records:,}",
            f"{targets:,}",
            f"{targets / total:.1%}",
            f"{held_out[name][0]:,}",
            f"{held_out[name][1]:,}",
            style=style,
        )
    return table


def _losses(data: TrainingData, section: DataSection) -> Table:
    table = Table(
        title=f"Longer than the context of {section.context} tokens: {section.too_long}",
        title_style="bold",
        title_justify="left",
    )
    table.add_column("category")
    for name in ("records", "longer", "left out", "labels all cut", "tokens lost", "labelled lost"):
        table.add_column(name, justify="right")
    for side, fit in zip(("training", "held out"), data.fits, strict=True):
        for loss in (*fit.losses, fit.total):
            last = loss.category == fit.total.category and loss == fit.total
            if not (last or loss.too_long or loss.removed):
                continue
            share = loss.targets / max(loss.targets_before, 1)
            table.add_row(
                f"{side}: {loss.category}",
                f"{loss.records:,}",
                f"{loss.too_long:,}",
                f"{loss.removed:,}",
                f"{loss.unlabelled:,}",
                f"{loss.tokens:,}",
                f"{loss.targets:,} ({share:.1%})",
                end_section=last,
            )
    return table


def _sources(side: WindowSet) -> int:
    return len({record.partition("#")[0] for record in side.records})


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun} is" if count == 1 else f"{count:,} {noun}s are"
