"""dce, cse and fold, text in and text out; and that no pass changes a bit."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import vkjit as vj
from tests.oracles import arrays_of
from tests.strategies import programs, seeds
from vkjit import lax
from vkjit.ir.check import check
from vkjit.ir.evaluate import evaluate
from vkjit.ir.parse import parse
from vkjit.ir.program import Program
from vkjit.ir.text import text
from vkjit.ops.registry import PRIMITIVES
from vkjit.passes.cse import cse
from vkjit.passes.dce import dce
from vkjit.passes.fold import fold
from vkjit.passes.pipeline import SIMPLIFY, simplify

PASSES = (*SIMPLIFY[:3], simplify)


def after(run: Callable[[Program], Program], params: str, body: str) -> str:
    """The equations and the return line of ``run`` on a program."""
    lines = textwrap.indent(textwrap.dedent(body).strip(), "  ")
    program = check(parse(f"program({params}) {{\n{lines}\n}}", PRIMITIVES))
    made = text(check(run(program))).splitlines()
    return textwrap.dedent("\n".join(made[1:-1]))


def expected(body: str) -> str:
    return textwrap.dedent(body).strip()


# -- dce -------------------------------------------------------------------------------------------


def test_dce_drops_what_nobody_reads() -> None:
    got = after(
        dce,
        "%0: f32[3], %1: f32[3]",
        """
        %2: f32[3] = exp %0
        %3: f32[3] = sin %2
        %4: f32[3] = mul %0, %0
        return %4
        """,
    )
    assert got == expected("""
        %2: f32[3] = mul %0, %0
        return %2
    """)


def test_dce_drops_a_write_whose_result_is_unread() -> None:
    body = """
        %2: f32[3] = copy_into[starts=(0,), strides=(1,)] %0, %1
        return %0
    """
    assert after(dce, "%0: f32[3], %1: f32[2]", body) == "return %0"


# -- cse -------------------------------------------------------------------------------------------


def test_cse_computes_equal_equations_once() -> None:
    got = after(
        cse,
        "%0: f32[3]",
        """
        %1: f32[3] = exp %0
        %2: f32[3] = exp %0
        %3: f32[3] = add %1, %2
        %4: f32[3] = add %2, %1
        return %3, %4
        """,
    )
    assert got == expected("""
        %1: f32[3] = exp %0
        %2: f32[3] = add %1, %1
        return %2, %2
    """)


def test_cse_looks_at_parameters() -> None:
    body = """
        %1: f32[2] = slice[starts=(0,), limits=(2,), strides=(1,)] %0
        %2: f32[2] = slice[starts=(1,), limits=(3,), strides=(1,)] %0
        return %1, %2
    """
    assert after(cse, "%0: f32[3]", body) == expected(body)


def test_cse_keeps_zeros_of_both_signs_apart() -> None:
    body = """
        %1: f32[3] = div %0, 0.0:f32[]
        %2: f32[3] = div %0, -0.0:f32[]
        return %1, %2
    """
    assert after(cse, "%0: f32[3]", body) == expected(body)


def test_cse_keeps_weak_and_strong_literals_apart() -> None:
    body = """
        %1: f32[3] = mul %0, 2.0:f32[]
        %2: f32[3] = mul %0, 2.0:f32[]*
        return %1, %2
    """
    assert after(cse, "%0: f32[3]", body) == expected(body)


def test_cse_leaves_recomputation_regions_alone() -> None:
    body = """
        %1: f32[3] = exp %0
        %2: f32[3] = exp@1 %0
        %3: f32[3] = exp@2 %0
        return %1, %2, %3
    """
    assert after(cse, "%0: f32[3]", body) == expected(body)


def test_cse_never_merges_writes() -> None:
    body = """
        %2: f32[3] = copy_into[starts=(0,), strides=(1,)] %0, %1
        %3: f32[3] = copy_into[starts=(0,), strides=(1,)] %0, %1
        return %2, %3
    """
    assert after(cse, "%0: f32[3], %1: f32[2]", body) == expected(body)


# -- fold ------------------------------------------------------------------------------------------


def test_fold_evaluates_scalar_literals() -> None:
    body = """
        %1: f32[] = add 1.5:f32[], 2.0:f32[]
        %2: f32[] = exp 0.0:f32[]
        %3: f32[] = mul %1, %2
        %4: f32[3] = mul %0, %3
        return %4, %3
    """
    assert after(fold, "%0: f32[3]", body) == expected("""
        %1: f32[3] = mul %0, 3.5:f32[]
        return %1, 3.5:f32[]
    """)


@pytest.mark.parametrize(
    ("equation", "special"),
    [
        ("mul %0, 0.0:f32[]", np.inf),
        ("add %0, 0.0:f32[]", -0.0),
        ("sub %0, %0", np.nan),
        ("div %0, %0", 0.0),
        ("eq %0, %0", np.nan),
    ],
)
def test_fold_keeps_what_a_special_value_would_change(equation: str, special: float) -> None:
    """X * 0 is NaN at infinity, x + 0.0 turns -0.0 into 0.0, x - x is NaN at NaN."""
    out = "bool[2]" if equation.startswith("eq") else "f32[2]"
    source = f"program(%0: f32[2]) {{\n  %1: {out} = {equation}\n  return %1\n}}"
    program = parse(source, PRIMITIVES)
    x = np.array([special, 1.0], np.float32)
    (want,), (got,) = evaluate(program, [x]), evaluate(simplify(program), [x])
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize(
    "equation",
    ["mul %0, 1.0:f32[]", "add -0.0:f32[], %0", "sub %0, 0.0:f32[]", "div %0, 1.0:f32[]", "neg %1"],
)
def test_fold_drops_what_changes_no_bit(equation: str) -> None:
    body = f"%1: f32[2] = neg %0\n%2: f32[2] = {equation}\nreturn %2"
    assert after(simplify, "%0: f32[2]", body) == "return %0"


def test_fold_leaves_writes_alone() -> None:
    body = """
        %0: f32[] = copy_into[starts=(), strides=()] 1.0:f32[], 2.0:f32[]
        return %0
    """
    assert after(fold, "", body) == expected(body)


# -- every pass ------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", PASSES, ids=lambda p: p.__name__)
@settings(max_examples=25)
@given(program=programs(), seed=seeds)
def test_passes_keep_every_bit(
    run: Callable[[Program], Program], program: Program, seed: int
) -> None:
    inputs = arrays_of(program, seed)
    for x in inputs:
        if x.dtype.kind == "f" and x.size > 1:  # special values must survive as well
            x.reshape(-1)[: 4 % x.size] = (np.nan, np.inf, -0.0, -np.inf)[: 4 % x.size]
    made = check(run(program))
    assert len(made.eqns) <= len(program.eqns)
    assert made.out_avals == program.out_avals
    for got, want in zip(evaluate(made, inputs), evaluate(program, inputs), strict=True):
        same = (got == want) | ((got != got) & (want != want))
        assert got.tobytes() == want.tobytes() or np.all(same)
        if got.dtype.kind == "f":
            signed = ~np.isnan(want)
            assert np.array_equal(np.signbit(got)[signed], np.signbit(want)[signed])


@settings(max_examples=25)
@given(program=programs())
def test_simplify_is_idempotent(program: Program) -> None:
    once = simplify(program)
    assert text(simplify(once)) == text(once)


@pytest.mark.parametrize(
    ("shapes", "equation", "repeats"),
    [
        # x [batch, rows, k] with w [k, n], both ways round where a side has no free axes
        (((3, 5, 4), (4, 6)), (((2,), (1,)), ((0,), (0,))), (3, 0)),
        (((3, 4), (4, 6)), (((1,), (1,)), ((0,), (0,))), (3, 0)),
        # two batch axes, one repeated: grouped heads
        (((2, 3, 5, 4), (2, 7, 4)), (((3,), (3,)), ((0, 1), (0, 1))), (3, 1)),
    ],
)
def test_fold_shares_an_operand_that_batches_repeat(
    shapes: Any, equation: Any, repeats: tuple[int, int]
) -> None:
    size, at = repeats
    contract, batch = equation

    def repeated(w: Any) -> Any:
        shape = (*w.shape[:at], size, *w.shape[at:])
        return lax.broadcast_in_dim(w, shape, [i for i in range(len(shape)) if i != at])

    def last(x: Any, w: Any) -> Any:
        return lax.dot_general(x, repeated(w), equation)

    def first(x: Any, w: Any) -> Any:
        return lax.dot_general(repeated(w), x, (contract[::-1], batch[::-1]))

    x, w = (
        np.random.default_rng(i).normal(size=s).astype(np.float32) for i, s in enumerate(shapes)
    )
    for f in (last, first):
        program = vj.make_ir(f)(x, w)
        simpler = simplify(program)
        names = [eqn.prim.name for eqn in simpler.eqns]
        needs_a_permutation = f is first and len(shapes[0]) > 2
        assert ("broadcast" in names) == needs_a_permutation
        (want,) = evaluate(program, [x, w])
        (got,) = evaluate(simpler, [x, w])
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
