"""The walkthrough of CONTRIBUTING.md makes an op that works."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vkjit as vj

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def softsign(tmp_path_factory: pytest.TempPathFactory) -> Any:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    path = tmp_path_factory.mktemp("walkthrough") / "softsign.py"
    path.write_text(blocks[0], encoding="utf-8")
    spec = importlib.util.spec_from_file_location("softsign", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:  # dataclasses look their module up
        patch.setitem(sys.modules, "softsign", module)
        spec.loader.exec_module(module)
    return module.softsign


def test_the_new_op_runs_on_every_device(softsign: Any, device: str) -> None:
    x = np.linspace(-3, 3, 37, dtype=np.float32)
    with vj.default_device(device):
        y = np.asarray(vj.jit(softsign)(x))
    np.testing.assert_allclose(y, x / (1 + np.abs(x)), rtol=3e-7)


def test_the_new_op_has_derivatives(softsign: Any) -> None:
    x = np.float32(-1.5)
    slope = vj.grad(softsign)(x)
    curvature = vj.grad(vj.grad(softsign))(x)
    np.testing.assert_allclose(np.asarray(slope), 1 / 2.5**2, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(curvature), 2 / 2.5**3, rtol=1e-6)


def test_the_new_op_prints(softsign: Any) -> None:
    assert "softsign" in str(vj.make_ir(softsign)(np.ones(3, np.float32)))
