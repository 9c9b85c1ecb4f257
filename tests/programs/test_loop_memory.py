"""Loops of jitted functions work in the memory that callers give up: caches, states, layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import vkjit as vj
from vkjit import lax
from vkjit import numpy as jnp
from vkjit.lowering.artifact import Launch, leaves
from vkjit.lowering.plan.groups import ContractGroup
from vkjit.lowering.target import MINIMAL_GPU

ROWS, WIDTH, TURNS, LAYERS = 128, 16, 6, 5
CACHE = 4 * ROWS * WIDTH


def numbers(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


def decode(cache: Any, xs: Any) -> Any:
    def body(state: Any, x: Any) -> Any:
        cache, at = state
        cache = lax.dynamic_update_slice(cache, x[None], (at, 0))
        return (cache, at + 1), cache @ x

    (cache, _), seen = lax.scan(body, (cache, jnp.asarray(2)), xs)
    return cache, seen


def test_a_donated_cache_is_the_carry_of_a_scan(device: str) -> None:
    cache, xs = numbers(0, ROWS, WIDTH), numbers(1, TURNS, WIDTH)
    with vj.default_device(device):
        kept = vj.jit(decode).lower(cache, xs).memory()
        jitted = vj.jit(decode, donate_argnums=0)
        given = jitted.lower(cache, xs).memory()
        got, seen = jitted(vj.device_put(cache), xs)
    assert kept.peak - given.peak == CACHE
    assert given.live_temporaries < CACHE / 2
    cache[2 : 2 + TURNS] = xs
    np.testing.assert_array_equal(np.asarray(got), cache)
    np.testing.assert_array_equal(np.asarray(seen)[-1], cache @ xs[-1])


def test_a_ref_is_written_in_place_inside_a_loop(device: str) -> None:
    """Rows at a computed place: no turn touches the rest."""

    def write(ref: Any, xs: Any) -> Any:
        def body(at: Any, x: Any) -> Any:
            ref[at] = x
            return at + 1, jnp.sum(x)

        return lax.scan(body, jnp.asarray(3), xs)[1]

    cache, xs = numbers(0, ROWS, WIDTH), numbers(1, TURNS, WIDTH)
    with vj.default_device(device):
        ref = vj.Ref(jnp.asarray(cache))
        jitted = vj.jit(write)
        lowered = jitted.lower(ref, xs)
        sums = jitted(ref, xs)
        got = np.asarray(ref[...])
    report = lowered.memory()
    assert report.donated == CACHE
    assert report.live_temporaries < CACHE / 4
    assert sum(b.size == CACHE for b in lowered.plan.buffers if b.donated is None) == 1
    cache[3 : 3 + TURNS] = xs
    np.testing.assert_array_equal(got, cache)
    np.testing.assert_array_equal(np.asarray(sums), xs.sum(axis=1))


def test_caches_of_layers_are_updated_in_place(device: str) -> None:
    """A decoding step with layers as a scan: each layer writes a row of its cache."""

    def step(caches: Any, h: Any, at: Any) -> Any:
        def layer(h: Any, cache: Any) -> Any:
            cache = lax.dynamic_update_slice(cache, h[None] * 2, (at, 0))
            return h + cache[at], cache

        return lax.scan(layer, h, caches)

    caches, h = numbers(0, LAYERS, ROWS, WIDTH), numbers(1, WIDTH)
    with vj.default_device(device):
        jitted = vj.jit(step, donate_argnums=0)
        report = jitted.lower(caches, h, np.int32(7)).memory()
        made, got = jitted(vj.device_put(caches), h, np.int32(7))
    assert report.donated == LAYERS * CACHE
    assert report.live_temporaries < CACHE
    for layer in range(LAYERS):
        caches[layer, 7] = h * 2
        h = h + caches[layer, 7]
    np.testing.assert_array_equal(np.asarray(got), caches)
    np.testing.assert_array_equal(np.asarray(made), h)


def model(ws: Any, x: Any) -> Any:
    return jnp.sum(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0] ** 2)


@pytest.mark.parametrize("transform", ["forward", "grad"])
def test_layers_as_a_scan_compile_once(transform: str) -> None:
    """As many kernels for 30 layers as for 3, and temporaries that grow with residuals only."""
    fn = vj.grad(model) if transform == "grad" else model
    found: list[tuple[int, int]] = []
    for count in (3, 30):
        ws, x = numbers(0, count, WIDTH, WIDTH), numbers(1, 8, WIDTH)
        with vj.default_device("reference"):
            lowered = vj.jit(fn).lower(ws, x)
        launches = [s for s in leaves(lowered.plan.steps) if isinstance(s, Launch)]
        found.append((len(launches), lowered.memory().live_temporaries))
    (few, small), (many, large) = found
    assert few == many
    residual = 4 * 8 * WIDTH  # of one layer: its input, or its output
    assert large - small <= (2 * 27 * residual if transform == "grad" else 0)


def test_groups_inside_loops_are_tuned_by_how_often_they_run() -> None:
    from vkjit.lowering.compile import compile_program  # noqa: PLC0415  the rest is public

    ws, x = numbers(0, 30, WIDTH, WIDTH), numbers(1, 8, WIDTH)
    program = vj.make_ir(model)(ws, x)
    asked: list[Any] = []
    compiled = compile_program(program, MINIMAL_GPU, choose=lambda group, *_: asked.append(group))
    (choice,) = compiled.choices
    assert isinstance(choice.group, ContractGroup)
    assert choice.count == 30
    assert asked == [choice.group]


def test_a_state_that_a_branch_may_update_stays_in_place(device: str) -> None:
    """Gradients of the same sizes come first among the operands; the parameters are updated."""

    def step(params: Any, grads: Any, good: Any) -> Any:
        def update(grads: Any, params: Any) -> Any:
            return [p - 2 * g for p, g in zip(params, grads, strict=True)]

        def skip(grads: Any, params: Any) -> Any:
            return params

        return lax.cond(good, update, skip, grads, params)

    params, grads = ([numbers(n + i, ROWS, WIDTH) for i in range(3)] for n in (0, 3))
    with vj.default_device(device):
        jitted = vj.jit(step, donate_argnums=0)
        for good in (True, False):
            report = jitted.lower(params, grads, good).memory()
            made = jitted(vj.tree.map(vj.device_put, params), grads, good)
            assert (report.donated, report.outputs) == (3 * CACHE, 0)
            assert report.temporaries < CACHE
            for got, p, g in zip(made, params, grads, strict=True):
                np.testing.assert_array_equal(np.asarray(got), p - 2 * g * good)
