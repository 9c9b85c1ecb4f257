"""A tiny model and a small data set, so that whole runs take seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vkjit_models.lora_sft.config import RunConfig, parse_config

GGUF = Path(__file__).resolve().parents[2] / "data" / "gguf" / "tiny_llama.gguf"


@pytest.fixture(scope="session")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty questions with one kind of answer, two categories."""
    path = tmp_path_factory.mktemp("data") / "conversations.jsonl"
    lines = []
    for i in range(20):
        category = ("sum", "product")[i % 2]
        answer = str(i + i) if category == "sum" else str(i * i)
        messages = [
            {"role": "user", "content": f"{category} {i} {i}?"},
            {"role": "assistant", "content": f"It is {answer}."},
        ]
        lines.append(json.dumps({"id": f"q{i}", "category": category, "messages": messages}))
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def settings(conversations: Path, tmp_path: Path) -> dict[str, Any]:
    """A config of four steps, as the TOML file would hold it."""
    return {
        "model": {"path": str(GGUF)},
        "data": {"jsonl": str(conversations), "context": 96, "held_out": 0.3},
        "lora": {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "down_proj"]},
        "optimizer": {"learning_rate": 0.01},
        "schedule": {"warmup_steps": 1},
        "train": {"steps": 4, "seed": 3, "eval_every": 2},
        "output": {"folder": str(tmp_path / "run"), "sample_tokens": 2},
    }


@pytest.fixture
def config(settings: dict[str, Any]) -> RunConfig:
    """The validated `settings`."""
    return parse_config(settings)
