"""Plain products on the device under every schedule; validated, in both modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from vkjit.lowering.compile import compile_program
from vkjit.lowering.plan.schedule import (
    GpuContract,
    NaiveSchedule,
    SkinnySchedule,
    TiledSchedule,
)

Array = np.ndarray[Any, Any]

SCHEDULES: list[GpuContract] = [
    NaiveSchedule(4, 8),
    TiledSchedule(16, 16, 16, 1, 1, 2),
    TiledSchedule(32, 16, 8, 4, 4, 2, slices=2, unroll=2),
    TiledSchedule(16, 32, 8, 4, 8, 1, split_k=3, unroll=1),
]
FEW: list[GpuContract] = [
    SkinnySchedule(16, 2),
    SkinnySchedule(8, 4, split_k=2),
    SkinnySchedule(4, 4, 8, along_k=False),
]


def product(x: Any, y: Any) -> Any:
    return jnp.matmul(x, y)


def transposed_right(x: Any, y: Any) -> Any:
    return x @ y.T


def transposed_left(x: Any, y: Any) -> Any:
    return jnp.swapaxes(x, 1, 2) @ y


def fused(x: Any, y: Any, c: Any) -> Any:
    return jnp.tanh(x @ y + c)


REFERENCES: dict[Callable[..., Any], Callable[..., Array]] = {
    product: np.matmul,
    transposed_right: transposed_right,
    transposed_left: lambda x, y: np.swapaxes(x, 1, 2) @ y,
    fused: lambda x, y, c: x @ y + c,
}
Case = tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]
CASES: dict[str, Case] = {
    "nn": (product, ((36, 40), (40, 44))),
    "nt ragged": (transposed_right, ((37, 29), (45, 29))),
    "tn batched": (transposed_left, ((2, 24, 20), (2, 24, 33))),
    "epilogue": (fused, ((33, 24), (24, 36), (36,))),
}
ROWS: dict[str, Case] = {
    "nn": (product, ((3, 72), (72, 40))),
    "nt ragged": (transposed_right, ((1, 45), (37, 45))),
    "columns batched": (product, ((2, 40, 64), (2, 64, 1))),
}


def agree(vulkan: Any, case: Case, schedule: GpuContract, dtype: Any = np.float32) -> None:
    """Within k * eps of the sum of absolute products, and the rounding of the result."""
    function, shapes = case
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    program = vj.make_ir(function)(*arrays)
    plan = compile_program(program, vulkan.target, choose=lambda *_: schedule).plan
    (out,) = vulkan.load(plan).run([vulkan.upload(a) for a in arrays])
    (of,) = program.out_avals
    got = vulkan.download(out, of.dtype, of.shape).astype(np.float64)
    exact = [a.astype(np.float64) for a in arrays]
    want, scale = (REFERENCES[function](*values) for values in (exact, [np.abs(a) for a in exact]))
    if function is fused:
        want = np.tanh(want)  # a contraction: the bound of its argument holds
    steps = max(shapes[0]) + 8
    rounding = 2.0**-8 if dtype == ml_dtypes.bfloat16 else 2.0**-22
    assert np.all(np.abs(got - want) <= steps * 2.0**-24 * scale + rounding * np.abs(want))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.text())
@pytest.mark.parametrize("case", CASES)
def test_schedules(vulkan, case: str, schedule: GpuContract) -> None:
    agree(vulkan, CASES[case], schedule)


@pytest.mark.parametrize("schedule", FEW, ids=lambda s: s.text())
@pytest.mark.parametrize("case", ROWS)
def test_few_rows(vulkan, case: str, schedule: GpuContract) -> None:
    agree(vulkan, ROWS[case], schedule)


@pytest.mark.parametrize("schedule", [SCHEDULES[2], FEW[0], FEW[2]], ids=lambda s: s.text())
def test_bfloat16(vulkan, schedule: GpuContract) -> None:
    case = ROWS["nn"] if isinstance(schedule, SkinnySchedule) else CASES["nn"]
    agree(vulkan, case, schedule, ml_dtypes.bfloat16)
