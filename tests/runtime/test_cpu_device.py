"""The CPU device: memory, donation, views, aliasing, steps, and what it refuses."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from vkjit.errors import ArgumentError, DeviceError, InternalError, OutOfMemoryError
from vkjit.lowering.artifact import Copy, Launch, Plan, PlannedBuffer, Range, Role, Step
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Kernel
from vkjit.lowering.kernel.types import F32, I64, Access, BinOp, VecType
from vkjit.runtime import get_device
from vkjit.runtime.cpu import pool
from vkjit.runtime.cpu.device import CpuDevice
from vkjit.runtime.cpu.memory import MemoryPool, class_bytes
from vkjit.runtime.cpu.native import can_run_threads
from vkjit.runtime.device import Device

COUNT = 64
SIZE = COUNT * 4


@pytest.fixture(params=["reference", "cpu"])
def host(request: pytest.FixtureRequest) -> Device:
    return get_device(request.param)


@pytest.fixture
def cpu() -> Iterator[CpuDevice]:
    made = CpuDevice()
    yield made
    made.close()


def binary(op: BinOp, name: str = "binary") -> Kernel:
    """``z = x op y`` on 64 f32, in 4 tasks."""
    b = Builder(name, index_type=I64)
    x = b.buffer("x", F32, COUNT, Access.READ)
    y = b.buffer("y", F32, COUNT, Access.READ)
    z = b.buffer("z", F32, COUNT, Access.WRITE)
    i = b.scaled(b.workgroup_id(), 16)
    b.store(z, i, b.binary(op, b.load(x, i, 16), b.load(y, i, 16)))
    return b.finish((4, 1, 1))


def whole(buffer: int, offset: int = 0) -> Range:
    return Range(buffer, offset, SIZE)


def make_plan(buffers: list[PlannedBuffer], *steps: Step) -> Plan:
    arena = sum(b.size for b in buffers if b.role is Role.ARENA)
    return Plan("test", tuple(buffers), steps, frozenset(range(1, len(steps))), 0, arena)


def in_out(role: Role, position: int = 0, donated: int | None = None) -> PlannedBuffer:
    return PlannedBuffer(role, SIZE, position, donated)


def ramp(start: float = 0) -> np.ndarray:
    return np.arange(start, start + COUNT, dtype=np.float32)


def read(device: Device, buffer: object) -> np.ndarray:
    return device.download(buffer, np.float32, (COUNT,))  # pyright: ignore[reportArgumentType]


def test_steps_arena_constants_and_copies_in_any_order_of_buffers(host: Device) -> None:
    # out0 = copy of x; out1 = (x + c) * x, through an arena range
    buffers = [
        PlannedBuffer(Role.ARENA, 4096),
        in_out(Role.OUTPUT, 1),
        in_out(Role.CONSTANT),
        in_out(Role.INPUT),
        in_out(Role.OUTPUT, 0),
    ]
    plan = make_plan(
        buffers,
        Copy(whole(3), whole(4)),
        Launch(binary(BinOp.ADD), (whole(3), whole(2), whole(0, 1024))),
        Launch(binary(BinOp.MUL), (whole(0, 1024), whole(3), whole(1))),
    )
    loaded = host.load(plan, [host.upload(ramp(5))])
    for start in (0.0, 100.0):
        x = ramp(start)
        copied, product = loaded.run([host.upload(x)])
        np.testing.assert_array_equal(read(host, copied), x)
        np.testing.assert_array_equal(read(host, product), (x + ramp(5)) * x)


def test_donated_input_becomes_the_output(host: Device) -> None:
    plan = make_plan(
        [in_out(Role.INPUT, 0), in_out(Role.INPUT, 1), in_out(Role.OUTPUT, 0, donated=1)],
        Launch(binary(BinOp.ADD), (whole(0), whole(1), whole(2))),
    )
    loaded = host.load(plan)
    x, y = host.upload(ramp()), host.upload(ramp(7))
    (z,) = loaded.run([x, y], donated=(1,))
    assert y.released
    assert not x.released
    np.testing.assert_array_equal(read(host, z), ramp() + ramp(7))
    with pytest.raises(InternalError, match="released"):
        loaded.run([x, y], donated=(1,))
    with pytest.raises(InternalError, match=r"expected 2 with \[1\]"):
        loaded.run([x, z])


def test_other_donated_inputs_are_released(host: Device) -> None:
    plan = make_plan(
        [in_out(Role.INPUT, 0), in_out(Role.INPUT, 1), in_out(Role.OUTPUT, 0)],
        Launch(binary(BinOp.ADD), (whole(0), whole(1), whole(2))),
    )
    x, y = host.upload(ramp()), host.upload(ramp(7))
    (z,) = host.load(plan).run([x, y], donated={0})
    assert x.released
    assert not y.released
    np.testing.assert_array_equal(read(host, z), ramp() + ramp(7))


def test_fresh_memory_of_the_reference_is_nan() -> None:
    device = get_device("reference")
    plan = make_plan([in_out(Role.OUTPUT)])
    (z,) = device.load(plan).run([])
    assert np.isnan(read(device, z)).all()


def large_plan(count: int, donated: int | None) -> Plan:
    """``y = x`` for ``count`` f32."""
    return Plan(
        "copy",
        (
            PlannedBuffer(Role.INPUT, count * 4),
            PlannedBuffer(Role.OUTPUT, count * 4, donated=donated),
        ),
        () if donated is not None else (Copy(Range(0, 0, count * 4), Range(1, 0, count * 4)),),
        frozenset(),
        0,
    )


@pytest.mark.parametrize("count", [1, 100_000, (1 << 18) + 3])
def test_copies_of_any_size(cpu: CpuDevice, count: int) -> None:
    x = np.random.default_rng(0).standard_normal(count).astype(np.float32)
    (y,) = cpu.load(large_plan(count, None)).run([cpu.upload(x)])
    np.testing.assert_array_equal(cpu.download(y, np.float32, (count,)), x)


def test_a_view_shares_memory_and_outlives_its_buffer(cpu: CpuDevice) -> None:
    x = np.arange(1 << 16, dtype=np.float32)
    buffer = cpu.upload(x)
    view = cpu.download(buffer, np.float32, (256, 256))
    assert view.ctypes.data == buffer.address
    assert not view.flags.writeable
    buffer.release()
    del buffer
    gc.collect()
    other = cpu.upload(x * 0)  # would take the same block if it were free
    np.testing.assert_array_equal(view.reshape(-1), x)
    live = cpu.memory_stats().live_bytes
    del view
    assert cpu.memory_stats().live_bytes == live - class_bytes(x.nbytes)
    other.release()


def test_donation_does_not_show_in_views(cpu: CpuDevice) -> None:
    count = 1 << 14
    plan = large_plan(count, 0)
    x = np.arange(count, dtype=np.float32)
    buffer = cpu.upload(x)
    address = buffer.address
    (moved,) = cpu.load(plan).run([buffer], donated=(0,))
    assert moved.address == address  # pyright: ignore[reportAttributeAccessIssue]
    view = cpu.download(moved, np.float32, (count,))
    (again,) = cpu.load(plan).run([moved], donated=(0,))
    assert again.address != address  # pyright: ignore[reportAttributeAccessIssue]
    np.testing.assert_array_equal(cpu.download(again, np.float32, (count,)), view)


def test_memory_comes_back_and_is_counted(cpu: CpuDevice) -> None:
    assert cpu.memory_stats().live_bytes == 0
    buffers = [cpu.allocate(1000) for _ in range(10)]
    assert cpu.memory_stats().live_bytes == 10 * 1024
    assert all(b.address % 64 == 0 for b in buffers)
    addresses = {b.address for b in buffers}
    del buffers
    stats = cpu.memory_stats()
    assert (stats.live_bytes, stats.pooled_bytes, stats.peak_bytes) == (0, 10240, 10240)
    again = cpu.allocate(1024)
    assert again.address in addresses
    again.release()
    again.release()
    assert again.released
    assert cpu.memory_stats().live_bytes == 0
    cpu.memory.trim()
    assert cpu.memory_stats().pooled_bytes == 0


def test_size_classes_waste_little() -> None:
    for nbytes in [*range(0, 5000, 7), 10**6 + 1, 10**9 + 1]:
        size = class_bytes(nbytes)
        assert size >= max(nbytes, 64)
        assert size % 64 == 0
        assert size - nbytes < max(64, nbytes / 16 + 1) or nbytes == 0
        assert class_bytes(size) == size


def test_memory_has_a_limit() -> None:
    memory = MemoryPool(limit=1 << 20, pooled_limit=1 << 20)
    first = memory.take(class_bytes(700_000))
    with pytest.raises(OutOfMemoryError, match=r"cannot allocate 458,752 bytes: 720,896 of 1,048,"):
        memory.take(class_bytes(450_000))
    memory.give(first, class_bytes(700_000))
    memory.give(memory.take(class_bytes(1_000_000)), class_bytes(1_000_000))
    assert memory.stats().live_bytes == 0


def test_pool_keeps_no_more_than_allowed() -> None:
    memory = MemoryPool(limit=1 << 30, pooled_limit=2048)
    taken = [memory.take(1024) for _ in range(4)]
    for address in taken:
        memory.give(address, 1024)
    assert memory.stats().pooled_bytes == 2048
    memory.trim()


def test_overlapping_arguments_are_seen(host: Device) -> None:
    """The output is the input moved by 16 elements; each task reads before it writes."""
    b = Builder("shift", index_type=I64)
    x = b.buffer("x", F32, COUNT, Access.READ)
    z = b.buffer("z", F32, COUNT, Access.WRITE)
    with b.loop(b.index(0), b.index(3), carried=(b.load(x, b.index(0), 16),)) as loop:
        following = b.scaled(b.offset(loop.index, 1), 16)
        next_ = b.load(x, following, 16)
        b.store(z, b.scaled(loop.index, 16), b.add(loop.carried[0], next_))
        # Overlapping memory: this load must not be merged with one from before the store.
        loop.yields(b.load(x, following, 16))
    kernel = b.finish((1, 1, 1))
    plan = make_plan(
        [PlannedBuffer(Role.ARENA, 1024), in_out(Role.INPUT), in_out(Role.OUTPUT)],
        Copy(whole(1), whole(0, 64)),
        Launch(kernel, (whole(0, 64), whole(0, 64))),
        Copy(whole(0, 64), whole(2)),
    )
    (got,) = host.load(plan).run([host.upload(ramp())])
    want = ramp().reshape(4, 16)
    for i in range(3):
        want[i] += want[i + 1]
    np.testing.assert_array_equal(read(host, got).reshape(4, 16), want)


def test_runs_from_several_threads_at_once(cpu: CpuDevice) -> None:
    buffers = [PlannedBuffer(Role.ARENA, SIZE), in_out(Role.INPUT), in_out(Role.OUTPUT)]
    plan = make_plan(
        buffers,
        Launch(binary(BinOp.ADD), (whole(1), whole(1), whole(0))),
        Launch(binary(BinOp.MUL), (whole(0), whole(1), whole(2))),
    )
    loaded = cpu.load(plan)
    wrong: list[int] = []

    def work(seed: int) -> None:
        x = ramp(seed)
        buffer = cpu.upload(x)
        for _ in range(300):
            (y,) = loaded.run([buffer])
            if not np.array_equal(read(cpu, y), 2 * x * x):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_profile_times_each_step(cpu: CpuDevice) -> None:
    buffers = [PlannedBuffer(Role.ARENA, SIZE), in_out(Role.INPUT), in_out(Role.OUTPUT)]
    plan = make_plan(
        buffers,
        Launch(binary(BinOp.ADD), (whole(1), whole(1), whole(0))),
        Copy(whole(0), whole(2)),
    )
    (y,), times = cpu.load(plan).timed([cpu.upload(ramp())])
    np.testing.assert_array_equal(read(cpu, y), 2 * ramp())
    assert len(times) == 2
    assert all(0 <= t.seconds < 60 for t in times)
    assert times[1].begin == times[0].begin + times[0].seconds


def test_equal_plans_share_code(cpu: CpuDevice) -> None:
    def plan(name: str) -> Plan:
        step = Launch(binary(BinOp.ADD, name), (whole(0), whole(0), whole(1)))
        return make_plan([in_out(Role.INPUT), in_out(Role.OUTPUT)], step)

    assert cpu.load(plan("a"))._library is cpu.load(plan("b"))._library


def test_wrong_calls_are_refused(cpu: CpuDevice) -> None:
    plan = make_plan([in_out(Role.INPUT), in_out(Role.OUTPUT)], Copy(whole(0), whole(1)))
    loaded = cpu.load(plan)
    with pytest.raises(InternalError, match="0 inputs"):
        loaded.run([])
    with pytest.raises(InternalError, match="given 1 constants"):
        cpu.load(plan, [cpu.upload(ramp())])
    with pytest.raises(InternalError, match="not contiguous"):
        cpu.upload(ramp()[::2])
    with pytest.raises(InternalError, match=r"float32\[65\] was asked of a buffer of 256 bytes"):
        cpu.upload(ramp()).as_numpy(np.float32, (65,))
    with pytest.raises(InternalError, match="a buffer of device reference"):
        cpu.load(
            make_plan([in_out(Role.CONSTANT), in_out(Role.OUTPUT)]),
            [get_device("reference").upload(ramp())],
        )
    given_twice = make_plan(
        [in_out(Role.INPUT, 0), in_out(Role.INPUT, 1), in_out(Role.OUTPUT, 0, donated=0)]
    )
    x = cpu.upload(ramp())
    with pytest.raises(InternalError, match="two positions"):
        cpu.load(given_twice).run([x, x], donated=(0,))
    assert not x.released


def test_a_closed_device_loads_nothing() -> None:
    device = CpuDevice()
    device.close()
    with pytest.raises(DeviceError, match="closed"):
        device.load(make_plan([in_out(Role.OUTPUT)]))


def test_thread_count_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    if not can_run_threads():
        pytest.skip("the pool needs Linux futexes")
    monkeypatch.setenv("VKJIT_NUM_THREADS", "3")
    assert pool.thread_count() == 3
    monkeypatch.setenv("VKJIT_NUM_THREADS", "none")
    with pytest.raises(ArgumentError, match="VKJIT_NUM_THREADS: got 'none'"):
        pool.thread_count()


def test_describe_names_processor_and_threads(cpu: CpuDevice) -> None:
    text = cpu.describe()
    assert re.search(r"cpu: .+, \d+ threads", text)
    assert "llvmlite" in text


def test_micro_kernel_keeps_its_accumulators_in_registers(cpu: CpuDevice) -> None:
    """A 12 x 2 tile of 16-lane accumulators: the shape of the matrix product's inner loop."""
    if cpu.target.vector_bytes < 64:
        pytest.skip("needs 32 vector registers of 64 bytes")
    rows, columns, depth = 12, 2, 64
    b = Builder("micro", index_type=I64)
    x = b.buffer("x", F32, depth * rows, Access.READ)
    y = b.buffer("y", F32, depth * columns * 16, Access.READ)
    z = b.buffer("z", F32, rows * columns * 16, Access.WRITE)
    zero = b.const(VecType(F32, 16), 0.0)
    with b.loop(b.index(0), b.index(depth), carried=[zero] * (rows * columns)) as loop:
        right = [
            b.load(y, b.offset(b.scaled(loop.index, columns * 16), 16 * n), 16)
            for n in range(columns)
        ]
        sums = list(loop.carried)
        for m in range(rows):
            left = b.splat(b.load(x, b.offset(b.scaled(loop.index, rows), m)), 16)
            for n in range(columns):
                sums[m * columns + n] = b.fma(left, right[n], sums[m * columns + n])
        loop.yields(*sums)
    for position, result in enumerate(loop.results):
        b.store(z, b.index(16 * position), result)
    kernel = b.finish((1, 1, 1))
    sizes = [buffer.length * 4 for buffer in kernel.buffers]
    roles = [(Role.INPUT, 0), (Role.INPUT, 1), (Role.OUTPUT, 0)]
    buffers = [PlannedBuffer(r, s, p) for (r, p), s in zip(roles, sizes, strict=True)]
    step = Launch(kernel, tuple(Range(i, 0, size) for i, size in enumerate(sizes)))
    plan = make_plan(buffers, step)

    rng = np.random.default_rng(0)
    left, right_ = rng.standard_normal((depth, rows)), rng.standard_normal((depth, columns * 16))
    left, right_ = left.astype(np.float32), right_.astype(np.float32)
    (got,) = cpu.load(plan).run([cpu.upload(left), cpu.upload(right_)])
    np.testing.assert_allclose(
        cpu.download(got, np.float32, (rows, columns * 16)), left.T @ right_, rtol=1e-4, atol=1e-4
    )
    assembly = cpu.assembly(plan)
    body = assembly[assembly.index("k0:") : assembly.index(".Lfunc_end0")]
    assert len(re.findall(r"vfmadd", body)) == rows * columns
    assert re.findall(r"zmm\d+, -?\d*\(%r[sb]p", body) == []  # no spills
