"""The race fixture: a copied transposed weight, consumed by products forward and backward.

On a GPU whose plan misses the barrier between copy and product, some runs read the weight of an
earlier run. So every run has another weight, nothing waits between runs, and all results are
compared bit by bit with those of runs that were waited for.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import vkjit as vj
from vkjit import numpy as vnp
from vkjit.errors import InternalError
from vkjit.lowering.artifact import Role
from vkjit.lowering.plan.hazards import check_order, footprint

RUNS = 1000
INTERPRETED = 2
WEIGHTS = 3
BATCH, INPUTS, OUTPUTS = 16, 24, 20


def loss(x: Any, w: Any, scale: Any) -> Any:
    transposed = w.T * scale  # stored once, read by both products
    return vnp.sum(vnp.tanh(x @ transposed) ** 2)


def step(x: Any, w: Any, scale: Any) -> Any:
    value, (dx, dw) = vj.value_and_grad(loss, argnums=(0, 1))(x, w, scale)
    return value, dx, x - 0.1 * dx, dw


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def test_a_copied_weight_is_never_read_too_early(device: str) -> None:
    with vj.default_device(device):
        jitted = vj.jit(step)
        x, scale = vnp.asarray(normal(0, BATCH, INPUTS)), vnp.asarray(np.float32(0.5))
        weights = [vnp.asarray(normal(1 + i, OUTPUTS, INPUTS)) for i in range(WEIGHTS)]
        wanted = [[np.array(v) for v in jitted(x, w, scale)] for w in weights]
        assert not np.array_equal(wanted[0][1], wanted[1][1])
        runs = RUNS if device != "reference" else INTERPRETED
        results = [jitted(x, weights[run % WEIGHTS], scale) for run in range(runs)]
        wrong = [
            run
            for run, found in enumerate(results)
            for got, want in zip(found, wanted[run % WEIGHTS], strict=True)
            if not np.array_equal(got, want)
        ]
    assert wrong == []


@pytest.mark.parametrize("name", ["cpu", "vulkan:0"])
def test_the_fixture_would_show_a_missing_barrier(name: str) -> None:
    """A step writes an array of the weight's size to the arena, and a later product reads it."""
    if name not in vj.devices():
        pytest.skip(f"no device {name}")
    arguments = normal(0, BATCH, INPUTS), normal(1, OUTPUTS, INPUTS), np.float32(0.5)
    with vj.default_device(name):
        plan = vj.jit(step).lower(*arguments).plan
    (arena,) = [i for i, b in enumerate(plan.buffers) if b.role is Role.ARENA]
    touched = [footprint(s) for s in plan.steps]
    copies = [
        (i, r)
        for i, t in enumerate(touched)
        for r in t.writes
        if r.buffer == arena and r.size == 4 * INPUTS * OUTPUTS
    ]
    assert copies
    first, copy = copies[0]
    readers = [i for i, t in enumerate(touched) if any(r.overlaps(copy) for r in t.reads)]
    assert len([i for i in readers if i > first]) >= 1
    between = {b for b in plan.barriers if first < b <= readers[0]}
    assert between
    with pytest.raises(InternalError, match="read after write"):
        check_order(dataclasses.replace(plan, barriers=plan.barriers - between))
