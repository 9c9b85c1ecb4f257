"""What nested plans compute, on the interpreter: the same bits as the evaluator."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.control_forms import run, traced
from tests.lowering.plan.control_programs import random_program
from tests.oracles import arrays_of
from vkjit import numpy as jnp
from vkjit.ir.avals import Aval, aval
from vkjit.ir.control import Branch, Call, Inline, Scan, While
from vkjit.ir.evaluate import evaluate
from vkjit.ir.program import Program
from vkjit.lowering.artifact import HostCall
from vkjit.lowering.compile import compile_program
from vkjit.lowering.target import ALL_SCALARS, MINIMAL_GPU, REFERENCE, Target
from vkjit.passes.pipeline import simplify
from vkjit.runtime.reference import ReferenceDevice

TARGETS = (
    REFERENCE,
    dataclasses.replace(REFERENCE, name="any-start", alignment=1),
    dataclasses.replace(REFERENCE, name="small-buffers", max_buffer_bytes=512),
    dataclasses.replace(MINIMAL_GPU, name="gpu", storage=ALL_SCALARS, arithmetic=ALL_SCALARS),
)
EXAMPLES = 40
Array = np.ndarray[Any, Any]


def f32(*shape: int) -> Aval:
    return aval(shape, np.dtype(np.float32))


def i32(*shape: int) -> Aval:
    return aval(shape, np.dtype(np.int32))


def results(
    program: Program, inputs: list[Array], target: Target, donated: tuple[int, ...] = ()
) -> list[Array]:
    device = ReferenceDevice(target)
    loaded = device.load(compile_program(program, target, donated=donated).plan)
    outs = loaded.run([device.upload(np.ascontiguousarray(x)) for x in inputs], donated)
    avals = program.out_avals
    return [device.download(o, a.dtype, a.shape) for o, a in zip(outs, avals, strict=True)]


@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_random_programs_equal_the_evaluator(seed: int) -> None:
    """Scans, whiles and branches inside each other; every way to plan them gives equal bits."""
    program = random_program(1000 + seed)
    if seed % 2:
        program = simplify(program, checked=True)
    inputs = arrays_of(program, seed)
    with np.errstate(all="ignore"):
        wanted = evaluate(program, inputs)
    target = TARGETS[seed // 2 % len(TARGETS)]
    donated = tuple(range(len(inputs))) if seed % 3 else ()
    for got, want in zip(results(program, inputs, target, donated), wanted, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_calls_get_values_in_order(target: Target) -> None:
    """From inside a scan, a branch and a while loop, as often as they are passed."""
    seen: list[tuple[str, float]] = []

    def tell(name: str) -> Call:
        return Call(lambda x: seen.append((name, float(np.sum(x)))))

    def branch(x: Any) -> Any:
        run(tell("branch"), x)
        return [x + 1]

    choose = Branch((traced(lambda x: [x], f32(4)), traced(branch, f32(4))))

    def body(n: Any, c: Any, x: Any) -> Any:
        run(tell("slice"), x)
        (c,) = run(choose, n % 2, c)
        run(tell("carry"), c)
        return [n + 1, c]

    scan = Scan(traced(body, i32(), f32(4), f32(4)), 3, 0, 2)

    def function(n: Any, c: Any, xs: Any) -> Any:
        run(tell("before"), c)
        n, c = run(scan, n, c, xs)
        run(tell("after"), c)
        return [n, c * 2]

    program = traced(function, i32(), f32(4), f32(3, 4))
    xs = np.arange(12, dtype=np.float32).reshape(3, 4)
    inputs = [np.asarray(0, np.int32), np.zeros(4, np.float32), xs]
    evaluate(program, inputs)
    wanted, seen[:] = list(seen), []
    got = results(program, inputs, target)
    assert seen == wanted
    assert [name for name, _ in seen][:4] == ["before", "slice", "carry", "slice"]
    np.testing.assert_array_equal(got[1], np.full(4, 2, np.float32))


def test_calls_see_copies() -> None:
    """What a call keeps does not change when the memory is used again."""
    kept: list[Array] = []

    def body(c: Any) -> Any:
        run(Call(kept.append), c)
        return [c * 2]

    scan = Scan(traced(body, f32(4)), 3, 0, 1)
    program = traced(lambda c: run(scan, c), f32(4))
    results(program, [np.ones(4, np.float32)], REFERENCE, donated=(0,))
    assert [float(x[0]) for x in kept] == [1, 2, 4]


def test_what_a_call_raises_ends_the_run() -> None:
    def refuse(x: Array) -> None:
        raise ValueError("no")

    program = traced(lambda c: [run(Call(refuse), c), c + 1][1:], f32(4))
    with pytest.raises(ValueError, match="no"):
        results(program, [np.ones(4, np.float32)], REFERENCE)


def test_booleans_are_given_to_calls_as_such() -> None:
    kept: list[Array] = []
    program = traced(lambda c: [run(Call(kept.append), c > 1), c + 1][1:], f32(4))
    results(program, [np.arange(4, dtype=np.float32)], REFERENCE)
    assert kept[0].dtype == np.bool_
    assert kept[0].tolist() == [False, False, True, True]


def test_constant_work_of_loops_is_not_split_off_with_its_calls() -> None:
    """A loop over constants that calls the host runs in every call."""
    body = traced(lambda c: [run(Call(print), c), c + 1][1:], f32(4))
    program = traced(lambda c, x: [run(Scan(body, 2, 0, 1), c)[0] + x], f32(4), f32(4))
    compiled = compile_program(program, REFERENCE, constants=1)
    assert compiled.setup is None
    assert any(isinstance(s, HostCall) for step in compiled.plan.steps for s in inside(step))


def inside(step: Any) -> tuple[Any, ...]:
    return step.body.steps if hasattr(step, "body") else (step,)


@pytest.mark.parametrize("index", [-3, 0, 1, 2, 9])
def test_indices_of_branches_are_clamped(index: int) -> None:
    branches = tuple([traced(lambda x, n=n: [x + n], f32(2)) for n in range(3)])
    program = traced(lambda i, x: run(Branch(branches), i, x), i32(), f32(2))
    (got,) = results(program, [np.asarray(index, np.int32), np.zeros(2, np.float32)], REFERENCE)
    assert got[0] == min(max(index, 0), 2)


def test_a_while_loop_may_run_no_turn() -> None:
    condition = traced(lambda n: [n < 3], i32())
    body = traced(lambda n: [n + 1], i32())
    program = traced(lambda n: run(While(condition, body, 0, 0), n), i32())
    for start, end in ((0, 3), (7, 7)):
        (got,) = results(program, [np.asarray(start, np.int32)], REFERENCE)
        assert got == end


def test_bodies_are_spliced_in() -> None:
    body = traced(lambda a, b: [a * b, a], f32(3), f32(3))
    program = traced(lambda a, b: run(Inline(body), a, b), f32(3), f32(3))
    plan = compile_program(simplify(program), REFERENCE).plan
    assert len(plan.steps) == 2
    a, b = np.arange(3, dtype=np.float32), np.full(3, 2, np.float32)
    got = results(simplify(program), [a, b], REFERENCE)
    np.testing.assert_array_equal(got[0], a * b)


def test_operands_that_are_views_or_constants() -> None:
    body = traced(lambda w, c, x: [c @ w + x, x], f32(3, 3), f32(3, 3), f32(3, 3))

    def function(w: Any, x: Any) -> Any:
        stacked = jnp.stack([x.T, x, x[::-1]])
        return run(Scan(body, 3, 1, 1), w.T, jnp.broadcast_to(jnp.sum(x), (3, 3)), stacked)

    program = traced(function, f32(3, 3), f32(3, 3))
    rng = np.random.default_rng(0)
    inputs = [rng.integers(-3, 4, (3, 3)).astype(np.float32) for _ in range(2)]
    for target in TARGETS:
        for got, want in zip(
            results(program, inputs, target), evaluate(program, inputs), strict=True
        ):
            np.testing.assert_array_equal(got, want)
