"""Random programs with loops and choices: derivatives, batches, passes and text, in float64.

The same properties for programs without loops are in tests/programs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from tests.derivatives import (
    assert_near,
    assert_pullback_is_adjoint,
    assert_pushforward_is_difference,
    noise,
    of,
    run,
)
from tests.oracles import arrays_of
from tests.strategies import chosen, counted, looped, programs, seeds
from vkjit import dtypes, jvp, vjp
from vkjit.api.batching import vmap
from vkjit.control.registry import CONTROL
from vkjit.ir.check import check
from vkjit.ir.evaluate import evaluate
from vkjit.ir.parse import parse
from vkjit.ir.program import Program
from vkjit.ir.text import text
from vkjit.numpy import stack
from vkjit.ops.registry import PRIMITIVES
from vkjit.passes.pipeline import simplify

LOOPS = 2 * (looped, chosen)
FORWARD = (*LOOPS, counted)
"""Reverse mode refuses loops that are as long as a value says."""
smooth = programs(max_steps=40, kinds=(dtypes.float64,), smooth=True, control=LOOPS)
ahead_only = programs(max_steps=40, kinds=(dtypes.float64,), smooth=True, control=FORWARD)


@pytest.fixture(autouse=True)
def wide() -> Any:
    with dtypes.enable_x64():
        yield


@settings(max_examples=30)
@given(program=programs(max_steps=40, control=FORWARD), seed=seeds)
def test_text_and_passes_keep_every_bit(program: Program, seed: int) -> None:
    with np.errstate(all="ignore"):
        inputs = arrays_of(program, seed)
        wanted = evaluate(program, inputs)
        again = check(parse(text(program), (*PRIMITIVES, *CONTROL)))
        assert text(again) == text(program)
        smaller = simplify(program, checked=True)
        assert text(parse(text(smaller), (*PRIMITIVES, *CONTROL))) == text(smaller)
        for made in (again, smaller):
            for got, want in zip(evaluate(made, inputs), wanted, strict=True):
                assert got.tobytes() == want.tobytes()


@settings(max_examples=30)
@given(program=smooth, seed=seeds)
def test_pullback_is_the_adjoint_of_the_pushforward(program: Program, seed: int) -> None:
    assert_pullback_is_adjoint(program, seed)


@settings(max_examples=25)
@given(program=ahead_only, seed=seeds)
def test_pushforward_agrees_with_differences(program: Program, seed: int) -> None:
    assert_pushforward_is_difference(program, seed)


@settings(max_examples=25)
@given(program=ahead_only, seed=seeds)
def test_vmap_equals_a_loop(program: Program, seed: int) -> None:
    rows = [arrays_of(program, seed + i) for i in range(3)]
    stacked = [np.stack(column) for column in zip(*rows, strict=True)]
    got = run(lambda *xs: vmap(of(program))(*xs), *stacked)
    wanted = [evaluate(program, row) for row in rows]
    for position, batch in enumerate(got):
        want = np.stack([w[position] for w in wanted])
        assert_near(batch, want, 1e-12, float(np.abs(want).max(initial=0)))


small = programs(max_steps=20, kinds=(dtypes.float64,), smooth=True, control=LOOPS)


@settings(max_examples=10)
@given(program=small, seed=seeds)
def test_three_transformations_in_a_row(program: Program, seed: int) -> None:
    """Vmap of the jvp of a vjp, and the vjp of a vmap, against one example at a time."""
    rows = [arrays_of(program, seed + i) for i in range(2)]
    stacked = [np.stack(column) for column in zip(*rows, strict=True)]
    dxs = noise(program.in_avals, seed + 5)
    cts = noise(program.out_avals, seed + 6)

    def pulled(xs: Any, cts: Any) -> Any:
        return vjp(of(program), *xs)[1](cts)

    def turned(xs: Any, dxs: Any, cts: Any) -> Any:
        return list(jvp(lambda *x: pulled(x, cts), xs, dxs)[1])

    def both(xs: Any, dxs: Any, cts: Any) -> Any:
        many = vjp(lambda *x: vmap(of(program))(*x), *xs)[1]
        return vmap(turned, (0, None, None))(xs, dxs, cts), many([stack([c, c]) for c in cts])

    got = run(both, stacked, dxs, cts)
    for position, row in enumerate(rows):
        wanted = [*run(turned, row, dxs, cts), *run(pulled, row, cts)]
        for batch, want in zip(got, wanted, strict=True):
            assert_near(batch[position], want, 1e-10, float(np.abs(want).max(initial=0)))
