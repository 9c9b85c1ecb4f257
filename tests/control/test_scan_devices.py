"""Random programs with loops, and their gradients, on every device against the evaluator."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings

from tests.oracles import arrays_of, assert_agrees, on_device
from tests.strategies import looped, programs, seeds
from vkjit import dtypes, vjp
from vkjit.api.staged import make_ir
from vkjit.ir.program import Program
from vkjit.passes.pipeline import simplify
from vkjit.trace import apply_program

EXAMPLES = {"reference": 10, "cpu": 10}
"""Vulkan drivers take some 50 ms for each kernel: fewer programs there, and shorter ones."""
LOOPS = 3 * (looped,)


def test_random_loops_agree_with_the_evaluator(device: str) -> None:
    longest = 40 if device in EXAMPLES else 12

    @settings(max_examples=EXAMPLES.get(device, 4))
    @given(program=programs(max_steps=longest, control=LOOPS), seed=seeds)
    def check(program: Program, seed: int) -> None:
        inputs = arrays_of(program, seed)
        assert_agrees(program, inputs, on_device(simplify(program), inputs, device))

    check()


def test_gradients_of_random_loops_agree_with_the_evaluator(device: str) -> None:
    longest = 20 if device in EXAMPLES else 8
    loops = programs(max_steps=longest, kinds=(dtypes.float32,), smooth=True, control=LOOPS)

    @settings(max_examples=EXAMPLES.get(device, 4))
    @given(program=loops, seed=seeds)
    def check(program: Program, seed: int) -> None:
        inputs = arrays_of(program, seed)

        def pulled(*xs: Any) -> Any:
            outs, pull = vjp(lambda *x: apply_program(program, x), *xs)
            return pull(outs)

        backward = make_ir(pulled)(*inputs)
        assert_agrees(backward, inputs, on_device(simplify(backward), inputs, device))

    check()
