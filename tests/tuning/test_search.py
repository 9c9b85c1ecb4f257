"""Timing, order, early stop, time box, what becomes of wrong kernels; no test uses real time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from tests.tuning.fakes import DEFAULT, FAST, SLOW, FakeGpu, product, workgroup
from vkjit.errors import MissingRuleError
from vkjit.lowering.artifact import Launch, Plan
from vkjit.lowering.gpu import gemm_naive
from vkjit.lowering.kernel.nodes import Kernel
from vkjit.lowering.kernel.types import BF16, F16, F32, I32
from vkjit.lowering.plan.groups import ContractGroup
from vkjit.lowering.plan.schedule import NaiveSchedule, TiledSchedule
from vkjit.tuning.records import Result, kernels_version
from vkjit.tuning.rig import Rig
from vkjit.tuning.search import Search
from vkjit.tuning.session import Job, run

Contract = Callable[[ContractGroup, NaiveSchedule, Any], Any]


def tuned(gpu: FakeGpu, seconds: float = 1e6, **sizes: Any) -> Result:
    rig = Rig(gpu, gpu.clock)
    result = Search(rig).tune(product(**sizes), gpu.clock() + seconds)
    assert result is not None
    return result


@pytest.mark.parametrize(
    "types", [(F32, F32), (F16, F16), (F16, F32), (BF16, BF16), (I32, I32)], ids=str
)
def test_the_fastest_right_schedule_is_kept_with_its_receipt(gpu: FakeGpu, types: Any) -> None:
    result = tuned(gpu, elem=types[0], out=types[1])
    receipt = result.receipt
    assert result.parsed() == FAST
    assert receipt.default == DEFAULT.text()
    assert receipt.seconds == {DEFAULT.text(): 3.0, FAST.text(): 1.0, SLOW.text(): 20.0}
    assert result.gain == 3.0
    assert receipt.error == 0.0 if types[0] is I32 else receipt.error <= 1.0
    assert receipt.error > 0.0 or types[1] is not F32
    for part in ("whole blocks special", "ragged large", "K = 0", "K = 1", "real size, all"):
        assert any(check.startswith(part) for check in receipt.checks), part
    assert result.hardware == gpu.hardware
    assert result.kernels == kernels_version()


def test_the_default_is_timed_first_and_slow_candidates_run_twice(gpu: FakeGpu) -> None:
    tuned(gpu)
    order = list(dict.fromkeys(gpu.timed))
    assert order == [workgroup(s) for s in (DEFAULT, FAST, SLOW)]
    assert gpu.timed.count(workgroup(SLOW)) == 2  # a warm-up, and one that counts
    assert gpu.timed.count(workgroup(FAST)) > 3


def test_later_ones_of_a_kind_that_is_far_behind_are_not_timed(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiled, slower = TiledSchedule(16, 16, 16, 1, 1), NaiveSchedule(1, 1)
    listed = [tiled, SLOW, slower]
    monkeypatch.setattr("vkjit.lowering.compile.candidates", lambda *_: listed)
    gpu.costs[tiled.workgroup] = 1.0
    result = tuned(gpu)
    assert result.receipt.seconds == {tiled.text(): 1.0, SLOW.text(): 20.0}
    assert "not timed" in result.receipt.refused[slower.text()]


def test_no_time_leaves_the_default(gpu: FakeGpu) -> None:
    result = tuned(gpu, seconds=1.0)
    assert result.receipt.seconds == {DEFAULT.text(): 3.0}
    assert result.parsed() == DEFAULT
    assert result.gain == 1.0


def test_a_gain_within_noise_does_not_replace_the_default(gpu: FakeGpu) -> None:
    gpu.costs[workgroup(FAST)] = 2.99
    assert tuned(gpu).parsed() == DEFAULT


def test_the_time_goes_to_the_largest_groups_and_is_never_passed_by_much(gpu: FakeGpu) -> None:
    jobs = [Job(product(m=m), 1) for m in (8, 10, 12, 14)]
    report = run(jobs, Rig(gpu, gpu.clock), 60.0)
    # The time may be passed by the candidate that is being timed, of 9 runs at most.
    assert report.seconds <= 60.0 + 9 * 3.0
    assert report.groups[-1].is_new
    assert not report.groups[0].is_new
    assert "schedule" in str(report)


def test_every_group_has_its_first_candidates_timed_before_any_its_last(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = [NaiveSchedule(4, columns) for columns in range(1, 13)]
    monkeypatch.setattr("vkjit.lowering.compile.candidates", lambda *_: listed)
    told: list[tuple[str, int]] = []

    def progress(group: str, done: int, _all: int) -> None:
        told.append((group, done))

    jobs = [Job(product(m=8), 1), Job(product(m=10), 2)]
    report = run(jobs, Rig(gpu, gpu.clock), 1e6, progress)
    small, large = (group.group for group in report.groups)
    assert [group for group, _ in told] == [*[large] * 4, *[small] * 4] * 3
    assert [done for group, done in told if group == small] == list(range(1, 13))


def test_a_pause_is_followed_by_a_warm_up(gpu: FakeGpu) -> None:
    """After it the device is slow for 0.3 seconds of work; nobody's time shows that."""
    listed = {DEFAULT: 30e-6, FAST: 10e-6}
    gpu.costs = {workgroup(s): cost for s, cost in listed.items()}
    rig, work = Rig(gpu, gpu.clock), gpu.pass_time
    cold_until = 0.3

    def slow_at_first(kernel: Kernel) -> None:
        before = gpu.clock.now
        work(kernel)
        gpu.clock.now += 4 * (gpu.clock.now - before) if before < cold_until else 0.0

    gpu.pass_time = slow_at_first  # pyright: ignore[reportAttributeAccessIssue]
    for schedule, seconds in listed.items():
        gpu.clock.now += 1.0  # the host compiles
        cold_until = gpu.clock.now + 0.3
        found = rig.seconds(rig.trial(product(), schedule), rig.filled(product()))
        assert found == pytest.approx(seconds)


def test_what_still_compiles_is_not_waited_for(gpu: FakeGpu) -> None:
    never: Future[Any] = Future()

    def prepare(plan: Plan) -> list[Future[Any]]:
        (kernel,) = {s.kernel for s in plan.steps if isinstance(s, Launch)}
        return [never] if kernel.workgroup == workgroup(FAST) else []

    gpu.prepare = prepare  # pyright: ignore[reportAttributeAccessIssue]
    result = tuned(gpu)
    assert result.parsed() == DEFAULT
    assert result.receipt.refused == {FAST.text(): "not timed: still being compiled"}


def test_what_is_known_is_not_measured_again(gpu: FakeGpu) -> None:
    jobs = [Job(product(), 2)]
    rig = Rig(gpu, gpu.clock)
    first = run(jobs, rig, 1e6)
    before = len(gpu.timed)
    second = run(jobs, rig, 1e6)
    assert len(gpu.timed) == before
    assert (first.groups[0].is_new, second.groups[0].is_new) == (True, False)
    assert second.gain == 3.0
    run(jobs, rig, 1e6, again=True)
    assert len(gpu.timed) > before


# -- wrong kernels --------------------------------------------------------------------------------


def forgets_a_term(group: ContractGroup) -> ContractGroup:
    return replace(group, k=group.k - 1) if group.k > 8 else group


def forgets_the_last_row(group: ContractGroup) -> ContractGroup:
    return replace(group, m=group.m - 1) if group.m % 8 else group


def sums_in_half_precision(group: ContractGroup) -> ContractGroup:
    return replace(group, accumulate=F16)


def turns_rows_round(group: ContractGroup) -> ContractGroup:
    view = group.lhs.view
    *batch, row, step = view.strides
    turned = replace(view, strides=(*batch, -row, step), offset=(group.m - 1) * row)
    return replace(group, lhs=replace(group.lhs, view=turned))


FAULTS = [forgets_a_term, forgets_the_last_row, sums_in_half_precision, turns_rows_round]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_planted_wrong_kernel_is_refused(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, fault: Callable[[ContractGroup], ContractGroup]
) -> None:
    right: Contract = gemm_naive.contract

    def contract(group: ContractGroup, schedule: NaiveSchedule, context: Any) -> Any:
        return right(fault(group) if schedule == FAST else group, schedule, context)

    monkeypatch.setattr(gemm_naive, "contract", contract)
    result = tuned(gpu, m=11)
    assert result.parsed() == DEFAULT
    assert "wrong result" in result.receipt.refused[FAST.text()]


def test_a_kernel_that_is_wrong_at_the_real_size_only_is_refused(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    right: Contract = gemm_naive.contract

    def contract(group: ContractGroup, schedule: NaiveSchedule, context: Any) -> Any:
        wrong = schedule == FAST and group.m == 300
        return right(replace(group, k=group.k - 1) if wrong else group, schedule, context)

    monkeypatch.setattr(gemm_naive, "contract", contract)
    result = tuned(gpu, m=300)
    assert "real size" in result.receipt.refused[FAST.text()]


def break_template(monkeypatch: pytest.MonkeyPatch, broken: NaiveSchedule) -> None:
    """Has the template refuse one schedule."""
    right: Contract = gemm_naive.contract

    def contract(group: ContractGroup, schedule: NaiveSchedule, context: Any) -> Any:
        if schedule == broken:
            raise MissingRuleError("gemm: no such tile")
        return right(group, schedule, context)

    monkeypatch.setattr(gemm_naive, "contract", contract)


def test_a_template_that_fails_is_refused_with_its_reason(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_template(monkeypatch, FAST)
    result = tuned(gpu)
    assert result.parsed() == DEFAULT
    assert "no such tile" in result.receipt.refused[FAST.text()]


def test_where_the_default_fails_the_first_that_works_takes_its_part(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_template(monkeypatch, DEFAULT)
    result = tuned(gpu)
    assert result.parsed() == FAST
    assert "no such tile" in result.receipt.refused[DEFAULT.text()]
    assert result.receipt.checks
    assert result.gain == 1.0
