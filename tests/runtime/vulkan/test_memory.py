"""Heaps of the Vulkan device: blocks, gaps, limits, roll-back; transfers through each memory."""

from __future__ import annotations

import gc
import itertools
import re
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import vkjit.numpy as jnp
from vkjit.api.staged import lower
from vkjit.errors import ConfigError, OutOfMemoryError
from vkjit.lowering.target import Addressing
from vkjit.trace import aval_of, trace

try:
    from vkjit.runtime.vulkan import memory as memory_module
except OSError as error:
    pytest.skip(f"no Vulkan loader: {error}", allow_module_level=True)

from vkjit.runtime.vulkan import transfers as transfers_module
from vkjit.runtime.vulkan.memory import Heap
from vkjit.runtime.vulkan.memory_types import MemoryKind

MIB = 1 << 20


@pytest.fixture
def opened(fresh):
    return fresh(Addressing.DESCRIPTOR)


@pytest.fixture
def heap(opened):
    wait = opened.queue.settle
    made = Heap(opened.logical, opened.capabilities, MemoryKind.STAGING, wait, 128 * MIB)
    yield made
    made.close()


# -- blocks ---------------------------------------------------------------------------------------


def test_spans_never_overlap_and_gaps_join_again(heap):
    rng = np.random.default_rng(0)
    held = []
    for _ in range(400):
        if held and rng.random() < 0.45:
            heap.give(held.pop(rng.integers(len(held))), 0)
        else:
            held.append(heap.take(int(rng.integers(1, 600_000))))
        if rng.random() < 0.05:
            heap.trim()
        taken = sorted((s.block.address or id(s.block), s.offset, s.size) for s in held)
        for (block, offset, size), (other, later, _) in itertools.pairwise(taken):
            assert block != other or offset + size <= later
    assert heap.live == sum(span.size for span in held)
    assert all(span.offset % memory_module.ALIGNMENT == 0 for span in held)
    for span in held:
        heap.give(span, 0)
    heap.trim()
    assert (heap.live, heap.reserved) == (0, 0)


def test_scattered_spans_become_room_for_a_large_one(heap):
    """Every other span comes back, then the rest: the gaps between must not stay apart."""
    spans = [heap.take(MIB) for _ in range(64)]
    assert heap.reserved == 64 * MIB
    for span in spans[::2] + spans[1::2]:
        heap.give(span, 0)
    whole = heap.take(64 * MIB)
    assert heap.reserved == 64 * MIB
    heap.give(whole, 0)


def test_the_limit_holds_and_the_pool_is_trimmed_before_giving_up(heap):
    first = heap.take(64 * MIB)
    heap.give(first, 0)
    kept = heap.take(MIB)
    assert heap.available() == 127 * MIB
    with pytest.raises(OutOfMemoryError, match="134217728 bytes asked, 1048576 in use"):
        heap.take(128 * MIB)
    heap.give(kept, 0)
    assert heap.take(128 * MIB).size == 128 * MIB  # the old block had to go first
    assert heap.reserved == 128 * MIB


def test_small_arrays_do_not_wait_for_the_device_while_there_is_room(heap):
    busy = heap.take(256)
    heap.give(busy, 7)
    assert heap.take_finished(256, 6) is not busy
    assert heap.take_finished(256, 7) is busy


def test_garbage_is_given_back_while_another_thread_has_the_heap(heap):
    """Collection runs in any thread, which may hold another heap: it must not wait for this one."""
    span = heap.take(256)
    thread = threading.Thread(target=heap.give, args=(span, 0), daemon=True)
    with heap._lock:
        thread.start()
        thread.join(timeout=10)
        assert not thread.is_alive()
    assert heap.live == 0
    assert heap.take(256) is span


def test_an_allocation_that_fails_halfway_leaves_nothing(opened, heap, monkeypatch):
    def refuse(*_: object) -> int:
        return memory_module.constants.VK_ERROR_MEMORY_MAP_FAILED

    before = dict(opened.logical.live)
    with monkeypatch.context() as patch:
        patch.setattr(opened.logical.functions, "vkMapMemory", refuse, raising=False)
        with pytest.raises(OutOfMemoryError, match="VK_ERROR_MEMORY_MAP_FAILED"):
            heap.take(256)
    assert {k: n for k, n in opened.logical.live.items() if n} == {
        k: n for k, n in before.items() if n
    }
    assert (heap.live, heap.reserved) == (0, 0)
    heap.take(256)


def test_the_limit_of_the_environment(fresh, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VKJIT_VULKAN_MEMORY_LIMIT", str(70 * MIB))
    opened = fresh(Addressing.DESCRIPTOR)
    assert opened.memory_stats().limit_bytes == 70 * MIB
    with pytest.raises(OutOfMemoryError, match="73400320"):
        opened.upload(np.zeros(71 * MIB, np.uint8))
    assert opened.memory_stats().live_bytes == 0
    assert opened.upload(np.zeros(60 * MIB, np.uint8)).nbytes == 60 * MIB


def test_arrays_in_cycles_make_room_before_memory_is_short(fresh, monkeypatch):
    monkeypatch.setenv("VKJIT_VULKAN_MEMORY_LIMIT", str(2 * MIB))
    device = fresh(Addressing.DESCRIPTOR)
    gc.disable()
    try:
        cycle: list[object] = [device.allocate(2 * MIB)]
        cycle.append(cycle)
        del cycle
        assert device.memory_stats().live_bytes == 2 * MIB
        device.allocate(MIB)
    finally:
        gc.enable()


def test_a_limit_that_is_no_number(fresh, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VKJIT_VULKAN_MEMORY_LIMIT", "1GB")
    with pytest.raises(ConfigError, match="VKJIT_VULKAN_MEMORY_LIMIT: got '1GB', expected a num"):
        fresh(Addressing.DESCRIPTOR)


# -- transfers ------------------------------------------------------------------------------------


@pytest.fixture
def discrete(opened, monkeypatch: pytest.MonkeyPatch):
    """What a device does whose memory the host cannot see, but for a part that it can write."""
    monkeypatch.setattr(transfers_module, "CHUNK", 4096)
    monkeypatch.setattr(transfers_module, "_WORTH_THREADS", 1000)
    monkeypatch.setattr(transfers_module, "_THREADS", 3)
    opened.memory.is_mapped = False
    wait = opened.queue.settle
    small = Heap(opened.logical, opened.capabilities, MemoryKind.DIRECT, wait)
    small.is_cached = False
    monkeypatch.setattr(opened, "_small", small)
    yield opened
    opened.synchronize()
    small.close()


@pytest.mark.parametrize("size", [1, 4096, 4097, 9 * 4096 + 5])
def test_large_arrays_go_through_more_chunks_than_stages(discrete, monkeypatch, size: int):
    monkeypatch.setattr(discrete, "_small", None)
    x = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    buffer = discrete.upload(x)
    wanted = x.copy()
    x[:] = 0  # the caller may change its array at once
    assert buffer.span.mapped == 0
    np.testing.assert_array_equal(discrete.download(buffer, np.uint8, (size,)), wanted)


def test_small_arrays_are_written_straight_and_read_through_staging(discrete):
    x = np.arange(100, dtype=np.float32)
    before = discrete.queue.submitted
    buffer = discrete.upload(x)
    assert buffer.span.mapped
    assert discrete.queue.submitted == before
    np.testing.assert_array_equal(discrete.download(buffer, np.float32, (100,)), x)
    assert discrete.queue.submitted == before + 1
    assert discrete.memory_stats().live_bytes == 512
    buffer.release()
    assert discrete.memory_stats().live_bytes == 0


def test_mapped_files_are_uploaded_without_a_copy_on_the_host(discrete, tmp_path: Path):
    size = 2 * MIB
    path = tmp_path / "weights"
    np.random.default_rng(0).integers(0, 256, size, np.uint8).tofile(path)
    mapped = np.memmap(path, np.uint8, "r")
    discrete.upload(mapped[: MIB // 4])
    tracemalloc.start()
    buffer = discrete.upload(mapped)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MIB // 2
    np.testing.assert_array_equal(discrete.download(buffer, np.uint8, (size,)), mapped)


# -- what a call needs ----------------------------------------------------------------------------


def program(x):
    return jnp.tanh(x @ x) @ x


def test_a_call_that_cannot_fit_is_refused_with_a_table(fresh, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VKJIT_VULKAN_MEMORY_LIMIT", str(192 << 10))
    device = fresh(Addressing.DEVICE_ADDRESS)
    traced = trace(lambda x: [program(x)], [aval_of(np.ones((128, 128), np.float32))], "program")
    plan = lower(traced, device.target).plan
    x = device.upload(np.ones((128, 128), np.float32))
    loaded = device.load(plan)
    held = device.allocate(64 << 10)
    with pytest.raises(OutOfMemoryError) as caught:
        loaded.run([x])
    message = str(caught.value)
    assert (
        "program needs 192.00 KiB, 128.00 KiB of it new; 64.00 KiB are free of 192.00 KiB"
        in message
    )
    assert re.search(
        r"inputs +64.00 KiB\n +outputs +64.00 KiB\n.*\n +temporaries +64.00 KiB", message
    )
    assert re.search(r"64.00 KiB  temporary made by .*tanh at .*test_memory.py:\d+", message)
    assert device.memory_stats().live_bytes == 128 << 10
    assert not x.released
    held.release()
    (y,) = loaded.run([x])
    assert device.download(y, np.float32, (128, 128))[0, 0] == 128
