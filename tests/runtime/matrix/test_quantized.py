"""Products out of quantized blocks on subgroup matrix units of the device, against float64."""

from __future__ import annotations

import pytest

from tests.quantized_products import Case, run_on
from vkjit.blocks import Q4_1, Q4_K, Q5_0, Q5_K, Q6_K, Q8_0, BlockType
from vkjit.lowering.gpu.gemm_coop_schedule import scheme_of, shapes_of
from vkjit.lowering.kernel.types import F16
from vkjit.lowering.plan.schedule import CoopSchedule

pytestmark = pytest.mark.matrix


def fragments(device, case: Case, depth: int = 32) -> CoopSchedule:
    """A small tile in fragments that the device has."""
    scheme = scheme_of(case.group())
    assert scheme is not None
    found = shapes_of(case.group(), scheme, device.target)
    if not found:
        pytest.skip(f"{device.target.name} does not multiply {scheme.elem}")
    m, n, k = found[0].m, found[0].n, found[0].k
    depth = -(-depth // k) * k
    return CoopSchedule(2 * m, 2 * n, depth, 1, 2, m, n, k, device.target.subgroup_sizes[0])


# Software drivers take seconds for a kernel; the interpreter has every type in every layout.
@pytest.mark.parametrize("block_type", [Q4_1, Q4_K, Q6_K], ids=str)
def test_forward(matrices, block_type: BlockType) -> None:
    case = Case(block_type, 17, 12, block_type.size, elem=F16)
    run_on(matrices, case, fragments(matrices, case, 16))


@pytest.mark.parametrize("block_type", [Q5_0, Q8_0], ids=str)
def test_backward(matrices, block_type: BlockType) -> None:
    case = Case(block_type, 16, block_type.size, 20, forward=False, elem=F16)
    run_on(matrices, case, fragments(matrices, case, 16))


def test_both_ways_to_reach_memory(in_both_modes) -> None:
    case = Case(Q5_K, 9, 16, 256, elem=F16, left=True, batch=2, first=3)
    run_on(in_both_modes, case, fragments(in_both_modes, case, 16))
