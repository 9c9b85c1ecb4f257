"""Runs hand-built kernels on the CPU and in the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

from vkjit.lowering.artifact import Launch, Plan, PlannedBuffer, Range, Role
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Kernel, Value
from vkjit.lowering.kernel.types import (
    BF16,
    F16,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    Access,
    ScalarType,
)
from vkjit.runtime import get_device

DTYPES = {
    I8: np.int8,
    I16: np.int16,
    I32: np.int32,
    I64: np.int64,
    F16: np.float16,
    BF16: ml_dtypes.bfloat16,
    F32: np.float32,
    F64: np.float64,
}


def plan_of(kernel: Kernel) -> Plan:
    """One launch: what is only read is an input, all else an output that takes over an input."""
    buffers: list[PlannedBuffer] = []
    outputs: list[PlannedBuffer] = []
    arguments: list[Range] = []
    for position, buffer in enumerate(kernel.buffers):
        size = buffer.length * buffer.elem.bytes
        buffers.append(PlannedBuffer(Role.INPUT, size, position))
        place = position
        if buffer.access is not Access.READ:
            place = len(kernel.buffers) + len(outputs)
            outputs.append(PlannedBuffer(Role.OUTPUT, size, len(outputs), donated=position))
        arguments.append(Range(place, 0, size))
    step = Launch(kernel, tuple(arguments))
    return Plan(kernel.name, (*buffers, *outputs), (step,), frozenset(), 0)


def run_on(name: str, kernel: Kernel, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The written arrays after one run, in order."""
    device = get_device(name)
    plan = plan_of(kernel)
    written = [i for i, b in enumerate(kernel.buffers) if b.access is not Access.READ]
    inputs = [device.upload(a) for a in arrays]
    results = device.load(plan).run(inputs, donated=written)
    return [
        np.array(device.download(r, arrays[i].dtype, arrays[i].shape))
        for r, i in zip(results, written, strict=True)
    ]


def check(kernel: Kernel, *arrays: np.ndarray, ulp: int = 0) -> list[np.ndarray]:
    """Runs on both devices; equal up to ``ulp`` units of f32; returns the CPU's."""
    want = run_on("reference", kernel, arrays)
    got = run_on("cpu", kernel, arrays)
    for w, g in zip(want, got, strict=True):
        if ulp:
            np.testing.assert_array_max_ulp(g, w, maxulp=ulp)
        else:
            np.testing.assert_array_equal(g, w)
    return got


def values(elem: ScalarType, count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if elem.kind == "float":
        return (rng.standard_normal(count) * 3).astype(DTYPES[elem])
    info = np.iinfo(DTYPES[elem])
    return rng.integers(info.min, info.max, count, DTYPES[elem], endpoint=True)


def elementwise(
    elem: ScalarType, out: ScalarType, lanes: int, formula: Callable[[Builder, Value, Value], Value]
) -> Kernel:
    """``z[i] = formula(x[i], y[i])`` over 4 tasks of ``lanes`` elements."""
    b = Builder("elementwise", index_type=I64)
    count = 4 * lanes
    x = b.buffer("x", elem, count, Access.READ)
    y = b.buffer("y", elem, count, Access.READ)
    z = b.buffer("z", out, count, Access.WRITE)
    i = b.scaled(b.workgroup_id(), lanes)
    b.store(z, i, formula(b, b.load(x, i, lanes), b.load(y, i, lanes)))
    return b.finish((4, 1, 1))


def run_elementwise(
    elem: ScalarType,
    out: ScalarType,
    formula: Callable[[Builder, Value, Value], Value],
    ulp: int = 0,
) -> None:
    for lanes in (1, 16):
        x, y = values(elem, 4 * lanes, 1), values(elem, 4 * lanes, 2)
        z = np.zeros(4 * lanes, DTYPES[out])
        check(elementwise(elem, out, lanes, formula), x, y, z, ulp=ulp)
