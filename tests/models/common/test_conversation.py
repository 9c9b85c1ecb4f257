"""Records and the held-out split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vkjit.errors import DataError
from vkjit_models.common.conversation import (
    Completion,
    Conversation,
    PlainText,
    Record,
    question_of,
    split_held_out,
)


@given(names=st.sets(st.integers(0, 999), min_size=100, max_size=200))
def test_split_depends_on_the_source_alone(names: set[int]) -> None:
    everything = [Conversation(f"f{n}.py#{k}", "x", ()) for n in range(1000) for k in range(2)]
    some = [one for one in everything if int(one.source[1:-3]) in names]
    train, held = split_held_out(everything, 0.2)
    some_train, some_held = split_held_out(some, 0.2)
    assert set(map(_identity, some_train)) <= set(map(_identity, train))
    assert set(map(_identity, some_held)) <= set(map(_identity, held))
    assert len(some_train) + len(some_held) == len(some)
    assert not {one.source for one in train} & {one.source for one in held}
    assert 0.15 < len(held) / len(everything) < 0.25


def test_records_of_a_source_may_be_split_apart_on_demand() -> None:
    everything = [Conversation(f"f{n}.py#{k}", "x", ()) for n in range(50) for k in range(4)]
    train, held = split_held_out(everything, 0.3, "record")
    assert {one.source for one in train} & {one.source for one in held}
    assert 0.2 < len(held) / len(everything) < 0.4


@given(sizes=st.lists(st.integers(2, 40), min_size=1, max_size=5), share=st.floats(0.01, 0.9))
def test_every_category_is_held_out_alike(sizes: list[int], share: float) -> None:
    records: list[Record] = [
        PlainText(f"{c}-{i}", f"c{c}", "text") for c, size in enumerate(sizes) for i in range(size)
    ]
    train, held = split_held_out(records, share, "category")
    assert sorted(map(_identity, train + held)) == sorted(map(_identity, records))
    for c, size in enumerate(sizes):
        count = sum(one.category == f"c{c}" for one in held)
        assert 1 <= count < size
        assert abs(count - share * size) <= 1


def test_questions() -> None:
    turns = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant")]
    assert question_of(Conversation("a", "x", tuple(turns))) == "u"
    assert question_of(Conversation("a", "x", tuple(turns[2:]))) == "a"
    assert question_of(Completion("a", "x", "prompt", "completion")) == "prompt"
    assert question_of(PlainText("a", "x", "t" * 100)) == "t" * 80


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0])
def test_split_share_out_of_range(share: float) -> None:
    with pytest.raises(DataError, match="expected between 0 and 1"):
        split_held_out([Conversation("a", "x", ())], share)


def test_split_with_an_empty_side() -> None:
    with pytest.raises(DataError, match=r"1 records give \d for training and \d held out"):
        split_held_out([Conversation("a", "x", ())], 0.5)


def _identity(one: Record) -> str:
    return one.id
