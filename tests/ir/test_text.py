"""The text form: what it prints, and that reading it back loses nothing but source lines."""

from __future__ import annotations

import re
import textwrap

import numpy as np
import pytest
from hypothesis import given, settings

from tests.oracles import arrays_of
from tests.strategies import programs, seeds
from vkjit import dtypes
from vkjit.errors import ArgumentError
from vkjit.ir.avals import aval
from vkjit.ir.check import check
from vkjit.ir.evaluate import evaluate
from vkjit.ir.parse import parse
from vkjit.ir.program import Program
from vkjit.ir.text import text
from vkjit.ops.arithmetic import mul
from vkjit.ops.math import exp
from vkjit.ops.registry import PRIMITIVES
from vkjit.ops.structural import add, permute, reduce_sum
from vkjit.trace import in_region, new_region, trace

F34 = aval((3, 4), dtypes.float32)


@settings(max_examples=40)
@given(program=programs(), seed=seeds)
def test_random_programs_survive_the_round_trip(program: Program, seed: int) -> None:
    source = text(program)
    again = check(parse(source, PRIMITIVES))
    assert text(again) == source
    inputs = arrays_of(program, seed)
    for got, want in zip(evaluate(again, inputs), evaluate(program, inputs), strict=True):
        assert got.tobytes() == want.tobytes()


def test_prints_parameters_literals_and_results() -> None:
    def fn(x, y):
        return [mul(permute(x, (1, 0)), 2.0), reduce_sum(y, (0,)), np.float32(0.5)]

    program = trace(fn, [F34, aval((4,), dtypes.bfloat16, True)], "example").program
    assert text(program) == textwrap.dedent("""\
        example(%0: f32[3,4], %1: bf16[4]*) {
          %2: f32[4,3] = permute[perm=(1, 0)] %0
          %3: f32[4,3] = mul %2, 2.0:f32[]*
          %4: bf16[]* = reduce_sum[axes=(0,)] %1
          return %3, %4, 0.5:f32[]
        }""")


@pytest.mark.parametrize(
    ("value", "printed"),
    [
        (np.float32(-0.0), "-0.0:f32[]"),
        (np.float32(0.1), "0.10000000149011612:f32[]"),
        (np.float32("nan"), "nan:f32[]"),
        (np.float32("-inf"), "-inf:f32[]"),
        (dtypes.bfloat16.type(1 / 3), "0.333984375:bf16[]"),
        (np.int32(-(2**31)), "-2147483648:i32[]"),
        (np.uint8(255), "255:u8[]"),
        (np.bool_(True), "True:bool[]"),
        (3, "3:i32[]*"),
    ],
)
def test_literals_keep_every_bit(value: object, printed: str) -> None:
    program = trace(lambda: [value], []).program
    assert text(program) == f"program() {{\n  return {printed}\n}}"
    (again,) = evaluate(parse(text(program), PRIMITIVES), [])
    (want,) = evaluate(program, [])
    assert again.dtype == want.dtype
    assert again.tobytes() == want.tobytes()


def test_regions_survive() -> None:
    def fn(x):
        kept = exp(x)
        with in_region(new_region()):
            again = exp(x)
        return [add(kept, again)]

    source = text(trace(fn, [F34]).program)
    assert "%1: f32[3,4] = exp %0" in source
    assert "%2: f32[3,4] = exp@1 %0" in source
    assert text(parse(source, PRIMITIVES)) == source


def test_literals_after_parameters() -> None:
    source = (
        "program() {\n  %0: f32[] = copy_into[starts=(), strides=()] 1.0:f32[], 2.0:f32[]\n"
        "  return %0\n}"
    )
    assert text(parse(source, PRIMITIVES)) == source


def test_source_lines_are_comments() -> None:
    program = trace(lambda x: [exp(x)], [F34]).program
    printed = text(program, lines=True)
    assert re.search(r"%1: f32\[3,4\] = exp %0  # .*test_text\.py:\d+\n", printed)
    assert text(parse(printed, PRIMITIVES)) == text(program)


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("program %0 {\n}", r"expected 'name\(params\)"),
        ("program(%0: q32[3]) {\n  return %0\n}", r"'q32\[3\]' is not an aval"),
        ("program(%0: f32[3]) {\n  %1: f32[3] = foo %0\n  return %1\n}", "foo %0"),
        ("program(%0: f32[3]) {\n  %1 = exp %0\n  return %1\n}", "%1 = exp %0"),
    ],
)
def test_malformed_text_is_shown(source: str, shown: str) -> None:
    with pytest.raises(ArgumentError, match=shown):
        parse(source, PRIMITIVES)
