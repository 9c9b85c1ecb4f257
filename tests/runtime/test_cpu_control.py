"""Loops, whiles, branches and host calls of hand-made plans, on the CPU and the interpreter."""

from __future__ import annotations

import _thread
import functools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from vkjit.lowering.artifact import (
    Block,
    Branch,
    Copy,
    HostCall,
    Launch,
    Loop,
    Move,
    Plan,
    PlannedBuffer,
    Range,
    Role,
    Step,
    While,
    leaves,
)
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Kernel, Value
from vkjit.lowering.kernel.types import I32, I64, Access, CmpOp
from vkjit.runtime import get_device


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Interrupts are errors, also where the process was started to ignore them (``nohup``)."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals are raised in the main thread")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


COUNT = 16
SLOT = 4 * COUNT
Formula = Callable[..., Value]


@pytest.fixture(params=["reference", "cpu"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def pointwise(title: str, inputs: int, formula: Formula, count: int = COUNT) -> Kernel:
    """``out[i] = formula(b, *inputs[i])`` of i32, as one task."""
    b = Builder(title, index_type=I64)
    given = [b.buffer(f"x{k}", I32, count, Access.READ) for k in range(inputs)]
    out = b.buffer("out", I32, count, Access.WRITE)
    with b.loop(b.index(0), b.index(count)) as loop:
        b.store(out, loop.index, formula(b, *(b.load(x, loop.index) for x in given)))
    return b.finish((1, 1, 1))


@functools.cache
def plus(amount: int) -> Kernel:
    return pointwise(f"plus{amount}", 1, lambda b, x: b.add(x, b.const(I32, amount)))


@functools.cache
def total() -> Kernel:
    return pointwise("total", 2, lambda b, x, y: b.add(x, y))


@functools.cache
def below(limit: int) -> Kernel:
    def formula(b: Builder, x: Value) -> Value:
        less = b.compare(CmpOp.LT, x, b.const(I32, limit))
        return b.select(less, b.const(I32, 256), b.const(I32, 0))  # true by its second byte

    return pointwise("below", 1, formula, 1)


def launch(kernel: Kernel, *ranges: Range) -> Launch:
    return Launch(kernel, ranges, (kernel.name,))


def block(*steps: Step) -> Block:
    return Block(steps, frozenset(range(1, len(steps))))


def plan(sizes: Sequence[tuple[Role, int]], *steps: Step) -> Plan:
    """Buffers of these numbers of slots."""
    seen: dict[Role, int] = {}
    buffers: list[PlannedBuffer] = []
    for role, slots in sizes:
        position = seen[role] = seen.get(role, -1) + 1
        buffers.append(PlannedBuffer(role, slots * SLOT, position))
    return Plan("plan", tuple(buffers), steps, frozenset(range(1, len(steps))), 0)


def slot(buffer: int, number: int = 0, *moves: Move) -> Range:
    return Range(buffer, number * SLOT, SLOT, moves)


def first(buffer: int, *moves: Move) -> Range:
    """The first element of a buffer."""
    return Range(buffer, 0, 4, moves)


def stacked(depth: int, length: int, size: int = SLOT) -> Move:
    return Move(depth, size, length)


def backwards(depth: int, length: int) -> Move:
    return Move(depth, SLOT, length, length - 1, -1)


def carry(depth: int, begin: int = 0) -> Move:
    return Move(depth, SLOT, 2, begin)


def call(function: Callable[..., object], *ranges: Range) -> HostCall:
    types = tuple((np.dtype(np.int32), (place.size // 4,)) for place in ranges)
    return HostCall(function, ranges, types, ("call",))


def upload(name: str, *arrays: np.ndarray) -> list[Any]:
    return [get_device(name).upload(np.ascontiguousarray(a, np.int32)) for a in arrays]


def download(name: str, buffer: Any) -> np.ndarray:
    return np.array(get_device(name).download(buffer, np.int32, (buffer.nbytes // SLOT, COUNT)))


def run(name: str, of: Plan, *arrays: np.ndarray) -> list[np.ndarray]:
    """The outputs, as rows of slots."""
    outputs = get_device(name).load(of).run(upload(name, *arrays))
    return [download(name, out) for out in outputs]


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-50, 50, (count, COUNT)).astype(np.int32)


def running_sum(length: int, move: Callable[[int, int], Move], times: int = 1) -> Plan:
    """Carries of two slots in the arena; stacked inputs and outputs move, ``times`` over."""
    body = block(
        launch(total(), slot(3, 0, carry(0)), slot(0, 0, move(0, length)), slot(3, 0, carry(0, 1))),
        Copy(slot(3, 0, carry(0, 1)), slot(1, 0, move(0, length))),
    )
    sizes = [(Role.INPUT, length), (Role.OUTPUT, length), (Role.OUTPUT, 1), (Role.ARENA, 2)]
    clear = launch(pointwise("zero", 0, lambda b: b.const(I32, 0)), slot(3))
    end = Copy(slot(3, length % 2), slot(2))
    return plan(sizes, clear, Loop(body, length), end)


@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize("move", [stacked, backwards])
def test_a_loop_moves_its_ranges_in_each_turn(name: str, length: int, move: Any) -> None:
    x = rows(length)
    got = run(name, running_sum(length, move), x)
    order = x if move is stacked else x[::-1]
    sums = np.cumsum(order, 0, dtype=np.int32)
    np.testing.assert_array_equal(got[0], sums if move is stacked else sums[::-1])
    np.testing.assert_array_equal(got[1][0], sums[-1])


def test_a_loop_without_turns_does_nothing(name: str) -> None:
    body = block(
        launch(plus(1), slot(1, 0, carry(0)), slot(1, 0, carry(0, 1))),
        Loop(block(launch(plus(1), slot(1, 0, stacked(1, 2)), slot(1))), 3),
    )
    x = rows(1)
    (got,) = run(name, plan([(Role.INPUT, 1), (Role.OUTPUT, 1)], Copy(slot(0), slot(1)),
                            Loop(body, 0)), x)  # fmt: skip
    np.testing.assert_array_equal(got, x)


def test_ranges_move_with_each_loop_around_them(name: str) -> None:
    outer, inner = 3, 4
    moves = (Move(0, inner * SLOT, outer, outer - 1, -1), stacked(1, inner))
    body = block(launch(total(), slot(0, 0, *moves), slot(1, 0, stacked(0, outer)),
                        slot(2, 0, *moves)))  # fmt: skip
    x, y = rows(outer * inner, 1), rows(outer, 2)
    sizes = [(Role.INPUT, outer * inner), (Role.INPUT, outer), (Role.OUTPUT, outer * inner)]
    (got,) = run(name, plan(sizes, Loop(block(Loop(body, inner)), outer)), x, y)
    want = x.reshape(outer, inner, COUNT)[::-1] + y[:, None]
    np.testing.assert_array_equal(got, want[::-1].reshape(-1, COUNT))


def test_loops_one_after_another_count_for_themselves(name: str) -> None:
    body = block(launch(plus(1), slot(0, 0, stacked(0, 2)), slot(1, 0, stacked(0, 2))))
    other = block(launch(plus(2), slot(0, 0, backwards(0, 3)), slot(2, 0, stacked(0, 3))))
    x = rows(3)
    sizes = [(Role.INPUT, 3), (Role.OUTPUT, 2), (Role.OUTPUT, 3)]
    got = run(name, plan(sizes, Loop(body, 2), Loop(other, 3)), x)
    np.testing.assert_array_equal(got[0], x[:2] + 1)
    np.testing.assert_array_equal(got[1], x[::-1] + 2)


@pytest.mark.parametrize("start", [-3, 4, 5, 9])
def test_a_while_runs_until_its_predicate_is_zero(name: str, start: int) -> None:
    condition = block(launch(below(5), first(1), first(2)))
    body = block(launch(plus(1), slot(1), slot(2, 1)), Copy(slot(2, 1), slot(1)))
    x = np.full((1, COUNT), start, np.int32)
    sizes = [(Role.INPUT, 1), (Role.OUTPUT, 1), (Role.ARENA, 2)]
    steps = (Copy(slot(0), slot(1)), While(condition, first(2), body))
    (got,) = run(name, plan(sizes, *steps), x)
    np.testing.assert_array_equal(got, np.maximum(x, 5))


@pytest.mark.parametrize(("index", "taken"), [(-7, 0), (0, 0), (1, 1), (2, 2), (3, 2), (99, 2)])
def test_a_branch_clamps_its_index(name: str, index: int, taken: int) -> None:
    branches = tuple(block(launch(plus(10 * k), slot(0), slot(2))) for k in range(3))
    x, choice = rows(1), np.full((1, COUNT), index, np.int32)
    sizes = [(Role.INPUT, 1), (Role.INPUT, 1), (Role.OUTPUT, 1)]
    (got,) = run(name, plan(sizes, Branch(first(1), branches)), x, choice)
    np.testing.assert_array_equal(got, x + 10 * taken)


def test_a_branch_inside_a_loop_reads_an_index_that_moves(name: str) -> None:
    length = 5
    branches = (
        block(launch(plus(1), slot(0, 0, stacked(0, length)), slot(2, 0, stacked(0, length)))),
        block(Loop(block(launch(plus(7), slot(0, 0, stacked(0, length)),
                                slot(2, 0, stacked(0, length)))), 2)),
        block(),
    )  # fmt: skip
    x, out = rows(length), np.array([0, 1, 1, 0, 1])
    choice = np.repeat(out[:, None], COUNT, 1)
    sizes = [(Role.INPUT, length), (Role.INPUT, length), (Role.OUTPUT, length)]
    chosen = Branch(first(1, stacked(0, length)), branches)
    (got,) = run(name, plan(sizes, Loop(block(chosen), length)), x, choice)
    np.testing.assert_array_equal(got, x + np.where(out, 7, 1)[:, None])


def counted_loop(function: Callable[..., object], length: int = 4) -> Plan:
    """Calls ``function(x[t], x[0])`` in each turn; buffer 1 is the sum of all."""
    body = block(
        call(function, slot(0, 0, stacked(0, length)), first(0)),
        launch(plus(1), slot(0, 0, stacked(0, length)), slot(1, 0, stacked(0, length))),
    )
    return plan([(Role.INPUT, length), (Role.OUTPUT, length)], Loop(body, length))


def test_the_host_is_called_in_order_with_copies(name: str) -> None:
    seen: list[tuple[np.ndarray, np.ndarray, int]] = []

    def function(row: np.ndarray, one: np.ndarray) -> None:
        seen.append((row.copy(), one.copy(), threading.get_ident()))
        row[:] = 0  # a copy: the plan does not see it

    x = rows(4)
    (got,) = run(name, counted_loop(function), x)
    np.testing.assert_array_equal(got, x + 1)
    assert [thread for _, _, thread in seen] == [threading.get_ident()] * 4
    for row, (given, one, _) in zip(x, seen, strict=True):
        np.testing.assert_array_equal(given, row)
        assert one == x[0, 0]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(3)])
def test_what_the_host_raises_ends_the_run_at_once(name: str, error: BaseException) -> None:
    calls: list[int] = []

    def function(row: np.ndarray, one: np.ndarray) -> None:
        del row, one
        calls.append(1)
        if len(calls) == 2:
            raise error

    loaded = get_device(name).load(counted_loop(function))
    with pytest.raises(type(error)) as caught:
        loaded.run(upload(name, rows(4)))
    assert caught.value is error
    assert len(calls) == 2
    (out,) = loaded.run(upload(name, rows(4)))  # and the plan still runs
    np.testing.assert_array_equal(download(name, out), rows(4) + 1)


def test_a_failed_run_gives_its_memory_back() -> None:
    def function(row: np.ndarray) -> None:
        raise ValueError(row[0])

    device = get_device("cpu")
    big = plan([(Role.INPUT, 1), (Role.OUTPUT, 1), (Role.ARENA, 1 << 12)], call(function, slot(0)))
    loaded = device.load(big)
    inputs = upload("cpu", rows(1))
    before = device.memory_stats().live_bytes
    for _ in range(3):
        with pytest.raises(ValueError, match=str(rows(1)[0, 0])):
            loaded.run(inputs)
    assert device.memory_stats().live_bytes == before


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_while_native_code_runs_reaches_the_caller_of_the_run() -> None:
    turns = 200
    seen: list[int] = []

    def function(row: np.ndarray) -> None:
        seen.append(1)
        if len(seen) == 1:
            threading.Timer(0.05, _thread.interrupt_main).start()
        time.sleep(0.005)
        del row

    spin = Loop(block(launch(plus(1), slot(0), slot(1))), 20000)
    body = block(call(function, slot(0)), spin)
    loaded = get_device("cpu").load(plan([(Role.INPUT, 1), (Role.OUTPUT, 1)], Loop(body, turns)))
    with pytest.raises(KeyboardInterrupt):
        loaded.run(upload("cpu", rows(1)))
    assert 1 < len(seen) < turns


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_while_loop_that_does_not_end() -> None:
    condition = block(launch(below(5), first(1), first(2)))
    body = block(launch(plus(0), slot(0), slot(1)))
    sizes = [(Role.INPUT, 1), (Role.OUTPUT, 1), (Role.ARENA, 2)]
    steps = (Copy(slot(0), slot(1)), While(condition, first(2), body))
    loaded = get_device("cpu").load(plan(sizes, *steps))
    threading.Timer(0.05, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        loaded.run(upload("cpu", np.zeros((1, COUNT), np.int32)))
    (out,) = loaded.run(upload("cpu", np.full((1, COUNT), 7, np.int32)))
    np.testing.assert_array_equal(download("cpu", out), np.full((1, COUNT), 7))


def test_a_host_call_may_run_the_same_plan_again(name: str) -> None:
    depth: list[int] = []

    def function(row: np.ndarray, one: np.ndarray) -> None:
        del one
        if len(depth) < 3:
            depth.append(1)
            (out,) = loaded.run(upload(name, rows(4)))
            np.testing.assert_array_equal(download(name, out), rows(4) + 1)
        assert row.shape == (COUNT,)

    loaded = get_device(name).load(counted_loop(function))
    (out,) = loaded.run(upload(name, rows(4)))
    np.testing.assert_array_equal(download(name, out), rows(4) + 1)
    assert len(depth) == 3


def test_times_of_leaves_are_summed_over_the_turns() -> None:
    seen: list[int] = []
    length = 50
    body = block(
        launch(plus(1), slot(0), slot(1)),
        call(lambda row: seen.append(row[0]), slot(0)),
        Branch(first(0), (block(Copy(slot(0), slot(1))), block(launch(plus(2), slot(0), slot(1))))),
    )
    of = plan([(Role.INPUT, 1), (Role.OUTPUT, 1)], Loop(body, length), Copy(slot(0), slot(1)))
    loaded = get_device("cpu").load(of)
    begin = time.perf_counter()
    _, times = loaded.timed(upload("cpu", np.ones((1, COUNT), np.int32)))
    wall = time.perf_counter() - begin
    assert len(times) == len(list(leaves(of.steps)))
    assert [t.runs for t in times] == [length, length, 0, length, 1]
    assert all(t.seconds >= 0 for t in times)
    assert times[2].seconds == 0
    assert sum(t.seconds for t in times) <= wall
    assert len(seen) == length


def test_threads_run_loops_at_the_same_time() -> None:
    loaded = get_device("cpu").load(running_sum(50, stacked))
    x = rows(50)
    failures: list[str] = []

    def work() -> None:
        for _ in range(20):
            out = loaded.run(upload("cpu", x))[0]
            if not np.array_equal(download("cpu", out), np.cumsum(x, 0)):
                failures.append("wrong")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
