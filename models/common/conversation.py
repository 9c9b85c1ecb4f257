"""Conversation data sets: one JSON object a line, and a split that never moves an example.

A line is ``{"id": str, "category": str, "messages": [{"role": str, "content": str}, ...]}``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from vkjit.errors import DataError

from .atomic import write_atomic
from .chat import check_messages


@final
@dataclass(frozen=True)
class Conversation:
    """Messages with roles and contents, under an id that is unique in the data set.

    Args:
        id: unique; what stands before the first ``#`` names the source the example comes from.
        category: label for losses by category.
        messages: ``{"role": ..., "content": ...}`` in order.
    """

    id: str
    category: str
    messages: tuple[Mapping[str, str], ...]

    @property
    def source(self) -> str:
        """The id up to the first ``#``: examples with one source are never split apart."""
        return self.id.partition("#")[0]


def write_jsonl(path: Path, conversations: Sequence[Conversation]) -> None:
    """Write a data set, whole or not at all.

    Raises:
        DataError: the data set is empty.
        OSError: the file cannot be written.
    """
    if not conversations:
        raise DataError(f"conversations: nothing to write to {path}, expected at least one")
    lines = [
        json.dumps(
            {"id": one.id, "category": one.category, "messages": list(map(dict, one.messages))},
            ensure_ascii=False,
        )
        for one in conversations
    ]
    write_atomic(path, ("\n".join(lines) + "\n").encode())


def read_jsonl(path: Path) -> list[Conversation]:
    """Read a data set; blank lines are skipped.

    Raises:
        DataError: no such file, a line that is not a conversation (named as file:line), an id that
            occurs twice, or no conversation at all.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"conversations: cannot read {path}: {error.strerror}") from error
    conversations: list[Conversation] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        conversation = _parse(line, f"{path}:{number}")
        first = seen.setdefault(conversation.id, number)
        if first != number:
            raise DataError(
                f"conversations: {path}:{number} repeats the id {conversation.id!r} of line "
                f"{first}, expected unique ids"
            )
        conversations.append(conversation)
    if not conversations:
        raise DataError(f"conversations: {path} is empty, expected one JSON object a line")
    return conversations


def split_held_out(
    conversations: Sequence[Conversation], held_out: float
) -> tuple[list[Conversation], list[Conversation]]:
    """Split into (training, held out) by a hash of each example's source.

    An example's side depends on its source and ``held_out`` alone: adding, removing or reordering
    others never moves it, and no source has examples on both sides.

    Args:
        conversations: the data set, in any order; both parts keep it.
        held_out: expected share of sources to hold out, 0 to 1, both excluded.

    Raises:
        DataError: a share outside that range, or a part that comes out empty.
    """
    if not 0.0 < held_out < 1.0:
        raise DataError(f"split: a held-out share of {held_out}, expected between 0 and 1")
    train = [one for one in conversations if _fraction(one.source) >= held_out]
    held = [one for one in conversations if _fraction(one.source) < held_out]
    if not train or not held:
        raise DataError(
            f"split: {len(conversations)} conversations give {len(train)} for training and "
            f"{len(held)} held out at a share of {held_out}, expected some of each; use more "
            f"sources or another share"
        )
    return train, held


def _fraction(source: str) -> float:
    """Hash of ``source``, uniform in [0, 1)."""
    return int.from_bytes(hashlib.sha256(source.encode()).digest()[:6]) / 2**48


def _parse(line: bytes, place: str) -> Conversation:
    try:
        data: Any = json.loads(line)
    except ValueError as error:
        raise DataError(f"conversations: {place} is not JSON: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("messages"), list):
        raise DataError(
            f'conversations: {place} is {type(data).__name__} without a list "messages", expected '
            f'{{"id": ..., "category": ..., "messages": [...]}}'
        )
    identity, category, messages = data.get("id"), data.get("category"), data["messages"]
    if not isinstance(identity, str) or not isinstance(category, str):
        raise DataError(
            f"conversations: {place} has id {identity!r} and category {category!r}, expected two "
            f"strings"
        )
    if not all(isinstance(message, dict) for message in messages):
        raise DataError(f"conversations: {place} has messages that are not objects")
    try:
        check_messages(messages)
    except DataError as error:
        raise DataError(f"conversations: {place}: {error}") from error
    return Conversation(identity, category, tuple(messages))
