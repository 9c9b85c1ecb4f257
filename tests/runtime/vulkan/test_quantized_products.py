"""Products out of quantized blocks on the device: random shapes, types, layouts and schedules."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.quantized_products import Case, run_on
from vkjit.blocks import BLOCK_TYPES, BlockType
from vkjit.lowering.kernel.types import BF16, F16, F32
from vkjit.lowering.plan.schedule import GpuContract, NaiveSchedule, SkinnySchedule, TiledSchedule

TILED: list[GpuContract] = [
    TiledSchedule(16, 16, 16, 4, 4, 2),
    TiledSchedule(16, 32, 8, 4, 4),
    TiledSchedule(8, 8, 8, 1, 1, 1, 2),
    NaiveSchedule(4, 8),
]
SKINNY: list[GpuContract] = [
    SkinnySchedule(16, 2, 1, along_k=True),
    SkinnySchedule(8, 4, 4, along_k=False),
]


@st.composite
def cases(draw: st.DrawFn, block_type: BlockType) -> tuple[Case, GpuContract]:
    forward = draw(st.booleans())
    few = draw(st.booleans())
    wide = block_type.size * draw(st.integers(1, 2 if block_type.size == 256 else 3))
    other, m = draw(st.integers(1, 40)), draw(st.integers(1, 8 if few else 20))
    schedule: GpuContract = draw(st.sampled_from(TILED))
    if few:
        # Its members stand along the axis along which the blocks lie.
        schedule = SKINNY[0] if forward else SKINNY[1]
        other = other if forward else 4 * other
    case = Case(
        block_type,
        m,
        other if forward else wide,
        wide if forward else other,
        forward,
        draw(st.sampled_from([F32, F32, F16, BF16])),
        draw(st.booleans()),
        draw(st.sampled_from([0, 0, 2])),
        draw(st.sampled_from([0, 3])),
    )
    return case, schedule


@pytest.mark.parametrize("block_type", BLOCK_TYPES.values(), ids=str)
@settings(max_examples=2)
@given(data=st.data())
def test_products(vulkan, block_type: BlockType, data: st.DataObject) -> None:
    case, schedule = data.draw(cases(block_type))
    run_on(vulkan, case, schedule)
