"""The Vulkan device: plans of several steps, barriers, memory, errors, leaks."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest

from vkjit.errors import (
    ArgumentError,
    ConfigError,
    DeviceError,
    InternalError,
    MissingRuleError,
    OutOfMemoryError,
)
from vkjit.lowering.artifact import Copy, Launch, Plan, PlannedBuffer, Range, Role, Step
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Kernel
from vkjit.lowering.kernel.types import F32, Access, Space
from vkjit.lowering.target import Addressing

COUNT = 1 << 12
SIZE = 4 * COUNT


def affine(scale: float, shift: float, count: int = COUNT) -> Kernel:
    """Y = x * scale + shift."""
    b = Builder(f"affine_{scale}_{shift}")
    x = b.buffer("x", F32, count, Access.READ)
    y = b.buffer("y", F32, count, Access.WRITE)
    i = b.add(b.scaled(b.workgroup_id(), 64), b.local_id())
    b.store(y, i, b.add(b.mul(b.load(x, i), b.const(F32, scale)), b.const(F32, shift)))
    return b.finish((count // 64, 1, 1), (64, 1, 1))


def whole(buffer: int) -> Range:
    return Range(buffer, 0, SIZE)


def plan_of(*steps: Step, barriers: set[int], buffers: tuple[PlannedBuffer, ...]) -> Plan:
    return Plan("test_plan", buffers, steps, frozenset(barriers), sum(b.size for b in buffers))


INPUT = PlannedBuffer(Role.INPUT, SIZE, 0)
OUTPUT = PlannedBuffer(Role.OUTPUT, SIZE, 0)
ARENA = PlannedBuffer(Role.ARENA, 2 * SIZE)


def chain(barriers: set[int]) -> Plan:
    """X to the arena to y: y = (x * 2 + 1) * 3 - 1."""
    first = Launch(affine(2, 1), (whole(0), whole(2)))
    second = Launch(affine(3, -1), (whole(2), whole(1)))
    return plan_of(first, second, barriers=barriers, buffers=(INPUT, OUTPUT, ARENA))


def copied(barriers: set[int]) -> Plan:
    """X copied into the second half of the arena, then y = that * 2 + 1, then y copied to z."""
    z = PlannedBuffer(Role.OUTPUT, SIZE, 1)
    half = Range(2, SIZE, SIZE)
    steps = (
        Copy(whole(0), half),
        Launch(affine(2, 1), (half, whole(1))),
        Copy(whole(1), whole(3)),
    )
    return plan_of(*steps, barriers=barriers, buffers=(INPUT, OUTPUT, ARENA, z))


def values(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-99, 99, COUNT).astype(np.float32)


def download(device, buffer) -> np.ndarray:
    return device.download(buffer, np.float32, (COUNT,))


# -- order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "all_barriers"), [(chain, {1}), (copied, {1, 2})])
def test_a_missing_barrier_is_reported(vulkan, make, all_barriers: set[int]):
    """Without this, silence of the validation layer in the other tests would mean nothing."""
    if vulkan.target.addressing is Addressing.DEVICE_ADDRESS:
        pytest.skip("synchronisation validation does not see accesses through device addresses")
    x = vulkan.upload(values())
    for missing in all_barriers:
        loaded = vulkan.load(make(all_barriers - {missing}))
        with pytest.raises(DeviceError, match="SYNC-HAZARD"):
            loaded.run([x])
        vulkan.synchronize()
    (y, *_) = vulkan.load(make(all_barriers)).run([x])
    vulkan.synchronize()
    assert download(vulkan, y).shape == (COUNT,)


def test_steps_run_in_order(vulkan):
    x = values()
    (y,) = vulkan.load(chain({1})).run([vulkan.upload(x)])
    np.testing.assert_array_equal(download(vulkan, y), (x * 2 + 1) * 3 - 1)


def test_copies_follow_the_arrays_of_each_call(vulkan):
    loaded = vulkan.load(copied({1, 2}))
    for seed in range(6):
        x = values(seed)
        y, z = loaded.run([vulkan.upload(x)])
        np.testing.assert_array_equal(download(vulkan, y), x * 2 + 1)
        np.testing.assert_array_equal(download(vulkan, z), x * 2 + 1)


def test_calls_in_flight_do_not_disturb_each_other(vulkan):
    """More calls than recordings, each on the result of the one before, none waited for."""
    loaded = vulkan.load(chain({1}))
    results = [vulkan.upload(np.zeros(COUNT, np.float32))]
    for _ in range(6):
        results.extend(loaded.run([results[-1]]))
    wanted = 0.0
    for found in results:
        assert (download(vulkan, found) == wanted).all()
        wanted = wanted * 6 + 2
    many = [loaded.run([vulkan.upload(values(seed))])[0] for seed in range(12)]
    for seed, found in enumerate(many):
        np.testing.assert_array_equal(download(vulkan, found), values(seed) * 6 + 2)


def test_constants_and_donation(vulkan):
    """The output takes over the second input; the constant stays."""
    b = Builder("weighted")
    w = b.buffer("w", F32, COUNT, Access.READ)
    x = b.buffer("x", F32, COUNT, Access.READ)
    y = b.buffer("y", F32, COUNT, Access.READ_WRITE)
    i = b.add(b.scaled(b.workgroup_id(), 64), b.local_id())
    b.store(y, i, b.add(b.load(y, i), b.mul(b.load(w, i), b.load(x, i))))
    kernel = b.finish((COUNT // 64, 1, 1), (64, 1, 1))
    buffers = (
        INPUT,
        PlannedBuffer(Role.INPUT, SIZE, 1),
        PlannedBuffer(Role.CONSTANT, SIZE, 0),
        PlannedBuffer(Role.OUTPUT, SIZE, 0, donated=1),
    )
    launch = Launch(kernel, (whole(2), whole(0), whole(3)))
    plan = plan_of(launch, barriers=set(), buffers=buffers)
    loaded = vulkan.load(plan, [vulkan.upload(values(2))])
    x_buffer, total = vulkan.upload(values(0)), vulkan.upload(values(1))
    before = total
    for _ in range(3):
        before = total
        (total,) = loaded.run([x_buffer, total], donated=(1,))
        assert before.released
        assert not x_buffer.released
    np.testing.assert_array_equal(download(vulkan, total), values(1) + 3 * values(0) * values(2))
    with pytest.raises(InternalError, match="released buffer"):
        vulkan.download(before, np.float32, (COUNT,))
    with pytest.raises(InternalError, match=r"expected 2 with \[1\]"):
        loaded.run([x_buffer, total])


# -- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "array",
    [
        np.arange(7, dtype=np.int8),
        np.zeros((0, 3), np.float32),
        np.array(2.5),
        np.ones((5, 4), bool),
    ],
    ids=repr,
)
def test_arrays_come_back(vulkan, array: np.ndarray):
    buffer = vulkan.upload(array)
    assert buffer.nbytes == array.nbytes
    np.testing.assert_array_equal(vulkan.download(buffer, array.dtype, array.shape), array)


def test_memory_is_accounted_and_reused(vulkan):
    gc.collect()
    before = vulkan.memory_stats()
    held = [vulkan.allocate(1 << 20) for _ in range(8)]
    assert vulkan.memory_stats().live_bytes == before.live_bytes + (8 << 20)
    spans = {buffer.span.address or id(buffer.span) for buffer in held}
    assert len(spans) == 8
    del held
    after = vulkan.memory_stats()
    assert after.live_bytes == before.live_bytes
    assert after.peak_bytes >= before.live_bytes + (8 << 20)
    reserved = after.pooled_bytes
    vulkan.allocate(3 << 20).release()
    assert vulkan.memory_stats().pooled_bytes == reserved


def test_an_impossible_array_is_refused_with_its_size(vulkan):
    with pytest.raises(OutOfMemoryError, match=f"{1 << 50} bytes"):
        vulkan.allocate(1 << 50)


def test_memory_in_use_is_not_overwritten_by_the_host(vulkan):
    """An upload into memory that a running call still reads has to wait for it."""
    loaded = vulkan.load(chain({1}))
    results = []
    for seed in range(8):
        buffer = vulkan.upload(values(seed))
        results.append(loaded.run([buffer])[0])
        buffer.release()
    for seed, found in enumerate(results):
        np.testing.assert_array_equal(download(vulkan, found), values(seed) * 6 + 2)


# -- life -----------------------------------------------------------------------------------------


def test_closing_leaves_nothing(vulkan_instance, fresh):
    device = fresh(Addressing.DEVICE_ADDRESS)
    loaded = device.load(copied({1, 2}))
    outputs = loaded.run([device.upload(values())])
    assert device.live_objects()["Pipeline"] == 1
    device.close()
    device.close()
    assert device.live_objects() == {}
    assert vulkan_instance.messages == []
    with pytest.raises(DeviceError, match="is closed"):
        device.allocate(4)
    del outputs, loaded


def test_dropped_plans_give_their_objects_back(vulkan):
    def live() -> dict[str, int]:
        gc.collect()
        return vulkan.live_objects()

    x = vulkan.upload(values())
    vulkan.load(chain({1})).run([x])
    before = live()
    for _ in range(5):
        vulkan.load(chain({1})).run([x])
    assert live() == before


def test_plans_may_be_collected_while_others_compile(vulkan, monkeypatch: pytest.MonkeyPatch):
    """Threads that compile collect garbage, too, while the device is locked."""
    from vkjit.runtime.vulkan.pipeline import Pipelines  # noqa: PLC0415  needs a Vulkan loader

    create = Pipelines._create

    def collecting(self, *args, **kwargs):
        gc.collect()
        return create(self, *args, **kwargs)

    x = vulkan.upload(values())
    loaded = [vulkan.load(chain({1}))]
    loaded[0].run([x])
    loaded.append(loaded)
    del loaded
    monkeypatch.setattr(Pipelines, "_create", collecting)
    first = Launch(affine(5, 1), (whole(0), whole(2)))
    second = Launch(affine(7, -1), (whole(2), whole(1)))
    plan = plan_of(first, second, barriers={1}, buffers=(INPUT, OUTPUT, ARENA))
    (y,) = vulkan.load(plan).run([x])
    np.testing.assert_array_equal(download(vulkan, y), (values() * 5 + 1) * 7 - 1)


def test_equal_kernels_share_a_pipeline(vulkan):
    x = vulkan.upload(values())
    vulkan.load(chain({1})).run([x])
    before = vulkan.live_objects()["Pipeline"]
    loaded = vulkan.load(chain({1}))
    assert vulkan.live_objects()["Pipeline"] == before
    loaded.run([x])


def test_limits_are_checked(vulkan):
    b = Builder("greedy")
    b.scratch("s", F32, 1 << 20, Space.SHARED)
    kernel = b.finish((1 << 20, 1, 1) if vulkan.target.max_grid[0] < 1 << 20 else (1, 1, 1))
    plan = plan_of(Launch(kernel, ()), barriers=set(), buffers=())
    with pytest.raises(InternalError, match=r"greedy.*bytes of shared memory over"):
        vulkan.load(plan)


def test_descriptors_bind_so_many_arrays(fresh, monkeypatch: pytest.MonkeyPatch):
    from vkjit.runtime.vulkan.pipeline import check_limits  # noqa: PLC0415  needs a Vulkan loader

    device = fresh(Addressing.DESCRIPTOR)
    few = replace(device.capabilities, max_bindings=1)
    with pytest.raises(MissingRuleError, match=r"affine.* has 2 arrays, .* binds at most 1"):
        check_limits(affine(1, 0), few)
    monkeypatch.setattr(device, "capabilities", replace(device.capabilities, max_storage_range=64))
    with pytest.raises(MissingRuleError, match=f"{SIZE} bytes, descriptors reach 64"):
        device.load(chain({1}))


def test_misplaced_arguments_are_refused(vulkan):
    launch = Launch(affine(1, 0, 64), (Range(0, 4, 256), Range(1, 0, 256)))
    plan = plan_of(launch, barriers=set(), buffers=(INPUT, OUTPUT))
    with pytest.raises(InternalError, match=r"x of kernel affine.*offset 4, expected \*"):
        vulkan.load(plan)


def test_the_description_names_hardware_and_addressing(vulkan):
    text = vulkan.describe()
    assert vulkan.capabilities.name in text
    assert vulkan.target.addressing.value in text
    for feature in vulkan.capabilities.enabled:
        assert feature in text
    for feature, reason in vulkan.capabilities.refused:
        assert feature not in vulkan.capabilities.enabled
        assert f"{feature}: {reason}" in text


def test_only_software_devices_are_trusted_to_divide_exactly(vulkan):
    assert (vulkan.target.quirks == ()) == vulkan.capabilities.is_software


def test_the_pipeline_cache_survives_the_process(
    vulkan_instance, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    from vkjit.runtime.vulkan import pipeline  # noqa: PLC0415  needs a Vulkan loader
    from vkjit.runtime.vulkan.device import VulkanDevice  # noqa: PLC0415  needs a Vulkan loader

    monkeypatch.setenv("VKJIT_CACHE", "1")
    monkeypatch.setenv("VKJIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(pipeline, "_SLOW_SECONDS", -1.0)
    physical = vulkan_instance.physical_devices()[0]
    for _ in range(2):
        device = VulkanDevice("vulkan:0", vulkan_instance, physical)
        x = values()
        (y,) = device.load(chain({1})).run([device.upload(x)])
        np.testing.assert_array_equal(download(device, y), x * 6 + 2)
        device.close()
        (saved,) = (tmp_path / "vulkan").iterdir()
        assert saved.stat().st_size > 32


def test_unknown_names_and_settings_are_refused(vulkan_instance, monkeypatch: pytest.MonkeyPatch):
    from vkjit.runtime import vulkan as package  # noqa: PLC0415  needs a Vulkan loader
    from vkjit.runtime.vulkan.features import query  # noqa: PLC0415  needs a Vulkan loader

    with pytest.raises(ArgumentError, match="'vulkan:99' does not exist"):
        package.open_device("vulkan:99")
    monkeypatch.setenv("VKJIT_VULKAN_ADDRESSING", "pigeon")
    with pytest.raises(ConfigError, match="got 'pigeon', expected one of device_address"):
        query(vulkan_instance, vulkan_instance.physical_devices()[0])


def test_discovery_lists_software_devices_as_such(vulkan_instance):
    from vkjit.runtime import vulkan as package  # noqa: PLC0415  needs a Vulkan loader

    found = package.discover()
    assert [info.name for info in found] == [f"vulkan:{i}" for i in range(len(found))]
    for info in found:
        if "llvmpipe" in info.description:
            assert info.device_class.value == "software"
