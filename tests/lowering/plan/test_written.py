"""Nothing is read before it is written, and values stored along a folded axis reach all of it."""

from __future__ import annotations

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from tests.oracles import on_device
from vkjit.errors import InternalError
from vkjit.ir.evaluate import evaluate
from vkjit.lowering.artifact import Launch
from vkjit.lowering.assemble import Layout, one_by_one
from vkjit.lowering.compile import compile_program
from vkjit.lowering.kernel.types import F32
from vkjit.lowering.plan.groups import ArrayInfo
from vkjit.lowering.steps import Arrays, KernelStep
from vkjit.lowering.target import REFERENCE


def folded_and_kept(x):
    """A value that repeats along the axis of a sum, stored along it; the sum repeats, too."""
    row = jnp.minimum(jnp.floor(jnp.broadcast_to(x, (4,)) * 3) * -1.0, x)
    spread = jnp.sum(jnp.broadcast_to(row[:, None] + 1, (4, 3)), axis=0)
    return row * -1.0, spread - x


def test_a_value_that_repeats_along_a_folded_axis(device: str):
    x = np.float32(0.4)
    program = vj.make_ir(folded_and_kept)(x)
    got = on_device(program, [np.asarray(x)], device)
    for a, b in zip(got, evaluate(program, [np.asarray(x)]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_read_before_the_write_is_refused():
    program = vj.make_ir(lambda x: jnp.cumsum(jnp.exp(x)) + 1)(np.ones(5, np.float32))
    planned = compile_program(program, REFERENCE).plan.steps
    launches = [step for step in planned if isinstance(step, Launch)]
    assert len(launches) == 3
    steps = [
        KernelStep(step.kernel, arrays, ("test",))
        for step, arrays in zip(launches, ((0, 1), (1, 2), (2, 3)), strict=True)
    ]

    arrays = Arrays()
    arrays.add([ArrayInfo(F32, 5)] * 4)

    def plan(order):
        layout = Layout(arrays, inputs=1, results=[3])
        return layout.plan("test", one_by_one([steps[n] for n in order]))

    assert len(plan((0, 1, 2))[0].steps) == 3
    with pytest.raises(InternalError, match="reads array 1 before anything has written it"):
        plan((1, 0, 2))


def test_an_empty_value_of_a_single_number_writes_nothing(device: str):
    x = np.ones(5, np.float32)

    def function(x):
        return jnp.tanh(jnp.minimum(x[2:2], x @ x)).reshape(1, 0), x @ x + 1

    program = vj.make_ir(function)(x)
    empty, number = on_device(program, [x], device)
    assert empty.shape == (1, 0)
    assert number == 6


def test_an_empty_value_that_is_padded_is_read_after_the_padding(device: str):
    y, nothing = np.arange(12, dtype=np.float32).reshape(3, 4), np.zeros(0, np.float32)
    program = vj.make_ir(lambda y, e: jnp.sum(y, axis=1) + jnp.pad(e, (0, 3)))(y, nothing)
    (got,) = on_device(program, [y, nothing], device)
    np.testing.assert_allclose(got, y.sum(axis=1))
