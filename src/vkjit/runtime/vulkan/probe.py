"""Questions that no Vulkan query answers, put to the device itself by a small kernel."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from vkjit.lowering.artifact import Launch, Plan, PlannedBuffer, Range, Role
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.types import F32, Access, CmpOp

if TYPE_CHECKING:
    from vkjit.runtime.device import Device, HostArray

_COUNT = 256


def has_fused_fma(device: Device) -> bool:
    """Whether the device rounds ``a * b + c`` once, on operands where rounding twice shows."""
    a, b, c = _operands()
    loaded = device.load(_plan(device))
    (out,) = loaded.run([device.upload(x) for x in (a, b, c)])
    return np.array_equal(device.download(out, np.float32, (_COUNT,)), _fused(a, b, c))


def _operands() -> tuple[HostArray, HostArray, HostArray]:
    """Products near 1 whose tail is all that an addend leaves of them; one row rounds upwards."""
    generator = np.random.default_rng(1)
    a = (1 + generator.integers(1, 1 << 12, _COUNT) * 2.0**-23).astype(np.float32)
    b = (1 - generator.integers(1, 1 << 12, _COUNT) * 2.0**-24).astype(np.float32)
    return a, b, -(a * b)


def _fused(a: HostArray, b: HostArray, c: HostArray) -> HostArray:
    """The sums rounded once. What is left of the product has few bits, so that float() is exact."""
    rows = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    return np.array([float(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in rows]).astype(
        np.float32
    )


def _plan(device: Device) -> Plan:
    builder = Builder("probe_fma", device.target.index_type)
    a, b, c = (builder.buffer(name, F32, _COUNT, Access.READ) for name in "abc")
    out = builder.buffer("out", F32, _COUNT, Access.WRITE)
    size = 32
    i = builder.add(builder.scaled(builder.workgroup_id(), size), builder.local_id())
    inside = builder.compare(CmpOp.LT, i, builder.index(_COUNT))
    with builder.branch(inside).then():
        builder.store(out, i, builder.fma(*(builder.load(v, i) for v in (a, b, c))))
    kernel = builder.finish((_COUNT // size, 1, 1), (size, 1, 1))
    roles = (Role.INPUT, Role.INPUT, Role.INPUT, Role.OUTPUT)
    buffers = tuple(
        PlannedBuffer(role, 4 * _COUNT, n if role is Role.INPUT else 0)
        for n, role in enumerate(roles)
    )
    arguments = tuple(Range(n, 0, 4 * _COUNT) for n in range(len(roles)))
    return Plan("probe", buffers, (Launch(kernel, arguments),), frozenset(), 16 * _COUNT)
