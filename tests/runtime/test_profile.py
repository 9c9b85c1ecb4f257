"""Profiles: every kernel of every call, as a table and as a trace."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vkjit as vj
from vkjit import lax
from vkjit import numpy as vnp
from vkjit.errors import ArgumentError, MissingRuleError

CALLS = 3


def function(x: Any, w: Any) -> Any:
    return vnp.sum(vnp.tanh(x @ w), 0), vnp.cumsum(x, 1)


def arguments() -> tuple[Any, Any]:
    generator = np.random.default_rng(0)
    shapes = ((48, 32), (32, 40))
    x, w = (vnp.asarray(generator.normal(size=s).astype(np.float32)) for s in shapes)
    return x, w


@pytest.fixture(params=["cpu", "vulkan:0"])
def profiled_device(request: pytest.FixtureRequest):
    if request.param not in vj.devices():
        pytest.skip(f"no device {request.param}")
    with vj.default_device(request.param):
        yield request.param


@pytest.fixture
def measured(profiled_device: str) -> tuple[vj.Profile, vj.Lowered]:
    x, w = arguments()
    jitted = vj.jit(function)
    plain = jitted(x, w)
    with vj.profile() as profile:
        results = [jitted(x, w) for _ in range(CALLS)]
    for result in results:
        for got, want in zip(result, plain, strict=True):
            np.testing.assert_array_equal(got, want)
    jitted(x, w)  # outside: not part of it
    return profile, jitted.compile(x, w)


def test_every_step_of_every_call_is_measured(profiled_device: str, measured: Any) -> None:
    profile, lowered = measured
    assert len(profile.calls) == CALLS
    for call in profile.calls:
        assert (call.plan, call.device) == ("function", profiled_device)
        assert len(call.steps) == len(lowered.plan.steps)
        assert all(0 <= step.seconds < 60 for step in call.steps)
        begins = [step.begin for step in call.steps]
        assert begins == sorted(begins)
    first, second, _ = profile.calls
    assert first.begin + first.seconds <= second.begin
    assert profile.seconds == pytest.approx(sum(row.seconds for row in profile.rows()))


def test_threads_share_a_profile(profiled_device: str) -> None:
    x, w = arguments()
    jitted = vj.jit(function)
    plain = jitted(x, w)
    with vj.profile() as profile, ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: jitted(x, w), range(8)))
    for result in results:
        np.testing.assert_array_equal(result[0], plain[0])
    assert len(profile.calls) == 8
    steps = len(jitted.compile(x, w).plan.steps)
    assert [len(call.steps) for call in profile.calls] == [steps] * 8


def test_rows_name_operations_lines_and_sizes(measured: Any) -> None:
    profile, _ = measured
    rows = profile.rows()
    assert [row.seconds for row in rows] == sorted((r.seconds for r in rows), reverse=True)
    product = next(row for row in rows if any("dot_general" in o for o in row.origin))
    assert product.runs % CALLS == 0
    assert any("test_profile.py:" in o for o in product.origin)
    table = str(profile)
    assert table.startswith("profile: 3 calls on ")
    assert f"{len(profile.calls[0].steps) * CALLS} launches" in table
    assert "test_profile.py:" in table
    assert "/test_profile.py" not in table


def test_steps_in_loops_are_summed_over_their_turns(profiled_device: str) -> None:
    turns = 7 if profiled_device.startswith("vulkan") else 100_000

    @vj.jit
    def looped(x: Any) -> Any:
        return lax.scan(lambda c, _: (c * 0.5 + 1, None), x, length=turns)[0]

    x = vnp.asarray(np.ones(3, np.float32))
    looped(x)
    with vj.profile() as profile:
        for _ in range(5):
            looped(x)
    runs = [sum(step.runs for step in call.steps) for call in profile.calls]
    assert min(runs) >= turns
    shares = [sum(s.seconds for s in call.steps) / call.seconds for call in profile.calls]
    assert max(shares) <= 1
    if profiled_device == "cpu":  # a GPU's clock does not see what the host does
        assert max(shares) > 0.95
    assert max(row.runs for row in profile.rows()) == 5 * turns
    assert f"{sum(runs)} launches" in str(profile)


def test_operations_and_bytes_give_rates() -> None:
    x = vnp.asarray(np.ones(1 << 12, np.float32))
    add = vj.jit(lambda a, b: a + b)
    with vj.default_device("cpu"), vj.profile() as profile:
        add(vj.device_put(x, "cpu"), vj.device_put(x, "cpu"))
    (row,) = profile.rows()
    assert row.nbytes == 3 * (4 << 12)
    assert row.flops == 1 << 12
    assert row.byte_rate == pytest.approx(row.nbytes / row.seconds)
    assert row.flop_rate == pytest.approx(row.flops / row.seconds)


def test_the_trace_is_what_perfetto_reads(measured: Any, tmp_path: Path) -> None:
    profile, _ = measured
    target = tmp_path / "trace.json"
    target.write_text("older")
    profile.save(target)
    assert list(tmp_path.iterdir()) == [target]
    events = json.loads(target.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {profile.calls[0].device, "calls", "kernels"} == names
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == CALLS + sum(len(call.steps) for call in profile.calls)
    for event in complete:
        assert {"name", "cat", "pid", "tid", "ts", "dur"} <= event.keys()
        assert event["dur"] >= 0
    kernels = [e for e in complete if e["cat"] == "kernel"]
    assert all(e["args"]["operations"] for e in kernels)


def test_a_trace_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with vj.profile() as profile:
        pass
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        profile.save(tmp_path / "taken")
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


def test_one_profile_at_a_time() -> None:
    with vj.profile(), pytest.raises(ArgumentError, match="another profile"), vj.profile():
        pass
    with vj.profile() as again:
        pass
    assert str(again).startswith("profile: 0 calls on no device")


def test_a_device_without_a_clock_says_so() -> None:
    with (
        vj.default_device("reference"),
        vj.profile(),
        pytest.raises(MissingRuleError, match=r"profile: .* no clock .* use cpu"),
    ):
        vj.jit(lambda x: x + 1)(vnp.ones(3))
    assert float(vj.jit(lambda x: x + 1)(vnp.ones(()))) == 2.0
