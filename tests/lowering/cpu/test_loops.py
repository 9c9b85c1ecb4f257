"""Pointwise groups on the CPU: spans, tails, tasks and turned tiles; through the interpreter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vkjit.lowering.cpu.loops import pointwise
from vkjit.lowering.cpu.tasks import task_count
from vkjit.lowering.kernel import interpret
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.check import verify
from vkjit.lowering.kernel.nodes import Load, Shuffle, Value
from vkjit.lowering.kernel.types import F32, I1, BinOp, CmpOp, ScalarType, VecType
from vkjit.lowering.kernel.views import View, dense
from vkjit.lowering.kernel.walk import all_nodes
from vkjit.lowering.plan.groups import ArrayInfo, LoadStep, LoopGroup, ScalarStep, StoreStep
from vkjit.lowering.plan.schedule import LoopSchedule
from vkjit.lowering.target import REFERENCE
from vkjit.lowering.templates.context import Lowered, TemplateContext

DTYPES = {F32: np.float32, I1: np.uint8}


def add(b: Builder, x: Value, y: Value) -> Value:
    return b.add(x, y)


def less(b: Builder, x: Value, y: Value) -> Value:
    return b.compare(CmpOp.LT, x, y)


def both(b: Builder, x: Value, y: Value) -> Value:
    return b.binary(BinOp.AND, x, y)


def run(
    group: LoopGroup,
    arrays: Sequence[np.ndarray],
    outputs: Sequence[tuple[ScalarType, int]],
    schedule: LoopSchedule,
) -> tuple[list[np.ndarray], list[Lowered]]:
    """The outputs, which come after the inputs, and the kernels."""
    elems = {np.dtype(d): e for e, d in DTYPES.items()}
    infos = [ArrayInfo(elems[a.dtype], a.size) for a in arrays]
    context = TemplateContext(REFERENCE, [*infos, *(ArrayInfo(e, n) for e, n in outputs)])
    kernels = pointwise(group, schedule, context)
    memory = [a.ravel().copy() for a in arrays]
    memory += [np.full(n, 77, DTYPES[e]) for e, n in outputs]
    for lowered in kernels:
        verify(lowered.kernel)
        interpret.run(lowered.kernel, [memory[i] for i in lowered.arrays])
    return memory[len(arrays) :], kernels


def sum_of(x: View, y: View, out: View) -> LoopGroup:
    """Arrays 0 and 1 added into array 2."""
    body = (LoadStep(0, x, F32), LoadStep(1, y, F32), ScalarStep(add, (0, 1), F32))
    return LoopGroup(out.shape, 0, body, (StoreStep(2, 2, out),))


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=3),
    st.data(),
    st.integers(0, 3).map(lambda n: 1 << n),
    st.integers(1, 3),
    st.integers(1, 9),
)
def test_permuted_operands_under_any_schedule(
    shape: list[int], data: st.DataObject, lanes: int, unroll: int, tasks: int
) -> None:
    """Each of two operands and the result lies in an order of its own."""
    orders = st.permutations(range(len(shape)))
    views: list[View] = []
    for order in (data.draw(orders), data.draw(orders), data.draw(orders)):
        inverse = tuple(order.index(a) for a in range(len(shape)))
        views.append(dense([shape[a] for a in order]).permuted(inverse))
    count = math.prod(shape)
    x, y = np.arange(count, dtype=np.float32), 1000 * np.arange(count, dtype=np.float32)
    schedule = LoopSchedule(lanes, unroll, tasks)
    (got,), _ = run(sum_of(*views), [x, y], [(F32, count)], schedule)
    want = seen(x, views[0]) + seen(y, views[1])
    np.testing.assert_array_equal(seen(got, views[2]), want)


def seen(array: np.ndarray, view: View) -> np.ndarray:
    """The array as ``view`` reads it."""
    strides = [s * array.itemsize for s in view.strides]
    return np.lib.stride_tricks.as_strided(array[view.offset :], view.shape, strides)


def matrix(rows: int, columns: int, *, turned: bool) -> View:
    """A matrix by rows, or by columns when ``turned``."""
    return dense((columns, rows)).permuted((1, 0)) if turned else dense((rows, columns))


@pytest.mark.parametrize("shape", [(8, 8), (40, 70), (33, 35), (64, 9), (7, 50), (3, 3)], ids=str)
@pytest.mark.parametrize("lanes", [4, 8])
@pytest.mark.parametrize("which", [(True, False, False), (False, True, False), (True, True, False),
                                   (False, False, True)], ids=str)  # fmt: skip
def test_turned_tiles(shape: tuple[int, int], lanes: int, which: tuple[bool, bool, bool]) -> None:
    views = [matrix(*shape, turned=t) for t in which]
    x, y = (np.random.default_rng(i).integers(0, 99, shape).astype(np.float32) for i in range(2))
    schedule = LoopSchedule(lanes, 1, 4)
    arrays = [x.T.copy() if which[0] else x, y.T.copy() if which[1] else y]
    (got,), _ = run(sum_of(*views), arrays, [(F32, x.size)], schedule)
    np.testing.assert_array_equal(seen(got, views[2]), x + y)


def test_a_transpose_gathers_only_at_its_edges() -> None:
    turned = matrix(64, 64, turned=True)
    group = LoopGroup((64, 64), 0, (LoadStep(0, turned, F32),), (StoreStep(0, 1, dense((64, 64))),))
    x = np.arange(4096, dtype=np.float32)
    (got,), (lowered,) = run(group, [x], [(F32, 4096)], LoopSchedule(8, 1, 1))
    np.testing.assert_array_equal(got.reshape(64, 64), x.reshape(64, 64).T)
    nodes = list(all_nodes(lowered.kernel.body))
    assert any(isinstance(n, Shuffle) for n in nodes)
    assert not [n for n in nodes if isinstance(n, Load) and isinstance(n.index.type, VecType)]


@pytest.mark.parametrize("which", [(True, False), (False, True)], ids=str)
def test_booleans_turn_as_bytes(which: tuple[bool, bool]) -> None:
    shape = (21, 19)
    views = [matrix(*shape, turned=t) for t in which]
    body = (LoadStep(0, views[0], I1), ScalarStep(both, (0, 0), I1))
    group = LoopGroup(shape, 0, body, (StoreStep(1, 1, views[1]),))
    x = np.random.default_rng(1).integers(0, 2, shape).astype(np.uint8)
    given_ = x.T.copy() if which[0] else x
    (got,), _ = run(group, [given_], [(I1, x.size)], LoopSchedule(8, 1, 2))
    np.testing.assert_array_equal(seen(got, views[1]), x)


def test_comparisons_are_stored_as_bytes() -> None:
    body = (
        LoadStep(0, dense((30,)), F32),
        LoadStep(1, dense((30,)), F32),
        ScalarStep(less, (0, 1), I1),
    )
    group = LoopGroup((30,), 0, body, (StoreStep(2, 2, dense((30,))),))
    x, y = np.arange(30, dtype=np.float32), np.full(30, 11, np.float32)
    (got,), _ = run(group, [x, y], [(I1, 30)], LoopSchedule(4, 2, 1))
    np.testing.assert_array_equal(got, x < y)


def test_small_work_stays_on_the_caller() -> None:
    many = replace(REFERENCE, threads=8)
    assert task_count(1 << 20, 1024, many) == 1
    assert task_count(0, 0, many) == 1
    assert task_count(1 << 20, 1 << 30, REFERENCE) == 1


def test_tasks_are_a_multiple_of_the_threads() -> None:
    target = replace(REFERENCE, threads=6)
    for items in range(1, 100):
        tasks = task_count(items, 1 << 40, target)
        assert 1 <= tasks <= items
        assert tasks % 6 == 0 or tasks < 6
