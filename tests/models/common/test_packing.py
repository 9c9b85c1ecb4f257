"""Packing: the stored windows, and what holds for any documents."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from vkjit.errors import DataError
from vkjit_models.common.chat import IGNORE
from vkjit_models.common.encoding import RecordEncoder
from vkjit_models.common.jsonl import read_records
from vkjit_models.common.packing import (
    Document,
    PackedWindows,
    pack_best_fit,
    pack_fullest,
    pack_sequential,
)
from vkjit_models.common.tokenizer import Tokenizer

WINDOW, PAD = 16, 2
LENGTHS = st.lists(st.integers(2, 24), min_size=1, max_size=40)
PACKERS = pytest.mark.parametrize("pack", [pack_sequential, pack_best_fit, pack_fullest])


@pytest.fixture(scope="module")
def golden_documents(data: Path) -> list[Document]:
    cases = json.loads((data / "chat" / "conversations.json").read_text())["conversations"]
    order = json.loads((data / "chat" / "packed.json").read_text())[
        "document_order_(index into conversations.json)"
    ]
    return [
        Document(np.array(case["ids"], np.int32), np.array(case["labels"], np.int32))
        for case in (cases[i] for i in order)
    ]


def test_stored_windows(golden_documents: list[Document], data: Path) -> None:
    facts = json.loads((data / "chat" / "packed.json").read_text())
    expected = load_file(data / "chat" / "packed.safetensors")
    packed = pack_sequential(golden_documents, facts["window"], facts["pad_id"])
    np.testing.assert_array_equal(packed.input_ids, expected["input_ids"])
    np.testing.assert_array_equal(packed.labels, expected["labels"])
    np.testing.assert_array_equal(packed.position_ids, expected["position_ids"])
    np.testing.assert_array_equal(packed.segment_ids, expected["document_ids"])
    assert packed.used_tokens.tolist() == facts["used_tokens"]
    assert packed.target_tokens.tolist() == facts["loss_tokens_per_window"]
    assert packed.utilisation == facts["utilisation"]
    segments = packed.segment_ids
    mask = (segments[:, :, None] == segments[:, None, :]) & (segments[:, None, :] >= 0)
    np.testing.assert_array_equal(mask & np.tri(128, dtype=bool), expected["attention_mask"] != 0)


def test_best_fit_needs_fewer_windows(golden_documents: list[Document]) -> None:
    assert len(pack_best_fit(golden_documents, 128, PAD).input_ids) == 4
    assert len(pack_sequential(golden_documents, 128, PAD).input_ids) == 5


@PACKERS
@given(lengths=LENGTHS)
def test_every_token_once_and_no_document_split(pack, lengths: list[int]) -> None:
    documents = _documents(lengths)
    packed: PackedWindows = pack(documents, WINDOW, PAD)
    for array in (packed.input_ids, packed.labels, packed.position_ids, packed.segment_ids):
        assert array.shape == packed.input_ids.shape
        assert array.dtype == np.int32
    for index, document in enumerate(documents):
        rows, columns = np.nonzero(packed.segment_ids == index)
        kept = min(len(document.input_ids), WINDOW)
        assert len(set(rows.tolist())) == 1
        assert columns.tolist() == list(range(columns[0], columns[0] + kept))
        np.testing.assert_array_equal(packed.input_ids[rows, columns], document.input_ids[:kept])
        np.testing.assert_array_equal(packed.position_ids[rows, columns], np.arange(kept))
        np.testing.assert_array_equal(packed.labels[rows, columns][1:], document.labels[1:kept])
        assert packed.labels[rows[0], columns[0]] == IGNORE


@PACKERS
@given(lengths=LENGTHS)
def test_padding_and_counts(pack, lengths: list[int]) -> None:
    packed: PackedWindows = pack(_documents(lengths), WINDOW, PAD)
    padding = packed.segment_ids == -1
    assert (np.diff(padding.astype(int), axis=1) >= 0).all()  # only behind the documents
    assert (packed.input_ids[padding] == PAD).all()
    assert (packed.labels[padding] == IGNORE).all()
    assert (packed.position_ids[padding] == 0).all()
    assert packed.used_tokens.sum() == sum(min(length, WINDOW) for length in lengths)
    assert packed.truncated == sum(length > WINDOW for length in lengths)
    assert packed.dropped_tokens == sum(max(0, length - WINDOW) for length in lengths)
    assert 0 < packed.utilisation <= 1


@given(lengths=LENGTHS)
def test_best_fit_keeps_its_bound(lengths: list[int]) -> None:
    documents = _documents(lengths)
    windows = len(pack_best_fit(documents, WINDOW, PAD).input_ids)
    least = -(-sum(min(length, WINDOW) for length in lengths) // WINDOW)
    assert least <= windows <= len(lengths)
    room = WINDOW - pack_best_fit(documents, WINDOW, PAD).used_tokens
    # at most one window is at most half full: two such would have been one
    assert (room >= WINDOW / 2).sum() <= 1 or windows == 1


def test_best_fit_fills_the_fullest_window() -> None:
    packed = pack_best_fit(_documents([9, 12, 4, 7]), WINDOW, PAD)
    assert [sorted(set(row.tolist()) - {-1}) for row in packed.segment_ids] == [[1, 2], [0, 3]]
    assert packed.utilisation == 1.0


@given(lengths=LENGTHS)
def test_fullest_windows_are_never_more_than_those_of_best_fit(lengths: list[int]) -> None:
    documents = _documents(lengths)
    fullest = pack_fullest(documents, WINDOW, PAD)
    assert len(fullest.input_ids) <= len(pack_best_fit(documents, WINDOW, PAD).input_ids)


@given(lengths=st.lists(st.integers(2, WINDOW), min_size=1, max_size=8))
def test_no_choice_of_documents_fills_the_first_window_better(lengths: list[int]) -> None:
    packed = pack_fullest(_documents(lengths), WINDOW, PAD)
    others = sorted(lengths)[:-1]
    sums = {sum(chosen) for n in range(9) for chosen in combinations(others, n)}
    best = max(s for s in sums if s <= WINDOW - max(lengths))
    best_fit = pack_best_fit(_documents(lengths), WINDOW, PAD)
    assert packed.used_tokens[0] == max(lengths) + best or len(packed.input_ids) == len(
        best_fit.input_ids
    )


@pytest.mark.parametrize("context", [1280, 1536, 2048])
def test_the_stored_records_fill_their_windows(
    data: Path, tiny_tokenizer: Tokenizer, context: int
) -> None:
    records = read_records([data / "records" / "source.jsonl"])[0]
    encoder = RecordEncoder(tiny_tokenizer)
    encoded = [encoder.encode(one) for one in records]
    packed = pack_fullest([Document(one.input_ids, one.labels) for one in encoded], context, PAD)
    assert packed.utilisation >= 0.98
    assert packed.truncated == 0
    assert packed.used_tokens.sum() == sum(len(one.input_ids) for one in encoded)


def test_several_documents_fill_what_no_single_one_does() -> None:
    lengths = [10, 8, 5, 4, 3, 2]  # best fit: 10+5, 8+4+3, 2
    assert pack_fullest(_documents(lengths), WINDOW, PAD).utilisation == 1.0
    assert len(pack_best_fit(_documents(lengths), WINDOW, PAD).input_ids) == 3


@PACKERS
@given(lengths=LENGTHS)
def test_nothing_is_seen_or_predicted_across_records(pack, lengths: list[int]) -> None:
    packed: PackedWindows = pack(_documents(lengths), WINDOW, PAD)
    segments, labels, positions = packed.segment_ids, packed.labels, packed.position_ids
    begins = np.diff(segments, axis=1, prepend=-2) != 0
    assert (labels[begins] == IGNORE).all()  # no first token is predicted from the one before
    assert (positions[begins] == 0).all()
    goes_on = ~begins & (segments >= 0)
    assert (positions[:, 1:] - positions[:, :-1])[goes_on[:, 1:]].tolist() == [1] * goes_on.sum()
    # A segment is one run: equal ids never meet again, so attention by equal ids stays inside it.
    assert begins[segments >= 0].sum() == len(lengths)


@PACKERS
def test_nothing_to_pack(pack) -> None:
    with pytest.raises(DataError, match="data set is empty"):
        pack([], WINDOW, PAD)
    empty = np.zeros(0, np.int32)
    with pytest.raises(DataError, match=r"document 0 has ids \(0,\) and labels \(0,\)"):
        pack([Document(empty, empty)], WINDOW, PAD)
    with pytest.raises(DataError, match="window of 1 tokens"):
        pack(_documents([3]), 1, PAD)


@PACKERS
def test_targets_beyond_the_window(pack) -> None:
    labels = np.full(20, IGNORE, np.int32)
    labels[17:] = 5
    with pytest.raises(DataError, match="all labels of 1 documents are masked in windows of 16"):
        pack([Document(np.arange(20, dtype=np.int32), labels)], WINDOW, PAD)


def _documents(lengths: list[int]) -> list[Document]:
    """Documents of distinct tokens, every token a target."""
    starts = np.cumsum([100, *lengths[:-1]])
    arrays = [
        np.arange(start, start + length, dtype=np.int32)
        for start, length in zip(starts, lengths, strict=True)
    ]
    return [Document(array, array) for array in arrays]
