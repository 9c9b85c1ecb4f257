"""Plans of control forms, as text: where the arrays of inner programs lie, and what is copied."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from tests.control_forms import run, traced
from vkjit import numpy as jnp
from vkjit.ir.avals import Aval, aval
from vkjit.ir.control import Branch, Call, Scan, While
from vkjit.ir.program import Program
from vkjit.lowering.compile import compile_program
from vkjit.lowering.plan.groups_text import groups_text
from vkjit.lowering.plan_text import plan_text
from vkjit.lowering.target import ALL_SCALARS, MINIMAL_GPU, REFERENCE, Addressing, Target
from vkjit.ops.write import copy_into

ANY = dataclasses.replace(REFERENCE, name="any start", alignment=1)


def f32(*shape: int) -> Aval:
    return aval(shape, np.dtype(np.float32))


def i32(*shape: int) -> Aval:
    return aval(shape, np.dtype(np.int32))


def steps_of(program: Program, *, donated: tuple[int, ...] = (), target: Any = REFERENCE) -> str:
    """The steps of a plan, without buffers and origins."""
    text = plan_text(compile_program(program, target, donated=donated).plan)
    lines = [line.partition("  #")[0] for line in text.splitlines()[1:]]
    return "\n".join(line[2:] for line in lines if not line.startswith("  buffer"))


def expect(got: str, wanted: str) -> None:
    """Equal but for the indentation of the whole."""
    lines = wanted.strip("\n").rstrip().splitlines()
    margin = min(len(line) - len(line.lstrip()) for line in lines)
    assert got == "\n".join(line[margin:] for line in lines)


def test_a_carry_in_place_and_stacks_where_they_are():
    """Buffers: 0 first carry, 1 stacked inputs, 2 last carry, 3 stacked outputs."""
    body = traced(lambda c, x: [c + x, x * 2], f32(4), f32(4))
    program = traced(lambda c, xs: run(Scan(body, 5, 0, 1), c, xs), f32(4), f32(5, 4))
    expect(
        steps_of(program),
        """
        0: copy 0[0:16] -> 2[0:16]
        1: loop 5 turns
          1.0: pointwise (1, 1, 1) (2[0:16], 1[0:16]+16*(t0%5), 2[0:16])
          1.1: pointwise (1, 1, 1) (1[0:16]+16*(t0%5), 3[0:16]+16*(t0%5))
        """,
    )
    expect(
        steps_of(program, donated=(0,)),
        """
        0: loop 5 turns
          0.0: pointwise (1, 1, 1) (0[0:16], 1[0:16]+16*(t0%5), 0[0:16])
          0.1: pointwise (1, 1, 1) (1[0:16]+16*(t0%5), 3[0:16]+16*(t0%5))
        """,
    )


def test_a_first_carry_is_made_where_the_loop_wants_it():
    body = traced(lambda c, x: [c + x], f32(4), f32(4))

    def function(c: Any, xs: Any) -> Any:
        return run(Scan(body, 5, 0, 1), c * 2, xs)

    expect(
        steps_of(traced(function, f32(4), f32(5, 4))),
        """
        0: pointwise (1, 1, 1) (0[0:16], 2[0:16])
        1: loop 5 turns
          1.0: pointwise (1, 1, 1) (2[0:16], 1[0:16]+16*(t0%5), 2[0:16])
        """,
    )


def test_a_reverse_scan_of_a_carry_that_needs_two_places():
    body = traced(lambda c, x: [jnp.flip(c, 0) + x, c], f32(40, 1), f32(40, 1))
    program = traced(
        lambda c, xs: run(Scan(body, 3, 0, 1, reverse=True), c, xs), f32(40, 1), f32(3, 40, 1)
    )
    moves = "+160*((2-t0)%3)"
    expect(
        steps_of(program),
        f"""
        0: copy 0[0:160] -> 4[0:160]
        1: loop 3 turns
          1.0: pointwise (1, 1, 1) (4[0:160]+256*(t0%2), 1[0:160]{moves}, 4[0:160]+256*((1+t0)%2))
          1.1: pointwise (1, 1, 1) (4[0:160]+256*(t0%2), 3[0:160]{moves})
        2: copy 4[256:416] -> 2[0:160]
        """,
    )


def test_slices_that_start_where_kernels_cannot_read_are_copied():
    body = traced(lambda c, x: [c + x, x * 2], f32(3), f32(3))
    program = traced(lambda c, xs: run(Scan(body, 4, 0, 1), c, xs), f32(3), f32(4, 3))
    expect(
        steps_of(program),
        """
        0: copy 0[0:12] -> 2[0:12]
        1: loop 4 turns
          1.0: copy 1[0:12]+12*(t0%4) -> 4[0:12]
          barrier
          1.1: pointwise (1, 1, 1) (2[0:12], 4[0:12], 2[0:12])
          1.2: pointwise (1, 1, 1) (4[0:12], 4[256:268])
          barrier
          1.3: copy 4[256:268] -> 3[0:12]+12*(t0%4)
        """,
    )
    expect(
        steps_of(program, target=ANY),
        """
        0: copy 0[0:12] -> 2[0:12]
        1: loop 4 turns
          1.0: pointwise (1, 1, 1) (2[0:12], 1[0:12]+12*(t0%4), 2[0:12])
          1.1: pointwise (1, 1, 1) (1[0:12]+12*(t0%4), 3[0:12]+12*(t0%4))
        """,
    )


def test_a_loop_in_a_loop_over_slices_of_slices():
    inner = traced(lambda c, x: [c + x, c * x], f32(4), f32(4))

    def outer(c: Any, x: Any) -> Any:
        return run(Scan(inner, 2, 0, 1), c, x)

    body = traced(outer, f32(4), f32(2, 4))
    program = traced(lambda c, xs: run(Scan(body, 3, 0, 1), c, xs), f32(4), f32(3, 2, 4))
    moves = "+32*(t0%3)+16*(t1%2)"
    expect(
        steps_of(program, donated=(0,)),
        f"""
        0: loop 3 turns
          0.0: loop 2 turns
            0.0.0: pointwise (1, 1, 1) (0[0:16], 1[0:16]{moves}, 3[0:16]{moves})
            barrier
            0.0.1: pointwise (1, 1, 1) (0[0:16], 1[0:16]{moves}, 0[0:16])
        """,
    )


def test_a_carry_that_is_written_in_part_is_never_copied_whole():
    def body(cache: Any, x: Any) -> Any:
        return [copy_into(cache, x[None], (2, 0))]

    form = Scan(traced(body, f32(64, 4), f32(4)), 3, 0, 1)
    program = traced(lambda c, xs: run(form, c, xs), f32(64, 4), f32(3, 4))
    expect(
        steps_of(program, donated=(0,)),
        """
        0: loop 3 turns
          0.0: pointwise (1, 1, 1) (1[0:16]+16*(t0%3), 0[32:48])
        """,
    )


def test_carries_that_change_places():
    """The first is written when the second has its value, and that one has two places."""
    body = traced(lambda a, b: [b, a], f32(4), f32(4))
    program = traced(lambda a, b: run(Scan(body, 3, 0, 2), a, b), f32(4), f32(4))
    expect(
        steps_of(program),
        """
        0: copy 0[0:16] -> 2[0:16]
        1: copy 1[0:16] -> 4[0:16]
        2: loop 3 turns
          2.0: pointwise (1, 1, 1) (2[0:16], 4[0:16]+256*((1+t0)%2))
          barrier
          2.1: pointwise (1, 1, 1) (4[0:16]+256*(t0%2), 2[0:16])
        3: copy 4[256:272] -> 3[0:16]
        """,
    )


def test_while_keeps_carries_where_they_are():
    condition = traced(lambda limit, n, x: [n < limit], i32(), i32(), f32(4))
    body = traced(lambda n, x: [n + 1, jnp.flip(x, 0)], i32(), f32(4))

    def function(limit: Any, n: Any, x: Any) -> Any:
        return run(While(condition, body, 1, 0), limit, n, x)

    expect(
        steps_of(traced(function, i32(), i32(), f32(4)), donated=(1,)),
        """
        0: copy 2[0:16] -> 4[0:16]
        1: while 5[256:257]
          1.c0: pointwise (1, 1, 1) (1[0:4], 0[0:4], 5[256:257])
        do
          1.0: pointwise (1, 1, 1) (1[0:4], 1[0:4])
          1.1: pointwise (1, 1, 1) (4[0:16], 5[0:16])
          barrier
          1.2: copy 5[0:16] -> 4[0:16]
        """,
    )


def test_branches_write_the_results_where_they_are():
    branches = (
        traced(lambda a, b: [a + b], f32(4), f32(4)),
        traced(lambda a, b: [a], f32(4), f32(4)),
        traced(lambda a, b: [b * 2], f32(4), f32(4)),
    )
    program = traced(lambda i, a, b: run(Branch(branches), i, a, b), i32(), f32(4), f32(4))
    expect(
        steps_of(program),
        """
        0: branch 0[0:4]
        case 0
          0.0.0: pointwise (1, 1, 1) (1[0:16], 2[0:16], 3[0:16])
        case 1
          0.1.0: pointwise (1, 1, 1) (1[0:16], 3[0:16])
        case 2
          0.2.0: pointwise (1, 1, 1) (2[0:16], 3[0:16])
        """,
    )
    expect(
        steps_of(program, donated=(1,)),
        """
        0: branch 0[0:4]
        case 0
          0.0.0: pointwise (1, 1, 1) (1[0:16], 2[0:16], 1[0:16])
        case 1
        case 2
          0.2.0: pointwise (1, 1, 1) (2[0:16], 1[0:16])
        """,
    )


def test_calls_of_the_host_stay_in_order():
    def function(x: Any) -> Any:
        run(Call(print), x)
        run(Call(print), x * 2)
        run(Call(print), x)
        return [x + 1]

    got = steps_of(traced(function, f32(4)))
    assert re.findall(r"call of the host \((\d)\[", got) == ["0", "2", "0"]


@pytest.mark.parametrize("length", [0, 1])
def test_loops_of_no_or_one_turn(length: int):
    body = traced(lambda c, x: [jnp.flip(c, 0) + x, c + x], f32(3), f32(3))
    program = traced(lambda c, xs: run(Scan(body, length, 0, 1), c, xs), f32(3), f32(length, 3))
    got = steps_of(program)
    assert ("loop 1 turns" in got) == bool(length)
    assert got.count("copy") == (2 if length else 1)


@pytest.mark.parametrize("kernels_have", ["addresses", "descriptors"])
def test_single_words_are_read_where_they_are(kernels_have: str):
    """A stack of losses or of learning rates: descriptors cannot start at each of them."""
    body = traced(lambda c, x: [c + x, c * x], f32(), f32())
    program = traced(lambda c, xs: run(Scan(body, 5, 0, 1), c, xs), f32(), f32(5))
    addressing = Addressing.DEVICE_ADDRESS
    if kernels_have == "descriptors":
        addressing = Addressing.DESCRIPTOR
    target = dataclasses.replace(REFERENCE, addressing=addressing)
    inside = steps_of(program, target=target).partition("loop 5 turns")[2]
    assert inside.count("copy") == (0 if kernels_have == "addresses" else 2)
    assert inside.count("*(t0%5)") == (3 if kernels_have == "addresses" else 2)


def test_groups_of_inner_programs_stand_below_what_runs_them():
    body = traced(lambda c, x: [c + x], f32(4), f32(4))
    choose = Branch((body, traced(lambda c, x: [c * x], f32(4), f32(4))))
    count = traced(lambda n, c: [n < 3], i32(), f32(4))
    inner = traced(lambda n, c: [n + 1, *run(choose, n, c, c)], i32(), f32(4))

    def function(n: Any, c: Any, xs: Any) -> Any:
        (c,) = run(Scan(body, 5, 0, 1, reverse=True), c, xs)
        run(Call(print), c)
        return run(While(count, inner, 0, 0), n, c)

    program = traced(function, i32(), f32(4), f32(5, 4))
    text = groups_text(compile_program(program, REFERENCE).groups)
    found = re.findall(r"^ *(?:[A-Z]\w+|body|condition|branch \d)", text, re.MULTILINE)
    expect(
        "\n".join(found),
        """
        Scan
          body
            LoopGroup
        Call
        While
          condition
            LoopGroup
          body
            Branch
              branch 0
                LoopGroup
              branch 1
                LoopGroup
            LoopGroup
        """,
    )
    assert "Scan[5 turns, 0 constants, 1 carries, reverse](operands=(1, 2)" in text


def test_a_gpu_keeps_small_carries_twice_rather_than_wait():
    """One kernel reads the carry that the other writes: with two places they run side by side."""
    body = traced(lambda c, x: [c + x, jnp.flip(c, 0) * x], f32(4), f32(4))

    def barriers(target: Target, length: int) -> int:
        avals = f32(4), f32(length, 4)
        program = traced(lambda c, xs: run(Scan(body, length, 0, 1), c, xs), *avals)
        return steps_of(program, target=target).count("  barrier")

    gpu = dataclasses.replace(MINIMAL_GPU, name="gpu", storage=ALL_SCALARS)
    assert [barriers(gpu, n) for n in (3, 20)] == [1, 0]
    assert [barriers(REFERENCE, n) for n in (3, 20)] == [1, 1]
