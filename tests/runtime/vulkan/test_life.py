"""The life of devices: nothing leaks after errors, and a forked process is told what to do."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from concurrent.futures import wait
from dataclasses import replace

import numpy as np
import pytest

from vkjit.errors import DeviceError, MissingRuleError, OutOfMemoryError
from vkjit.lowering.artifact import Launch, Plan, PlannedBuffer, Range, Role
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Kernel
from vkjit.lowering.kernel.types import F32, Access
from vkjit.lowering.target import Addressing

SIZE = 256


def summed(inputs: int) -> Kernel:
    """The sum of so many arrays."""
    b = Builder(f"sum_{inputs}")
    given = [b.buffer(f"x{i}", F32, SIZE // 4, Access.READ) for i in range(inputs)]
    y = b.buffer("y", F32, SIZE // 4, Access.WRITE)
    i = b.local_id()
    total = b.load(given[0], i)
    for x in given[1:]:
        total = b.add(total, b.load(x, i))
    b.store(y, i, total)
    return b.finish((1, 1, 1), (SIZE // 4, 1, 1))


def plan(kernel: Kernel, inputs: int = 1, arena: int = 0) -> Plan:
    buffers = [PlannedBuffer(Role.INPUT, SIZE, i) for i in range(inputs)]
    buffers.append(PlannedBuffer(Role.OUTPUT, SIZE, 0))
    if arena:
        buffers.append(PlannedBuffer(Role.ARENA, arena))
    launch = Launch(kernel, tuple(Range(i, 0, SIZE) for i in range(inputs + 1)))
    total = sum(b.size for b in buffers)
    return Plan("life", tuple(buffers), (launch,), frozenset(), total, arena)


@pytest.mark.parametrize("addressing", list(Addressing), ids=lambda mode: mode.value)
def test_every_kind_of_object_goes_after_every_kind_of_error(
    vulkan_instance, fresh, addressing: Addressing, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("VKJIT_VULKAN_MEMORY_LIMIT", str(1 << 20))
    device = fresh(addressing)
    x = device.upload(np.ones(SIZE // 4, np.float32))
    loaded = device.load(plan(summed(1)))
    outputs = [loaded.run([x])[0] for _ in range(20)]
    with pytest.raises(OutOfMemoryError):
        device.load(plan(summed(1), arena=2 << 20))
    big = device.allocate(900 << 10)
    with pytest.raises(OutOfMemoryError):
        device.load(plan(summed(1), arena=600 << 10)).run([x])
    if addressing is Addressing.DESCRIPTOR:
        few = replace(device.capabilities, max_bindings=2)
        monkeypatch.setattr(device.pipelines, "_capabilities", few)
        with pytest.raises(MissingRuleError, match=r"has 3 arrays, .* binds at most 2"):
            device.load(plan(summed(2), 2))
        monkeypatch.setattr(device.pipelines, "_capabilities", device.capabilities)

    def refuse(*_: object) -> int:
        return -3

    with monkeypatch.context() as patch:
        functions = device.logical.functions
        patch.setattr(functions, "vkCreateComputePipelines", refuse, raising=False)
        with pytest.raises(DeviceError, match="refused kernel sum_2"):
            device.load(plan(summed(2), 2))
    np.testing.assert_array_equal(device.download(outputs[-1], np.float32, (4,)), 1)
    kinds = set(device.live_objects())
    assert {"Buffer", "CommandPool", "DeviceMemory", "Pipeline", "PipelineCache"} <= kinds
    assert ("DescriptorPool" in kinds) == (addressing is Addressing.DESCRIPTOR)
    assert device.live_objects()["Pipeline"] == 1
    assert "ShaderModule" not in kinds
    del outputs, big, loaded
    gc.collect()
    assert device.memory_stats().live_bytes == SIZE
    device.close()
    assert device.live_objects() == {}
    assert vulkan_instance.messages == []


def test_what_is_compiled_ahead_is_compiled_once_and_goes_with_the_device(
    vulkan_instance, fresh, monkeypatch: pytest.MonkeyPatch
):
    device = fresh(Addressing.DEVICE_ADDRESS)
    tasks = [*device.prepare(plan(summed(1))), *device.prepare(plan(summed(1)))]
    wait(tasks)
    assert device.live_objects()["Pipeline"] == 1
    (y,) = device.load(plan(summed(1))).run([device.upload(np.ones(SIZE // 4, np.float32))])
    np.testing.assert_array_equal(device.download(y, np.float32, (4,)), 1)
    assert device.live_objects()["Pipeline"] == 1
    assert device.prepare(plan(summed(1))) == []

    def refuse(*_: object) -> int:
        return -3

    with monkeypatch.context() as patch:
        functions = device.logical.functions
        patch.setattr(functions, "vkCreateComputePipelines", refuse, raising=False)
        wait(device.prepare(plan(summed(2), 2)))
    with pytest.raises(DeviceError, match="refused kernel sum_2"):
        device.load(plan(summed(2), 2))
    device.load(plan(summed(2), 2))  # which compiles it anew
    device.prepare(plan(summed(3), 3))
    device.close()
    assert device.live_objects() == {}
    assert vulkan_instance.messages == []


FORKED = """
import os, signal
import numpy as np
import vkjit as vj
from vkjit.errors import DeviceError
x = vj.device_put(np.ones(8, np.float32), "vulkan:0")
double = vj.jit(lambda v: v * 2)
assert np.asarray(double(x))[0] == 2
if os.fork() == 0:
    signal.alarm(20)  # a hang would be the fault
    told = 0
    for use in (lambda: np.asarray(x), lambda: double(x), lambda: vj.device_put(1.0, "vulkan:0")):
        try:
            use()
        except DeviceError as error:
            told += "opened before this process was forked" in str(error)
    del x, double
    raise SystemExit(told)
_, status = os.wait()
assert os.waitstatus_to_exitcode(status) == 3, status
assert np.asarray(double(x))[0] == 2
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_is_told_and_its_parent_goes_on(vulkan_instance):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
