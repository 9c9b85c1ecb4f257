"""Files of JSON lines: layouts, what is accepted, and a message for everything that is not."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from vkjit.errors import DataError
from vkjit_models.common.conversation import Completion, Conversation, PlainText
from vkjit_models.common.jsonl import Layout, read_records, write_jsonl

USER = {"role": "user", "content": "hi"}
REPLY = {"role": "assistant", "content": "ho"}
GOOD: dict[str, Any] = {"id": "a#1", "category": "x", "messages": [USER, REPLY]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data.jsonl"


def lines(*objects: Any) -> str:
    return "".join(json.dumps(one) + "\n" for one in objects)


def test_round_trip(path: Path) -> None:
    conversations = [
        Conversation("a#1", "x", ({"role": "user", "content": "ünï\u2028\n\x1c\t🙂"}, REPLY)),
        Conversation("b", "y", (USER, REPLY, USER, REPLY)),
    ]
    path = path.parent / "new" / path.name
    write_jsonl(path, conversations)
    assert read_records([path]) == [conversations]
    assert [one.source for one in conversations] == ["a", "b"]


def test_layouts_are_told_apart_line_by_line(path: Path) -> None:
    path.write_text(
        lines(
            {"messages": [USER, REPLY]},
            {
                "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
                "system": "s",
                "id": 17,
            },
            {"prompt": "p", "completion": "c", "category": "z"},
            {"text": "t", "id": "t"},
        )
    )
    assert read_records([path]) == [
        [
            Conversation("data.jsonl:1", "data", (USER, REPLY)),
            Conversation(
                "17",
                "data",
                (
                    {"role": "system", "content": "s"},
                    {"role": "user", "content": "q"},
                    {"role": "assistant", "content": "a"},
                ),
            ),
            Completion("data.jsonl:3", "z", "p", "c"),
            PlainText("t", "data", "t"),
        ]
    ]


def test_byte_order_mark_windows_line_ends_and_blank_lines(path: Path) -> None:
    text = lines(GOOD) + "\n \n" + lines({"text": "no end of line"}).rstrip()
    path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert [one.id for one in read_records([path])[0]] == ["a#1", "data.jsonl:4"]


def test_keys_that_are_not_read(path: Path) -> None:
    path.write_text(lines({**GOOD, "score": 3, "messages": [{**USER, "weight": 0}, REPLY]}))
    assert read_records([path], ignore=["score", "weight"])[0][0].id == "a#1"
    with pytest.raises(DataError, match=r":1 has the unknown key 'score', expected 'id'"):
        read_records([path], ignore=["weight"])
    with pytest.raises(DataError, match=r":1 has the unknown key of message 0 'weight'"):
        read_records([path], ignore=["score"])


BAD: list[tuple[str, str]] = [
    ("{", r"is not JSON: .* expected one JSON object a line"),
    ("{'id': 1}", r"is not JSON"),
    ('["a",', r"looks like one JSON array: write its elements one a line"),
    ("[]", r"is a JSON array, expected a JSON object"),
    ("7", r"is a JSON number"),
    ("[" * 100_000, r"is nested too deeply"),
    ('{"text": "a", "text": "b"}', r"has the key 'text' twice"),
    ("{}", r"has the keys none, expected exactly one of 'messages' or 'conv"),
    (lines({"text": "a", "messages": [REPLY]}), r"has the keys 'text', 'messages', expected ex"),
    (lines({"completion": "a"}), r"lacks the prompt, expected a text"),
    (lines({"prompt": "a"}), r"lacks the completion"),
    (lines({"prompt": "", "completion": "a"}), r"has the prompt '', expected .* not empty"),
    (lines({"text": 3}), r"has the text of JSON type number"),
    ('{"text": "\\ud83d"}', r"half a surrogate pair, '\\ud83d', at character 0"),
    (lines({"text": "a", "catgeory": "b"}), r"unknown key 'catgeory'.* did you mean 'category'"),
    (lines({**GOOD, "id": 1.5}), r"has the id 1.5, expected a string or an integer"),
    (lines({**GOOD, "id": True}), r"has the id True"),
    (lines({**GOOD, "id": ""}), r"has the id ''"),
    (lines({**GOOD, "category": None}), r"has the category of JSON type null"),
    (
        lines({**GOOD, "category": "a\nb"}),
        r"has the category 'a\\nb', expected up to 80 characters",
    ),
    (lines({**GOOD, "category": "c" * 81}), r"has the category 'c+', expected up to 80"),
    (lines({**GOOD, "messages": "hi"}), r"has 'messages' of JSON type string"),
    (lines({**GOOD, "messages": []}), r"has no message in 'messages'"),
    (lines({**GOOD, "messages": ["hi"]}), r"has a message 0 of JSON type string"),
    (lines({**GOOD, "messages": [USER, {"role": "assistant"}]}), r"lacks in message 1 the content"),
    (
        lines({**GOOD, "messages": [{**USER, "content": [1]}]}),
        r"message 0 the content of JSON type",
    ),
    (lines({**GOOD, "messages": [USER, {**REPLY, "content": " \n"}]}), r"the content ' \\n'"),
    (
        lines({**GOOD, "messages": [USER, {**REPLY, "role": "asistant"}]}),
        r"in message 1 the role 'asistant', expected one of system, .*did you mean 'assistant'",
    ),
    (lines({**GOOD, "messages": [{"content": "x"}]}), r"in message 0 the role None"),
    (lines({**GOOD, "messages": [USER]}), r"has messages of user only, expected one of the assis"),
    (lines({"conversations": [{"from": "bot", "value": "x"}]}), r"the from 'bot', expected one"),
    (lines(GOOD), r"repeats the id 'a#1' of .*data\.jsonl:1, expected unique ids"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_a_bad_line_is_named(path: Path, line: str, message: str) -> None:
    path.write_text(f"{json.dumps(GOOD)}\n\n{line}\n")
    with pytest.raises(DataError, match=rf"^data: .*data\.jsonl:3 (?s:.)*{message}"):
        read_records([path])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "\xff"}\n', r"data\.jsonl:1 is not UTF-8 \(byte 0xff at 10 of the line\)"),
        ('{"text": "a"}\n'.encode("utf-16"), r"data\.jsonl:1 is not UTF-8"),
        (b"\x1f\x8b\x08\x00 gzip", r"data\.jsonl:1 is not UTF-8"),
        (b"", r"data\.jsonl is empty, expected one JSON object a line"),
        (b"\xef\xbb\xbf\n \n", r"data\.jsonl is empty"),
    ],
)
def test_a_file_that_is_no_text_or_empty(path: Path, content: bytes, message: str) -> None:
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_records([path])


def test_a_file_that_cannot_be_read(path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*data\.jsonl: No such file"):
        read_records([path])
    with pytest.raises(DataError, match=r"cannot read .*: Is a directory, expected a file"):
        read_records([path.parent])
    with pytest.raises(DataError, match="nothing to write"):
        write_jsonl(path, [])
    assert not path.exists()


def test_other_bad_lines_are_counted(path: Path) -> None:
    path.write_text(lines(*[{"text": ""}] * 7, {"text": "good"}))
    with pytest.raises(DataError, match=r":1 has .* \(bad lines also: 2, 3, 4, 5 and 2 more\)"):
        read_records([path])


def test_ids_are_unique_over_files(path: Path) -> None:
    other = path.with_name("other.jsonl")
    for one in (path, other):
        one.write_text(lines(GOOD))
    with pytest.raises(DataError, match=r"other\.jsonl:1 repeats the id 'a#1' of .*data\.jsonl:1"):
        read_records([path, other])


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("chat", "'messages'"),
        ("sharegpt", "'conversations'"),
        ("completion", "'prompt' with 'completion'"),
    ],
)
def test_a_layout_that_was_asked_for(path: Path, layout: Layout, expected: str) -> None:
    path.write_text(lines({"text": "a"}))
    with pytest.raises(DataError, match=rf":1 has the keys 'text', expected {expected}$"):
        read_records([path], layout)
    assert len(read_records([path], "text")[0]) == 1


def test_many_records_are_read_in_seconds(path: Path) -> None:
    messages = [USER, {**REPLY, "content": "word " * 100}]
    with path.open("w") as handle:
        for i in range(20_000):
            handle.write(lines({"id": i, "category": "x", "messages": messages}))
    began = time.perf_counter()
    assert len(read_records([path])[0]) == 20_000
    assert time.perf_counter() - began < 10.0
