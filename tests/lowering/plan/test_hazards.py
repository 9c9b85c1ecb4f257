"""Barriers: enough of them, and not one too many."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import vkjit as vj
from tests.strategies import programs
from vkjit import numpy as vnp
from vkjit.errors import InternalError
from vkjit.ir.program import Program
from vkjit.lowering.artifact import Copy, Launch, Plan, Range, Role
from vkjit.lowering.compile import compile_program
from vkjit.lowering.kernel.types import Access
from vkjit.lowering.plan.hazards import barriers, check_order, footprint
from vkjit.lowering.target import ALL_SCALARS, MINIMAL_GPU, REFERENCE, Target
from vkjit.passes.pipeline import simplify

Params = dict[str, Any]
GPU = dataclasses.replace(MINIMAL_GPU, name="gpu", storage=ALL_SCALARS)


def loss(params: Params, x: Any, y: Any) -> Any:
    hidden = vnp.tanh(x @ params["w1"] + params["b1"])
    return vnp.mean((hidden @ params["w2"] - y) ** 2)


def step(params: Params, x: Any, y: Any) -> tuple[Params, Any]:
    value, grads = vj.value_and_grad(loss)(params, x, y)
    return vj.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments() -> tuple[Params, Any, Any]:
    rng = np.random.default_rng(0)
    made = {"w1": (8, 16), "b1": (16,), "w2": (16, 4)}
    params = {k: rng.normal(size=s).astype(np.float32) for k, s in made.items()}
    return params, rng.normal(size=(32, 8)).astype(np.float32), np.ones((32, 4), np.float32)


@pytest.fixture(params=["cpu", "vulkan:0"])
def plan(request: pytest.FixtureRequest) -> Plan:
    if request.param not in vj.devices():
        pytest.skip(f"no device {request.param}")
    with vj.default_device(request.param):
        return vj.jit(step, donate_argnums=0).lower(*arguments()).plan


def test_the_plan_of_a_training_step_is_ordered(plan: Plan) -> None:
    check_order(plan)
    assert plan.barriers
    assert 0 not in plan.barriers
    assert plan.barriers == barriers(plan.steps)


def test_removing_any_barrier_is_found(plan: Plan) -> None:
    for position in plan.barriers:
        without = dataclasses.replace(plan, barriers=plan.barriers - {position})
        with pytest.raises(InternalError, match=r"(read|write) after (read|write) at step"):
            check_order(without)


def test_every_barrier_stands_before_a_conflict(plan: Plan) -> None:
    """A barrier is placed only where the step touches what one since the last barrier wrote."""
    start = 0
    for position in sorted(plan.barriers):
        touched = footprint(plan.steps[position])
        earlier = [footprint(s) for s in plan.steps[start:position]]
        clash = [
            (a, b)
            for e in earlier
            for a, b in (
                *((w, r) for w in e.writes for r in (*touched.reads, *touched.writes)),
                *((r, w) for r in e.reads for w in touched.writes),
            )
            if a.overlaps(b)
        ]
        assert clash
        start = position


def test_results_take_donated_inputs(plan: Plan) -> None:
    taken = [b for b in plan.buffers if b.donated is not None]
    assert all(b.role is Role.OUTPUT for b in taken)
    inputs = {b.position: b for b in plan.buffers if b.role is Role.INPUT}
    for buffer in taken:
        assert buffer.donated in inputs
        assert inputs[buffer.donated].size == buffer.size
    assert len({b.donated for b in taken}) == len(taken)


def conflicts(steps: list[Copy]) -> frozenset[int]:
    return barriers(steps)


A, B, C = Range(0, 0, 64), Range(1, 0, 64), Range(2, 0, 64)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([Copy(A, B), Copy(A, C)], set()),  # two readers
        ([Copy(A, B), Copy(B, C)], {1}),  # read after write
        ([Copy(A, B), Copy(C, B)], {1}),  # write after write
        ([Copy(A, B), Copy(C, A)], {1}),  # write after read
        ([Copy(A, B), Copy(A, C), Copy(B, Range(3, 0, 64)), Copy(C, Range(4, 0, 64))], {2}),
        ([Copy(A, Range(1, 0, 32)), Copy(C, Range(1, 32, 32))], set()),  # apart in one buffer
        ([Copy(A, Range(1, 0, 33)), Copy(C, Range(1, 32, 32))], {1}),  # sharing one byte
    ],
)
def test_barriers_stand_where_bytes_are_shared(steps: list[Copy], expected: set[int]) -> None:
    assert conflicts(steps) == expected


def test_a_kernel_reads_and_writes_what_its_buffers_say(plan: Plan) -> None:
    for launch in plan.steps:
        assert isinstance(launch, Launch)
        touched = footprint(launch)
        for buffer, where in zip(launch.kernel.buffers, launch.arguments, strict=True):
            assert (where in touched.reads) or buffer.access is Access.WRITE
            assert (where in touched.writes) or buffer.access is Access.READ


def test_the_message_names_hazard_and_step() -> None:
    plan = Plan("example", (), (Copy(A, B), Copy(B, C)), frozenset(), 0)
    with pytest.raises(InternalError, match="plan example: read after write at step 1"):
        check_order(plan)


@pytest.mark.parametrize("target", [REFERENCE, GPU], ids=lambda t: t.name)
def test_random_programs_need_every_barrier(target: Target) -> None:
    removed = 0

    @settings(max_examples=120, derandomize=True)
    @given(program=programs(max_steps=30))
    def check(program: Program) -> None:
        nonlocal removed
        plan = compile_program(simplify(program), target).plan
        check_order(plan)
        for position in plan.barriers:
            removed += 1
            with pytest.raises(InternalError, match="is not ordered by a barrier"):
                check_order(dataclasses.replace(plan, barriers=plan.barriers - {position}))

    check()
    assert removed > 40
