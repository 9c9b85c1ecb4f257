"""The script that checks a device: it passes here, and it does fail where results are wrong."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "gpu_check.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, vulkan):
    """The script as a module, with products small enough for a software driver."""
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SIZES", ((33, 45, 37),))
    monkeypatch.setattr(module, "get_device", lambda name: vulkan)
    monkeypatch.setattr(module, "check_training", lambda train, device, box: {"mismatches": []})
    return module


def run_main(script, monkeypatch: pytest.MonkeyPatch, path: Path) -> int:
    arguments = ["gpu_check.py", "--json", str(path), "--box", "3", "--skip-timing"]
    monkeypatch.setattr(sys, "argv", arguments)
    return script.main()


def test_a_right_device_passes(script, vulkan, tmp_path, monkeypatch: pytest.MonkeyPatch):
    assert run_main(script, monkeypatch, tmp_path / "report.json") == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"]
    assert report["target"] == vulkan.target.name
    assert report["driver"] == vulkan.capabilities.driver
    assert report["samples"]["done"] > 0
    assert 0 < report["products"]["worst"] < script.PRODUCT_TOLERANCE


def test_a_wrong_result_fails(script, tmp_path, monkeypatch: pytest.MonkeyPatch):
    right = script.run_program

    def wrong(device, program, arrays):
        return [a + np.ones((), a.dtype) for a in right(device, program, arrays)]

    monkeypatch.setattr(script, "run_program", wrong)
    assert run_main(script, monkeypatch, tmp_path / "report.json") == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert not report["passed"]
    assert len(report["products"]["mismatches"]) == len(script.LAYOUTS)
    assert report["samples"]["mismatches"]


def test_times_come_with_the_rate(script, vulkan):
    rng = np.random.default_rng(0)
    line, fault = script.square_product(64, vulkan, rng)
    assert fault == ""
    assert line["kernels"] == "gemm_tiled"
    assert line["GF/s"] == pytest.approx(2 * 64**3 / line["ms"] / 1e6, abs=0.06)
