"""Windows of a run: categories and records of their targets, the probe, the order of epochs."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vkjit as vj
from vkjit_models.common.gguf import open_gguf
from vkjit_models.common.packing import Document, PackedWindows, pack_best_fit
from vkjit_models.common.tokenizer import Tokenizer
from vkjit_models.llama.model import target_losses
from vkjit_models.lora_sft.base import load_base
from vkjit_models.lora_sft.config import RunConfig
from vkjit_models.lora_sft.data import TrainingData, WindowSet, load_data, training_rows

from .conftest import GGUF

WINDOW, PAD = 32, 7


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(open_gguf(GGUF))


@pytest.fixture
def loaded(config: RunConfig, tokenizer: Tokenizer) -> TrainingData:
    return load_data(config.data, tokenizer, config.train.seed)


def window_set(lengths: list[int], *, shift: int = 0) -> WindowSet:
    """Documents of distinct tokens; document i has the category ``"abc"[i % 3]``."""
    starts = 100 + np.cumsum([0, *lengths])
    arrays = [np.arange(a, a + n, dtype=np.int32) for a, n in zip(starts, lengths, strict=False)]
    order = np.roll(np.arange(len(lengths)), shift)
    packed = pack_best_fit([Document(arrays[i], arrays[i]) for i in order], WINDOW, PAD)
    names = tuple("abc"[i % 3] for i in order)
    return WindowSet(packed, tuple(f"r{i}" for i in order), names, ("a", "b", "c"), PAD)


@given(lengths=st.lists(st.integers(2, WINDOW), min_size=1, max_size=20))
def test_every_target_has_the_category_of_its_record(lengths: list[int]) -> None:
    data = window_set(lengths)
    batch = data.batch(range(len(data)))
    rows, categories = np.asarray(batch.rows), np.asarray(batch.categories)
    assert categories.shape == rows.shape
    assert categories.dtype == np.int32
    assert ((categories == -1) == (rows < 0)).all()
    predicted = np.asarray(batch.labels).reshape(-1)[rows[rows >= 0] + 1]
    document = np.searchsorted(100 + np.cumsum(lengths), predicted, side="right")
    np.testing.assert_array_equal(categories[rows >= 0], document % 3)
    assert (rows >= 0).sum() == sum(length - 1 for length in lengths)


def test_both_sides_number_the_categories_alike(loaded: TrainingData) -> None:
    assert loaded.train.category_names == loaded.held_out.category_names == ("product", "sum")
    for side in (loaded.train, loaded.held_out):
        assert [side.category_names[i] for i in side.category_ids] == list(side.categories)
        assert len(side.records) == len(side.categories)


def test_records_of_all_windows(loaded: TrainingData) -> None:
    for side in (loaded.train, loaded.held_out):
        found = [one for row in range(len(side)) for one in side.records_of(row)]
        assert sorted(found) == sorted(side.records)


@given(
    lengths=st.lists(st.integers(2, WINDOW), min_size=1, max_size=20),
    shift=st.integers(0, 19),
    count=st.integers(1, 8),
)
def test_the_probe_depends_on_the_contents_alone(
    lengths: list[int], shift: int, count: int
) -> None:
    first = window_set(lengths).probe(count)
    second = window_set(lengths, shift=shift).probe(count)
    assert first.records == second.records
    assert first.categories == second.categories
    np.testing.assert_array_equal(first.windows.input_ids, second.windows.input_ids)
    assert len(first.records) == min(count, len(lengths))
    assert set(window_set(lengths).probe(count + 1).records) >= set(first.records)
    for index, name in enumerate(first.records):
        tokens = first.windows.input_ids[first.windows.segment_ids == index]
        assert len(tokens) == lengths[int(name[1:])]


def test_a_record_has_the_same_losses_in_any_company(loaded: TrainingData) -> None:
    """Packed with others or alone in a window: attention and positions stay inside a record."""
    base = load_base(str(GGUF), "float32")
    losses = vj.jit(partial(target_losses, base.spec, base.params, {}))
    packed = loaded.train
    length = packed.windows.labels.shape[1]
    alone = pack_apart(packed.documents(), length, packed.pad_id)
    apart = WindowSet(alone, packed.records, packed.categories, packed.category_names, PAD)
    assert len(apart) == len(packed.records) > len(packed)
    found: list[dict[str, list[float]]] = []
    for data in (packed, apart):
        of_record: dict[str, list[float]] = {}
        for row in range(len(data)):
            batch = data.batch([row])
            rows, values = np.asarray(batch.rows), np.asarray(losses(batch)[0])
            for place, value in zip(rows[rows >= 0], values[rows >= 0], strict=True):
                record = data.records[data.windows.segment_ids[row, place]]
                of_record.setdefault(record, []).append(float(value))
        found.append(of_record)
    assert found[0].keys() == found[1].keys() == set(packed.records)
    for record, values in found[0].items():
        np.testing.assert_allclose(values, found[1][record], rtol=1e-5, atol=1e-5)


def pack_apart(documents: list[Document], window: int, pad: int) -> PackedWindows:
    """One document a window."""
    rows = [pack_best_fit([one], window, pad) for one in documents]
    fields = [
        np.concatenate([getattr(row, name) for row in rows])
        for name in ("input_ids", "labels", "position_ids", "segment_ids")
    ]
    places = np.arange(len(documents), dtype=np.int32)[:, None]
    fields[3] = np.where(fields[3] >= 0, places, fields[3]).astype(np.int32)
    return PackedWindows(*fields, truncated=0, dropped_tokens=0)


def test_every_epoch_visits_every_window_once() -> None:
    visited = [int(row) for step in range(6) for row in training_rows(9, 3, 5, step)]
    assert sorted(visited[:9]) == sorted(visited[9:]) == list(range(9))
    assert visited[:9] != visited[9:]
    assert visited == [int(row) for step in range(3) for row in training_rows(9, 6, 5, step)]
