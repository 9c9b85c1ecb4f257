"""Devices that bind few arrays, or allow only small allocations: other plans, same results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import vkjit.numpy as jnp
from vkjit.api.staged import lower
from vkjit.errors import OutOfMemoryError
from vkjit.lowering.artifact import Launch, Role
from vkjit.lowering.target import Addressing
from vkjit.trace import aval_of, trace

COUNT = 96


def compiled(function, target, *args):
    traced = trace(lambda *values: [function(*values)], [aval_of(a) for a in args], "program")
    return lower(traced, target).plan


def run(device, plan, *args) -> np.ndarray:
    (out,) = device.load(plan).run([device.upload(a) for a in args])
    return device.download(out, np.float32, args[0].shape)


def sum_of_many(*values):
    total = values[0]
    for value in values[1:]:
        total = total * 0.5 + jnp.maximum(value, 0.25)
    return total


@pytest.mark.parametrize("limit", [4, 8, 12])
def test_no_kernel_has_more_arrays_than_the_device_binds(fresh, limit: int):
    device = fresh(Addressing.DESCRIPTOR)
    rng = np.random.default_rng(0)
    args = [rng.standard_normal(COUNT, np.float32) for _ in range(20)]
    free = compiled(sum_of_many, replace(device.target, max_bindings=0), *args)
    assert max(len(s.arguments) for s in free.steps if isinstance(s, Launch)) > limit
    plan = compiled(sum_of_many, replace(device.target, max_bindings=limit), *args)
    assert max(len(s.arguments) for s in plan.steps if isinstance(s, Launch)) <= limit
    wanted = args[0].astype(np.float64)
    for value in args[1:]:
        wanted = wanted * 0.5 + np.maximum(value, 0.25)
    np.testing.assert_allclose(run(device, plan, *args), wanted, rtol=1e-6)


def products(x):
    first = jnp.tanh(x @ x)
    return (first @ x) @ (x @ first)


def test_temporaries_are_spread_over_buffers_of_the_size_that_can_be_had(fresh):
    device = fresh(Addressing.DEVICE_ADDRESS)
    x = 0.1 * np.random.default_rng(0).standard_normal((32, 32), np.float32)
    whole = compiled(products, device.target, x)
    plan = compiled(products, replace(device.target, max_buffer_bytes=x.nbytes + 256), x)
    arenas = [b for b in plan.buffers if b.role is Role.ARENA]
    assert len([b for b in whole.buffers if b.role is Role.ARENA]) == 1
    assert len(arenas) > 1
    assert [b.position for b in arenas] == list(range(len(arenas)))
    assert max(b.size for b in arenas) <= x.nbytes + 256
    np.testing.assert_array_equal(run(device, plan, x), run(device, whole, x))


def test_an_array_beyond_an_allocation_is_refused_by_source_line(fresh, monkeypatch):
    device = fresh(Addressing.DEVICE_ADDRESS)
    small = replace(device.capabilities, max_allocation=4096)
    monkeypatch.setattr(device.memory, "_capabilities", small)
    x = np.ones((64, 64), np.float32)
    plan = compiled(products, replace(device.target, max_buffer_bytes=4096), x)
    with pytest.raises(
        OutOfMemoryError,
        match=r"program has an array of 16.00 KiB, the device allows 4.00 KiB in one allocation: "
        r"input 0 read by dot_general at .*test_limits.py:\d+; split the array",
    ):
        device.load(plan)
