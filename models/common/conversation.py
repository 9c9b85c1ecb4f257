"""Records of a data set: conversations, completions, plain texts; and splits that keep them apart.

How they are written in files: :mod:`vkjit_models.common.jsonl`.
"""

from __future__ import annotations

import hashlib
from abc import ABC
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar, assert_never, final

from vkjit.errors import DataError

SplitBy: TypeAlias = Literal["source", "record", "category"]
"""What is never split: a source; a record; a record, with an equal share of every category."""


@dataclass(frozen=True)
class _Identified(ABC):
    """What all records have.

    Args:
        id: unique in the data set; what stands before the first ``#`` names the record's source.
        category: label for losses by category.
    """

    id: str
    category: str

    @property
    def source(self) -> str:
        """The id up to the first ``#``: examples with one source need not be split apart."""
        return self.id.partition("#")[0]


@final
@dataclass(frozen=True)
class Conversation(_Identified):
    """Messages, of which the assistant's are learned.

    Args:
        messages: ``{"role": ..., "content": ...}`` in order.
    """

    messages: tuple[Mapping[str, str], ...]


@final
@dataclass(frozen=True)
class Completion(_Identified):
    """A text in two parts, of which the second is learned."""

    prompt: str
    completion: str


@final
@dataclass(frozen=True)
class PlainText(_Identified):
    """A text that is learned as a whole."""

    text: str


Record: TypeAlias = Conversation | Completion | PlainText
_RecordT = TypeVar("_RecordT", Conversation, Record)


def question_of(record: Record) -> str:
    """What a reply to the record would answer: its first user message, prompt or beginning."""
    match record:
        case Conversation():
            asked = [one["content"] for one in record.messages if one["role"] == "user"]
            return asked[0] if asked else record.messages[0]["content"]
        case Completion():
            return record.prompt
        case PlainText():
            return record.text[:80]
        case _:
            assert_never(record)


def split_held_out(
    records: Sequence[_RecordT], held_out: float, by: SplitBy = "source"
) -> tuple[list[_RecordT], list[_RecordT]]:
    """Split into (training, held out) by a hash of each record's source or id.

    By source or by record, a record's side depends on that and on ``held_out`` alone: adding,
    removing or reordering others never moves it. By category, the same share of every category is
    held out (the least hashes; at least one record where there are two), so another record of
    its category may move it.

    Args:
        records: the data set, in any order; both parts keep it.
        held_out: share to hold out, 0 to 1, both excluded; expected share of sources or records,
            exact but for rounding by category.
        by: ``"source"`` keeps the records of a source on one side.

    Raises:
        DataError: a share outside that range, or a part that comes out empty.
    """
    if not 0.0 < held_out < 1.0:
        raise DataError(f"split: a held-out share of {held_out}, expected between 0 and 1")
    match by:
        case "source":
            chosen = {one.id for one in records if hash_fraction(one.source) < held_out}
        case "record":
            chosen = {one.id for one in records if hash_fraction(one.id) < held_out}
        case "category":
            chosen = _of_each_category(records, held_out)
        case _:
            assert_never(by)
    train = [one for one in records if one.id not in chosen]
    held = [one for one in records if one.id in chosen]
    if not train or not held:
        raise DataError(
            f"split: {len(records)} records give {len(train)} for training and {len(held)} held "
            f"out at a share of {held_out} by {by}, expected some of each; use more records, "
            f"another share, or a validation file"
        )
    return train, held


def hash_fraction(text: str) -> float:
    """Hash of ``text``, uniform in [0, 1)."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) / 2**48


def _of_each_category(records: Iterable[Record], share: float) -> set[str]:
    members: dict[str, list[str]] = {}
    for one in records:
        members.setdefault(one.category, []).append(one.id)
    chosen: set[str] = set()
    for ids in members.values():
        count = min(max(1, round(share * len(ids))), len(ids) - 1)
        chosen.update(sorted(ids, key=hash_fraction)[:count])
    return chosen
