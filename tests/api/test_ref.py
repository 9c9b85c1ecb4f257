"""Refs: writes in place, ordered by data, refused where they would be lost."""

from __future__ import annotations

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from vkjit.errors import DTypeError, IndexingError, ShapeError, TracerError


def test_writes_and_reads_in_order():
    ref = vj.Ref(jnp.zeros((4, 3)))
    before = ref[...]
    ref[1:3] = jnp.ones((2, 3))
    ref[::2, 1] = 7.0
    want = np.zeros((4, 3), np.float32)
    want[1:3] = 1
    want[::2, 1] = 7
    np.testing.assert_array_equal(ref[...], want)
    np.testing.assert_array_equal(before, np.zeros((4, 3)))
    np.testing.assert_array_equal(ref[2], want[2])


def test_jit_writes_the_callers_ref(device):
    with vj.default_device(device):
        cache = vj.Ref(jnp.zeros((4, 2)))
        row = jnp.asarray([1.0, 2.0])

        @vj.jit
        def step(ref, x):
            old = ref[0] + 0.0
            ref[0] = x
            ref[3] = ref[0] * 10
            return old + ref[3]

        np.testing.assert_array_equal(step(cache, row), [10, 20])
        np.testing.assert_array_equal(cache[...], [[1, 2], [0, 0], [0, 0], [10, 20]])
        np.testing.assert_array_equal(step(cache, row), [11, 22])


def test_a_write_through_jit_copies_nothing():
    cache = vj.Ref(jnp.zeros((64, 64)))

    @vj.jit
    def step(ref, x):
        ref[5] = x

    lowered = step.lower(cache, jnp.ones(64))
    assert len(lowered.plan.steps) == 1
    assert lowered.memory().donated == cache.nbytes
    assert lowered.memory().temporaries == 0


def test_writes_stay_in_the_program_once():
    def f(x):
        ref = vj.Ref(x)
        ref[0] = 1.0
        ref[0] = 1.0
        return ref[...]

    program = vj.jit(f).lower(jnp.zeros(3)).program
    assert [e.prim.name for e in program.eqns].count("copy_into") == 2


def test_gradient_flows_around_a_write():
    def f(x, v):
        ref = vj.Ref(x * 2)
        ref[1] = v
        return (ref[...] ** 2).sum()

    gx, gv = vj.grad(f, argnums=(0, 1))(jnp.asarray([1.0, 2.0, 3.0]), jnp.asarray(5.0))
    np.testing.assert_array_equal(gx, [8, 0, 24])
    np.testing.assert_array_equal(gv, 10)


def test_a_ref_from_outside_is_refused_inside_a_trace():
    ref = vj.Ref(jnp.zeros(3))

    def f(x):
        ref[0] = x
        return x

    with pytest.raises(TracerError, match="pass the Ref to the jitted function as an argument"):
        vj.jit(f)(1.0)
    np.testing.assert_array_equal(ref[...], np.zeros(3))


@pytest.mark.parametrize("index", [slice(None, None, -1), None])
def test_indices_that_cannot_be_written_are_refused(index):
    ref = vj.Ref(jnp.zeros(3))
    with pytest.raises(IndexingError, match="positive steps"):
        ref[index] = 1.0


def test_a_value_that_does_not_fit_is_refused():
    ref = vj.Ref(jnp.zeros((3, 2)))
    with pytest.raises(ShapeError, match=r"value f32\[3\].*region \(3, 2\)"):
        ref[...] = jnp.ones(3)


def test_a_value_that_the_dtype_cannot_hold_is_refused():
    ref = vj.Ref(jnp.zeros(3, jnp.int32))
    ref[0] = 2
    with pytest.raises(DTypeError, match=r"value f32\[\]\* was written to a Ref i32\[3\]"):
        ref[0] = 2.5
    np.testing.assert_array_equal(ref[...], [2, 0, 0])
