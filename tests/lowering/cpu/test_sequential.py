"""Scatter-add and scans on the CPU: order, ragged lanes, tasks; through the interpreter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vkjit import dtypes
from vkjit.lowering.cpu.sequential import scan, scatter_add
from vkjit.lowering.kernel import interpret
from vkjit.lowering.kernel.check import verify
from vkjit.lowering.kernel.types import F32, I32
from vkjit.lowering.kernel.views import View, dense
from vkjit.lowering.plan.groups import ArrayInfo, LoadStep, ScanGroup, ScatterAddGroup
from vkjit.lowering.target import REFERENCE, Target
from vkjit.lowering.templates.context import TemplateContext
from vkjit.ops.structural import SumRule

TARGETS = [REFERENCE, replace(REFERENCE, vector_bytes=64, threads=4)]


@pytest.mark.parametrize("target", TARGETS, ids=["short", "wide"])
@pytest.mark.parametrize(
    ("outer", "size", "inner"), [(1, 7, 1), (3, 7, 1), (1, 5, 37), (2, 5, 16), (1, 3, 5000)]
)
def test_scatter_add(outer: int, size: int, inner: int, target: Target) -> None:
    """Equal indices add up, indices outside are dropped."""
    rng = np.random.default_rng(2)
    indices = np.array([3, -1, 0, 3, size, 2, 3, 0], np.int32)
    count = len(indices)
    updates = rng.integers(-9, 9, (outer, count, inner)).astype(np.float32)
    base = rng.integers(-9, 9, (outer, size, inner)).astype(np.float32)
    group = ScatterAddGroup(
        outer, size, inner, count, 0,
        LoadStep(1, dense((count,)), I32),
        LoadStep(2, dense((outer, count, inner)), F32),
    )  # fmt: skip
    infos = [ArrayInfo(F32, base.size), ArrayInfo(I32, count), ArrayInfo(F32, updates.size)]
    want = base.copy()
    for i, at in enumerate(indices):
        if 0 <= at < size:
            want[:, at] += updates[:, i]

    got, memory = base.ravel().copy(), [indices, updates.ravel()]
    for lowered in scatter_add(group, TemplateContext(target, infos)):
        verify(lowered.kernel)
        interpret.run(lowered.kernel, [[got, *memory][i] for i in lowered.arrays])
    np.testing.assert_array_equal(got, want.ravel())


@pytest.mark.parametrize("target", TARGETS, ids=["short", "wide"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("shape", [(1, 9, 1), (4, 9, 1), (2, 11, 21), (1, 40, 3000)], ids=str)
def test_running_sum(shape: tuple[int, int, int], target: Target, *, reverse: bool) -> None:
    """The source may be read through any view: here the outer axis comes last in memory."""
    x = np.random.default_rng(3).integers(-9, 9, shape).astype(np.float32)
    outer, length, inner = shape
    source = dense((length, inner, outer)).permuted((2, 0, 1))
    group = ScanGroup(
        outer, length, inner,
        reverse=reverse,
        rule=SumRule(dtypes.float32),
        source=LoadStep(0, View(shape, source.strides), F32),
        target=1,
        target_type=F32,
    )  # fmt: skip

    context = TemplateContext(target, [ArrayInfo(F32, x.size), ArrayInfo(F32, x.size)])
    memory = [x.transpose(1, 2, 0).ravel(), np.zeros(x.size, np.float32)]
    for lowered in scan(group, context):
        verify(lowered.kernel)
        interpret.run(lowered.kernel, [memory[i] for i in lowered.arrays])
    want = np.cumsum(x[:, ::-1], axis=1)[:, ::-1] if reverse else np.cumsum(x, axis=1)
    np.testing.assert_array_equal(memory[1].reshape(shape), want)
