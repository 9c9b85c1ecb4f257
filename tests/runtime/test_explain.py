"""``vkjit info``: complete, and never stopped by a device that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

import vkjit as vj
from vkjit import runtime
from vkjit.runtime import explain
from vkjit.runtime.device import DeviceClass, DeviceInfo

HOST = DeviceInfo("cpu", DeviceClass.CPU, "the host")
BROKEN = DeviceInfo("vulkan:0", DeviceClass.DISCRETE_GPU, "a card")
REFUSED = DeviceInfo("vulkan", DeviceClass.SOFTWARE, "a driver", refused="no library of this name")


def test_it_names_versions_devices_environment_and_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "entry").write_bytes(bytes(3 << 20))
    monkeypatch.setenv("VKJIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("VK_ICD_FILENAMES", "/x/y.json")
    monkeypatch.setattr(runtime, "_found", [HOST, REFUSED])
    text = vj.info()
    assert f"vkjit: {vj.__version__}" in text
    assert "numpy 2" in text
    assert "not usable: no library of this name" in text
    assert "llvmlite" in text.split("\n\n")[2]
    assert "  VK_ICD_FILENAMES=/x/y.json" in text
    assert f"cache: {tmp_path}, " in text
    assert "3.0 of 512 MiB" in text
    assert vj.info(brief=True) == runtime.explain_devices()


def test_a_device_that_fails_to_open_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> object:
        raise OSError("driver fell over")

    monkeypatch.setattr(runtime, "_found", [HOST, BROKEN])
    monkeypatch.setattr(explain, "get_device", fail)
    text = explain.info()
    assert "cpu: cannot be opened: OSError: driver fell over" in text
    assert "vulkan:0: cannot be opened" in text


@pytest.mark.parametrize(
    ("variable", "value", "want"),
    [
        ("VKJIT_CACHE", "0", "cache: off"),
        ("VKJIT_CACHE_BYTES", "many", "cache: VKJIT_CACHE_BYTES: got 'many'"),
        ("VKJIT_CACHE_DIR", "/proc/1/absent", "0 files, 0.0 of 512 MiB"),
    ],
)
def test_the_state_of_the_cache(
    variable: str, value: str, want: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VKJIT_CACHE", "VKJIT_CACHE_BYTES", "VKJIT_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    assert want in explain.cache_state()


def test_the_default_and_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_found", [HOST, BROKEN])
    monkeypatch.delenv("VKJIT_DEVICE", raising=False)
    assert "the first real GPU" in explain._why_default()
    monkeypatch.setattr(runtime, "_found", [HOST])
    assert "no real GPU" in explain._why_default()
    monkeypatch.setenv("VKJIT_DEVICE", "cpu")
    assert "by VKJIT_DEVICE" in explain._why_default()
