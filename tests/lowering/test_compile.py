"""Small programs that once were compiled wrongly, and what the compiler shares and reports."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.oracles import arrays_of, assert_agrees, on_device
from vkjit import dtypes
from vkjit.api.staged import plan_text
from vkjit.ir.avals import aval
from vkjit.ir.parse import parse
from vkjit.lowering.artifact import Launch, Role
from vkjit.lowering.compile import compile_program
from vkjit.lowering.kernel.text import text
from vkjit.ops.contract import dot_general
from vkjit.ops.math import exp
from vkjit.ops.registry import PRIMITIVES
from vkjit.ops.trigonometry import tanh
from vkjit.runtime import get_device
from vkjit.trace import trace

REGRESSIONS = {
    "repeated reduction placed": """
        program(%0: i32[3]) {
          %1: i32[] = reduce_min[axes=(0,)] %0
          %2: i32[3] = broadcast[shape=(3,), axes=()] %1
          %3: i32[6] = concatenate[axis=0] %0, %2
          return %3
        }""",
    "repeated rows placed": """
        program(%0: f32[5,4]) {
          %1: f32[5] = reduce_max[axes=(1,)] %0
          %2: f32[5,3] = broadcast[shape=(5, 3), axes=(0,)] %1
          %3: f32[15] = reshape[shape=(15,)] %2
          %4: f32[17] = pad[low=(1,), high=(1,), interior=(0,)] 0.0:f32[], %3
          return %4, %3
        }""",
    "fold of an axis of size 1": """
        program(%0: f32[1,7,5]) {
          %1: f32[1,7,5] = sin %0
          %2: f32[1,7,5] = exp %1
          %3: f32[1,7,5] = sin %2
          %4: f32[1,7,5] = sin %3
          %5: f32[7,5] = reduce_max[axes=(0,)] %4
          return %5
        }""",
    "view of an empty value": """
        program(%0: f32[3,0,0]) {
          %1: f32[3,0,0] = sin %0
          %2: f32[3,0,0] = exp %1
          %3: f32[3,0,0] = sin %2
          %4: f32[0,3,0] = permute[perm=(1, 0, 2)] %3
          return %3, %4
        }""",
    "scan of nothing": """
        program(%0: f32[3,0,2]) {
          %1: f32[3,0,2] = cumsum[axis=0, reverse=True] %0
          return %1
        }""",
    "empty product": """
        program(%0: f16[3,0,6,5]) {
          %1: f16[5,3,0,3,0] = dot_general[lhs_contract=(2,), rhs_contract=(2,), lhs_batch=(3,), \
rhs_batch=(3,), accumulate=f32, dtype=f16] %0, %0
          %2: f16[5,3,0,3,0] = add %1, %1
          return %2
        }""",
    "sum of nothing": """
        program(%0: f32[3,0], %1: f32[0,4]) {
          %2: f32[3,4] = dot_general[lhs_contract=(1,), rhs_contract=(0,), lhs_batch=(), \
rhs_batch=(), accumulate=f32, dtype=f32] %0, %1
          %3: f32[3] = reduce_sum[axes=(1,)] %0
          return %2, %3
        }""",
}


@pytest.mark.parametrize("name", list(REGRESSIONS))
def test_regressions(name: str, device: str) -> None:
    lines = [line.removeprefix(" " * 8) for line in REGRESSIONS[name].strip().splitlines()]
    program = parse("\n".join(lines), PRIMITIVES)
    inputs = arrays_of(program, 0)
    assert_agrees(program, inputs, on_device(program, inputs, device))


@pytest.mark.parametrize("of", [dtypes.int8, dtypes.uint8, dtypes.int32], ids=str)
def test_integer_products_in_a_wider_dtype(of: np.dtype[Any], device: str) -> None:
    to = dtypes.int32 if dtypes.is_signed(of) else dtypes.uint32

    def product(x: Any, y: Any) -> list[Any]:
        return [dot_general(x, y, ((1,), (0,)), preferred=to)]

    program = trace(product, [aval((3, 9), of), aval((9, 4), of)]).program
    rng = np.random.default_rng(0)
    limits = np.iinfo(np.int8 if dtypes.is_signed(of) else np.uint8)
    x = rng.integers(limits.min, limits.max, (3, 9)).astype(of)
    y = rng.integers(limits.min, limits.max, (9, 4)).astype(of)
    (got,) = on_device(program, [x, y], device)
    assert got.dtype == to
    np.testing.assert_array_equal(got, x.astype(np.int64) @ y.astype(np.int64))


def layers(count: int) -> Any:
    """``count`` equal layers."""

    def fn(x: Any, *weights: Any) -> list[Any]:
        for w in weights:
            x = tanh(dot_general(x, w, ((1,), (0,))))
        return [x]

    square = aval((16, 16), dtypes.float32)
    return trace(fn, [square] * (count + 1)).program


def test_equal_layers_share_a_kernel(device: str) -> None:
    compiled = compile_program(layers(12), get_device(device).target)
    kernels = [s.kernel for s in compiled.plan.steps if isinstance(s, Launch)]
    first, rest = kernels[: len(kernels) // 12], kernels[len(kernels) // 12 :]
    assert len(kernels) == 12 * len(first)
    assert {id(k) for k in rest} == {id(k) for k in first}


def test_temporaries_of_layers_take_turns(device: str) -> None:
    plan = compile_program(layers(12), get_device(device).target).plan
    assert plan.arena_bytes <= 3 * 16 * 16 * 4
    assert plan.peak_bytes == sum(b.size for b in plan.buffers)


def test_leading_parameters_are_constants(device: str) -> None:
    target = get_device(device).target
    plan = compile_program(layers(2), target, constants=1, donated=(0,)).plan
    roles = [(b.role, b.position) for b in plan.buffers]
    assert roles[:3] == [(Role.CONSTANT, 0), (Role.INPUT, 0), (Role.INPUT, 1)]


def test_lowering_is_deterministic(device: str) -> None:
    program = trace(lambda x: [exp(x), tanh(exp(x))], [aval((5, 7), dtypes.float32)]).program
    target = get_device(device).target
    one, two = (compile_program(program, target).plan for _ in range(2))
    assert plan_text(one) == plan_text(two)
    kernels = [[text(s.kernel) for s in p.steps if isinstance(s, Launch)] for p in (one, two)]
    assert kernels[0] == kernels[1]
