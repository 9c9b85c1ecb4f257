"""Products on subgroup matrix units of the device, against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.products import DTYPES, OUT, Array, Case
from vkjit.lowering.artifact import Launch, Plan, PlannedBuffer, Range, Role
from vkjit.lowering.gpu import gemm_coop
from vkjit.lowering.gpu.gemm_coop_schedule import candidates, scheme_of, shapes_of
from vkjit.lowering.kernel.specs import Precision
from vkjit.lowering.kernel.types import F16, F32
from vkjit.lowering.legalize import legalize
from vkjit.lowering.plan.schedule import CoopSchedule
from vkjit.lowering.templates.context import TemplateContext

pytestmark = pytest.mark.matrix

# Software drivers take seconds for a kernel: each case tests as much as one kernel can.
BOTH = [
    Case(16, 16, 16, "nn", out=F32),
    Case(24, 20, 24, "tn", batch=(2,), epilogue="full"),
]
CASES = [
    Case(24, 24, 24, "nt", extra=8),
    Case(19, 21, 17, "tt", out=F32),
    Case(16, 24, 70, "tn", out=F32),
    Case(24, 16, 16, "nn", accumulate=F16),
    Case(16, 16, 24, "nt", elem=F32, precision=Precision.F16X3),
]


def fragments(device, case: Case) -> CoopSchedule:
    """A small tile in fragments that the device has."""
    group = case.group()
    scheme = scheme_of(group)
    assert scheme is not None
    found = shapes_of(group, scheme, device.target)
    if not found:
        pytest.skip(f"{device.target.name} does not multiply {scheme.elem} for {case}")
    m, n, k = found[0].m, found[0].n, found[0].k
    return CoopSchedule(2 * m, 2 * n, k, 1, 2, m, n, k, device.target.subgroup_sizes[0])


def run(device, case: Case, schedule: CoopSchedule, data: list[Array]) -> None:
    """Runs the kernels of a product on ``data``; the result replaces its place there."""
    context = TemplateContext(device.target, case.arrays())
    kernels = gemm_coop.contract(case.group(), schedule, context)
    sizes = [max(4, i.length * i.elem.bytes) for i in context.arrays]
    inputs = [i for i in range(len(data)) if i != OUT]
    buffers = [PlannedBuffer(Role.INPUT, sizes[a], p) for p, a in enumerate(inputs)]
    buffers.append(PlannedBuffer(Role.OUTPUT, sizes[OUT], 0))
    places = {a: Range(p, 0, sizes[a]) for p, a in enumerate([*inputs, OUT])}
    arena = sum(sizes[len(data) :])
    if arena:
        buffers.append(PlannedBuffer(Role.ARENA, arena))
        (extra,) = range(len(data), len(sizes))
        places[extra] = Range(len(buffers) - 1, 0, arena)
    steps = tuple(
        Launch(legalize(k.kernel, device.target), tuple(places[a] for a in k.arrays))
        for k in kernels
    )
    plan = Plan("product", tuple(buffers), steps, frozenset(range(1, len(steps))), 0, arena)
    (out,) = device.load(plan).run([device.upload(data[i]) for i in inputs])
    data[OUT] = device.download(out, DTYPES[case.product], (case.arrays()[OUT].length,))


@pytest.mark.parametrize("case", BOTH, ids=str)
def test_products(in_both_modes, case: Case) -> None:
    data = case.data()
    run(in_both_modes, case, fragments(in_both_modes, case), data)
    case.check(data)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layouts_types_and_edges(matrices, case: Case) -> None:
    data = case.data()
    run(matrices, case, fragments(matrices, case), data)
    case.check(data)


def test_sums_in_parts(matrices) -> None:
    case = Case(16, 16, 96, "nt", epilogue="full")
    schedule = replace(fragments(matrices, case), split_k=3)
    results: list[Array] = []
    for _ in range(2):
        data = case.data()
        run(matrices, case, schedule, data)
        case.check(data)
        results.append(data[OUT])
    np.testing.assert_array_equal(results[0], results[1])


def test_not_a_number_and_infinity(matrices) -> None:
    case = Case(16, 16, 16, out=F32)
    data = case.data()
    data[0][3 * 16 + 5], data[0][7 * 16 + 2], data[1][4 * 16 + 9] = np.inf, np.nan, -np.inf
    run(matrices, case, fragments(matrices, case), data)
    want, got = case.expected(data).ravel(), data[OUT]
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(got[np.isinf(want)], want[np.isinf(want)])


def test_the_device_has_schedules_for_its_fragments(matrices) -> None:
    group = Case(64, 64, 64, elem=F16).group()
    assert candidates(group, matrices.target)
