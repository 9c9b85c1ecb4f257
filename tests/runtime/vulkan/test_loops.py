"""Counted loops: unrolled where short, replayed by the device, or driven where nothing else can."""

from __future__ import annotations

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
    block,
    carry,
    check,
    clear,
    expected,
    increment,
    loop,
    mix,
    plan_of,
    run,
    start,
)
from vkjit.errors import DeviceError
from vkjit.lowering.artifact import Copy, Launch, Loop, Plan, Range
from vkjit.lowering.target import Addressing

LENGTHS = (0, 1, 2, 31, 64, 129)


def stacked(length: int, *, reverse: bool = False) -> Plan:
    """A scan: carry c = 3 c + x[t] + 1 in two slots, and each carry stored in y[t]."""
    stack = along(0, max(length, 1), reverse=reverse)
    before, after = at(2, 0, carry(0, 0)), at(2, 0, carry(0, 1))
    turn = (
        Launch(mix(), (before, at(0, 0, stack), after)),
        Copy(before, at(1, 0, stack)),
    )
    size = max(length, 1)
    last = at(2, length % 2)
    return plan_of(
        size,
        size + 1,
        2,
        Launch(clear(), (at(2, 0),)),
        *[Launch(clear(), (at(1, n),)) for n in (0, size)],
        loop(length, *turn),
        Copy(last, at(1, size)),
    )


@pytest.mark.parametrize("length", LENGTHS)
def test_carries_and_stacks(vulkan, length: int):
    check(vulkan, stacked(length))


@pytest.mark.parametrize("length", [1, 99])
def test_reversed_stacks(vulkan, length: int):
    check(vulkan, stacked(length, reverse=True))


def nested(outer: int, inner: int) -> Plan:
    """y[i] of carries that run through all x[i * inner + j], with steps on both sides."""
    both = (replace(along(0, outer), stride=inner * SLOT), along(1, inner))
    row = along(0, outer)
    total, part = at(2, 0), at(2, 1, carry(1, 0))
    body = (
        Launch(increment(), (total,)),
        Copy(total, at(2, 1)),
        loop(inner, Launch(mix(), (part, at(0, 0, *both), at(2, 1, carry(1, 1))))),
        Launch(mix(), (at(2, 1 + inner % 2), total, at(1, 0, row))),
    )
    return plan_of(outer * inner, outer, 3, Launch(clear(), (total,)), loop(outer, *body))


@pytest.mark.parametrize(("outer", "inner"), [(1, 1), (3, 5), (5, 100), (40, 3), (41, 67)])
def test_nested_loops_move_with_both(vulkan, outer: int, inner: int):
    plan = nested(outer, inner)
    x = start(plan)
    np.testing.assert_array_equal(run(vulkan, plan, x), by_numpy(x, outer, inner))


def by_numpy(x: np.ndarray, outer: int, inner: int) -> np.ndarray:
    """What ``nested`` computes."""
    rows: list[np.ndarray] = []
    stack = x.reshape(outer, inner, COUNT)
    for turn in range(outer):
        part = np.full(COUNT, turn + 1, np.int32)
        for step in range(inner):
            part = 3 * part + stack[turn, step] + 1
        rows.append(3 * part + (turn + 1) + 1)
    return np.concatenate(rows).astype(np.int32)


def test_three_loops_and_siblings(vulkan):
    count = at(2, 0)
    deep = loop(5, loop(3, loop(70, Launch(increment(), (count,)))), Launch(increment(5), (count,)))
    side = loop(90, Launch(increment(7), (count,)))
    plan = plan_of(
        1, 1, 1, Launch(clear(), (count,)), deep, loop(20, side, side), Copy(count, at(1))
    )
    found = run(vulkan, plan, start(plan))
    wanted = 5 * (3 * 70 + 5) + 20 * 2 * 90 * 7
    np.testing.assert_array_equal(found, np.full(COUNT, wanted, np.int32))


def test_bodies_that_do_nothing(vulkan):
    nothing = Copy(Range(0, 0, 0), Range(1, 0, 0))
    count = at(1)
    plan = plan_of(
        1,
        1,
        1,
        Launch(clear(), (count,)),
        loop(1000, nothing),
        loop(100, loop(0, Launch(increment(), (count,))), nothing),
        Loop(block(), 7),
        Launch(increment(), (count,)),
    )
    np.testing.assert_array_equal(run(vulkan, plan, start(plan)), np.ones(COUNT, np.int32))


def test_many_turns(vulkan):
    """Three ways: one step, several steps, and a loop around; no table grows with the turns."""
    described = vulkan.target.addressing is Addressing.DESCRIPTOR
    turns = 3_000 if described else 100_000
    count = at(1)
    plan = plan_of(1, 1, 1, Launch(clear(), (count,)), loop(turns, Launch(increment(), (count,))))
    live = vulkan.tables.live
    np.testing.assert_array_equal(run(vulkan, plan, start(plan)), np.full(COUNT, turns, np.int32))
    assert vulkan.tables.live - live < 64 << 10


def test_bytes_that_are_aligned_to_nothing(vulkan):
    """Elements of one byte, gathered from and scattered to places between words."""
    length = 99
    source = Range(0, 3, 1, (replace(along(0, length), stride=1),))
    target = Range(1, 7, 1, (replace(along(0, length, reverse=True), stride=1),))
    plan = plan_of(1, 1, 1, Launch(clear(), (at(1),)), loop(length, Copy(source, target)))
    check(vulkan, plan)


@pytest.mark.parametrize("seed", range(8))
def test_random_loops(vulkan, seed: int):
    check(vulkan, Maker(np.random.default_rng(seed), host=False).plan(), seed)


@pytest.mark.parametrize("seconds", ["1e-3", "1e-6", "2e-8"])
def test_loops_in_several_submissions(vulkan, monkeypatch: pytest.MonkeyPatch, seconds: str):
    """Ends of submissions between turns, inside them, and inside a launch."""
    monkeypatch.setenv("VKJIT_SUBMIT_SECONDS", seconds)
    for plan in (stacked(65), nested(7, 70), nested(70, 2)):
        loaded = vulkan.load(plan)
        before = vulkan.queue.submitted
        x = start(plan)
        np.testing.assert_array_equal(run(vulkan, plan, x, loaded), expected(plan, x))
        most = {"1e-3": 1, "1e-6": 500, "2e-8": 5000}[seconds]
        if loaded.submissions is not None:
            assert loaded.submissions <= most
            assert loaded.submissions == vulkan.queue.submitted - before
            assert (loaded.submissions > 1) == (seconds != "1e-3")


def test_a_long_loop_has_few_recorded_submissions(vulkan, monkeypatch: pytest.MonkeyPatch):
    """Equal submissions are one recording, submitted again and again."""
    if vulkan.target.addressing is Addressing.DESCRIPTOR:
        pytest.skip("loops are not replayed with descriptors")
    monkeypatch.setenv("VKJIT_SUBMIT_SECONDS", "1e-5")
    count = at(1)
    plan = plan_of(1, 1, 1, Launch(clear(), (count,)), loop(20_000, Launch(increment(3), (count,))))
    loaded = vulkan.load(plan)
    assert loaded.submissions > 20
    assert len(loaded._only.parts.parts) <= 4
    np.testing.assert_array_equal(
        run(vulkan, plan, start(plan), loaded), np.full(COUNT, 60_000, np.int32)
    )


def test_calls_do_not_wait(vulkan, monkeypatch: pytest.MonkeyPatch):
    """More calls than recordings, each with arrays of its own, all in flight."""
    if vulkan.target.addressing is Addressing.DESCRIPTOR:
        pytest.skip("long loops are driven with descriptors")
    plan = stacked(65)
    loaded = vulkan.load(plan)
    inputs = [start(plan, seed) for seed in range(12)]
    uploaded = [vulkan.upload(x) for x in inputs]
    outputs = [loaded.run([x])[0] for x in uploaded]
    assert len(loaded._ring) <= 8
    for x, y in zip(inputs, outputs, strict=True):
        found = vulkan.download(y, np.int32, (plan.buffers[1].size // 4,))
        np.testing.assert_array_equal(found, expected(plan, x))


def test_times_of_leaves_add_up(vulkan):
    plan = nested(10, 70)
    loaded = vulkan.load(plan)
    x = vulkan.upload(start(plan))
    loaded.timed([x])
    _, times = loaded.timed([x])
    assert [time.runs for time in times] == [1, 10, 10, 700, 10]
    assert all(time.seconds > 0 for time in times)
    assert times[3].seconds > 5 * max(time.seconds for time in times[:3])


def lose(device: Any) -> None:
    for name in ("vkQueueSubmit", "vkWaitSemaphores", "vkGetSemaphoreCounterValue"):
        setattr(device.logical.functions, name, lambda *_: -4)


@pytest.mark.parametrize("addressing", list(Addressing), ids=lambda mode: mode.value)
def test_a_lost_device_is_named_with_step_and_turn(fresh, addressing: Addressing):
    device = fresh(addressing)
    count = at(1)
    body = loop(90, Launch(increment(), (count,), ("add at model.py:7",)))
    plan = plan_of(
        1, 1, 1, Launch(clear(), (count,)), loop(80, body, Launch(increment(2), (count,)))
    )
    loaded = device.load(plan)
    (y,) = loaded.run([device.upload(start(plan))])
    device.logical.functions.vkDeviceWaitIdle(device.logical.handle)
    lose(device)
    with pytest.raises(DeviceError) as caught:
        device.download(y, np.int32, (COUNT,))
    message = str(caught.value)
    assert "by_hand, " in message
    assert " of 3 steps known to be done in turn " in message
    assert "turn 80 of 80" in message
    assert "kernel increment" in message
