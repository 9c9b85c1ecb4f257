"""Submission: lost devices, plans in several submissions, dispatches in slices, futures."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import vkjit as vj
from vkjit import numpy as vnp
from vkjit.errors import ConfigError, DeviceError, OutOfMemoryError
from vkjit.lowering.artifact import Copy, Launch, Plan, PlannedBuffer, Range, Role
from vkjit.lowering.compile import compile_program
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Kernel
from vkjit.lowering.kernel.types import F32, Access
from vkjit.lowering.target import Addressing

COUNT = 1 << 10
SIZE = 4 * COUNT
STEPS = 20
LOST = -4  # VK_ERROR_DEVICE_LOST
TIMEOUT = 2  # VK_TIMEOUT


def doubling(grid: tuple[int, int, int] = (COUNT // 64, 1, 1)) -> Kernel:
    """Y = x + x, over a grid of any shape."""
    b = Builder("doubling")
    x = b.buffer("x", F32, COUNT, Access.READ)
    y = b.buffer("y", F32, COUNT, Access.WRITE)
    plane = b.add(b.scaled(b.workgroup_id(2), grid[1]), b.workgroup_id(1))
    group = b.add(b.scaled(plane, grid[0]), b.workgroup_id(0))
    i = b.add(b.scaled(group, 64), b.local_id())
    value = b.load(x, i)
    b.store(y, i, b.add(value, value))
    return b.finish(grid, (64, 1, 1))


def whole(buffer: int, offset: int = 0) -> Range:
    return Range(buffer, offset, SIZE)


def long_chain(steps: int = STEPS) -> Plan:
    """Every step reads what the one before wrote, in the two halves of the arena."""
    kernel = doubling()
    places = [whole(0), *(whole(2, SIZE * (i % 2)) for i in range(steps - 1)), whole(1)]
    launches = tuple(
        Launch(kernel, pair, (f"double at model.py:{line}",))
        for line, pair in enumerate(itertools.pairwise(places))
    )
    buffers = (
        PlannedBuffer(Role.INPUT, SIZE),
        PlannedBuffer(Role.OUTPUT, SIZE),
        PlannedBuffer(Role.ARENA, 2 * SIZE),
    )
    return Plan("long_chain", buffers, launches, frozenset(range(1, steps)), 4 * SIZE)


def values() -> np.ndarray:
    return np.random.default_rng(0).integers(-9, 9, COUNT).astype(np.float32)


def lose(device: Any, *names: str) -> list[str]:
    """Makes driver functions say that the device is lost; returns the calls made since."""
    calls: list[str] = []

    def lost(name: str) -> Any:
        def call(*_arguments: Any) -> int:
            calls.append(name)
            return LOST

        return call

    for name in names:
        setattr(device.logical.functions, name, lost(name))
    return calls


ASKING = ("vkQueueSubmit", "vkWaitSemaphores", "vkGetSemaphoreCounterValue")


@pytest.mark.parametrize("addressing", list(Addressing), ids=lambda mode: mode.value)
def test_a_lost_device_is_named_with_kernel_and_progress(fresh, addressing: Addressing):
    device = fresh(addressing)
    loaded = device.load(long_chain())
    (y,) = loaded.run([device.upload(values())])
    device.logical.functions.vkDeviceWaitIdle(device.logical.handle)  # the marks are written
    lose(device, *ASKING)
    with pytest.raises(DeviceError) as caught:
        device.download(y, np.float32, (COUNT,))
    message = str(caught.value)
    assert "the device was lost" in message
    assert "VK_ERROR_DEVICE_LOST" in message
    assert f"long_chain, 16 of {STEPS} steps known to be done" in message
    assert "the last of them kernel doubling (double at model.py:15)" in message
    assert "running was kernel doubling (double at model.py:16)" in message


def test_a_lost_device_does_not_hang_anything(fresh):
    device, other = fresh(Addressing.DEVICE_ADDRESS), fresh(Addressing.DEVICE_ADDRESS)
    loaded, x = device.load(long_chain(2)), device.upload(values())
    outputs = loaded.run([x])
    calls = lose(device, *ASKING)
    with pytest.raises(DeviceError, match=r"lost \(vkGet.*long_chain") as first:
        loaded.run([x])
    asked = len(calls)
    for again in (
        lambda: loaded.run([x]),
        lambda: device.download(outputs[0], np.float32, (COUNT,)),
        device.synchronize,
        outputs[0].wait,
        outputs[0].is_ready,
    ):
        with pytest.raises(DeviceError) as later:
            again()
        assert str(later.value) == str(first.value)
    assert len(calls) == asked, "a lost device is not asked again"
    (y,) = other.load(long_chain(2)).run([other.upload(values())])
    np.testing.assert_array_equal(other.download(y, np.float32, (COUNT,)), values() * 4)
    device.close()
    assert device.live_objects() == {}


def test_a_device_lost_unnoticed_can_be_closed(fresh):
    device = fresh(Addressing.DEVICE_ADDRESS)
    device.load(long_chain(2)).run([device.upload(values())])
    lose(device, *ASKING)
    device.close()
    assert device.live_objects() == {}
    with pytest.raises(DeviceError, match="is closed"):
        device.allocate(4)


def test_other_failures_of_a_submission_do_not_end_the_device(fresh):
    device = fresh(Addressing.DEVICE_ADDRESS)
    loaded, x = device.load(long_chain(2)), device.upload(values())
    live = device.memory_stats().live_bytes
    device.logical.functions.vkQueueSubmit = lambda *_: -1
    with pytest.raises(DeviceError, match="vkQueueSubmit failed with VK_ERROR_OUT_OF_HOST_MEMORY"):
        loaded.run([x])
    assert device.memory_stats().live_bytes == live
    del device.logical.functions.vkQueueSubmit
    (y,) = loaded.run([x])
    np.testing.assert_array_equal(device.download(y, np.float32, (COUNT,)), values() * 4)


def test_a_recording_that_fails_is_made_anew(fresh):
    """Else the next call on the arrays of the last good one would replay what failed."""
    device = fresh(Addressing.DESCRIPTOR)
    loaded = device.load(long_chain(2))
    x, other = device.upload(values()), device.upload(values() + 1)
    recording = device.recording(loaded._only, measures=False)
    loaded._ring.append(recording)
    spans = [x.span, *(device.memory.take(size) for size, *_ in loaded._made)]
    recording.submit(spans)
    end = device.logical.functions.vkEndCommandBuffer

    def short(commands: Any) -> int:
        end(commands)
        return -1

    device.queue.wait(recording.busy)
    device.logical.functions.vkEndCommandBuffer = short
    with pytest.raises(DeviceError, match="vkEndCommandBuffer failed"):
        recording.submit([other.span, *spans[1:]])
    device.logical.functions.vkEndCommandBuffer = end
    assert not recording.fits(spans)
    device.queue.wait(recording.submit(spans))
    device._transfers.read(spans[1], (got := np.empty(COUNT, np.float32)).ctypes.data, SIZE)
    np.testing.assert_array_equal(got, values() * 4)


def test_a_wait_for_a_hung_device_can_be_interrupted(fresh):
    device = fresh(Addressing.DEVICE_ADDRESS)
    (y,) = device.load(long_chain(2)).run([device.upload(values())])
    asked: list[int] = []

    def hung(_device: Any, _info: Any, nanoseconds: int) -> int:
        asked.append(nanoseconds)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return TIMEOUT

    device.logical.functions.vkWaitSemaphores = hung
    device.logical.functions.vkGetSemaphoreCounterValue = lambda *_: 0
    with pytest.raises(KeyboardInterrupt):
        y.wait()
    assert asked == [100_000_000] * 3
    for name in ("vkWaitSemaphores", "vkGetSemaphoreCounterValue"):
        delattr(device.logical.functions, name)
    np.testing.assert_array_equal(device.download(y, np.float32, (COUNT,)), values() * 4)


# -- several submissions --------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", ["1e-6", "1e-7", "inf"])
def test_split_plans_give_the_same_results(vulkan, monkeypatch: pytest.MonkeyPatch, seconds: str):
    x = vulkan.upload(values())
    monkeypatch.setenv("VKJIT_SUBMIT_SECONDS", seconds)
    loaded = vulkan.load(long_chain())
    submissions = {"1e-6": 10, "1e-7": 100, "inf": 1}[seconds]
    assert loaded.submissions == submissions
    before = vulkan.queue.submitted
    results = [loaded.run([x])[0] for _ in range(3)]
    assert vulkan.queue.submitted == before + 3 * submissions
    for result in results:
        found = vulkan.download(result, np.float32, (COUNT,))
        np.testing.assert_array_equal(found, values() * 2.0**STEPS)
    _, times = loaded.timed([x])
    assert len(times) == STEPS


@pytest.mark.parametrize("grid", [(16, 1, 1), (2, 8, 1), (4, 2, 2), (1, 1, 16)])
def test_slices_of_a_grid_cover_it(vulkan, monkeypatch: pytest.MonkeyPatch, grid: Any):
    buffers = (PlannedBuffer(Role.INPUT, SIZE), PlannedBuffer(Role.OUTPUT, SIZE))
    launch = Launch(doubling(grid), (whole(0), whole(1)))
    plan = Plan("sliced", buffers, (launch,), frozenset(), 2 * SIZE)
    for seconds in ("1e-7", "1e-9"):
        monkeypatch.setenv("VKJIT_SUBMIT_SECONDS", seconds)
        loaded = vulkan.load(plan)
        assert loaded.submissions > 1
        (y,) = loaded.run([vulkan.upload(values())])
        np.testing.assert_array_equal(vulkan.download(y, np.float32, (COUNT,)), values() * 2)


@pytest.mark.parametrize("grid", [(7, 1, 1), (3, 5, 1), (2, 3, 4), (1, 1, 6)])
def test_slices_are_a_partition(vulkan_instance, grid: tuple[int, int, int]):
    from vkjit.runtime.vulkan.estimate import slices  # noqa: PLC0415  needs a Vulkan loader

    for count in range(1, 40):
        covered: list[tuple[int, ...]] = []
        boxes = slices(grid, count)
        for base, size in boxes:
            axes = [range(b, b + n) for b, n in zip(base, size, strict=True)]
            covered += itertools.product(*axes)
        assert sorted(covered) == list(itertools.product(*map(range, grid)))
        assert len(boxes) >= min(count, math.prod(grid))


def test_a_wrong_limit_is_refused(vulkan, monkeypatch: pytest.MonkeyPatch):
    for wrong in ("0", "-1", "soon", "nan"):
        monkeypatch.setenv("VKJIT_SUBMIT_SECONDS", wrong)
        with pytest.raises(ConfigError, match=f"VKJIT_SUBMIT_SECONDS: got '{wrong}'"):
            vulkan.load(long_chain(2))


def test_grids_past_the_limit_of_an_axis(vulkan):
    """As with more than 65,535 workgroups, through smaller limits."""
    target = replace(vulkan.target, max_grid=(4, 4, 4))

    def function(x: Any, w: Any) -> Any:
        return vnp.sin(x) + 1.0, vnp.sum(x, 1), x @ w

    generator = np.random.default_rng(0)
    x = generator.standard_normal((60, 40), np.float32)
    w = generator.standard_normal((40, 50), np.float32)
    program = vj.make_ir(function)(x, w)
    plan = compile_program(program, target).plan
    grids = [s.kernel.grid for s in plan.steps if isinstance(s, Launch)]
    assert any(grid[1] > 1 for grid in grids)
    assert any(grid[2] > 1 for grid in grids)
    assert all(max(grid) <= 4 for grid in grids)
    outs = vulkan.load(plan).run([vulkan.upload(x), vulkan.upload(w)])
    avals = program.out_avals
    got = [vulkan.download(o, a.dtype, a.shape) for o, a in zip(outs, avals, strict=True)]
    for g, wanted in zip(got, (np.sin(x) + 1, x.sum(1), x @ w), strict=True):
        np.testing.assert_allclose(g, wanted, rtol=1e-5, atol=1e-4)


# -- futures --------------------------------------------------------------------------------------


def test_arrays_are_futures(vulkan):
    loaded = vulkan.load(long_chain())
    x = vulkan.upload(values())
    assert x.is_ready()
    results = [loaded.run([x])[0] for _ in range(20)]
    for result in results:
        result.wait()
        assert result.is_ready()
    assert vulkan.queue.is_finished(vulkan.queue.submitted)


def test_waiting_for_one_array_does_not_wait_for_later_work(vulkan, monkeypatch):
    loaded = vulkan.load(long_chain())
    (first,) = loaded.run([vulkan.upload(values())])
    waited: list[int] = []
    monkeypatch.setattr(type(vulkan.queue), "wait", lambda _, value: waited.append(value))
    loaded.run([vulkan.upload(values())])
    waited.clear()
    first.wait()
    assert waited == [first.written]
    assert first.written < vulkan.queue.submitted


def test_donated_memory_in_flight(vulkan):
    """Each call overwrites what the call before it still reads or writes."""
    buffers = (
        PlannedBuffer(Role.INPUT, SIZE),
        PlannedBuffer(Role.OUTPUT, SIZE, donated=0),
        PlannedBuffer(Role.ARENA, SIZE),
    )
    steps = (Launch(doubling(), (whole(0), whole(2))), Copy(whole(2), whole(1)))
    loaded = vulkan.load(Plan("in_place", buffers, steps, frozenset({1}), 3 * SIZE))
    x = vulkan.upload(values())
    for _ in range(30):
        (x,) = loaded.run([x], donated=(0,))
    np.testing.assert_array_equal(vulkan.download(x, np.float32, (COUNT,)), values() * 2.0**30)


def test_memory_that_is_short_leaves_nothing_behind(vulkan, monkeypatch: pytest.MonkeyPatch):
    loaded, x = vulkan.load(long_chain(2)), vulkan.upload(values())
    loaded.run([x])
    live = vulkan.memory_stats().live_bytes
    take = type(vulkan.memory).take

    def short(heap: Any, nbytes: int) -> Any:
        if nbytes == 2 * SIZE:
            raise OutOfMemoryError("vulkan: no memory")
        return take(heap, nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(type(vulkan.memory), "take", short)
        with pytest.raises(OutOfMemoryError):
            loaded.run([x])
    assert vulkan.memory_stats().live_bytes == live
    (y,) = loaded.run([x])
    np.testing.assert_array_equal(vulkan.download(y, np.float32, (COUNT,)), values() * 4)
