"""Epilogues of products that write over what they read: every template, in the interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.lowering.gpu.matrix_cases import EPSILON
from tests.lowering.gpu.test_gemm_tensor import TARGET
from vkjit.lowering.assemble import updated_in_place
from vkjit.lowering.gpu.choose import lower_contract, serves
from vkjit.lowering.gpu.gemm_tensor_epilogue import supports
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.interpret import run
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import F16, F32, MatScope
from vkjit.lowering.kernel.views import dense
from vkjit.lowering.plan.groups import (
    ArrayInfo,
    ContractGroup,
    LoadStep,
    ProductStep,
    ScalarStep,
    StoreStep,
)
from vkjit.lowering.plan.schedule import (
    CoopSchedule,
    GpuContract,
    NaiveSchedule,
    SkinnySchedule,
    TensorSchedule,
    TiledSchedule,
)
from vkjit.lowering.target import CoopShape
from vkjit.lowering.templates.context import TemplateContext

Array = np.ndarray[Any, Any]
GPU = replace(
    TARGET,
    shared_bytes=49152,
    subgroup_ops=True,
    features=TARGET.features | {"subgroup_shuffle"},
    coop_shapes=(CoopShape(F16, F16, F32, 8, 8, 8, MatScope.SUBGROUP),),
)
LHS, RHS, MOMENTUM, WEIGHTS, NEW_MOMENTUM, NEW_WEIGHTS = range(6)
IN_PLACE = {NEW_MOMENTUM: MOMENTUM, NEW_WEIGHTS: WEIGHTS}
"""Each result in the memory of an operand of the epilogue."""

SCHEDULES: list[GpuContract] = [
    NaiveSchedule(4, 8),
    TiledSchedule(16, 16, 16, 1, 1, 2, slices=2),
    TiledSchedule(32, 16, 16, 4, 8, 2),
    TiledSchedule(16, 16, 16, 4, 4, 1, 1, slices=4, unroll=2),
    TiledSchedule(16, 16, 8, 4, 4, 2, 3),
    CoopSchedule(16, 16, 16, 1, 2, 8, 8, 8, 8),
    CoopSchedule(16, 16, 16, 1, 2, 8, 8, 8, 8, split_k=2),
]
TENSOR = TensorSchedule(32, 32, 16, 128, 2)
FEW: list[GpuContract] = [
    SkinnySchedule(16, 2),
    SkinnySchedule(8, 4, split_k=2),
    SkinnySchedule(4, 4, 8, along_k=False),
]


def _plus(b: Builder, x: Value, y: Value) -> Value:
    return b.add(x, y)


def _minus(b: Builder, x: Value, y: Value) -> Value:
    return b.sub(x, y)


def update(m: int, n: int, k: int, *, turned: bool = False) -> ContractGroup:
    """``momentum += lhs @ rhs; weights -= momentum``; ``turned``: both lie column by column."""
    place = dense((n, m)).permuted((1, 0)) if turned else dense((m, n))
    body = (
        ProductStep(F32),
        LoadStep(MOMENTUM, place, F32),
        ScalarStep(_plus, (0, 1), F32),
        LoadStep(WEIGHTS, place, F32),
        ScalarStep(_minus, (3, 2), F32),
    )
    stores = (StoreStep(2, NEW_MOMENTUM, place), StoreStep(4, NEW_WEIGHTS, place))
    lhs, rhs = (LoadStep(a, dense(s), F16) for a, s in ((LHS, (m, k)), (RHS, (k, n))))
    return ContractGroup((), m, n, k, lhs, rhs, F32, body, stores)


def check(group: ContractGroup, schedule: GpuContract, memory: dict[int, int] = IN_PLACE) -> None:
    """Runs the kernels with results in the ``memory`` of what their epilogue reads."""
    assert {(old, new) for new, old in memory.items()} <= updated_in_place(group)
    m, n, k = group.m, group.n, group.k
    rng = np.random.default_rng(0)
    elems = (F16, F16, F32, F32, F32, F32)
    lengths = (m * k, k * n, m * n, m * n, m * n, m * n)
    infos = [ArrayInfo(e, size) for e, size in zip(elems, lengths, strict=True)]
    context = TemplateContext(GPU, infos)
    kernels = lower_contract(group, schedule, context)
    data: list[Array] = [rng.uniform(-1, 1, i.length).astype(np.float32) for i in context.arrays]
    data[LHS], data[RHS] = data[LHS].astype(np.float16), data[RHS].astype(np.float16)
    a, b = data[LHS].reshape(m, k).astype(np.float64), data[RHS].reshape(k, n).astype(np.float64)
    turned = group.stores[0].view.strides[-1] != 1

    def seen(array: int) -> Array:
        x = data[array].astype(np.float64)
        return x.reshape(n, m).T if turned else x.reshape(m, n)

    product, momentum = a @ b, seen(MOMENTUM) + a @ b
    values = {0: product, 2: momentum, 4: seen(WEIGHTS) - momentum}
    for new, old in memory.items():
        data[new] = data[old]
    for item in kernels:
        run(item.kernel, [data[x] for x in item.arrays], subgroup=8)
    bound = (k + 3) * EPSILON[F32] * (np.abs(a) @ np.abs(b) + 4)
    for step in group.stores:
        assert (np.abs(seen(step.array) - values[step.value]) <= bound).all()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.text())
def test_products_update_in_place(schedule: GpuContract, *, turned: bool) -> None:
    for sizes in ((32, 64, 48), (35, 29, 41)):
        check(update(*sizes, turned=turned), schedule)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("schedule", FEW, ids=lambda s: s.text())
def test_products_of_few_rows_update_in_place(schedule: GpuContract, *, turned: bool) -> None:
    for sizes in ((3, 32, 64), (29, 5, 77)):
        check(update(*sizes, turned=turned), schedule)


def test_maps_over_matrices_leave_stores_to_others_where_two_of_them_read() -> None:
    """Each store has a map of its own, which would read what the one before has written."""
    group = update(64, 64, 64)
    context = TemplateContext(GPU, [ArrayInfo(F32, 64 * 64)] * 6)
    assert not supports(group)
    assert not serves(group, TENSOR, context)
    alone = replace(group, stores=group.stores[1:])
    assert supports(alone)
    check(alone, TENSOR, {NEW_WEIGHTS: MOMENTUM})


@pytest.mark.parametrize("first", [0, 1])
def test_maps_over_matrices_read_before_the_product_is_stored(first: int) -> None:
    group = update(64, 64, 64)
    stores = (StoreStep(0, NEW_MOMENTUM, dense((64, 64))), group.stores[1])
    group = replace(group, stores=(stores[first], stores[1 - first]))
    assert supports(group)
    check(group, TENSOR, {NEW_MOMENTUM: MOMENTUM})
    check(group, TENSOR, {NEW_MOMENTUM: WEIGHTS})
