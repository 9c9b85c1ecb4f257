"""Groups on parts of arrays: slices of one stack share kernels, none reads beyond its part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import vkjit as vj
from vkjit import numpy as vnp
from vkjit.ir.evaluate import evaluate
from vkjit.lowering.artifact import Launch, leaves
from vkjit.lowering.compile import compile_program
from vkjit.lowering.kernel.text import text
from vkjit.lowering.kernel.types import F32
from vkjit.lowering.kernel.views import View
from vkjit.lowering.plan.groups import ArrayInfo, GatherStep, LoadStep, LoopGroup, StoreStep
from vkjit.lowering.plan.rebase import Part, rebased
from vkjit.lowering.target import MINIMAL_GPU, REFERENCE, Target
from vkjit.passes.pipeline import simplify

TARGETS = pytest.mark.parametrize("target", [REFERENCE, MINIMAL_GPU], ids=lambda t: t.name)


def kernels(fn: Any, target: Target, *args: Any) -> set[str]:
    plan = compile_program(simplify(vj.make_ir(fn)(*args)), target).plan
    return {text(step.kernel) for step in leaves(plan.steps) if isinstance(step, Launch)}


@TARGETS
@pytest.mark.parametrize("count", [3, 6])
def test_layers_cut_from_one_stack_share_their_kernels(target: Target, count: int) -> None:
    def model(stack: Any, x: Any) -> Any:
        for n in range(count):
            x = vnp.sum(vnp.tanh(x @ stack[n]) ** 2, 0, keepdims=True) + vnp.ones((8, 1))
        return x

    made = kernels(model, target, np.ones((count, 16, 16), np.float32), np.ones((8, 16)))
    again = kernels(model, target, np.ones((count, 16, 16), np.float32), np.ones((8, 16)))
    assert made == again
    assert len(made) <= 6  # of the first layer, of those between, of the last


def group(reads: View, writes: View) -> LoopGroup:
    return LoopGroup(
        reads.shape, 0, (LoadStep(0, reads, F32),), (StoreStep(0, 1, writes),), ("copy",)
    )


INFOS = (ArrayInfo(F32, 100), ArrayInfo(F32, 40))


def test_parts_begin_where_arrays_may_begin() -> None:
    made, parts = rebased(group(View((3, 2), (10, 1), 21), View((3, 2), (2, 1), 8)), INFOS, 16)
    assert parts == (Part(20, 23), Part(8, 6))
    assert isinstance(made, LoopGroup)
    assert isinstance(made.body[0], LoadStep)
    assert made.body[0].view == View((3, 2), (10, 1), 1)
    assert made.stores[0].view == View((3, 2), (2, 1), 0)


def test_views_that_run_backwards_reach_below_their_offset() -> None:
    _, parts = rebased(group(View((5,), (-4,), 60), View((5,), (1,), 0)), INFOS, 16)
    assert parts == (Part(44, 17), Part(0, 5))


def test_what_a_gather_may_reach_is_part_of_its_part() -> None:
    gather = GatherStep(0, View((5,), (0,), 16), 1, 8, 6, F32)
    made = LoopGroup((5,), 0, (LoadStep(1, View((5,), (1,), 4), F32), gather), (), ())
    _, parts = rebased(made, INFOS, 16)
    assert parts == (Part(16, 41), Part(4, 5))


def test_whole_arrays_stay() -> None:
    plain = group(View((4, 10), (10, 1)), View((4, 10), (10, 1)))
    made, parts = rebased(plain, (ArrayInfo(F32, 40), ArrayInfo(F32, 40)), 16)
    assert made is plain
    assert parts == (Part(0, 40), Part(0, 40))


def test_a_part_that_is_read_and_another_that_is_written_are_no_update_in_place() -> None:
    """Read at 0 and written at 32, both are at 0 of their part: they are still two places."""

    def shift(x: Any) -> Any:
        return vnp.concatenate([vnp.zeros(32), x[:32] * 2])

    program = simplify(vj.make_ir(shift)(np.zeros(64, np.float32)))
    x = np.linspace(0, 1, 64, dtype=np.float32)
    (want,) = evaluate(program, [x])
    with vj.default_device("reference"):
        got = vj.jit(shift, donate_argnums=0)(vnp.asarray(x))
    np.testing.assert_array_equal(got, want)
