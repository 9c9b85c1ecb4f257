"""Records that are longer than the context: what is kept, and what is counted as lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vkjit.errors import DataError
from vkjit_models.common.chat import IGNORE
from vkjit_models.common.fit import TooLong, fit_documents
from vkjit_models.common.packing import Document, pack_fullest

CONTEXT = 8
SHAPES = st.lists(
    st.tuples(st.integers(2, 16), st.integers(0, 16), st.sampled_from("ab")), min_size=1
)  # tokens, the first of them that is labelled, category


def document(tokens: int, labelled_from: int) -> Document:
    ids = np.arange(1, tokens + 1, dtype=np.int32)
    return Document(ids, np.where(np.arange(tokens) >= labelled_from, ids, np.int32(IGNORE)))


def test_what_each_policy_keeps_and_counts() -> None:
    documents = [document(5, 2), document(12, 4), document(12, 9)]
    names = [("r0", "a"), ("r1", "b"), ("r2", "b")]
    cut = fit_documents(documents, names, CONTEXT, "truncate")
    assert cut.kept == (0, 1)
    a, b = cut.losses
    assert (a.category, a.records, a.too_long, a.removed, a.tokens, a.targets) == (
        "a",
        1,
        0,
        0,
        0,
        0,
    )
    assert (b.category, b.records, b.too_long, b.removed, b.unlabelled) == ("b", 2, 2, 1, 1)
    assert (b.tokens, b.targets, b.targets_before) == (4 + 12, 4 + 3, 8 + 3)
    assert cut.total.tokens == 16
    skipped = fit_documents(documents, names, CONTEXT, "skip")
    assert skipped.kept == (0,)
    assert (skipped.total.removed, skipped.total.unlabelled) == (2, 1)
    assert (skipped.total.tokens, skipped.total.targets) == (24, 11)
    with pytest.raises(
        DataError, match=r"record 'r1' has 12 tokens and 2 of 3 .*data\.context = 8"
    ):
        fit_documents(documents, names, CONTEXT, "error")
    assert fit_documents(documents[:1], names[:1], CONTEXT, "error").kept == (0,)


@given(shapes=SHAPES, policy=st.sampled_from(["truncate", "skip"]))
def test_lost_and_packed_targets_are_all_there_were(
    shapes: list[tuple[int, int, str]], policy: TooLong
) -> None:
    shapes = [(3, 0, "a"), *shapes]  # one that keeps a label whatever the others do
    documents = [document(tokens, first) for tokens, first, _ in shapes]
    names = [(str(i), category) for i, (_, _, category) in enumerate(shapes)]
    fit = fit_documents(documents, names, CONTEXT, policy)
    packed = pack_fullest([documents[i] for i in fit.kept], CONTEXT, 0)
    total = fit.total
    assert packed.target_tokens.sum() + total.targets == total.targets_before
    assert packed.used_tokens.sum() + total.tokens == sum(tokens for tokens, _, _ in shapes)
    assert len(fit.kept) + total.removed == total.records == len(shapes)
    for index in range(len(fit.kept)):
        mine = packed.labels[packed.segment_ids == index]
        assert (mine != IGNORE).any()


def test_no_label_left() -> None:
    with pytest.raises(DataError, match=r"none of 1 records .*keeps a label in a context of 8"):
        fit_documents([document(12, 9)], [("r", "a")], CONTEXT, "truncate")
