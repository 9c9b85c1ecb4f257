"""Random programs on every device against the NumPy evaluator."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.oracles import arrays_of, assert_agrees, on_device
from tests.strategies import programs, seeds
from vkjit.ir.program import Program
from vkjit.passes.pipeline import simplify

EXAMPLES = {"reference": 30, "cpu": 15}
"""Vulkan drivers take some 50 ms for each kernel: fewer programs there, and shorter ones."""


@pytest.mark.parametrize("order", ["simplified", "as traced"])
def test_random_programs_agree_with_the_evaluator(device: str, order: str) -> None:
    longest = 30 if device in EXAMPLES else 12

    @settings(max_examples=EXAMPLES.get(device, 8))
    @given(program=programs(max_steps=longest), seed=seeds)
    def check(program: Program, seed: int) -> None:
        inputs = arrays_of(program, seed)
        compiled = simplify(program) if order == "simplified" else program
        assert_agrees(program, inputs, on_device(compiled, inputs, device))

    check()


def test_two_runs_give_the_same_bits(device: str) -> None:
    @settings(max_examples=5)
    @given(program=programs(max_steps=12), seed=seeds)
    def check(program: Program, seed: int) -> None:
        inputs = arrays_of(program, seed)
        first, second = (on_device(program, inputs, device) for _ in range(2))
        assert [a.tobytes() for a in first] == [b.tobytes() for b in second]

    check()
