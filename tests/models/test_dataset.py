"""``vkjit dataset``: what it writes, what it prints, what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vkjit_models.cli import app
from vkjit_models.common.conversation import Conversation
from vkjit_models.common.jsonl import read_records
from vkjit_models.common.source_chat import CATEGORIES

TREE = Path(__file__).resolve().parents[2] / "models" / "common"


def dataset(*arguments: str | int | Path) -> Any:
    return CliRunner().invoke(app, ["dataset", *map(str, arguments)])


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("first.jsonl", "second.jsonl", "third.jsonl")]
    for path, seed in zip(paths, "445", strict=True):
        result = dataset(TREE, "-o", path, "--seed", seed, "--functions-per-file", 1)
        assert result.exit_code == 0, result.output
        assert "sha256" in result.output
        for category in CATEGORIES:
            assert category in result.output
    first, second, third = (path.read_bytes() for path in paths)
    assert first == second != third
    records = read_records(paths[:1])[0]
    assert {one.category for one in records} == set(CATEGORIES)
    for one in records:
        assert isinstance(one, Conversation)
        assert (TREE / one.source).is_file()
        assert one.id.startswith(f"{one.source}#{one.category}")


def test_some_categories(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    result = dataset(TREE, "-o", path, "--category", "usage", "--category", "errors", "--files", 9)
    assert result.exit_code == 0, result.output
    assert {one.category for one in read_records([path])[0]} == {"usage", "errors"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("absent", "-o", "out"), "absent is not a folder, expected a source tree"),
        ((TREE, "-o", "there"), "there exists, expected a new file; pass --overwrite"),
        ((TREE, "-o", "file/x", "--files", "3"), "cannot write file/x"),
        ((TREE, "-o", "out", "--category", "poem"), "the category 'poem', expected one of expl"),
        (("empty", "-o", "out"), "0 usable Python files in empty give no conversation"),
    ],
)
def test_refusals(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str | Path, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("there", "file"):
        (tmp_path / name).write_text("kept")
    (tmp_path / "empty").mkdir()
    result = dataset(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
    assert (tmp_path / "there").read_text() == "kept"
