"""``vkjit dataset``: questions about a source tree, with answers read off it, as JSON lines."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vkjit.errors import ArgumentError, DataError
from vkjit_models.common.conversation import Conversation
from vkjit_models.common.jsonl import write_jsonl
from vkjit_models.common.source_chat import (
    CATEGORIES,
    Category,
    SourceOptions,
    build_conversations,
    standard_library,
)


def categories_of(names: Sequence[str] | None) -> tuple[Category, ...]:
    """The categories named, in their usual order; all where there are no names.

    Raises:
        ArgumentError: A name that is no category.
    """
    if not names:
        return CATEGORIES
    unknown = [name for name in names if name not in CATEGORIES]
    if unknown:
        raise ArgumentError(
            f"dataset: the category {unknown[0]!r}, expected one of {', '.join(CATEGORIES)}"
        )
    return tuple(one for one in CATEGORIES if one in names)


def write_dataset(
    root: Path | None, output: Path, options: SourceOptions, console: Console, *, overwrite: bool
) -> list[Conversation]:
    """Builds the data set of a tree, writes it and prints what is in it.

    Args:
        root: The tree; the standard library of this Python where None.
        output: The file of JSON lines.
        options: Seed and sizes.
        console: Where progress and summary go.
        overwrite: Replace ``output`` if it exists.

    Raises:
        DataError: No folder, nothing in it to ask about, or the file exists or cannot be written.
    """
    if output.exists() and not overwrite:
        raise DataError(
            f"dataset: {output} exists, expected a new file; pass --overwrite to replace it"
        )
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("reading the tree", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        conversations = build_conversations(root, options, progress)
    try:
        write_jsonl(output, conversations)
    except OSError as error:
        raise DataError(f"dataset: cannot write {output}: {error.strerror}; check the path") from (
            error
        )
    console.print(_summary(root or standard_library(), conversations))
    digest = hashlib.sha256(output.read_bytes()).hexdigest()
    console.print(
        f"{output}: {output.stat().st_size:,} bytes, sha256 {digest}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return conversations


def _summary(root: Path, conversations: Sequence[Conversation]) -> Table:
    sources = len({one.source for one in conversations})
    table = Table(
        title=f"{len(conversations):,} conversations about {sources:,} files of {root}",
        title_style="bold",
        title_justify="left",
    )
    table.add_column("category")
    for name in ("records", "mean question", "mean answer", "characters"):
        table.add_column(name, justify="right")
    for category in CATEGORIES:
        mine = [one for one in conversations if one.category == category]
        if mine:
            asked, answered = (
                sum(len(one.messages[turn]["content"]) for one in mine) for turn in (0, 1)
            )
            table.add_row(
                category,
                f"{len(mine):,}",
                f"{asked / len(mine):.0f}",
                f"{answered / len(mine):.0f}",
                f"{asked + answered:,}",
            )
    return table
