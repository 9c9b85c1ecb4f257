"""Which records a run trains on: files, weights, validation files, splits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vkjit.errors import ConfigError, DataError
from vkjit_models.common.conversation import Record
from vkjit_models.lora_sft.config import DataSection, parse_config
from vkjit_models.lora_sft.gather import gather, origin


def write(folder: Path, name: str, count: int) -> Path:
    path = folder / f"{name}.jsonl"
    lines = (json.dumps({"id": f"{name}{i}", "text": f"{name} {i}"}) for i in range(count))
    path.write_text("\n".join(lines))
    return path


def ids(records: list[Record]) -> list[str]:
    return [one.id for one in records]


def test_several_files_and_their_categories(tmp_path: Path) -> None:
    a, b = write(tmp_path, "a", 30), write(tmp_path, "b", 30)
    section = DataSection(jsonl=(a, b), split="category", held_out=0.2)
    train, held_out = gather(section, 0)
    assert sorted(ids(train) + ids(held_out)) == sorted(f"{x}{i}" for x in "ab" for i in range(30))
    for name in "ab":
        assert sum(one.category == name for one in held_out) == 6
    assert origin(section) == f"{a}, {b}"


def test_weights_repeat_training_records_and_leave_out_others(tmp_path: Path) -> None:
    files = tuple(write(tmp_path, name, 200) for name in "abc")
    section = DataSection(jsonl=files, weights=(1.0, 2.0, 0.5))
    train, held_out = gather(section, 0)
    plain, same_held_out = gather(DataSection(jsonl=files), 0)
    assert ids(held_out) == ids(same_held_out)  # evaluation does not depend on the weights
    counts = {name: [one for one in ids(train) if one[0] == name] for name in "abc"}
    known = {name: [one for one in ids(plain) if one[0] == name] for name in "abc"}
    assert counts["a"] == known["a"]
    assert sorted(counts["b"]) == sorted(known["b"] * 2)
    assert set(counts["c"]) < set(known["c"])
    assert 0.35 < len(counts["c"]) / len(known["c"]) < 0.65


def test_validation_files_replace_the_split(tmp_path: Path) -> None:
    a, b = write(tmp_path, "a", 5), write(tmp_path, "b", 3)
    train, held_out = gather(DataSection(jsonl=(a,), validation=(b,)), 0)
    assert (len(train), ids(held_out)) == (5, ["b0", "b1", "b2"])
    with pytest.raises(DataError, match=r"a\.jsonl:1 repeats the id 'a0'"):
        gather(DataSection(jsonl=(a,), validation=(a,)), 0)


def test_a_weight_that_leaves_nothing(tmp_path: Path) -> None:
    a, b = write(tmp_path, "a", 2), write(tmp_path, "b", 2)
    with pytest.raises(DataError, match=r"the weights \[1e-09\] leave no record"):
        gather(DataSection(jsonl=(a,), weights=(1e-9,), validation=(b,)), 0)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"jsonl": 3}, r"data\.jsonl = 3 was given, expected a path or a list of paths"),
        ({"jsonl": []}, r"data\.jsonl is an empty list"),
        ({"jsonl": "a", "weights": [1.0, 2.0]}, r"data\.weights = \[1\.0, 2\.0\] .* with 1 files"),
        ({"jsonl": ["a", "b"], "weights": [1.0, -1.0]}, r"expected one positive number"),
        ({"weights": [1.0]}, r"with 0 files in data\.jsonl"),
        ({"jsonl": "a", "source": "b"}, "expected one of them"),
        ({"categories": ["poems"]}, r"data\.categories\.0 = 'poems'"),
        ({"too_long": "split"}, r"data\.too_long = 'split'"),
        ({"split": "file"}, r"data\.split = 'file'"),
        ({"format": "alpaca"}, r"data\.format = 'alpaca'"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({**settings, "data": section})


def test_one_file_may_be_given_without_a_list(settings: dict[str, Any]) -> None:
    config = parse_config({**settings, "data": {"jsonl": "a", "validation": "b"}})
    assert (config.data.jsonl, config.data.validation) == ((Path("a"),), (Path("b"),))
    assert parse_config(config.resolved()) == config


def test_the_documentation_names_every_key() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "data.md").read_text(encoding="utf-8")
    section = text.partition("## Keys of `[data]`")[2]
    assert [name for name in DataSection.model_fields if f"`{name}`" not in section] == []
