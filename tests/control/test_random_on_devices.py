"""Random programs with loops, choices, checkpoints and writes on every device, evaluated beside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import vkjit as vj
import vkjit.numpy as jnp
from tests.oracles import arrays_of, assert_agrees, on_device
from tests.strategies import checkpointed, chosen, counted, looped, programs, seeds, written
from vkjit import dtypes, tree
from vkjit.ir.program import Program
from vkjit.passes.pipeline import simplify
from vkjit.trace import apply_program, trace

Function = Callable[..., Sequence[Any]]

EXAMPLES = {"reference": 20, "cpu": 15}
CONTROL = (looped, looped, chosen, chosen, counted, checkpointed, written)
SMOOTH = (looped, looped, chosen, chosen, checkpointed, written)
smooth = programs(max_steps=8, kinds=(dtypes.float32,), smooth=True, control=SMOOTH)


def test_random_programs_agree_with_the_evaluator(device: str) -> None:
    longest = 40 if device in EXAMPLES else 10

    @settings(max_examples=EXAMPLES.get(device, 5))
    @given(program=programs(max_steps=longest, control=CONTROL), seed=seeds)
    def check(program: Program, seed: int) -> None:
        inputs = arrays_of(program, seed)
        assert_agrees(program, inputs, on_device(simplify(program), inputs, device))

    check()


def pulled(fn: Function) -> Function:
    def run(*xs: Any) -> Sequence[Any]:
        outs, pull = vj.vjp(fn, *xs)
        return pull(tree.map(jnp.ones_like, outs))

    return run


def pushed(fn: Function) -> Function:
    return lambda *xs: vj.jvp(fn, xs, xs)[1]


def mapped(fn: Function) -> Function:
    return lambda *xs: vj.vmap(fn)(*[jnp.stack([x, x * 0.5]) for x in xs])


def test_up_to_three_transformations_agree_with_the_evaluator(device: str) -> None:
    chains = st.lists(st.sampled_from([pulled, pushed, mapped]), min_size=1, max_size=3)

    @settings(max_examples=EXAMPLES.get(device, 9) // 3)
    @given(program=smooth, chain=chains, seed=seeds)
    def check(program: Program, chain: list[Any], seed: int) -> None:
        fn: Function = lambda *xs: apply_program(program, xs)  # noqa: E731  the innermost
        for transform in chain:
            fn = transform(fn)
        made = trace(fn, program.in_avals)
        captured = [np.asarray(v) for v in made.captured]
        inputs = [*captured, *arrays_of(program, seed)]
        assert_agrees(made.program, inputs, on_device(simplify(made.program), inputs, device))

    check()
