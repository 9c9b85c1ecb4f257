"""The README's Python runs as printed and does what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_example_trains(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    names: dict[str, Any] = {}
    exec(compile(blocks[0], "README.md", "exec"), names)  # the document is ours
    printed = float(re.findall(r"[\d.e+-]+", capsys.readouterr().out)[-1])
    assert 0.0 <= printed < 0.05  # the target has variance 0.5
