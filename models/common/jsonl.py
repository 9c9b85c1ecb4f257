"""Data sets in files of JSON lines: four layouts, told apart line by line.

======== =================================================================================
chat       ``{"messages": [{"role": "user", "content": "..."}, ...]}``
sharegpt   ``{"conversations": [{"from": "human", "value": "..."}, ...]}``, optional ``"system"``
completion ``{"prompt": "...", "completion": "..."}``
text       ``{"text": "..."}``
======== =================================================================================

Each may have an ``"id"`` (a string or an integer; default ``file name:line``) and a ``"category"``
(default: the file's name without its ending). A byte order mark of UTF-8 at the beginning of the
file, blank lines and Windows line ends are accepted. Nothing else is guessed or left out silently.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeAlias, final, get_args

from vkjit.errors import DataError

from .atomic import write_atomic
from .conversation import Completion, Conversation, PlainText, Record

Layout: TypeAlias = Literal["auto", "chat", "sharegpt", "completion", "text"]
"""How lines are laid out; ``"auto"`` tells it by each line's keys."""

ROLES: tuple[str, ...] = ("system", "user", "assistant", "tool")
"""Roles of messages."""

_SHAREGPT_ROLES: Mapping[str, str] = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant",
    "assistant": "assistant", "tool": "tool",
}  # fmt: skip
_KEYS: Mapping[str, tuple[str, ...]] = {
    "chat": ("messages",),
    "sharegpt": ("conversations", "system"),
    "completion": ("prompt", "completion"),
    "text": ("text",),
}  # the first key tells the layout
_COMMON = ("id", "category")
_CATEGORY_CHARACTERS = 80
_SHOWN = 4  # bad lines that a message names beside the first
_BOM = b"\xef\xbb\xbf"


def write_jsonl(path: Path, conversations: Sequence[Conversation]) -> None:
    """Write conversations, whole or not at all.

    Raises:
        DataError: there are none.
        OSError: the file cannot be written.
    """
    if not conversations:
        raise DataError(f"data: nothing to write to {path}, expected at least one conversation")
    lines = [
        json.dumps(
            {"id": one.id, "category": one.category, "messages": list(map(dict, one.messages))},
            ensure_ascii=False,
        )
        for one in conversations
    ]
    write_atomic(path, ("\n".join(lines) + "\n").encode())


def read_records(
    paths: Iterable[Path], layout: Layout = "auto", ignore: Collection[str] = ()
) -> list[list[Record]]:
    """Read data sets, line by line; one list for each file, in order.

    Args:
        paths: the files; ids are unique over all of them.
        layout: what every line must be; ``"auto"``: any of the layouts.
        ignore: keys that lines and messages may have beside those of their layout; their values
            are not read.

    Raises:
        DataError: a file that cannot be read or has no record, or lines that are no record: the
            first is named as file:line with what it is and what was expected, others by number.
    """
    seen: dict[str, str] = {}
    return [_read(path, _Reader(layout, frozenset(ignore)), seen) for path in paths]


def _read(path: Path, reader: _Reader, seen: dict[str, str]) -> list[Record]:
    records: list[Record] = []
    problems: list[tuple[int, str]] = []
    for number, line in _lines(path):
        try:
            record = reader.record(line, path, number)
            if record.id in seen:
                raise DataError(
                    f"repeats the id {record.id!r} of {seen[record.id]}, expected unique ids; "
                    f"remove one of the records or change its id"
                )
            seen[record.id] = f"{path}:{number}"
        except DataError as error:
            problems.append((number, str(error)))
        else:
            records.append(record)
    if problems:
        raise DataError(_report(path, problems))
    if not records:
        raise DataError(f"data: {path} is empty, expected one JSON object a line")
    return records


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbers from 1 and contents of the lines that are not blank."""
    try:
        with path.open("rb") as handle:
            for number, line in enumerate(handle, 1):
                content = line.removeprefix(_BOM) if number == 1 else line
                if content.strip():
                    yield number, content
    except OSError as error:
        raise DataError(
            f"data: cannot read {path}: {error.strerror}, expected a file of JSON lines; check "
            f"the path"
        ) from error


def _report(path: Path, problems: Sequence[tuple[int, str]]) -> str:
    number, text = problems[0]
    others = [str(line) for line, _ in problems[1 : 1 + _SHOWN]]
    rest = len(problems) - 1 - len(others)
    message = f"data: {path}:{number} {text}"
    if others:
        more = f" and {rest} more" if rest else ""
        message += f" (bad lines also: {', '.join(others)}{more})"
    return message


@final
@dataclass(frozen=True)
class _Reader:
    """Makes records of lines; errors say what the line is, not where it stands."""

    layout: Layout
    ignore: frozenset[str]

    def record(self, line: bytes, path: Path, number: int) -> Record:
        data = _object(line)
        layout = self._layout(data)
        self._check_keys(data, (*_COMMON, *_KEYS[layout]), "key")
        identity = _identity(data.get("id", f"{path.name}:{number}"))
        category = _category(data) if "category" in data else path.stem
        match layout:
            case "chat":
                return Conversation(identity, category, self._messages(data))
            case "sharegpt":
                return Conversation(identity, category, self._sharegpt(data))
            case "completion":
                return Completion(
                    identity, category, _text(data, "prompt"), _text(data, "completion")
                )
            case _:
                return PlainText(identity, category, _text(data, "text"))

    def _layout(self, data: Mapping[str, Any]) -> str:
        found = [name for name, keys in _KEYS.items() if keys[0] in data]
        if "completion" in data and "completion" not in found:
            found.append("completion")
        wanted = [self.layout] if self.layout != "auto" else list(get_args(Layout)[1:])
        if self.layout != "auto" and self.layout in found:
            return self.layout
        if len(found) == 1 and found[0] in wanted:
            return found[0]
        keys = " or ".join(" with ".join(map(repr, _required(name))) for name in wanted)
        given = ", ".join(map(repr, list(data)[:6])) or "none"
        raise DataError(
            f"has the keys {given}, expected {'exactly one of ' if len(wanted) > 1 else ''}{keys}"
        )

    def _check_keys(self, data: Mapping[str, Any], known: Sequence[str], what: str) -> None:
        for key in data:
            if key not in known and key not in self.ignore:
                near = get_close_matches(key, known, n=1)
                advice = f"did you mean {near[0]!r}? Else " if near else ""
                raise DataError(
                    f"has the unknown {what} {key!r}, expected {', '.join(map(repr, known))}; "
                    f"{advice}remove it, or name it in data.ignore_keys"
                )

    def _messages(self, data: Mapping[str, Any]) -> tuple[Mapping[str, str], ...]:
        given = _turns(data, "messages")
        messages: list[Mapping[str, str]] = []
        for index, turn in enumerate(given):
            self._check_keys(turn, ("role", "content"), f"key of message {index}")
            role = turn.get("role")
            if not isinstance(role, str) or role not in ROLES:
                raise DataError(_wrong_role(index, "role", role, ROLES))
            messages.append({"role": role, "content": _text(turn, "content", index)})
        return _with_reply(messages)

    def _sharegpt(self, data: Mapping[str, Any]) -> tuple[Mapping[str, str], ...]:
        messages: list[Mapping[str, str]] = []
        if "system" in data:
            messages.append({"role": "system", "content": _text(data, "system")})
        for index, turn in enumerate(_turns(data, "conversations")):
            self._check_keys(turn, ("from", "value"), f"key of message {index}")
            role = turn.get("from")
            if not isinstance(role, str) or role not in _SHAREGPT_ROLES:
                raise DataError(_wrong_role(index, "from", role, _SHAREGPT_ROLES))
            content = _text(turn, "value", index)
            messages.append({"role": _SHAREGPT_ROLES[role], "content": content})
        return _with_reply(messages)


def _object(line: bytes) -> dict[str, Any]:
    try:
        data = json.loads(line.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise DataError(
            f"is not UTF-8 (byte {line[error.start]:#04x} at {error.start} of the line), expected "
            f"UTF-8; save the file in that encoding"
        ) from error
    except RecursionError as error:
        raise DataError("is nested too deeply, expected an object of a few levels") from error
    except ValueError as error:
        whole = line.lstrip()[:1] == b"["
        advice = "; the file looks like one JSON array: write its elements one a line"
        raise DataError(
            f"is not JSON: {error}, expected one JSON object a line{advice if whole else ''}"
        ) from error
    if not isinstance(data, dict):
        raise DataError(f"is a JSON {_kind(data)}, expected a JSON object")
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise DataError(f"has the key {twice!r} twice, expected each key once")
    return data


def _identity(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value:
        raise DataError(f"has the id {value!r}, expected a string or an integer")
    return value


def _category(data: Mapping[str, Any]) -> str:
    category = _text(data, "category")
    if not category.isprintable() or len(category) > _CATEGORY_CHARACTERS:
        raise DataError(
            f"has the category {category[:_CATEGORY_CHARACTERS]!r}, expected up to "
            f"{_CATEGORY_CHARACTERS} characters that print: it heads a column of the logs"
        )
    return category


def _text(data: Mapping[str, Any], key: str, index: int | None = None) -> str:
    """A text that is not empty; ``index`` is the message's, for the error."""
    where = f"the {key}" if index is None else f"in message {index} the {key}"
    if key not in data:
        raise DataError(f"lacks {where}, expected a text")
    value = data[key]
    if not isinstance(value, str):
        raise DataError(f"has {where} of JSON type {_kind(value)}, expected a text")
    if not value.strip():
        raise DataError(f"has {where} {value!r}, expected a text that is not empty")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"has {where} with half a surrogate pair, {value[error.start]!r}, at character "
                f"{error.start}, expected valid Unicode"
            ) from error
    return value


def _turns(data: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    turns = data[key]
    if not isinstance(turns, list):
        raise DataError(f"has {key!r} of JSON type {_kind(turns)}, expected an array of messages")
    if not turns:
        raise DataError(f"has no message in {key!r}, expected at least one")
    for index, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise DataError(f"has a message {index} of JSON type {_kind(turn)}, expected an object")
    return turns


def _with_reply(messages: Sequence[Mapping[str, str]]) -> tuple[Mapping[str, str], ...]:
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise DataError(
            f"has messages of {', '.join(roles)} only, expected one of the assistant: without a "
            f"reply there is nothing to learn"
        )
    return tuple(messages)


def _wrong_role(index: int, key: str, value: Any, known: Iterable[str]) -> str:
    near = get_close_matches(value, list(known), n=1) if isinstance(value, str) else []
    advice = f"; did you mean {near[0]!r}?" if near else ""
    return f"has in message {index} the {key} {value!r}, expected one of {', '.join(known)}{advice}"


def _required(layout: str) -> tuple[str, ...]:
    return tuple(key for key in _KEYS[layout] if key != "system")


def _kind(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
