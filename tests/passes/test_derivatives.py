"""jvp, linearize, transpose and batch: the text of what they make, and what linearize saves."""

from __future__ import annotations

import textwrap
from typing import Any

from hypothesis import given, settings

from tests.oracles import arrays_of
from tests.strategies import programs, seeds
from vkjit import dtypes
from vkjit.ir.check import check
from vkjit.ir.evaluate import evaluate
from vkjit.ir.parse import parse
from vkjit.ir.primitive import Kind
from vkjit.ir.program import Program, Var
from vkjit.ir.text import text
from vkjit.ops.registry import PRIMITIVES
from vkjit.passes.batch import batch
from vkjit.passes.dce import dce
from vkjit.passes.jvp import jvp
from vkjit.passes.linearize import Linearized, linearize
from vkjit.passes.transpose import transpose
from vkjit.trace import trace


def program_of(params: str, body: str) -> Program:
    lines = textwrap.indent(textwrap.dedent(body).strip(), "  ")
    return check(parse(f"program({params}) {{\n{lines}\n}}", PRIMITIVES))


def body_of(program: Program) -> str:
    return textwrap.dedent("\n".join(text(check(dce(program))).splitlines()[1:-1]))


def expected(body: str) -> str:
    return textwrap.dedent(body).strip()


def pushed(program: Program, moving: tuple[int, ...]) -> Program:
    """Parameters and the tangents of ``moving`` to results and tangents."""
    count = len(program.params)

    def both(*values: Any) -> list[Any]:
        tangents: list[Any] = [None] * count
        for position, value in zip(moving, values[count:], strict=True):
            tangents[position] = value
        outs, douts = jvp(program, values[:count], tangents)
        return [*outs, *(d for d in douts if d is not None)]

    return trace(both, [*program.in_avals, *(program.in_avals[i] for i in moving)]).program


def split(program: Program, moving: tuple[int, ...]) -> Linearized:
    count = len(program.params)
    forward = pushed(program, moving)
    return linearize(forward, range(count, count + len(moving)), len(program.results))


# -- jvp -------------------------------------------------------------------------------------------


def test_jvp_of_a_product() -> None:
    program = program_of("%0: f32[3], %1: f32[3]", "%2: f32[3] = mul %0, %1\nreturn %2")
    assert body_of(pushed(program, (0,))) == expected("""
        %3: f32[3] = mul %2, %1
        %4: f32[3] = mul %0, %1
        return %4, %3
    """)


def test_zero_tangents_cost_nothing() -> None:
    program = program_of(
        "%0: f32[3], %1: f32[3]",
        """
        %2: f32[3] = exp %1
        %3: f32[3] = sin %2
        %4: f32[3] = add %0, %3
        return %4
        """,
    )
    made = pushed(program, (0,))
    assert [e.prim.name for e in made.eqns] == ["exp", "sin", "add"]
    assert made.results[1] is made.params[2]


def test_integers_have_no_tangents() -> None:
    program = program_of(
        "%0: f32[3]",
        """
        %1: i32[3] = cast[dtype=i32] %0
        %2: f32[3] = cast[dtype=f32] %1
        return %2
        """,
    )
    assert len(pushed(program, (0,)).results) == 1


# -- linearize -------------------------------------------------------------------------------------


def test_linearize_splits_known_from_linear() -> None:
    program = program_of("%0: f32[3]", "%1: f32[3] = sin %0\nreturn %1")
    parts = split(program, (0,))
    assert [e.prim.name for e in dce(parts.known).eqns] == ["sin"]
    assert {e.prim.name for e in dce(parts.linear).eqns} == {"cos", "mul"}
    assert parts.residuals == 1


def maker(program: Program, result: object) -> str:
    """Name of the primitive that makes a result; "parameter" without one."""
    for eqn in program.eqns:
        if result in eqn.outs:
            return eqn.prim.name
    return "parameter"


def test_casts_and_views_are_never_saved() -> None:
    program = program_of(
        "%0: bf16[3,4], %1: f32[4,3]",
        """
        %2: f32[3,4] = cast[dtype=f32] %0
        %3: f32[4,3] = permute[perm=(1, 0)] %2
        %4: f32[4,3] = mul %3, %1
        return %4
        """,
    )
    parts = split(program, (0, 1))
    saved = [maker(parts.known, r) for r in parts.known.results[1:]]
    assert saved == ["parameter", "parameter"]
    assert "cast" in {e.prim.name for e in dce(parts.linear).eqns}


def test_reductions_and_products_are_saved() -> None:
    program = program_of(
        "%0: f32[3,3]",
        """
        %1: f32[3,3] = dot_general[lhs_contract=(1,), rhs_contract=(0,), lhs_batch=(), \
rhs_batch=(), accumulate=f32, dtype=f32] %0, %0
        %2: f32[3,3] = sin %1
        return %2
        """,
    )
    parts = split(program, (0,))
    again = [e for e in dce(parts.linear).eqns if not reads_tangents(parts, e)]
    assert all(e.prim.traits.kind in (Kind.POINTWISE, Kind.VIEW) for e in again)
    saved = {maker(parts.known, r) for r in parts.known.results[1:]}
    assert saved & {"dot_general", "cos"}


def reads_tangents(parts: Linearized, eqn: Any) -> bool:
    moving = set(parts.linear.params[parts.residuals :])
    for other in parts.linear.eqns:
        if any(a in moving for a in other.args):
            moving.update(other.outs)
    return any(out in moving for out in eqn.outs)


@settings(max_examples=25)
@given(program=programs(max_steps=8, kinds=(dtypes.float32,), smooth=True), seed=seeds)
def test_recomputed_values_are_cheap_and_saved_ones_are_needed(program: Program, seed: int) -> None:
    moving = tuple(range(len(program.params)))
    parts = split(program, moving)
    check(parts.known)
    check(parts.linear)
    linear = dce(parts.linear)
    for eqn in linear.eqns:
        if not reads_tangents(parts, eqn):
            assert eqn.prim.traits.kind in (Kind.POINTWISE, Kind.VIEW)
            assert not eqn.prim.traits.effect
    for result in parts.known.results[len(program.results) :]:
        kinds = [e.prim.traits.kind for e in parts.known.eqns if result in e.outs]
        assert Kind.VIEW not in kinds
        assert maker(parts.known, result) != "cast"
    # Both halves together are the whole.
    inputs = arrays_of(program, seed)
    tangents = arrays_of(program, seed + 1)
    whole = evaluate(pushed(program, moving), [*inputs, *tangents])
    known = evaluate(parts.known, inputs)
    halves = evaluate(parts.linear, [*known[len(program.results) :], *tangents])
    for got, want in zip((*known[: len(program.results)], *halves), whole, strict=False):
        assert got.tobytes() == want.tobytes()


def test_a_view_after_a_long_chain_is_not_saved() -> None:
    lines = [f"%{i + 1}: f32[4] = sin %{i}" for i in range(12)]
    lines += ["%13: f32[1000,4] = broadcast[shape=(1000, 4), axes=(1,)] %12"]
    lines += ["%14: f32[1000,4] = mul %13, %13", "return %14"]
    parts = split(program_of("%0: f32[4]", "\n".join(lines)), (0,))
    saved = [r.aval.nbytes for r in parts.known.results[1:]]
    assert sum(saved) <= 13 * 16


# -- transpose -------------------------------------------------------------------------------------


def pulled(program: Program, residuals: int) -> Program:
    """Residuals and cotangents to the cotangents of the linear parameters; zeros left out."""

    def back(*values: Any) -> list[Any]:
        cts = transpose(program, values[:residuals], values[residuals:])
        return [ct for ct in cts if ct is not None]

    return trace(back, [*program.in_avals[:residuals], *program.out_avals]).program


def test_cotangents_of_several_uses_are_summed() -> None:
    program = program_of(
        "%0: f32[3], %1: f32[3]",
        """
        %2: f32[3] = mul %0, %1
        %3: f32[3] = neg %1
        %4: f32[3] = add %2, %3
        return %4
        """,
    )
    assert body_of(pulled(program, 1)) == expected("""
        %2: f32[3] = neg %1
        %3: f32[3] = mul %0, %1
        %4: f32[3] = add %2, %3
        return %4
    """)


def test_a_repeated_value_sums_its_cotangent() -> None:
    program = program_of(
        "%0: f32[4]", "%1: f32[3,4] = broadcast[shape=(3, 4), axes=(1,)] %0\nreturn %1"
    )
    assert body_of(pulled(program, 0)) == expected("""
        %1: f32[4] = reduce_sum[axes=(0,)] %0
        return %1
    """)


def test_unused_parameters_have_no_cotangent() -> None:
    program = program_of("%0: f32[3], %1: f32[4]", "%2: f32[3] = neg %0\nreturn %2")
    assert len(pulled(program, 0).results) == 1


def test_a_parameter_that_is_a_result_gets_its_cotangent() -> None:
    program = program_of("%0: f32[3]", "%1: f32[3] = neg %0\nreturn %0, %1")
    assert body_of(pulled(program, 0)) == expected("""
        %2: f32[3] = neg %1
        %3: f32[3] = add %0, %2
        return %3
    """)


def test_recomputation_is_a_region_of_its_own() -> None:
    program = program_of(
        "%0: f32[3], %1: f32[3]",
        """
        %2: f32[3] = cos %0
        %3: f32[3] = mul %1, %2
        return %3
        """,
    )
    made = pulled(program, 1)
    regions = {e.prim.name: e.region for e in made.eqns}
    assert regions["cos"] != regions["mul"]


# -- batch -----------------------------------------------------------------------------------------


def test_only_what_varies_is_batched() -> None:
    program = program_of(
        "%0: f32[3], %1: f32[3]",
        """
        %2: f32[3] = exp %1
        %3: f32[3] = mul %0, %2
        return %3, %2
        """,
    )
    x = program_of("%0: f32[5,3], %1: f32[3]", "return %0, %1").in_avals
    flags: list[bool] = []

    def many(*values: Any) -> list[Any]:
        outs, spread = batch(program, values, [True, False])
        flags.extend(spread)
        return outs

    made = trace(many, x).program
    assert flags == [True, False]
    exp = next(e for e in made.eqns if e.prim.name == "exp")
    assert exp.outs[0].aval.shape == (3,)
    assert isinstance(made.results[0], Var)
    assert made.results[0].aval.shape == (5, 3)
