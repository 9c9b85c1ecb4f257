"""The checker, the evaluator's guard, avals and the lines in messages."""

from __future__ import annotations

import copy
import re
import sys
import textwrap
from typing import Any

import numpy as np
import pytest

from vkjit import dtypes
from vkjit.errors import DTypeError, InternalError, ShapeError, TracerError, UserError
from vkjit.ir.avals import aval
from vkjit.ir.check import check
from vkjit.ir.evaluate import evaluate
from vkjit.ir.parse import parse
from vkjit.ir.program import Eqn, Program, Var
from vkjit.ops.arithmetic import mul
from vkjit.ops.math import Exp
from vkjit.ops.registry import PRIMITIVES
from vkjit.ops.structural import Add, add
from vkjit.trace import Tracer, trace

F3 = aval((3,), dtypes.float32)
F4 = aval((4,), dtypes.float32)


def program_of(body: str, params: str = "%0: f32[3]") -> Program:
    source = f"program({params}) {{\n{textwrap.indent(textwrap.dedent(body).strip(), '  ')}\n}}"
    return parse(source, PRIMITIVES)


def refusal(program: Program) -> str:
    with pytest.raises(InternalError) as caught:
        check(program)
    return str(caught.value)


def test_a_wrong_result_shows_its_neighbours() -> None:
    body = "\n".join(f"%{i + 1}: f32[3] = exp %{i}" for i in range(5))
    body += "\n%6: f32[4] = exp %5\n%7: f32[4] = exp %6\nreturn %7"
    assert refusal(program_of(body)) == textwrap.dedent("""\
        exp: result has aval f32[4], inferred f32[3]
          %2: f32[3] = exp %1
          %3: f32[3] = exp %2
          %4: f32[3] = exp %3
          %5: f32[3] = exp %4
        > %6: f32[4] = exp %5
          %7: f32[4] = exp %6
        (print the program for the whole text)""")


def test_refused_operands_name_both() -> None:
    message = refusal(program_of("%2: f32[3] = add %0, %1\nreturn %2", "%0: f32[3], %1: f32[4]"))
    assert message.startswith("add: operands are refused: add: operands f32[3], f32[4]")
    assert "> %2: f32[3] = add %0, %1" in message


def test_a_variable_must_be_defined_before_its_use() -> None:
    first, second = Var(F3), Var(F3)
    x = Var(F3)
    eqns = (Eqn(Exp(), (second,), (first,)), Eqn(Exp(), (x,), (second,)))
    message = refusal(Program((x,), eqns, (first,)))
    assert message.startswith("exp: argument of aval f32[3] is used before it is defined\n> ")


def test_a_variable_is_defined_once() -> None:
    x, y = Var(F3), Var(F3)
    eqns = (Eqn(Exp(), (x,), (y,)), Eqn(Add(), (x, y), (y,)))
    assert refusal(Program((x,), eqns, (y,))).startswith(
        "add: result of aval f32[3] is defined twice"
    )
    assert refusal(Program((x, x), (), (x,))) == "program: a parameter appears twice"


def test_a_result_must_be_defined() -> None:
    x = Var(F3)
    assert refusal(Program((x,), (), (Var(F4),))).startswith(
        "program: a result of aval f32[4] is never defined"
    )


def test_weakness_alone_is_no_fault() -> None:
    x, y = Var(aval((3,), dtypes.float32, True)), Var(F3)
    check(Program((x,), (Eqn(Exp(), (x,), (y,)),), (y,)))


@pytest.mark.parametrize(
    "given", [np.zeros(4, np.float32), np.zeros(3, np.float16), np.zeros((3, 1), np.float32)]
)
def test_the_evaluator_refuses_other_inputs(given: np.ndarray[Any, Any]) -> None:
    program = program_of("%1: f32[3] = exp %0\nreturn %1")
    with pytest.raises(InternalError, match=r"parameter: evaluated to .*, inferred f32\[3\]"):
        evaluate(program, [given])


def test_the_evaluator_refuses_another_number_of_inputs() -> None:
    with pytest.raises(ValueError, match="zip"):
        evaluate(program_of("return %0"), [])


def test_avals_are_interned() -> None:
    again = aval((3,), np.dtype("float32"))
    assert again is F3
    assert aval((3,), dtypes.float32, True) is not F3
    assert copy.deepcopy(F3) is F3
    assert (F3.ndim, F3.size, F3.nbytes) == (1, 3, 12)
    assert str(aval((2, 0), dtypes.bfloat16)) == "bf16[2,0]"
    assert str(aval((), dtypes.int32, True)) == "i32[]*"


def here() -> int:
    """The line of the caller."""
    return sys._getframe(1).f_lineno


def line_in(error: UserError) -> int:
    found = re.search(r"\n  at (.*):(\d+)$", str(error))
    assert found, str(error)
    assert found.group(1) == __file__
    return int(found.group(2))


def test_shapes_that_differ_are_both_named_with_the_line() -> None:
    x, y = np.zeros(3, np.float32), np.zeros(4, np.float32)
    with pytest.raises(ShapeError, match=r"add: operands f32\[3\], f32\[4\]") as caught:
        add(x, y)
    assert line_in(caught.value) == here() - 1


def test_a_trace_names_the_line_that_failed() -> None:
    lines: list[int] = []

    def fn(x: Tracer, y: Tracer) -> list[Any]:
        lines.append(here() + 1)
        return [mul(x, y)]

    with pytest.raises(DTypeError, match=r"mul: operands f32\[3\], i32\[3\]") as caught:
        trace(fn, [F3, aval((3,), dtypes.int32)])
    assert line_in(caught.value) == lines[0]


def test_a_leaked_tracer_names_where_it_was_made() -> None:
    kept: list[Any] = []

    def fn(x: Tracer) -> list[Any]:
        kept.append(add(x, x))
        return [x]

    trace(fn, [F3])
    with pytest.raises(TracerError, match=r"f32\[3\] of a finished trace.*test_check\.py:\d+"):
        trace(lambda x: [add(x, kept[0])], [F3])
    with pytest.raises(TracerError, match="must return what it computes"):
        add(kept[0], kept[0])
