"""Records that are longer than the context: counted by category, and cut, skipped or refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from vkjit.errors import DataError

from .chat import IGNORE
from .packing import Document

TooLong: TypeAlias = Literal["truncate", "skip", "error"]
"""What becomes of records longer than the context."""


@final
@dataclass(frozen=True)
class Loss:
    """What one category lost to the context.

    Args:
        category: its name.
        records: records that came.
        too_long: those longer than the context.
        removed: those left out as a whole: skipped, or with no label left to learn.
        unlabelled: those among them whose labels were all cut (or that had none to begin with).
        tokens: tokens lost.
        targets: labelled tokens lost.
        targets_before: labelled tokens that came.
    """

    category: str
    records: int
    too_long: int
    removed: int
    unlabelled: int
    tokens: int
    targets: int
    targets_before: int


@final
@dataclass(frozen=True)
class Fit:
    """Outcome of `fit_documents`.

    Args:
        kept: indices of the documents to train on, ascending. Those longer than the context are
            cut by the packer.
        losses: what each category lost, sorted by name.
    """

    kept: tuple[int, ...]
    losses: tuple[Loss, ...]

    @property
    def total(self) -> Loss:
        """Sums over the categories."""
        return Loss(
            category="all",
            records=sum(one.records for one in self.losses),
            too_long=sum(one.too_long for one in self.losses),
            removed=sum(one.removed for one in self.losses),
            unlabelled=sum(one.unlabelled for one in self.losses),
            tokens=sum(one.tokens for one in self.losses),
            targets=sum(one.targets for one in self.losses),
            targets_before=sum(one.targets_before for one in self.losses),
        )


def fit_documents(
    documents: Sequence[Document],
    names: Sequence[tuple[str, str]],
    context: int,
    policy: TooLong,
) -> Fit:
    """Decide which documents are trained on, and count what the others lose.

    Args:
        documents: the tokenised records.
        names: id and category of each.
        context: tokens that a document may have.
        policy: ``"truncate"``: longer ones keep their first ``context`` tokens, and are left out
            where no label is among them; ``"skip"``: longer ones are left out.

    Raises:
        DataError: under ``"error"``, a longer document; or no document with a label remains.
    """
    lengths = np.array([len(one.input_ids) for one in documents], np.int64)
    long = lengths > context
    if policy == "error" and long.any():
        raise DataError(_refusal(lengths, names, context))
    before = np.array([_targets(one, len(one.labels)) for one in documents], np.int64)
    after = np.array([_targets(one, context) for one in documents], np.int64)
    removed = (after == 0) | (long & (policy == "skip"))
    if removed.all():
        raise DataError(
            f"data: none of {len(documents)} records on one side of the split (the first is "
            f"{names[0][0]!r}) keeps a label in a context of {context} tokens, the longest has "
            f"{lengths.max()}; expected some; raise data.context, or use shorter records"
        )
    categories = np.array([category for _, category in names])
    losses: list[Loss] = []
    for category in sorted(set(categories.tolist())):
        mine = categories == category
        gone = mine & removed
        kept_tokens = np.where(removed, 0, np.minimum(lengths, context))
        losses.append(
            Loss(
                category=category,
                records=int(mine.sum()),
                too_long=int((mine & long).sum()),
                removed=int(gone.sum()),
                unlabelled=int((gone & (after == 0)).sum()),
                tokens=int((lengths - kept_tokens)[mine].sum()),
                targets=int((before - np.where(removed, 0, after))[mine].sum()),
                targets_before=int(before[mine].sum()),
            )
        )
    return Fit(tuple(np.flatnonzero(~removed).tolist()), tuple(losses))


def _targets(document: Document, context: int) -> int:
    """Labels among the first ``context`` tokens; the first token's own is never learned."""
    return int((document.labels[1:context] != IGNORE).sum())


def _refusal(lengths: NDArray[np.int64], names: Sequence[tuple[str, str]], context: int) -> str:
    places = np.flatnonzero(lengths > context)
    first = int(places[0])
    return (
        f"data: record {names[first][0]!r} has {lengths[first]} tokens and {len(places)} of "
        f"{len(names)} records are longer than data.context = {context} (the longest has "
        f'{lengths.max()}), expected none under data.too_long = "error"; raise data.context, or '
        f'set data.too_long to "truncate" or "skip"'
    )
