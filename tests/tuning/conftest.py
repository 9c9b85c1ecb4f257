"""A cache folder and a store for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tuning.fakes import DEFAULT, FAST, SLOW, FakeGpu
from vkjit import runtime
from vkjit.tuning import choosing


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VKJIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("VKJIT_CACHE", raising=False)
    monkeypatch.delenv("VKJIT_TUNE", raising=False)
    monkeypatch.setattr(choosing._state, "store", None)
    return tmp_path / "cache" / "tuning"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A device ``fake:0`` on which three schedules serve every product."""
    found = FakeGpu()
    monkeypatch.setitem(runtime._open, found.name, found)
    monkeypatch.setattr("vkjit.lowering.compile.candidates", lambda *_: [DEFAULT, FAST, SLOW])
    monkeypatch.setattr("vkjit.lowering.gpu.lower.candidates", lambda *_: [DEFAULT, FAST, SLOW])
    return found
