"""The data set built from source: determinism, and answers that the source bears out."""

from __future__ import annotations

from pathlib import Path

import pytest

from vkjit.errors import DataError
from vkjit_models.common.jsonl import write_jsonl
from vkjit_models.common.source_chat import (
    CATEGORIES,
    Category,
    SourceOptions,
    build_conversations,
    standard_library,
)
from vkjit_models.common.source_facts import FunctionFacts, analyse, describe

MODULE = '''\
"""Keeps a stack of plates clean.

More about plates.
"""

import os
from collections import deque


class Stack(list):
    """Plates."""

    def wash(self, soap, *, water=1, **rest):
        """Wash every plate, top
        to bottom.

        At length.
        """
        for plate in self:
            if plate and soap or water:
                scrub(plate)
            elif rest:
                raise ValueError("no water")
        return deque(self)


def scrub(plate, log=[]):
    try:
        plate.scrub()
        os.remove(plate)
    except:
        pass
'''


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "pack").mkdir(parents=True)
    (root / "test").mkdir()
    (root / "plates.py").write_text(MODULE)
    (root / "pack" / "__init__.py").write_text(
        '"""A package that holds nothing but its doc."""\nx = 1\n'
    )
    (root / "pack" / "broken.py").write_text("def f(:\n")
    (root / "pack" / "latin.py").write_bytes(b'"""\xe9t\xe9, an encoding of its own, unread."""\n')
    (root / "test" / "test_plates.py").write_text(MODULE)
    return root


def _describe(source: str, qualname: str) -> FunctionFacts:
    found = {one.qualname: one for one in analyse(source, "plates").functions}
    return describe(found[qualname])


def test_facts_of_a_module() -> None:
    facts = analyse(MODULE, "plates")
    assert facts.doc == "Keeps a stack of plates clean."
    assert facts.imports == ("os", "collections")
    assert [(one.name, one.bases, one.methods) for one in facts.classes] == [
        ("Stack", ("list",), ("wash",))
    ]
    assert facts.top_level == (("scrub", 6),)
    assert [one.qualname for one in facts.functions] == ["Stack.wash", "scrub"]


def test_facts_of_a_function() -> None:
    wash = _describe(MODULE, "Stack.wash")
    assert wash.parameters == ("soap", "water", "**rest")
    assert wash.defaults == ("water=1",)
    assert wash.calls == ("scrub", "ValueError", "deque")
    assert wash.raises == ("ValueError",)
    assert wash.guards == ("rest",)
    assert wash.result == "returns a value"
    assert wash.complexity == 6  # one path, for, if, elif, and, or
    assert wash.depth == 2
    assert wash.findings == ()
    scrub = _describe(MODULE, "scrub")
    assert scrub.result == "returns nothing"
    assert scrub.findings == (
        "there is no docstring",
        "a bare except hides every error",
        "an exception is swallowed with pass",
        "a default argument is mutable",
    )


def test_code_shows_no_docstring() -> None:
    code = analyse(MODULE, "plates").functions[0].code
    assert code.startswith("def wash(self, soap, *, water=1, **rest):\n    for plate in self:\n")
    assert "Wash every plate" not in code


@pytest.mark.parametrize(
    ("source", "parameters", "defaults"),
    [
        ("def f(a, /, b=1, *c, d, e=2): pass", ("a", "b", "*c", "d", "e"), ("b=1", "e=2")),
        ("def f(): 'only a docstring'", (), ()),
        ("async def f(cls): yield 1", (), ()),
    ],
)
def test_signatures(source: str, parameters: tuple[str, ...], defaults: tuple[str, ...]) -> None:
    facts = _describe(source, "f")
    assert (facts.parameters, facts.defaults) == (parameters, defaults)


def test_conversations_of_a_tree(tree: Path) -> None:
    built = {one.id: one for one in build_conversations(tree)}
    assert sorted(built) == [
        "plates.py#architecture",
        "plates.py#errors:Stack.wash",
        "plates.py#explanation:Stack.wash",
        "plates.py#implementation:Stack.wash",
        "plates.py#review:Stack.wash",
        "plates.py#review:scrub",
        "plates.py#summary",
        "plates.py#usage:Stack.wash",
        "plates.py#usage:scrub",
    ]
    answers = {key: one.messages[1]["content"] for key, one in built.items()}
    assert answers["plates.py#explanation:Stack.wash"] == (
        "Wash every plate, top to bottom. It takes `soap`, `water` and `**rest` (`water=1` by "
        "default) and returns a value. It calls `scrub`, `ValueError` and `deque`. It raises "
        "`ValueError`."
    )
    assert answers["plates.py#review:scrub"] == (
        "`scrub`: 6 lines, complexity 2, nesting depth 1. It is easy to follow. Remarks: there is "
        "no docstring; a bare except hides every error; an exception is swallowed with pass; a "
        "default argument is mutable."
    )
    assert answers["plates.py#architecture"] == (
        "It imports `os` and `collections`. It defines 1 class: `Stack` (1 method). It has 1 "
        "function: `scrub`. The largest part is `Stack` with 15 lines."
    )
    assert answers["plates.py#summary"] == "Keeps a stack of plates clean."
    assert answers["plates.py#errors:Stack.wash"] == "It raises `ValueError` when `rest`."
    assert answers["plates.py#usage:Stack.wash"] == (
        "Call it as `wash(soap, water=1, **rest)`. `soap` is required. `water` may be left out "
        "(`water=1`). It returns a value."
    )
    implementation = built["plates.py#implementation:Stack.wash"].messages
    assert "Wash every plate, top to bottom." in implementation[0]["content"]
    assert "def wash(self, soap, *, water=1, **rest):\n    ..." in implementation[0]["content"]
    assert "raise ValueError" not in implementation[0]["content"]
    code = implementation[1]["content"].removeprefix("```python\n").removesuffix("\n```")
    assert code == analyse(MODULE, "plates").functions[0].code
    for one in built.values():
        assert [message["role"] for message in one.messages] == ["user", "assistant"]
        assert one.category in one.id


def test_the_standard_library_gives_all_categories_and_the_same_bytes(tmp_path: Path) -> None:
    options = SourceOptions(seed=3, files=40)
    first, second = build_conversations(None, options), build_conversations(None, options)
    for name, conversations in (("first", first), ("second", second)):
        write_jsonl(tmp_path / name, conversations)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    assert {one.category for one in first} == set(CATEGORIES)
    assert len({one.id for one in first}) == len(first)
    assert all((standard_library() / one.source).is_file() for one in first)


def test_the_seed_matters(tree: Path) -> None:
    texts = {
        tuple(one.messages[0]["content"] for one in build_conversations(tree, SourceOptions(seed)))
        for seed in range(4)
    }
    assert len(texts) > 1


def test_limits(tree: Path) -> None:
    options = SourceOptions(functions_per_file=1, code_characters=120)
    built = build_conversations(tree, options)
    assert [one.id for one in built if one.category == "review"] == ["plates.py#review:scrub"]
    for one in built:
        code = one.messages[0]["content"].split("```python\n")[1]
        assert len(code) <= 120 + len("...\n```")


def test_nothing_to_ask_about(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"0 usable Python files in .* give no conversation"):
        build_conversations(tmp_path)
    with pytest.raises(DataError, match="is not a folder"):
        build_conversations(tmp_path / "absent")


GUARDED = """\
def f(x):
    with lock:
        if x < 0:
            raise ValueError(x)
        elif x > 9:
            raise OverflowError
        else:
            raise TypeError
    for y in x:
        raise StopIteration
    try:
        raise KeyError
    except KeyError:
        raise ValueError from None
    def inner():
        raise OSError
"""


def test_exceptions_and_the_conditions_that_lead_to_them() -> None:
    facts = _describe(GUARDED, "f")
    assert dict(zip(facts.raises, facts.guards, strict=True)) == {
        "ValueError": "x < 0",
        "OverflowError": "x > 9",
        "TypeError": "not (x > 9)",
        "StopIteration": "",
        "KeyError": "",
    }


def test_a_category_left_out_changes_nothing_about_the_others(tree: Path) -> None:
    everything = build_conversations(tree, SourceOptions(seed=1))
    choices: list[tuple[Category, ...]] = [("usage",), ("review", "summary"), CATEGORIES]
    for chosen in choices:
        options = SourceOptions(seed=1, categories=chosen)
        expected = [one for one in everything if one.category in chosen]
        assert build_conversations(tree, options) == expected


def test_progress_counts_files(tree: Path) -> None:
    seen: list[tuple[int, int]] = []
    build_conversations(tree, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
