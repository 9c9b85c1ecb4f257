"""Reductions on the CPU: phases, lanes along rows, parts, blocks; through the interpreter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vkjit as vj
import vkjit.numpy as vnp
from vkjit import dtypes
from vkjit.lowering.cpu import nest
from vkjit.lowering.cpu.rows import rows
from vkjit.lowering.kernel import interpret
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.check import verify
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import F32, I32, BinOp, ScalarType, UnOp
from vkjit.lowering.kernel.views import View, dense
from vkjit.lowering.plan.groups import (
    ArrayInfo,
    BodyStep,
    LoadStep,
    LoopGroup,
    ReduceStep,
    ScalarStep,
    StoreStep,
)
from vkjit.lowering.plan.schedule import LoopSchedule
from vkjit.lowering.target import REFERENCE
from vkjit.lowering.templates.context import Lowered, TemplateContext
from vkjit.ops.rules import BinaryRule, PositionRule
from vkjit.ops.structural import SumRule

SUM = SumRule(dtypes.float32)
MAX = BinaryRule(dtypes.float32, BinOp.MAX, -math.inf)
ARGMAX = PositionRule(dtypes.float32, largest=True)
THREADS = replace(REFERENCE, threads=4)
SCHEDULES = {
    "scalar": LoopSchedule(1, 1, 2),
    "one task": LoopSchedule(4, 4, 1),
    "tasks": LoopSchedule(4, 2, 3),
    "parts": LoopSchedule(4, 1, 40),
    "wide parts": LoopSchedule(8, 2, 16),
}
DTYPES = {F32: np.float32, I32: np.int32}


def sub(b: Builder, x: Value, y: Value) -> Value:
    return b.sub(x, y)


def exp(b: Builder, x: Value) -> Value:
    return b.unary(UnOp.EXP, x)


def div(b: Builder, x: Value, y: Value) -> Value:
    return b.binary(BinOp.DIV, x, y)


def views(shape: Sequence[int], reduced: Sequence[int]) -> tuple[View, View, int]:
    """A dense array with ``reduced`` axes last, the row-major results of its rows, the count."""
    kept = [a for a in range(len(shape)) if a not in reduced]
    full = dense(tuple(shape)).permuted((*kept, *reduced))
    row = dense([shape[a] for a in kept])
    over = View(full.shape, (*row.strides, *(0,) * len(reduced)))
    return full, over, len(reduced)


def softmax(shape: Sequence[int], reduced: Sequence[int]) -> LoopGroup:
    """Softmax over ``reduced``; the sum of each row is stored too."""
    full, row, count = views(shape, reduced)
    body: tuple[BodyStep, ...] = (
        LoadStep(0, full, F32),
        ReduceStep(MAX, 0, F32),
        ScalarStep(sub, (0, 1), F32),
        ScalarStep(exp, (2,), F32),
        ReduceStep(SUM, 3, F32),
        ScalarStep(div, (3, 4), F32),
    )
    stores = (StoreStep(5, 1, full), StoreStep(4, 2, row))
    return LoopGroup(full.shape, count, body, stores)


def positions(shape: Sequence[int], reduced: Sequence[int]) -> LoopGroup:
    """The position of the largest element, and the sum."""
    full, row, count = views(shape, reduced)
    body = (LoadStep(0, full, F32), ReduceStep(ARGMAX, 0, I32), ReduceStep(SUM, 0, F32))
    return LoopGroup(full.shape, count, body, (StoreStep(1, 1, row), StoreStep(2, 2, row)))


def run(
    group: LoopGroup, x: np.ndarray, outputs: Sequence[tuple[ScalarType, int]], name: str
) -> tuple[list[np.ndarray], list[Lowered]]:
    """The outputs, arrays 1 and on, and the kernels."""
    context = TemplateContext(
        THREADS, [ArrayInfo(F32, x.size), *(ArrayInfo(e, n) for e, n in outputs)]
    )
    kernels = rows(group, SCHEDULES[name], context)
    memory = [x.ravel().copy()]
    memory += [np.full(a.length, -77, DTYPES[a.elem]) for a in context.arrays[1:]]
    for lowered in kernels:
        verify(lowered.kernel)
        interpret.run(lowered.kernel, [memory[i] for i in lowered.arrays])
    return memory[1 : 1 + len(outputs)], kernels


SHAPES = [
    ((5, 70), (1,)), ((70, 5), (0,)), ((3, 257), (1,)), ((40, 9), (0,)), ((1, 1000), (1,)),
    ((6, 11, 13), (1, 2)), ((11, 6, 13), (0, 2)), ((11, 13, 40), (0, 1)), ((4, 3), (1,)),
    ((600,), (0,)), ((9, 1), (1,)),
]  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("shape", "reduced"), SHAPES, ids=str)
def test_softmax(shape: tuple[int, ...], reduced: tuple[int, ...], name: str) -> None:
    x = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    e = np.exp(x.astype(np.float64) - x.max(axis=reduced, keepdims=True))
    sums = e.sum(axis=reduced, keepdims=True)
    (full, row), _ = run(softmax(shape, reduced), x, [(F32, x.size), (F32, sums.size)], name)
    np.testing.assert_allclose(full.reshape(shape), e / sums, rtol=2e-6)
    np.testing.assert_allclose(row, sums.ravel(), rtol=2e-6)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("shape", "reduced"), SHAPES, ids=str)
def test_first_of_equal_positions_wins(
    shape: tuple[int, ...], reduced: tuple[int, ...], name: str
) -> None:
    x = np.random.default_rng(4).integers(0, 3, shape).astype(np.float32)
    kept = [a for a in range(len(shape)) if a not in reduced]
    lined = x.transpose(*kept, *reduced).reshape(*[shape[a] for a in kept], -1)
    count = max(1, math.prod(shape[a] for a in kept))
    (where, total), _ = run(positions(shape, reduced), x, [(I32, count), (F32, count)], name)
    np.testing.assert_array_equal(where, np.argmax(lined, axis=-1).ravel())
    np.testing.assert_array_equal(total, lined.sum(axis=-1).ravel())


@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 40)),
    st.sampled_from([(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]),
    st.integers(0, 3).map(lambda n: 1 << n),
    st.integers(1, 5),
    st.integers(1, 24),
)
def test_sums_are_exact_under_any_schedule(
    shape: tuple[int, int, int], reduced: tuple[int, ...], lanes: int, unroll: int, tasks: int
) -> None:
    x = np.random.default_rng(5).integers(-9, 9, shape).astype(np.float32)
    full, row, count = views(shape, reduced)
    body = (LoadStep(0, full, F32), ReduceStep(SUM, 0, F32))
    group = LoopGroup(full.shape, count, body, (StoreStep(1, 1, row),))
    want = x.sum(axis=reduced).ravel()
    context = TemplateContext(THREADS, [ArrayInfo(F32, x.size), ArrayInfo(F32, want.size)])
    kernels = rows(group, LoopSchedule(lanes, unroll, tasks), context)
    memory = [x.ravel(), *(np.zeros(a.length, np.float32) for a in context.arrays[1:])]
    for lowered in kernels:
        interpret.run(lowered.kernel, [memory[i] for i in lowered.arrays])
    np.testing.assert_array_equal(memory[1], want)


def test_few_long_rows_are_folded_in_parts() -> None:
    x = np.zeros((1, 4096), np.float32)
    for group, kernels in ((softmax, 3), (positions, 2)):
        outputs = [(F32, x.size), (F32, 1)] if group is softmax else [(I32, 1), (F32, 1)]
        _, lowered = run(group((1, 4096), (1,)), x, outputs, "parts")
        assert len(lowered) == kernels
        assert lowered[0].kernel.grid[0] > 8


def test_many_rows_are_one_kernel() -> None:
    x = np.zeros((64, 64), np.float32)
    _, lowered = run(softmax((64, 64), (1,)), x, [(F32, x.size), (F32, 64)], "parts")
    assert [k.kernel.grid[0] for k in lowered] == [40]


def test_a_group_in_place_is_one_kernel() -> None:
    """Its parts would read what others have written."""
    group = softmax((1, 4096), (1,))
    group = replace(group, stores=(StoreStep(5, 0, group.stores[0].view), group.stores[1]))
    x = np.random.default_rng(6).standard_normal((1, 4096)).astype(np.float32)
    context = TemplateContext(THREADS, [ArrayInfo(F32, 4096), ArrayInfo(F32, 1)] * 2)
    (lowered,) = rows(group, SCHEDULES["parts"], context)
    memory = [x.ravel().copy(), np.zeros(1, np.float32), np.zeros(4096, np.float32)]
    interpret.run(lowered.kernel, [memory[i] for i in lowered.arrays])
    e = np.exp(x.ravel().astype(np.float64) - x.max())
    np.testing.assert_allclose(memory[0], e / e.sum(), rtol=2e-6)


def test_blocks_nest_until_each_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks of two steps, a sum of 4096 has loops of every depth and is still exact."""
    monkeypatch.setattr(nest, "_BLOCK", 2)
    x = np.arange(4099, dtype=np.float32).reshape(1, -1) % 31
    for name in SCHEDULES:
        (_, total), _ = run(positions((1, 4099), (1,)), x, [(I32, 1), (F32, 1)], name)
        assert total[0] == x.sum(), name


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_long_sums_of_equal_numbers_stay_accurate(axis: int | None) -> None:
    """Rounding errors of equal terms all point one way: a running sum would be off by 1e-3."""
    x = np.full((1 << 10, 1 << 12), 0.1, np.float32)
    if axis == 0:
        x = x.reshape(1 << 20, 4)
    total: Callable[[vj.Array], vj.Array] = partial(vnp.sum, axis=axis)
    got = np.asarray(vj.jit(total)(x))
    np.testing.assert_allclose(got, x.sum(axis=axis, dtype=np.float64), rtol=2e-6)
