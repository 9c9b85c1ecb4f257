"""The reference and null devices, and how devices are found."""

from __future__ import annotations

import numpy as np
import pytest

from vkjit import runtime
from vkjit.errors import ArgumentError, InternalError
from vkjit.lowering.artifact import Copy, Launch, Plan, PlannedBuffer, Range, Role
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.types import F32, I64, Access
from vkjit.lowering.target import MINIMAL_GPU
from vkjit.runtime.device import DeviceClass, DeviceInfo
from vkjit.runtime.null import NullDevice
from vkjit.runtime.reference import ReferenceDevice


def one_copy() -> Plan:
    return Plan(
        "copy",
        (PlannedBuffer(Role.INPUT, 16), PlannedBuffer(Role.OUTPUT, 16)),
        (Copy(Range(0, 0, 8), Range(1, 8, 8)),),
        frozenset(),
        32,
    )


def test_reference_runs_and_counts_memory() -> None:
    device = ReferenceDevice()
    x = device.upload(np.arange(4, dtype=np.float32))
    (y,) = device.load(one_copy()).run([x])
    got = device.download(y, np.float32, (4,))
    assert np.isnan(got[:2]).all()  # nothing wrote them
    assert list(got[2:]) == [0, 1]
    stats = device.memory_stats()
    assert (stats.live_bytes, stats.peak_bytes) == (32, 32)
    y.release()
    x.release()
    assert device.memory_stats().live_bytes == 0
    with pytest.raises(InternalError, match="released buffer"):
        device.download(y, np.float32, (4,))


def test_uploads_are_copies() -> None:
    device = ReferenceDevice()
    x = np.arange(4, dtype=np.float32)
    buffer = device.upload(x)
    x[:] = 9
    got = device.download(buffer, np.float32, (2, 2))
    assert got.tolist() == [[0, 1], [2, 3]]


def test_kernels_must_fit_their_ranges() -> None:
    b = Builder("big", index_type=I64)
    z = b.buffer("z", F32, 8, Access.WRITE)
    b.store(z, b.index(0), b.const(F32, 1))
    plan = Plan(
        "p",
        (PlannedBuffer(Role.OUTPUT, 16),),
        (Launch(b.finish((1, 1, 1)), (Range(0, 0, 16),)),),
        frozenset(),
        16,
    )
    for name in ("reference", "cpu"):
        with pytest.raises(InternalError, match=r"kernel big declares z with .*16"):
            runtime.get_device(name).load(plan).run([])


def test_a_buffer_of_another_device_is_refused() -> None:
    x = ReferenceDevice().upload(np.zeros(4, np.float32))
    with pytest.raises(InternalError, match="a buffer of reference was given"):
        ReferenceDevice().load(one_copy()).run([x])


def test_null_records_steps() -> None:
    device = NullDevice(MINIMAL_GPU)
    plan = one_copy()
    loaded = device.load(plan)
    for _ in range(2):
        loaded.run([device.allocate(16)])
    assert device.steps == [*plan.steps, *plan.steps]


def test_devices_are_found_and_opened_once() -> None:
    names = runtime.available_devices()
    assert names[:2] == ["cpu", "reference"]
    assert runtime.get_device("reference") is runtime.get_device("reference")
    with pytest.raises(ArgumentError, match="unknown kind 'tpu'"):
        runtime._family("tpu:0")
    with pytest.raises(ArgumentError, match="'tpu:0' does not exist, expected one of cpu, ref"):
        runtime.get_device("tpu:0")


GPU = DeviceInfo("vulkan:1", DeviceClass.DISCRETE_GPU, "a card")
SMALL_GPU = DeviceInfo("vulkan:0", DeviceClass.INTEGRATED_GPU, "a part of the processor")
LAVAPIPE = DeviceInfo("vulkan:2", DeviceClass.SOFTWARE, "a driver on the CPU")
OLD = DeviceInfo("vulkan:3", DeviceClass.DISCRETE_GPU, "an old card", refused="Vulkan 1.0")
HOST = DeviceInfo("cpu", DeviceClass.CPU, "the host")


@pytest.mark.parametrize(
    ("found", "want"),
    [
        ([HOST, SMALL_GPU, GPU], "vulkan:1"),
        ([HOST, LAVAPIPE, SMALL_GPU], "vulkan:0"),
        ([HOST, LAVAPIPE], "cpu"),
        ([HOST, OLD], "cpu"),
    ],
)
def test_the_default_is_the_first_real_gpu(
    monkeypatch: pytest.MonkeyPatch, found: list[DeviceInfo], want: str
) -> None:
    monkeypatch.delenv("VKJIT_DEVICE", raising=False)
    monkeypatch.setattr(runtime, "_found", found)
    assert runtime.default_device_name() == want
    lines = runtime.explain_devices().splitlines()
    assert next(line for line in lines if line.startswith("*")).split()[1] == want
    if OLD in found:
        assert "not usable: Vulkan 1.0" in runtime.explain_devices()


def test_the_environment_chooses_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_found", [HOST, GPU, OLD])
    monkeypatch.setenv("VKJIT_DEVICE", "cpu")
    assert runtime.default_device_name() == "cpu"
    monkeypatch.setenv("VKJIT_DEVICE", "vulkan:3")
    with pytest.raises(ArgumentError, match=r"'vulkan:3' cannot be used: Vulkan 1\.0"):
        runtime.default_device_name()
    monkeypatch.setenv("VKJIT_DEVICE", "vulkan:7")
    assert "'vulkan:7' does not exist" in runtime.explain_devices()
