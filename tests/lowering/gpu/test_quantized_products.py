"""Products that read quantized blocks: every template, interpreted and validated as SPIR-V."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.lowering.gpu.test_gemm_coop import EIGHT
from tests.quantized_products import Case, lowered
from vkjit.blocks import BLOCK_TYPES, BlockType
from vkjit.lowering.kernel.check import verify
from vkjit.lowering.kernel.interpret import run
from vkjit.lowering.kernel.types import F16, F32
from vkjit.lowering.legalize import legalize
from vkjit.lowering.plan.schedule import (
    CoopSchedule,
    GpuContract,
    NaiveSchedule,
    SkinnySchedule,
    TiledSchedule,
)
from vkjit.lowering.spirv.emit import emit
from vkjit.lowering.spirv.validate import validate
from vkjit.lowering.target import Addressing

TYPES = list(BLOCK_TYPES.values())
SCHEDULES: list[GpuContract] = [
    NaiveSchedule(4, 8),
    TiledSchedule(16, 16, 16, 4, 4, 2),
    TiledSchedule(16, 16, 16, 1, 1, 1, 2),
    SkinnySchedule(8, 1, 1, along_k=True),
    SkinnySchedule(8, 4, 4, along_k=False),
    CoopSchedule(16, 16, 16, 1, 2, 8, 8, 8, 8),
    CoopSchedule(16, 32, 32, 2, 1, 8, 8, 8, 8, split_k=2),
]


def check(case: Case, schedule: GpuContract) -> None:
    kernels, data = lowered(case, schedule, EIGHT)
    for item in kernels:
        verify(item.kernel, 4)
        run(item.kernel, [data[a] for a in item.arrays])
        legal = legalize(item.kernel, EIGHT)
        verify(legal, 4)
        for addressing in Addressing:
            validate(emit(legal, replace(EIGHT, addressing=addressing)))
    case.check(data)


def case_of(block_type: BlockType, schedule: GpuContract, *, forward: bool) -> Case:
    size = block_type.size
    rows = 5 if isinstance(schedule, SkinnySchedule) else 17
    elem = F16 if isinstance(schedule, CoopSchedule) else F32
    if forward:
        return Case(block_type, rows, 12, size, forward=True, elem=elem)
    return Case(block_type, rows, size, 20, forward=False, elem=elem)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.text())
@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
@pytest.mark.parametrize("block_type", TYPES, ids=str)
def test_every_type(block_type: BlockType, schedule: GpuContract, forward: bool) -> None:  # noqa: FBT001  of pytest
    check(case_of(block_type, schedule, forward=forward), schedule)
