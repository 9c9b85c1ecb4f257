"""``--dry-run``: the tables, the warnings, and records token by token."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from vkjit_models.cli import app
from vkjit_models.common.chat import IGNORE
from vkjit_models.common.gguf import open_gguf
from vkjit_models.common.packing import Document
from vkjit_models.common.tokenizer import Tokenizer
from vkjit_models.lora_sft.config import RunConfig, parse_config
from vkjit_models.lora_sft.dry_run import Marks, dry_run, render_document, token_pieces

from .conftest import GGUF

SOURCE = GGUF.parents[1] / "records" / "source.jsonl"
MARKS = Marks("<<", ">>", "$")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(open_gguf(GGUF))


def shown(config: RunConfig, records: int = 3, **options: Any) -> str:
    output = io.StringIO()
    dry_run(config, Console(file=output, width=120, **options), records)
    return output.getvalue()


def test_everything_is_shown_and_nothing_is_written(config: RunConfig) -> None:
    output = shown(config)
    for text in (
        "conversations.jsonl", "training", "held out", "filled", "product", "sum",
        "no record is longer than the context of 96 tokens", "4 steps of 1 windows are",
        "fewer than 500 labelled tokens to train on in product", "nothing was trained",
    ):  # fmt: skip
        assert text in output
    assert not config.output.folder.exists()


def test_the_stored_records_in_tables(settings: dict[str, Any]) -> None:
    settings["data"] = {"jsonl": str(SOURCE), "context": 400, "split": "category"}
    output = shown(parse_config(settings), 0)
    assert "Longer than the context of 400 tokens: truncate" in output
    longer = next(line for line in output.splitlines() if "training: all" in line)
    numbers = [field.strip() for field in longer.strip("│ \n").split("│")]
    assert 0 < int(numbers[2]) < int(numbers[1])  # longer ones among the records
    assert "%" in numbers[-1]


def test_labels_that_are_all_cut_are_said_so(settings: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    with path.open("w") as handle:
        for i in range(40):
            prompt = "word " * (400 if i % 3 else 2)
            handle.write(json.dumps({"id": str(i), "prompt": prompt, "completion": " yes"}) + "\n")
    settings["data"] = {"jsonl": str(path), "context": 64, "split": "category"}
    output = " ".join(shown(parse_config(settings)).split())
    assert "because the context cuts all of their labels" in output


def test_a_context_that_the_model_does_not_know(settings: dict[str, Any]) -> None:
    settings["data"]["context"] = 4096
    output = " ".join(shown(parse_config(settings), 0).split())
    assert "data.context = 4096 is more than the" in output


def test_too_many_categories_are_said_so(settings: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text("\n".join(json.dumps({"text": "a b", "category": f"c{i}"}) for i in range(60)))
    settings["data"] = {"jsonl": str(path), "split": "record", "held_out": 0.5}
    output = " ".join(shown(parse_config(settings), 0).split())
    assert "60 categories: each is a line" in output
    assert "and 52 more" in output


def test_copies_on_both_sides_are_said_so(settings: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "copies.jsonl"
    path.write_text("\n".join(json.dumps({"id": i, "text": "the same"}) for i in range(40)))
    settings["data"] = {"jsonl": str(path), "split": "category"}
    output = " ".join(shown(parse_config(settings)).split())
    assert "4 held-out records are also among the training records" in output


def test_marks_stand_around_the_learned_words(config: RunConfig) -> None:
    output = shown(config, 1)
    assert "\u27e6It is " in output
    assert "<|im_end|>\u27e7\u21b5" in output
    assert "<|im_start|>assistant\u21b5" in output
    assert "\x1b[" not in output  # a file gets no colours
    coloured = shown(config, 1, force_terminal=True, color_system="truecolor")
    assert "\x1b[1;32m" in coloured


@given(text=st.text(max_size=40))
def test_pieces_of_a_text_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    pieces = token_pieces(tokenizer, ids)
    assert len(pieces) == len(ids)
    if "\ufffd" not in text:
        assert "".join(pieces) == text


def test_a_character_that_is_cut_off(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙂").ids[:-1]
    assert "".join(token_pieces(tokenizer, ids)).strip("\ufffd") == "a"


def test_what_does_not_print_is_escaped(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a\x1b[31m\u202eb\nc").ids
    labels = np.where(np.arange(len(ids)) < 3, IGNORE, ids)
    text = render_document(Document(ids, labels.astype(np.int32)), tokenizer, MARKS).plain
    assert text.replace("<<", "").replace(">>", "") == "a\\x1b[31m\\u202eb$\nc"
    assert text.endswith(">>")


def test_long_records_are_cut_in_the_display(tokenizer: Tokenizer) -> None:
    ids = np.full(1000, tokenizer.encode("a").ids[0], np.int32)
    text = render_document(Document(ids, ids), tokenizer, MARKS).plain
    assert text.endswith("... and 200 tokens more, 200 of them labelled")


def test_the_command(settings: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    lines = ["[output]", f"folder = '{tmp_path / 'run'}'", "[train]", "steps = 3"]
    lines += ["[model]", f"path = '{GGUF}'", "[data]", f"jsonl = '{settings['data']['jsonl']}'"]
    path.write_text("\n".join(lines))
    result = CliRunner().invoke(app, ["train", str(path), "--dry-run", "--records", "1"])
    assert result.exit_code == 0, result.output
    assert "nothing was trained" in result.output
    assert not (tmp_path / "run").exists()
    path.write_text("\n".join(lines).replace("jsonl =", "jsonL ="))
    result = CliRunner().invoke(app, ["train", str(path), "--dry-run"])
    assert result.exit_code == 2
    assert "did you mean 'data.jsonl'?" in result.stderr
