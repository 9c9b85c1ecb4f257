"""SPIR-V and the driver's pipeline cache on disk: used where they fit, never trusted."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Kernel
from vkjit.lowering.kernel.types import F32, Access
from vkjit.lowering.target import MINIMAL_GPU

try:
    from vkjit.runtime.vulkan import driver_cache, modules, pipeline
except OSError as error:
    pytest.skip(f"no Vulkan loader: {error}", allow_module_level=True)

from vkjit.runtime.vulkan.device import VulkanDevice
from vkjit.runtime.vulkan.modules import Modules


def doubled(origin: str = "here.py:1", factor: float = 2.0) -> Kernel:
    b = Builder("doubled")
    x = b.buffer("x", F32, 64, Access.READ)
    y = b.buffer("y", F32, 64, Access.WRITE)
    i = b.local_id()
    b.store(y, i, b.mul(b.load(x, i), b.const(F32, factor)))
    kernel = b.finish((1, 1, 1), (64, 1, 1))
    kernel.origin = (origin,)
    return kernel


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VKJIT_CACHE", "1")
    monkeypatch.setenv("VKJIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(pipeline, "_SLOW_SECONDS", -1.0)
    return tmp_path


# -- modules --------------------------------------------------------------------------------------


def test_the_next_process_emits_nothing(folder: Path):
    first, second = (Modules(MINIMAL_GPU, strict=True) for _ in range(2))
    assert first.of(doubled()) == second.of(doubled())
    assert (first.emitted, second.emitted) == (1, 0)


def test_moving_a_line_changes_no_module(folder: Path):
    made = Modules(MINIMAL_GPU, strict=True)
    assert made.of(doubled("here.py:1")) is made.of(doubled("there.py:2"))


def test_another_kernel_target_or_emitter_makes_another_entry(folder: Path, monkeypatch):
    from dataclasses import replace  # noqa: PLC0415  used here alone

    made = Modules(MINIMAL_GPU, strict=True)
    made.of(doubled())
    made.of(doubled(factor=3.0))
    assert made.emitted == 2
    other = Modules(replace(MINIMAL_GPU, features=frozenset({"subgroup_vote"})), strict=True)
    other.of(doubled())
    assert other.emitted == 1
    monkeypatch.setattr(modules, "emitter_version", lambda: "edited")
    edited = Modules(MINIMAL_GPU, strict=True)
    edited.of(doubled())
    assert edited.emitted == 1


DAMAGE = {
    "cut": lambda data: data[:-5],
    "flipped": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "blank": lambda data: b"",
    "foreign": lambda data: b"\x03\x02\x23\x07" * 20,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_modules_are_made_again(folder: Path, damage: str):
    words = Modules(MINIMAL_GPU, strict=True).of(doubled())
    (path,) = (folder / "spirv").iterdir()
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    for emitted in (1, 0):
        again = Modules(MINIMAL_GPU, strict=True)
        assert again.of(doubled()) == words
        assert again.emitted == emitted


@pytest.mark.parametrize("content", [b"abc", b"\0" * 64, b"\x03\x02\x23\x07"])
def test_entries_that_are_no_modules_are_made_again(folder: Path, content: bytes):
    first = Modules(MINIMAL_GPU, strict=True)
    words = first.of(doubled())
    (path,) = (folder / "spirv").iterdir()
    assert first._disk is not None
    first._disk.put(path.name, content)
    assert Modules(MINIMAL_GPU, strict=True).of(doubled()) == words


# -- the driver's cache ---------------------------------------------------------------------------


def run_once(instance) -> None:
    """Opens a device, runs a kernel, closes."""
    from vkjit.lowering.artifact import (  # noqa: PLC0415  used here alone
        Launch,
        Plan,
        PlannedBuffer,
        Range,
        Role,
    )

    device = VulkanDevice("vulkan:0", instance, instance.physical_devices()[0])
    try:
        buffers = (PlannedBuffer(Role.INPUT, 256, 0), PlannedBuffer(Role.OUTPUT, 256, 0))
        launch = Launch(doubled(), (Range(0, 0, 256), Range(1, 0, 256)))
        plan = Plan("doubling", buffers, (launch,), frozenset(), 512)
        x = np.arange(64, dtype=np.float32)
        (y,) = device.load(plan).run([device.upload(x)])
        np.testing.assert_array_equal(device.download(y, np.float32, (64,)), 2 * x)
    finally:
        device.close()


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_driver_caches_are_made_again(vulkan_instance, folder: Path, damage: str):
    run_once(vulkan_instance)
    (path,) = (folder / "vulkan").iterdir()
    whole = path.read_bytes()
    path.write_bytes(DAMAGE[damage](whole))
    run_once(vulkan_instance)
    assert len(path.read_bytes()) == len(whole)


def test_a_cache_of_another_driver_is_not_given_to_this_one(
    vulkan_instance, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    run_once(vulkan_instance)
    (path,) = (folder / "vulkan").iterdir()
    given: list[int] = []
    create = driver_cache.DriverCache._create
    monkeypatch.setattr(
        driver_cache.DriverCache,
        "_create",
        lambda self, saved: given.append(len(saved)) or create(self, saved),
    )
    run_once(vulkan_instance)
    assert given[0] > 0
    disk = driver_cache.open_cache("vulkan")
    assert disk is not None
    saved = disk.get(path.name)
    assert saved is not None
    disk.put(path.name, saved[:16] + bytes(16) + saved[32:])  # a UUID of nobody
    given.clear()
    run_once(vulkan_instance)
    assert given == [0]


def test_what_another_process_wrote_meanwhile_is_kept(vulkan_instance, folder: Path):
    """Both save; the second merges what it did not know."""
    first, second = (
        VulkanDevice("vulkan:0", vulkan_instance, vulkan_instance.physical_devices()[0])
        for _ in range(2)
    )
    first.pipelines.get([doubled(factor=5.0)])
    second.pipelines.get([doubled(factor=7.0)])
    first.close()
    second.close()
    (path,) = (folder / "vulkan").iterdir()
    assert path.stat().st_size > 32


def test_a_cache_that_grows_while_it_is_read_is_read_again(
    vulkan_instance, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """Other threads compile meanwhile: the driver then says that the data are incomplete."""
    device = VulkanDevice("vulkan:0", vulkan_instance, vulkan_instance.physical_devices()[0])
    device.pipelines.get([doubled(factor=3.0)])
    get, calls = device.logical.functions.vkGetPipelineCacheData, list[bool]()

    def grown(handle: object, cache: object, size: object, data: object) -> int:
        result = get(handle, cache, size, data)
        calls.append(data != driver_cache.NULL)
        return driver_cache.constants.VK_INCOMPLETE if sum(calls) == 1 and calls[-1] else result

    monkeypatch.setattr(device.logical.functions, "vkGetPipelineCacheData", grown)
    device.close()
    assert calls == [False, True, False, True]


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs POSIX")
def test_a_folder_that_cannot_be_written(vulkan_instance, folder: Path, monkeypatch):
    blocked = folder / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("VKJIT_CACHE_DIR", str(blocked))
    with pytest.warns(RuntimeWarning, match="cannot be written") as seen:
        run_once(vulkan_instance)
    assert len(seen) == 1
