"""make_ir, eval_shape and the stages of a lowered function."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import numpy as np
import pytest

import vkjit as vj
from vkjit import numpy as vnp
from vkjit.errors import ArgumentError
from vkjit.ir.text import text
from vkjit.lowering.artifact import Role
from vkjit.lowering.target import MINIMAL_GPU, TargetKind

X = np.zeros((3, 4), np.float32)


def layer(x: Any, w: Any) -> Any:
    return vnp.tanh(x @ w)


def test_make_ir_prints_the_program() -> None:
    program = vj.make_ir(lambda x: vnp.sum(x * 2))(X)
    assert str(program) == textwrap.dedent("""\
        lambda_(%0: f32[3,4]) {
          %1: f32[3,4] = mul %0, 2.0:f32[]
          %2: f32[] = reduce_sum[axes=(0, 1)] %1
          return %2
        }""")


def test_make_ir_of_a_gradient_has_no_leftovers() -> None:
    program = vj.make_ir(vj.grad(lambda x: vnp.sum(vnp.sin(x))))(X)
    names = [e.prim.name for e in program.eqns]
    assert names.count("cos") == 1


def test_closed_over_arrays_are_the_first_parameters() -> None:
    table = vnp.asarray(np.ones(4, np.float32))
    program = vj.make_ir(lambda x: x + table)(X)
    assert [str(a) for a in program.in_avals] == ["f32[4]", "f32[3,4]"]


def test_eval_shape_computes_nothing() -> None:
    huge = vj.ShapeDtypeStruct((1 << 20, 1 << 20), "float32")
    out = vj.eval_shape(lambda x: {"a": x @ x, "b": (x.sum(0), 1.0)}, huge)
    assert out["a"] == vj.ShapeDtypeStruct((1 << 20, 1 << 20), np.float32)
    assert out["b"][0].shape == (1 << 20,)
    assert out["b"][1].weak_type
    assert (huge.ndim, huge.size) == (2, 1 << 40)


def test_eval_shape_agrees_with_the_call() -> None:
    want = vj.eval_shape(layer, X, np.zeros((4, 5), np.float32))
    got = layer(vnp.asarray(X), vnp.zeros((4, 5)))
    assert (want.shape, want.dtype) == (got.shape, got.dtype)


@pytest.fixture(params=["cpu", "reference", "vulkan:0"])
def lowered(request: pytest.FixtureRequest) -> Any:
    if request.param not in vj.devices():
        pytest.skip(f"no device {request.param}")
    with vj.default_device(request.param):
        return vj.jit(layer).lower(X, np.zeros((4, 5), np.float32))


def test_every_stage_has_a_text(lowered: Any) -> None:
    program = lowered.as_text()
    assert program.startswith("layer(%0: f32[3,4], %1: f32[4,5]) {")
    assert "test_staged.py:" in program
    assert "ContractGroup" in lowered.as_text("groups")
    assert "kernel" in lowered.as_text("kernels")
    plan = lowered.as_text("plan")
    assert plan.startswith(f"plan layer peak={lowered.plan.peak_bytes}")
    assert "  buffer 0: input 0 48 bytes" in plan
    assert "output 0 60 bytes" in plan


def test_spirv_has_names_and_lines(lowered: Any) -> None:
    if lowered.target.kind is TargetKind.GPU:
        found = lowered.as_text("spirv")
    else:
        with pytest.raises(ArgumentError, match=r"spirv: .* takes no SPIR-V; .* GPU target"):
            lowered.as_text("spirv")
        found = lowered.spirv(MINIMAL_GPU)
    kernels = found.count("; kernel ")
    assert kernels == found.count(" OpEntryPoint GLCompute ") >= 1
    assert 'OpString "tanh at ' in found
    assert "test_staged.py:" in found
    assert "OpLine %" in found
    assert re.search(r"OpName %\w+ \"lhs|OpName %\w+ \"a", found)


def test_operations_on_trees_keep_the_users_line() -> None:
    program = text(vj.make_ir(vj.lax.stop_gradient)({"x": X}), lines=True)
    lines = [line for line in program.splitlines() if "stop_gradient %" in line]
    assert len(lines) == 1
    assert "optree" not in lines[0]


def test_an_unknown_stage_is_named() -> None:
    with pytest.raises(ArgumentError, match="as_text: stage 'asm', expected 'program', 'groups'"):
        vj.jit(layer).lower(X, X.T).as_text("asm")


def test_the_memory_report_is_the_plan(lowered: Any) -> None:
    report, plan = lowered.memory(), lowered.plan
    sizes = {role: sum(b.size for b in plan.buffers if b.role is role) for role in Role}
    assert report.inputs == sizes[Role.INPUT] == 48 + 80
    assert report.outputs == sizes[Role.OUTPUT] == 60
    assert report.constants == report.donated == 0
    assert report.temporaries == plan.arena_bytes == sizes[Role.ARENA]
    assert report.peak == plan.peak_bytes == sum(sizes.values())
    assert report.live_temporaries <= report.temporaries
    assert "peak" in str(report)


def test_donation_lowers_the_planned_peak() -> None:
    def step(x: Any) -> Any:
        return vnp.sum(x, 0) + 1.0, vnp.cumsum(x, 1)

    x = np.zeros((256, 256), np.float32)
    kept = vj.jit(step).lower(x).memory()
    given = vj.jit(step, donate_argnums=0).lower(x).memory()
    assert given.peak <= kept.peak
    assert given.peak == given.inputs + given.outputs + given.temporaries


def test_lowering_twice_gives_the_same_text(lowered: Any) -> None:
    again = vj.jit(layer).lower(X, np.zeros((4, 5), np.float32))
    assert again.as_text("program") == lowered.as_text("program")
