"""No loader, no driver, broken drivers, devices that lack something: told, and the CPU still works.

Each case is a process of its own, since a process loads Vulkan once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vkjit.errors import ArgumentError, ConfigError, MissingRuleError
from vkjit.lowering.target import Addressing

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the loader's variables are tested on Linux"
)

PROGRAM = """
import json
import numpy as np
import vkjit as vj
from vkjit.errors import VkjitError
from vkjit.runtime import explain_devices, get_device
found = {"devices": explain_devices()}
with vj.default_device("cpu"):
    found["cpu"] = float(np.asarray(vj.jit(lambda x: x + 1)(np.float32(1))))
try:
    get_device("vulkan:0")
except VkjitError as error:
    found["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


def told(**environment: str) -> dict[str, str]:
    """What the program prints under these variables; it must not fail, and not lose the CPU."""
    clean = {k: v for k, v in os.environ.items() if k not in ("VK_DRIVER_FILES", "VKJIT_DEVICE")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**clean, "VK_ICD_FILENAMES": "", **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["cpu"] == 2.0
    assert "cpu " in found["devices"]
    return found


def driver(folder: Path, content: str) -> str:
    """The path of a new manifest."""
    path = folder / "driver.json"
    path.write_text(content)
    return str(path)


def test_no_loader(tmp_path: Path):
    (tmp_path / "libvulkan.so.1").write_bytes(b"not a library")
    found = told(LD_LIBRARY_PATH=str(tmp_path))
    assert "not usable: no Vulkan loader" in found["devices"]
    assert "'vulkan:0' does not exist" in found["error"]
    assert "install it (Debian: libvulkan1)" in found["error"]


def test_no_driver(tmp_path: Path, vulkan_loader):
    found = told(VK_DRIVER_FILES=str(tmp_path))
    assert "the loader found no driver that works" in found["devices"]
    assert f"VK_DRIVER_FILES={tmp_path}" in found["error"]


BROKEN = {
    "garbage": ("{", "not JSON"),
    "nameless": ('{"ICD": {}}', "it names no library"),
    "absent": (
        '{"file_format_version": "1.0.0", '
        '"ICD": {"library_path": "/absent/driver.so", "api_version": "1.3.0"}}',
        "its library cannot be loaded (/absent/driver.so",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_wrong_with_a_driver(tmp_path: Path, vulkan_loader, monkeypatch, kind: str):
    from vkjit.runtime.vulkan.manifests import driver_faults  # noqa: PLC0415  needs a loader

    content, reason = BROKEN[kind]
    path = driver(tmp_path, content)
    monkeypatch.setenv("VK_DRIVER_FILES", os.pathsep.join([path, str(tmp_path / "nothing.json")]))
    broken, missing = driver_faults()
    assert broken.startswith(f"driver manifest {path}: {reason}")
    assert missing.endswith("nothing.json: No such file or directory")


def test_only_a_broken_driver(tmp_path: Path, vulkan_loader):
    path = driver(tmp_path, BROKEN["garbage"][0])
    found = told(VK_DRIVER_FILES=path)
    for text in (found["devices"], found["error"]):
        assert f"driver manifest {path}: not JSON" in text


def test_a_broken_driver_costs_no_other_device(tmp_path: Path, vulkan_loader):
    from vkjit.runtime.vulkan.manifests import _manifests  # noqa: PLC0415  needs a loader

    path = driver(tmp_path, BROKEN["absent"][0])
    others = [str(p) for p in _manifests()]
    found = told(VK_DRIVER_FILES=os.pathsep.join([path, *others]))
    assert "error" not in found
    assert "its library cannot be loaded" in found["devices"]


def test_a_device_of_the_environment_that_does_not_exist(vulkan_loader, monkeypatch):
    from vkjit import runtime  # noqa: PLC0415  with the others

    monkeypatch.setenv("VKJIT_DEVICE", "vulkan:77")
    wanted = "device: 'vulkan:77' does not exist, expected one of cpu, reference, vulkan:0"
    with pytest.raises(ArgumentError, match=wanted):
        runtime.default_device_name()
    assert wanted in runtime.explain_devices()


# -- devices that lack something ------------------------------------------------------------------


@pytest.fixture(scope="module")
def vulkan_loader():
    """The loader with at least one driver, on this machine."""
    try:
        from vkjit.runtime.vulkan.instance import Instance  # noqa: PLC0415  needs a Vulkan loader
    except OSError as error:
        pytest.skip(str(error))
    instance = Instance(validation=False)
    if not instance.physical_devices():
        pytest.skip("no Vulkan driver")
    return instance


def test_an_old_device_is_refused(vulkan_loader, monkeypatch: pytest.MonkeyPatch):
    real = vulkan_loader.functions.vkGetPhysicalDeviceProperties

    def old(physical, properties):
        real(physical, properties)
        properties.apiVersion = 1 << 22 | 1 << 12

    with monkeypatch.context() as patch:
        patch.setattr(vulkan_loader.functions, "vkGetPhysicalDeviceProperties", old)
        refusal = vulkan_loader.refusal(vulkan_loader.physical_devices()[0])
    assert refusal == "Vulkan 1.1, expected 1.2 or later"


def without(patch: pytest.MonkeyPatch, *missing: str) -> None:
    """Has the device lack features."""
    from vkjit.runtime.vulkan import features  # noqa: PLC0415  needs a Vulkan loader

    kept = {
        struct: tuple(name for name in names if name not in missing)
        for struct, names in features._WANTED.items()
    }
    patch.setattr(features, "_WANTED", kept)
    core = tuple(name for name in features._CORE_WANTED if name not in missing)
    patch.setattr(features, "_CORE_WANTED", core)


def test_a_device_without_addresses_uses_descriptors(vulkan_loader, monkeypatch):
    from vkjit.runtime.vulkan.device import VulkanDevice  # noqa: PLC0415  needs a Vulkan loader

    without(monkeypatch, "bufferDeviceAddress", "shaderFloat64", "shaderInt64")
    physical = vulkan_loader.physical_devices()[0]
    monkeypatch.delenv("VKJIT_VULKAN_ADDRESSING", raising=False)
    monkeypatch.setenv("VKJIT_CACHE", "0")
    device = VulkanDevice("vulkan:0", vulkan_loader, physical)
    try:
        assert device.target.addressing is Addressing.DESCRIPTOR
        assert not {"f64", "i64"} & {t.name for t in device.target.arithmetic}
        x = np.arange(8, dtype=np.float32)
        np.testing.assert_array_equal(run(device, lambda v: v * 2, x), x * 2)
    finally:
        device.close()
    assert device.live_objects() == {}
    monkeypatch.setenv("VKJIT_VULKAN_ADDRESSING", "device_address")
    with pytest.raises(ConfigError, match="the device has no buffer addresses; unset"):
        VulkanDevice("vulkan:0", vulkan_loader, physical)


def test_a_device_without_doubles_says_so(vulkan_loader, monkeypatch):
    from vkjit import dtypes  # noqa: PLC0415  with the others
    from vkjit.runtime.vulkan.device import VulkanDevice  # noqa: PLC0415  needs a Vulkan loader

    without(monkeypatch, "shaderFloat64", "shaderInt64")
    monkeypatch.setenv("VKJIT_CACHE", "0")
    device = VulkanDevice("vulkan:0", vulkan_loader, vulkan_loader.physical_devices()[0])
    try:
        with dtypes.enable_x64(), pytest.raises(MissingRuleError, match="f64"):
            run(device, lambda v: v * 2, np.arange(8, dtype=np.float64))
    finally:
        device.close()


def run(device, function, x: np.ndarray) -> np.ndarray:
    """A function of one array, compiled for a device that is not among those of the process."""
    from vkjit.api.staged import lower  # noqa: PLC0415  with the others
    from vkjit.trace import aval_of, trace  # noqa: PLC0415  with the others

    plan = lower(trace(lambda v: [function(v)], [aval_of(x)], "program"), device.target).plan
    (out,) = device.load(plan).run([device.upload(x)])
    return device.download(out, x.dtype, x.shape)
