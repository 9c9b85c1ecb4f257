"""Plans in which the host decides: loops until a flag falls, branches, calls of functions."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.runtime.vulkan.plans import (
    COUNT,
    SLOT,
    Maker,
    along,
    at,
    below,
    block,
    check,
    clear,
    expected,
    increment,
    loop,
    low_bits,
    mix,
    plan_of,
    run,
    start,
)
from vkjit.errors import ArgumentError, DeviceError
from vkjit.lowering.artifact import (
    Branch,
    Copy,
    HostCall,
    Launch,
    Plan,
    PlannedBuffer,
    Range,
    Role,
    While,
)
from vkjit.lowering.target import Addressing

KIND = (np.dtype(np.int32), (COUNT,))


def counting(limit: int) -> While:
    """Counts output 0 up to a limit; the flag is one byte."""
    test = block(Launch(below(limit), (at(1), at(2))))
    return While(test, Range(2, 0, 1), block(Launch(increment(), (at(1),))))


@pytest.mark.parametrize("limit", [-1, 0, 1, 40])
def test_while(vulkan, limit: int):
    plan = plan_of(1, 1, 1, Launch(clear(), (at(1),)), counting(limit))
    found = run(vulkan, plan, start(plan))
    np.testing.assert_array_equal(found, np.full(COUNT, max(limit, 0), np.int32))


@pytest.mark.parametrize("number", range(8))
def test_branch_is_clamped(vulkan, number: int):
    branches = tuple(block(Launch(increment(10 * n), (at(1),))) for n in range(1, 4))
    plan = plan_of(
        1,
        1,
        1,
        Launch(clear(), (at(1),)),
        Launch(low_bits(), (at(0), at(2))),
        Branch(Range(2, 0, 4), branches),
    )
    x = np.full(COUNT, number, np.int32)
    wanted = 10 * (1 + min(max(number - 2, 0), 2))
    np.testing.assert_array_equal(run(vulkan, plan, x), np.full(COUNT, wanted, np.int32))


def heard_by(function: Any, length: int) -> Plan:
    """A call in each turn, of row t and of the counter."""
    row = along(0, length)
    call = HostCall(function, (at(0, 0, row), at(1)), (KIND, KIND))
    return plan_of(
        length,
        1,
        1,
        Launch(clear(), (at(1),)),
        loop(length, Launch(increment(), (at(1),)), call, Launch(increment(10), (at(1),))),
    )


def test_calls_get_copies_in_order(vulkan):
    heard: list[tuple[np.ndarray, np.ndarray]] = []
    length = 9

    def hear(row: np.ndarray, count: np.ndarray) -> None:
        heard.append((row.copy(), count.copy()))
        row[:], count[:] = 0, 0  # copies: nobody else sees it

    plan = heard_by(hear, length)
    x = start(plan)
    found = run(vulkan, plan, x)
    np.testing.assert_array_equal(found, np.full(COUNT, 11 * length, np.int32))
    assert [int(count[0]) for _, count in heard] == [11 * turn + 1 for turn in range(length)]
    np.testing.assert_array_equal(np.stack([row for row, _ in heard]), x.reshape(length, COUNT))


def test_what_a_call_raises_ends_the_run(vulkan):
    def refuse(row: np.ndarray, count: np.ndarray) -> None:
        del row
        if count[0] > 30:
            raise ZeroDivisionError("enough")

    plan = heard_by(refuse, 9)
    loaded = vulkan.load(plan)
    x = vulkan.upload(start(plan))
    vulkan.memory_stats()
    live = vulkan.memory_stats().live_bytes
    for _ in range(3):
        with pytest.raises(ZeroDivisionError, match="enough"):
            loaded.run([x])
        assert vulkan.memory_stats().live_bytes == live
        assert vulkan.queue.is_finished(vulkan.queue.submitted)
    assert len(loaded._drivers) == 1
    np.testing.assert_array_equal(vulkan.download(x, np.int32, (9 * COUNT,)), start(plan))


def test_what_was_taken_over_is_lost_when_a_call_raises(vulkan):
    def refuse(_: np.ndarray) -> None:
        raise ZeroDivisionError("enough")

    buffers = (
        PlannedBuffer(Role.INPUT, SLOT, 0),
        PlannedBuffer(Role.OUTPUT, SLOT, 0, donated=0),
        PlannedBuffer(Role.INPUT, SLOT, 1),
    )
    steps = (Launch(increment(), (at(1),)), HostCall(refuse, (at(1),), (KIND,)))
    loaded = vulkan.load(Plan("taken", buffers, steps, frozenset(), 2 * SLOT))
    x, kept = (vulkan.upload(np.zeros(COUNT, np.int32)) for _ in range(2))
    live = vulkan.memory_stats().live_bytes
    with pytest.raises(ZeroDivisionError):
        loaded.run([x, kept], donated=(0, 1))
    assert x.released
    assert not kept.released
    assert vulkan.memory_stats().live_bytes == live - 256


def test_a_call_must_not_donate_what_is_still_read(vulkan):
    plan = heard_by(lambda *_: x.release(), 2)
    x = vulkan.upload(start(plan))
    with pytest.raises(ArgumentError, match="donated an array that this call still reads"):
        vulkan.load(plan).run([x])


def test_calls_may_run_plans(vulkan):
    """The same plan inside itself, and another in another thread that the call waits for."""
    inner = plan_of(1, 1, 1, Launch(clear(), (at(1),)), counting(3))
    results: list[int] = []

    def again(row: np.ndarray, count: np.ndarray) -> None:
        del row
        if count[0] == 1 and len(results) < 5:
            results.append(0)
            run(vulkan, plan, start(plan), loaded)
        worker = threading.Thread(
            target=lambda: results.append(int(run(vulkan, inner, start(inner))[0]))
        )
        worker.start()
        worker.join(30)

    plan = heard_by(again, 2)
    loaded = vulkan.load(plan)
    found = run(vulkan, plan, start(plan), loaded)
    np.testing.assert_array_equal(found, np.full(COUNT, 22, np.int32))
    assert set(results) == {0, 3}


def test_a_long_loop_inside_a_while(vulkan):
    """The device replays the loop anew in each turn of the host."""
    body = block(
        Launch(increment(), (at(1),)), loop(150, Launch(mix(), (at(2, 1), at(1), at(2, 1))))
    )
    test = block(Launch(below(5), (at(1), at(2))))
    plan = plan_of(
        1,
        2,
        2,
        Launch(clear(), (at(1),)),
        Launch(clear(), (at(2, 1),)),
        While(test, Range(2, 0, 1), body),
        Copy(at(2, 1), at(1, 1)),
    )
    check(vulkan, plan)


@pytest.mark.parametrize("seed", range(10))
def test_random_plans(vulkan, seed: int):
    maker = Maker(np.random.default_rng(seed), host=True)
    plan, x = maker.plan(), None
    loaded = vulkan.load(plan)
    for turn in range(2):
        x = start(plan, seed + turn)
        wanted = expected(plan, x)
        heard = maker.heard.copy()
        maker.heard.clear()
        np.testing.assert_array_equal(run(vulkan, plan, x, loaded), wanted)
        assert len(maker.heard) == len(heard)
        for got, want in zip(maker.heard, heard, strict=True):
            np.testing.assert_array_equal(got, want)
        maker.heard.clear()


def test_times_of_driven_plans(vulkan):
    plan = heard_by(lambda *_: None, 7)
    loaded = vulkan.load(plan)
    _, times = loaded.timed([vulkan.upload(start(plan))])
    assert [time.runs for time in times] == [1, 7, 7, 7]
    assert all(time.seconds > 0 for time in times)
    plan = plan_of(1, 1, 1, Launch(clear(), (at(1),)), counting(0))
    _, times = vulkan.load(plan).timed([vulkan.upload(start(plan))])
    assert [time.runs for time in times] == [1, 1, 0]


def test_a_planted_hazard_in_a_loop_is_reported(fresh):
    """Without the barrier between two steps of the body; with it there is no message."""
    device = fresh(Addressing.DESCRIPTOR)
    steps = (Launch(increment(), (at(1),)), Launch(mix(), (at(1), at(0), at(2))))
    body = block(*steps)
    assert body.barriers == {1}
    plan = plan_of(1, 1, 1, Launch(clear(), (at(1),)), loop(3, *steps))
    device.load(plan).run([device.upload(start(plan))])
    device.synchronize()
    bad = replace(plan.steps[1], body=replace(body, barriers=frozenset()))
    plan = replace(plan, steps=(plan.steps[0], bad))
    with pytest.raises(DeviceError, match=r"SYNC-HAZARD-READ[-_]AFTER[-_]WRITE"):
        device.load(plan).run([device.upload(start(plan))])
