"""What a run would train on, without its weights: tables, and records token by token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from vkjit_models.common.chat import IGNORE
from vkjit_models.common.gguf import llama_hyper, open_gguf
from vkjit_models.common.packing import Document
from vkjit_models.common.smollm2 import find_smollm2
from vkjit_models.common.tokenizer import Tokenizer

from .base import SMOLLM2
from .config import RunConfig
from .data import TrainingData, WindowSet, load_data
from .data_report import context_warnings, show_data, show_warnings, tokenising

SHOWN_TOKENS = 800
"""Tokens of a record that are shown, at most."""

_SPLIT_TOKENS = 6  # tokens that one character of four bytes can be spread over, generously
_STYLES = {  # by (labelled, every other token): neighbours differ, so that their border shows
    (True, False): "bold green", (True, True): "bold cyan",
    (False, False): "default", (False, True): "bright_black",
}  # fmt: skip


@final
@dataclass(frozen=True)
class Marks:
    """What stands around labelled tokens, and what shows a line end."""

    opening: str
    closing: str
    newline: str


def dry_run(config: RunConfig, console: Console, records: int = 3) -> TrainingData:
    """Prints the data of a run: both sides, categories, what is cut, and ``records`` records.

    Only the model file's metadata is read. The records shown are the first of each category, then
    the second, and so on, as they stand in the training windows.

    Raises:
        DataError: As `load_data`, and for a model file that cannot be read.
    """
    path = config.model.path
    with console.status("reading the tokenizer"):
        file = open_gguf(find_smollm2() if path == SMOLLM2 else Path(path))
        tokenizer, hyper = Tokenizer(file), llama_hyper(file)
    with console.status("reading the records") as status:
        data = load_data(config.data, tokenizer, config.train.seed, tokenising(status))
    show_data(console, data, config.data)
    show_warnings(console, context_warnings(config.data, hyper.context_length))
    per_step = config.train.micro_batch * config.train.accumulation
    console.print(
        f"{config.train.steps} steps of {per_step} windows are "
        f"{config.train.steps * per_step / len(data.train):.2f} epochs",
        highlight=False,
    )
    show_records(console, data.train, tokenizer, records)
    console.print("dry run: nothing was trained and nothing was written", highlight=False)
    return data


def show_records(console: Console, data: WindowSet, tokenizer: Tokenizer, count: int) -> None:
    """Prints ``count`` records of the windows, the labelled tokens in marks and in colour."""
    if not count:
        return
    marks = (
        Marks("\u27e6", "\u27e7", "\u21b5") if _is_unicode(console) else Marks("[[", "]]", "\\n")
    )
    console.print(
        Text.assemble(
            "labelled tokens are in ",
            (f"{marks.opening}marks and green{marks.closing}", "bold green"),
            f", control tokens reversed, line ends {marks.newline}; the colour alternates from "
            "token to token",
        )
    )
    documents = data.documents()
    for index in _one_of_each(data.categories)[:count]:
        document = documents[index]
        labelled = int((document.labels != IGNORE).sum())
        name = f"{data.records[index]}: {data.categories[index]}"
        sizes = f"{len(document.labels)} tokens, {labelled} labelled"
        console.print(Text(f"--- {name}, {sizes}", "bold"), soft_wrap=True)
        console.print(render_document(document, tokenizer, marks), soft_wrap=True)


def render_document(document: Document, tokenizer: Tokenizer, marks: Marks) -> Text:
    """The document as styled text; runs of labelled tokens stand between marks.

    Line ends are shown and kept, other characters that do not print are shown as escapes.
    """
    text = Text()
    control = set(tokenizer.control_tokens.values())
    learned = document.labels != IGNORE
    pieces = token_pieces(tokenizer, document.input_ids[:SHOWN_TOKENS])
    inside = False
    for place, (token, piece) in enumerate(zip(document.input_ids, pieces, strict=False)):
        if bool(learned[place]) != inside:
            inside = not inside
            text.append(marks.opening if inside else marks.closing, "bold green")
        style = _STYLES[inside, bool(place % 2)]
        text.append(
            _visible(piece, marks.newline), f"{style} reverse" if int(token) in control else style
        )
    if inside:
        text.append(marks.closing, "bold green")
    left = len(document.labels) - len(pieces)
    if left:
        rest = int(learned[len(pieces) :].sum())
        text.append(f"\n... and {left} tokens more, {rest} of them labelled", "italic")
    return text


def token_pieces(tokenizer: Tokenizer, ids: NDArray[np.int32]) -> list[str]:
    """Text of each token; of tokens that share a character, the first has it all."""
    pieces: list[str] = []
    while len(pieces) < len(ids):
        start = len(pieces)
        stop = start + 1
        piece = tokenizer.decode(ids[start:stop])
        while "\ufffd" in piece and stop < min(len(ids), start + _SPLIT_TOKENS):
            stop += 1
            piece = tokenizer.decode(ids[start:stop])
        if "\ufffd" in piece:  # a character that is cut off, or U+FFFD itself
            stop, piece = start + 1, tokenizer.decode(ids[start : start + 1])
        pieces += [piece, *[""] * (stop - start - 1)]
    return pieces


def _visible(piece: str, newline: str) -> str:
    return "".join(
        f"{newline}\n" if one == "\n" else one if one.isprintable() else ascii(one)[1:-1]
        for one in piece
    )


def _one_of_each(categories: tuple[str, ...]) -> list[int]:
    """All indices: the first of each category, then the second of each, and so on."""
    seen: dict[str, int] = {}
    turns: list[tuple[int, str, int]] = []
    for index, name in enumerate(categories):
        turns.append((seen.setdefault(name, 0), name, index))
        seen[name] += 1
    return [index for _, _, index in sorted(turns)]


def _is_unicode(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")
