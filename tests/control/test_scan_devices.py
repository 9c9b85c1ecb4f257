"""Long random programs with loops on the devices that compile them quickly.

Shorter ones, with choices and transformations, run on every device: test_random_on_devices.py.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.oracles import arrays_of, assert_agrees, on_device
from tests.strategies import looped, programs, seeds
from vkjit.ir.program import Program
from vkjit.passes.pipeline import simplify


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_long_programs_with_loops_agree_with_the_evaluator(name: str) -> None:
    @settings(max_examples=8)
    @given(program=programs(max_steps=40, control=3 * (looped,)), seed=seeds)
    def check(program: Program, seed: int) -> None:
        inputs = arrays_of(program, seed)
        assert_agrees(program, inputs, on_device(simplify(program), inputs, name))

    check()
