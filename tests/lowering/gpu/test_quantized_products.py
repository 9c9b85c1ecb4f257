"""Products that read quantized blocks: every template, interpreted and validated as SPIR-V."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.lowering.gpu.test_gemm_coop import EIGHT
from tests.lowering.gpu.test_gemm_tensor import TARGET as TENSORS
from tests.quantized_products import Case, lowered
from tests.targets import LARGE_GPU
from vkjit.blocks import BLOCK_TYPES, Q4_K, Q6_K, Q8_0, BlockType
from vkjit.errors import MissingRuleError
from vkjit.lowering.gpu.choose import candidates, serves
from vkjit.lowering.gpu.gemm_coop_schedule import Scheme
from vkjit.lowering.gpu.gemm_split import decoded_in_words
from vkjit.lowering.gpu.lower import lower
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.check import verify
from vkjit.lowering.kernel.interpret import run
from vkjit.lowering.kernel.interpret_ops import DTYPES
from vkjit.lowering.kernel.text import text
from vkjit.lowering.kernel.types import BF16, F16, F32, I32, Access
from vkjit.lowering.legalize import legalize
from vkjit.lowering.plan.schedule import (
    CoopSchedule,
    GpuContract,
    NaiveSchedule,
    SkinnySchedule,
    TensorSchedule,
    TiledSchedule,
)
from vkjit.lowering.spirv.emit import emit
from vkjit.lowering.spirv.validate import validate
from vkjit.lowering.target import Addressing, Target
from vkjit.lowering.templates.context import TemplateContext

GOLDEN = Path(__file__).parents[2] / "data/kernels/gemm_coop_q8_0.txt"
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


def check(case: Case, schedule: GpuContract, target: Target = EIGHT) -> None:
    kernels, data = lowered(case, schedule, target)
    for item in kernels:
        verify(item.kernel, 4)
        run(item.kernel, [data[a] for a in item.arrays])
        legal = legalize(item.kernel, target)
        verify(legal, 4)
        for addressing in Addressing:
            validate(emit(legal, replace(target, addressing=addressing)))
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


@pytest.mark.parametrize("block_type", [Q4_K, Q8_0, Q6_K], ids=str)
def test_scales_by_the_conversion_of_the_device(block_type: BlockType) -> None:
    target = replace(EIGHT, features=frozenset({"denorm_preserve_f16"}))
    schedule = SCHEDULES[-2]
    check(case_of(block_type, schedule, forward=True), schedule, target)


def test_decoded_numbers_are_rounded_to_nearest_even() -> None:
    """Every bfloat16 significand with every tie, one unit around it, and random numbers."""
    upper = (0x3F80 + np.arange(256, dtype=np.uint32)) << 16
    near = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    bits = (upper[:, None] | near).ravel()
    rng = np.random.default_rng(0)
    scales = 2.0 ** rng.integers(-24, 12, bits.size)
    x = (bits.view(np.float32) * scales * rng.choice([-1.0, 1.0], bits.size)).astype(np.float32)
    x[:8] = 0.0
    b = Builder("rounded", I32)
    source = b.buffer("x", F32, x.size, Access.READ)
    target = b.buffer("y", I32, x.size // 2, Access.WRITE)
    start = b.scaled(b.workgroup_id(), 8)
    halves = (b.load(source, start, 4), b.load(source, b.offset(start, 4), 4))
    b.store(target, b.scaled(b.workgroup_id(), 4), decoded_in_words(b, halves, Scheme(BF16)))
    got = np.zeros(x.size // 2, np.int32)
    run(b.finish(grid=(x.size // 8, 1, 1)), [x, got])
    np.testing.assert_array_equal(got.view(DTYPES[BF16]), x.astype(DTYPES[BF16]))


def test_only_templates_that_read_blocks_are_candidates() -> None:
    case = Case(Q4_K, 256, 256, 256, elem=F16)
    context = TemplateContext(TENSORS, case.arrays())
    packed = candidates(case.group(), context)
    assert not any(isinstance(s, TensorSchedule) for s in packed)
    plain = replace(case.group(), rhs=replace(case.group().rhs, blocks=None))
    tensors = [s for s in candidates(plain, context) if isinstance(s, TensorSchedule)]
    assert tensors
    assert not serves(case.group(), tensors[0], context)


def test_more_numbers_than_indices_reach_are_refused() -> None:
    case = Case(Q4_K, 1, 1 << 20, 2048)
    with pytest.raises(MissingRuleError, match="indexes fewer"):
        lower(case.group(), TemplateContext(LARGE_GPU, case.arrays()))


def test_the_text_of_a_kernel() -> None:
    """Blocks are read before a step and decoded after it, on the way to shared memory."""
    case = Case(Q8_0, 8, 16, 32, elem=F16)
    (item, *others), _ = lowered(case, CoopSchedule(8, 16, 16, 1, 2, 8, 8, 8, 8), EIGHT)
    assert not others
    assert text(item.kernel) == GOLDEN.read_text()
