"""Memory and work of loops: known before the run, in place where it can be, compiled once."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.control_forms import run, traced
from vkjit import numpy as jnp
from vkjit.ir.avals import Aval, aval
from vkjit.ir.control import Branch, Scan, While
from vkjit.ir.evaluate import evaluate
from vkjit.ir.program import Program
from vkjit.lax import dynamic_update_slice
from vkjit.lowering.artifact import Copy, Launch, Loop, Plan, Role, leaves
from vkjit.lowering.compile import Compiled, compile_program
from vkjit.lowering.target import ALL_SCALARS, MINIMAL_GPU, REFERENCE
from vkjit.passes.pipeline import simplify
from vkjit.runtime.reference import ReferenceDevice

GPU = dataclasses.replace(MINIMAL_GPU, name="gpu", storage=ALL_SCALARS, arithmetic=ALL_SCALARS)
TARGETS = pytest.mark.parametrize("target", [REFERENCE, GPU], ids=["reference", "gpu"])
WIDTH = 64
SIZE = 4 * WIDTH * WIDTH


def f32(*shape: int) -> Aval:
    return aval(shape, np.dtype(np.float32))


def i32(*shape: int) -> Aval:
    return aval(shape, np.dtype(np.int32))


def layer(h: Any, w: Any) -> Any:
    return [jnp.tanh(h @ w) + h]


def layers(length: int) -> Program:
    form = Scan(traced(layer, f32(WIDTH, WIDTH), f32(WIDTH, WIDTH)), length, 0, 1)
    avals = f32(WIDTH, WIDTH), f32(length, WIDTH, WIDTH)
    return traced(lambda h, ws: run(form, h, ws), *avals)


def temporaries(compiled: Compiled) -> int:
    return compiled.arena.live_peak


@TARGETS
def test_temporaries_of_a_scan_do_not_depend_on_its_length(target: Any) -> None:
    short, long = (compile_program(layers(n), target) for n in (2, 30))
    assert temporaries(long) == temporaries(short)
    assert long.plan.arena_bytes == short.plan.arena_bytes
    assert long.plan.peak_bytes - short.plan.peak_bytes == 28 * SIZE  # the weights


@TARGETS
def test_only_stacked_results_grow(target: Any) -> None:
    def both(h: Any, w: Any) -> Any:
        (made,) = layer(h, w)
        return [made, jnp.sum(made, axis=0)]

    def program(length: int) -> Program:
        form = Scan(traced(both, f32(WIDTH, WIDTH), f32(WIDTH, WIDTH)), length, 1, 0)
        form = dataclasses.replace(form, constants=0, carries=1)
        avals = f32(WIDTH, WIDTH), f32(length, WIDTH, WIDTH)
        return traced(lambda h, ws: run(form, h, ws), *avals)

    short, long = (compile_program(program(n), target).plan for n in (2, 30))
    assert long.peak_bytes - short.peak_bytes == 28 * (SIZE + 4 * WIDTH)


@TARGETS
def test_a_loop_is_compiled_once_however_long(target: Any) -> None:
    def kernels(plan: Plan) -> list[int]:
        return [id(s.kernel) for s in leaves(plan.steps) if isinstance(s, Launch)]

    short, long = (compile_program(layers(n), target).plan for n in (2, 30))
    assert len(kernels(long)) == len(kernels(short)) < 5
    (loop,) = [s for s in long.steps if isinstance(s, Loop)]
    assert loop.length == 30


@TARGETS
def test_inside_and_outside_share_kernels(target: Any) -> None:
    """Two layers before a scan of the same layer, whose body runs in another one, too."""
    body = traced(layer, f32(WIDTH, WIDTH), f32(WIDTH, WIDTH))
    inner = traced(
        lambda w, h, ws: run(Scan(body, 3, 0, 1), layer(h, w)[0], ws),
        *(f32(WIDTH, WIDTH), f32(WIDTH, WIDTH), f32(3, WIDTH, WIDTH)),
    )

    def function(h: Any, w: Any, ws: Any) -> Any:
        h = layer(layer(h, w)[0], w)[0]
        (h,) = run(Scan(body, 3, 0, 1), h, ws)
        return run(Scan(inner, 2, 1, 1), w, h, jnp.stack([ws, ws * 2]))

    program = traced(function, f32(WIDTH, WIDTH), f32(WIDTH, WIDTH), f32(3, WIDTH, WIDTH))
    launches = [s for s in leaves(compile_program(program, target).plan.steps)]
    products = [s for s in launches if isinstance(s, Launch) and "dot_general" in str(s.origin)]
    assert len(products) >= 5
    single = compile_program(traced(layer, f32(WIDTH, WIDTH), f32(WIDTH, WIDTH)), target).plan
    assert len({id(s.kernel) for s in products}) == len(single.steps)


def cache_loop(cache: Any, xs: Any) -> Any:
    """Writes one row a turn at a computed place, as decoding does."""

    def body(cache: Any, at: Any, x: Any) -> Any:
        return [dynamic_update_slice(cache, x[None], (at, 0)), at + 1]

    inner = traced(body, aval_of_cache, i32(), f32(WIDTH))
    start = jnp.astype(jnp.sum(xs) * 0, np.int32)
    return run(Scan(inner, 8, 0, 2), cache, start, xs)[:1]


aval_of_cache = f32(512, WIDTH)
CACHE = 4 * 512 * WIDTH


@TARGETS
def test_a_donated_cache_is_updated_in_place(target: Any) -> None:
    program = simplify(traced(cache_loop, aval_of_cache, f32(8, WIDTH)))
    kept = compile_program(program, target)
    donated = compile_program(program, target, donated=(0,))
    assert kept.plan.peak_bytes - donated.plan.peak_bytes == CACHE
    assert temporaries(donated) < 4096
    (loop,) = [s for s in donated.plan.steps if isinstance(s, Loop)]
    for step in leaves(loop.body.steps):
        assert not isinstance(step, Copy) or step.source.size < CACHE
    (output,) = [b for b in donated.plan.buffers if b.role is Role.OUTPUT]
    assert output.donated == 0
    assert sum(isinstance(s, Copy) for s in donated.plan.steps) == 0


@TARGETS
def test_an_accumulator_has_one_place(target: Any) -> None:
    """A gradient that is added up: its first value is made in the result, nothing else is big."""

    def body(total: Any, a: Any, b: Any) -> Any:
        return [total + a[:, None] * b[None, :]]

    form = Scan(traced(body, f32(WIDTH, WIDTH), f32(WIDTH), f32(WIDTH)), 16, 0, 1)

    def function(a: Any, b: Any) -> Any:
        zeros = jnp.broadcast_to(a[0, 0] * 0, (WIDTH, WIDTH))
        return run(form, zeros, a, b)

    compiled = compile_program(traced(function, f32(16, WIDTH), f32(16, WIDTH)), target)
    assert temporaries(compiled) < SIZE / 16
    assert compiled.plan.peak_bytes < 1.1 * (SIZE + 2 * 4 * 16 * WIDTH)


@TARGETS
def test_a_cache_passes_through_loops_and_branches_in_place(target: Any) -> None:
    def update(cache: Any, x: Any) -> Any:
        return [dynamic_update_slice(cache, x[None], (3, 0))]

    branch = Branch(
        (
            traced(update, aval_of_cache, f32(WIDTH)),
            traced(lambda cache, x: [cache], aval_of_cache, f32(WIDTH)),
        )
    )

    def inner(cache: Any, index: Any, x: Any) -> Any:
        return [*run(branch, index, cache, x), index]

    scanned = Scan(traced(inner, aval_of_cache, i32(), f32(WIDTH)), 4, 0, 2)

    def body(n: Any, cache: Any, xs: Any) -> Any:
        return [n + 1, run(scanned, cache, n % 2, xs)[0], xs]

    avals = i32(), aval_of_cache, f32(4, WIDTH)
    loop = While(traced(lambda n, *_: [n < 3], *avals), traced(body, *avals), 0, 0)
    program = traced(lambda *args: run(loop, *args), *avals)
    compiled = compile_program(simplify(program), target, donated=(0, 1, 2))
    assert temporaries(compiled) < CACHE / 16
    assert compiled.plan.peak_bytes < 1.1 * CACHE


@TARGETS
def test_branches_share_memory_for_their_temporaries(target: Any) -> None:
    def busy(x: Any) -> Any:
        return [jnp.sum((x @ x) @ x, axis=0)]

    def also(x: Any) -> Any:
        return [jnp.sum((x @ x.T) @ x, axis=1)]

    def program(*functions: Any) -> Program:
        form = Branch(tuple([traced(f, f32(WIDTH, WIDTH)) for f in functions]))
        return traced(lambda i, x: run(form, i, x), i32(), f32(WIDTH, WIDTH))

    one, two = (temporaries(compile_program(program(*f), target)) for f in ((busy,), (busy, also)))
    assert SIZE <= one == two


def test_unaligned_stacks_cost_one_slice() -> None:
    def program(width: int) -> Program:
        body = traced(lambda c, x: [c + jnp.flip(x, 0)], f32(width), f32(width))
        form = Scan(body, 10, 0, 1)
        return traced(lambda c, xs: run(form, c, xs), f32(width), f32(10, width))

    whole, odd = (compile_program(program(n), REFERENCE) for n in (64, 63))
    assert temporaries(whole) == 0
    assert temporaries(odd) == 4 * 63


@TARGETS
def test_stacked_caches_are_updated_in_place(target: Any) -> None:
    """Layers as a scan: each turn takes the cache of its layer and gives it with a new row."""

    def body(h: Any, cache: Any) -> Any:
        made = dynamic_update_slice(cache, h[None], (jnp.astype(h[0], np.int32), 0))
        return [h + made[3], made]

    scan = Scan(traced(body, f32(WIDTH), f32(64, WIDTH)), 12, 0, 1)

    def function(h: Any, caches: Any) -> Any:
        return run(scan, h, caches)

    program = simplify(traced(function, f32(WIDTH), f32(12, 64, WIDTH)))
    kept = compile_program(program, target)
    donated = compile_program(program, target, donated=(1,))
    assert kept.plan.peak_bytes - donated.plan.peak_bytes == 12 * 4 * 64 * WIDTH
    assert temporaries(donated) < 4 * 64 * WIDTH / 2
    rng = np.random.default_rng(0)
    inputs = [rng.integers(0, 9, a.shape).astype(np.float32) for a in program.in_avals]
    device = ReferenceDevice(target)
    wanted = evaluate(program, inputs)
    outs = device.load(donated.plan).run([device.upload(x) for x in inputs], (1,))
    for out, want in zip(outs, wanted, strict=True):
        np.testing.assert_array_equal(device.download(out, want.dtype, want.shape), want)
