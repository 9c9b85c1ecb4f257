"""Conversation files and the held-out split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vkjit.errors import DataError
from vkjit_models.common.conversation import (
    Conversation,
    read_jsonl,
    split_held_out,
    write_jsonl,
)

TURN = {"role": "user", "content": "hi"}
GOOD: dict[str, Any] = {"id": "a#1", "category": "x", "messages": [TURN]}


def test_round_trip(tmp_path: Path) -> None:
    conversations = [
        Conversation("a#1", "x", ({"role": "user", "content": "ünï\u2028\n\x1c\t🙂"},)),
        Conversation(
            "b", "y", ({"role": "user", "content": ""}, {"role": "assistant", "content": "z"})
        ),
    ]
    path = tmp_path / "new" / "data.jsonl"
    write_jsonl(path, conversations)
    assert read_jsonl(path) == conversations
    assert [one.source for one in conversations] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"data\.jsonl:3 is not JSON"),
        ("[]", r"data\.jsonl:3 is list without a list \"messages\""),
        (json.dumps({**GOOD, "messages": "hi"}), r":3 is dict without a list \"messages\""),
        (json.dumps({**GOOD, "id": 4}), r":3 has id 4"),
        (json.dumps({**GOOD, "messages": []}), r":3: chat: an empty conversation"),
        (json.dumps({**GOOD, "messages": ["hi"]}), r":3 has messages that are not objects"),
        (json.dumps({**GOOD, "messages": [{"role": "user"}]}), r":3: chat: message 0 has role"),
        (json.dumps(GOOD), r":3 repeats the id 'a#1' of line 1"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{line}\n")
    with pytest.raises(DataError, match=message):
        read_jsonl(path)


def test_undecodable_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"id": "\xff"}\n')
    with pytest.raises(DataError, match=r"data\.jsonl:1 is not JSON"):
        read_jsonl(path)


def test_empty(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("\n \n")
    with pytest.raises(DataError, match=r"data\.jsonl is empty, expected one JSON object a line"):
        read_jsonl(tmp_path / "data.jsonl")
    with pytest.raises(DataError, match="cannot read"):
        read_jsonl(tmp_path / "absent.jsonl")
    with pytest.raises(DataError, match="nothing to write"):
        write_jsonl(tmp_path / "none.jsonl", [])
    assert not (tmp_path / "none.jsonl").exists()


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


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0])
def test_split_share_out_of_range(share: float) -> None:
    with pytest.raises(DataError, match="expected between 0 and 1"):
        split_held_out([Conversation("a", "x", ())], share)


def test_split_with_an_empty_side() -> None:
    with pytest.raises(DataError, match=r"1 conversations give \d for training and \d held out"):
        split_held_out([Conversation("a", "x", ())], 0.5)


def _identity(one: Conversation) -> str:
    return one.id
