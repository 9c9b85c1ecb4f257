"""The tables of ../shared/cases that ask for functions of the trainer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HOOKS = Path(__file__).with_name("case_hooks.py")


@pytest.mark.parametrize("table", ["training", "numerics", "quantized"])
def test_no_case_fails(table: str, shared: Path) -> None:
    command = [
        sys.executable, str(shared / "cases" / "run_cases.py"),
        "--module", "vkjit", "--hooks", str(HOOKS), "--only", table,
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ", 0 failed" in result.stdout.strip().splitlines()[-1], result.stdout + result.stderr
