"""Scans as programs: their text, what derivatives stack, what passes take out of them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from vkjit import dtypes, lax
from vkjit.api.flat import flatten_call
from vkjit.api.staged import make_ir
from vkjit.control.registry import CONTROL
from vkjit.control.scan import Scan
from vkjit.errors import InternalError
from vkjit.ir.avals import aval
from vkjit.ir.check import check
from vkjit.ir.evaluate import evaluate
from vkjit.ir.parse import parse
from vkjit.ir.program import Eqn, Program, Var
from vkjit.ir.text import text
from vkjit.ops.registry import PRIMITIVES
from vkjit.passes.pipeline import simplify
from vkjit.trace import bind_outs

KNOWN = (*PRIMITIVES, *CONTROL)
H, N, T = 4, 3, 50
W = np.full((H, H), 0.1, np.float32)
HIDDEN = np.full((N, H), 0.5, np.float32)
XS = np.full((T, N, H), 0.25, np.float32)


def simplified(fn: Callable[..., Any], *args: Any) -> Program:
    """The program of ``fn`` after the passes, which must keep its results."""
    flat, leaves = flatten_call(fn, args)
    traced = flat.trace(leaves)
    program = check(traced.program)
    made = simplify(program, checked=True)
    inputs = [np.asarray(a) for a in (*traced.captured, *leaves)]
    for got, want in zip(evaluate(made, inputs), evaluate(program, inputs), strict=True):
        np.testing.assert_array_equal(got, want)
    return made


def scans(program: Program) -> list[Eqn]:
    return [e for e in program.eqns if isinstance(e.prim, Scan)]


def names(program: Program) -> list[str]:
    return [e.prim.name for e in program.eqns]


def parts(eqn: Eqn) -> tuple[list[str], list[str], list[str], list[str], list[str]]:
    """Types of constants, carries, stacked operands; of last carries and stacked results."""
    prim = eqn.prim
    assert isinstance(prim, Scan)
    args = [str(a.aval) for a in eqn.args]
    outs = [str(v.aval) for v in eqn.outs]
    first, second = prim.constants, prim.constants + prim.carries
    return (
        args[:first],
        args[first:second],
        args[second:],
        outs[: prim.carries],
        outs[prim.carries :],
    )


def cumulated(w: Any, h: Any, xs: Any) -> Any:
    def step(h: Any, x: Any) -> tuple[Any, Any]:
        h = jnp.sin(h * w) + x
        return h, h

    return lax.scan(step, h, xs)


def test_text_of_a_scan_and_of_its_gradient() -> None:
    args = np.float32(2), np.float32(1), np.ones(5, np.float32)
    assert text(make_ir(cumulated)(*args)) == textwrap.dedent("""\
        cumulated(%0: f32[], %1: f32[], %2: f32[5]) {
          %3: f32[], %4: f32[5] = scan[length=5, constants=1, carries=1, reverse=False] %0, %1, %2
            body = step(%0: f32[], %1: f32[], %2: f32[]) {
              %3: f32[] = mul %1, %0
              %4: f32[] = sin %3
              %5: f32[] = add %4, %2
              return %5, %5
            }
          return %3, %4
        }""")

    def loss(w: Any, h: Any, xs: Any) -> Any:
        return cumulated(w, h, xs)[0]

    assert text(simplify(make_ir(vj.grad(loss, (0, 1, 2)))(*args))) == textwrap.dedent("""\
        loss(%0: f32[], %1: f32[], %2: f32[5]) {
          %3: f32[], %4: f32[5] = scan[length=5, constants=1, carries=1, reverse=False] %0, %1, %2
            body = step.jvp.known(%0: f32[], %1: f32[], %2: f32[]) {
              %3: f32[] = mul %1, %0
              %4: f32[] = sin %3
              %5: f32[] = add %4, %2
              return %5, %1
            }
          %5: f32[], %6: f32[], %7: f32[5] = scan[length=5, constants=1, carries=2, reverse=True] \
%0, 0.0:f32[], 1.0:f32[], %4
            body = step.jvp.linear.transpose(%0: f32[], %1: f32[], %2: f32[], %3: f32[]) {
              %4: f32[] = mul@1 %3, %0
              %5: f32[] = cos@1 %4
              %6: f32[] = mul %2, %5
              %7: f32[] = mul %3, %6
              %8: f32[] = mul %6, %0
              %9: f32[] = add %1, %7
              return %9, %8, %2
            }
          return %5, %6, %7
        }""")


def test_text_with_lines_reads_back_without_them() -> None:
    program = make_ir(cumulated)(np.float32(2), HIDDEN, XS)
    printed = text(program, lines=True)
    assert printed.count("test_scan_program.py:") == 4
    assert text(parse(printed, KNOWN)) == text(program)


def test_checker_looks_inside() -> None:
    program = make_ir(cumulated)(np.float32(2), HIDDEN, XS)
    (eqn,) = program.eqns
    body = eqn.prim.programs()[0]
    broken = Program(body.params, body.eqns[1:], body.results, body.name)
    outer = Eqn(eqn.prim.with_programs([broken]), eqn.args, eqn.outs, eqn.source)
    with pytest.raises(InternalError, match=r"sin: argument of aval .* before it is defined"):
        check(Program(program.params, (outer,), program.results, program.name))
    longer = Var(aval((T + 1, N, H), dtypes.float32))
    wrong = Eqn(eqn.prim, eqn.args, (eqn.outs[0], longer), eqn.source)
    with pytest.raises(InternalError, match=r"scan: result has aval f32\[51,3,4\]"):
        check(Program(program.params, (wrong,), wrong.outs, program.name))


# -- what derivatives keep -------------------------------------------------------------------------


def gru(w: Any, h: Any, xs: Any) -> Any:
    """The last hidden state (N, H) for inputs (T, N, H)."""
    return lax.scan(lambda h, x: (gru_step(w, h, x), None), h, xs)[0]


def gru_step(w: Any, h: Any, x: Any) -> Any:
    xr, xz, xn = jnp.split(x @ w["x"] + w["b"], 3, -1)
    hr, hz, hn = jnp.split(h @ w["h"], 3, -1)
    r, z = lax.logistic(xr + hr), lax.logistic(xz + hz)
    return (1 - z) * jnp.tanh(xn + r * hn) + z * h


GRU = {
    "x": np.full((H, 3 * H), 0.1, np.float32),
    "h": np.full((H, 3 * H), 0.2, np.float32),
    "b": np.zeros(3 * H, np.float32),
}


def test_gru_stacks_five_values_of_a_turn() -> None:
    """The carry, the product with it, and the three gates; neither weights nor inputs again."""
    program = simplified(vj.grad(lambda w: jnp.sum(gru(w, HIDDEN, XS))), GRU)
    ahead, back = scans(program)
    turn = N * H * 4
    kept = sum(v.aval.nbytes for v in ahead.outs[1:])
    assert kept == 5 * T * turn
    assert parts(ahead)[4] == ["f32[50,3,4]"] * 5
    # Backward: the weights of the hidden product are a constant; what stacks are the residuals and
    # the inputs; the carries are the gradients of the weights and of the state.
    constants, carries, stacked, _, made = parts(back)
    assert constants == ["f32[4,12]"]
    assert sorted(carries) == ["f32[12]", "f32[3,4]", "f32[4,12]", "f32[4,12]"]
    assert stacked == ["f32[50,3,4]"] * 6
    assert made == []


def test_chunks_keep_carries_only() -> None:
    """With chunks of 10, 5 carries, and five values of the 10 turns of one chunk at a time."""

    def loss(w: Any) -> Any:
        def step(h: Any, x: Any) -> tuple[Any, None]:
            return gru_step(w, h, x), None

        return jnp.sum(lax.scan(step, HIDDEN, XS, chunk=10)[0])

    program = simplified(vj.grad(loss), GRU)
    ahead, _ = scans(program)
    assert parts(ahead)[4] == ["f32[5,3,4]"]


def residuals(step: Callable[[Any, Any], Any], *args: Any) -> list[str]:
    """What the forward scan stacks for the gradient of its last carry."""

    def loss(*args: Any) -> Any:
        return jnp.sum(lax.scan(step, args[0], args[1])[0])

    eqns = scans(simplified(vj.grad(loss, tuple(range(len(args)))), *args))
    return [] if len(eqns) == 1 else parts(eqns[0])[4]


def test_linear_loops_stack_nothing() -> None:
    decay = jnp.asarray(np.full((N, H), 0.9, np.float32))
    assert residuals(lambda h, x: (h * decay + x, None), HIDDEN, XS) == []


def test_slices_and_constants_are_not_stacked_again() -> None:
    w = jnp.asarray(W)
    assert residuals(lambda h, x: (h * jnp.sin(x) + x, None), HIDDEN, XS) == ["f32[50,3,4]"]
    assert residuals(lambda h, x: (h @ jnp.tanh(w @ w), None), HIDDEN, XS) == []


def test_a_carry_is_stacked_once() -> None:
    def step(h: Any, x: Any) -> Any:
        return (h * h + x * h + jnp.sin(h), None)

    assert residuals(step, HIDDEN, XS) == ["f32[50,3,4]"]


def test_work_on_constants_is_done_once() -> None:
    def loss(w: Any, h: Any, xs: Any) -> Any:
        return jnp.sum(lax.scan(lambda h, x: (jnp.sin(h @ (w @ w)) + x, None), h, xs)[0])

    program = simplified(vj.grad(loss), W, HIDDEN, XS)
    ahead, back = scans(program)
    assert names(program).index("dot_general") < names(program).index("scan")
    for eqn in (ahead, back):
        assert parts(eqn)[0] == ["f32[4,4]"]
        (body,) = eqn.prim.programs()
        assert [e.prim.name for e in body.eqns].count("dot_general") == 1 + (eqn is back)
    # ahead, back: h @ (w @ w); back also the sum of h.T @ ct; after it two products make the
    # gradient of w from that sum.
    assert names(program).count("dot_general") == 3


def test_zeros_stay_symbolic() -> None:
    def last(h: Any, xs: Any) -> Any:
        return jnp.sum(lax.scan(lambda h, x: (jnp.sin(h), h * x), h, xs)[0])

    program = make_ir(vj.grad(last, (0, 1)))(HIDDEN, XS)
    back = scans(program)[-1]
    assert parts(back)[1] == ["f32[3,4]"]  # no sums, no cotangents of ys
    assert parts(back)[4] == []
    moved = make_ir(lambda h, xs, d: vj.jvp(lambda xs: last(h, xs), (xs,), (d,))[1])
    assert [parts(e)[1] for e in scans(simplify(moved(HIDDEN, XS, XS)))] == []


def test_derivatives_of_integers_cost_nothing() -> None:
    def count(x: Any) -> Any:
        (n, s), _ = lax.scan(lambda c, x: ((c[0] + 1, c[1] + x * c[0]), None), (0, x[0] * 0), x)
        return s * n

    program = simplified(vj.grad(count), np.ones(T, np.float32))
    assert all("i32" not in t for part in parts(scans(program)[-1])[1:2] for t in part)


# -- passes ----------------------------------------------------------------------------------------


def test_what_nobody_reads_leaves_the_loop() -> None:
    def step(carry: Any, x: Any) -> Any:
        a, b, unread = carry
        return (jnp.sin(a), a + b, unread * x["v"]), {"a": a, "b": b * x["u"]}

    def run(init: Any, xs: Any) -> Any:
        (a, *_), ys = lax.scan(step, (init, init, init), {"u": xs, "v": xs + 1, "w": xs})
        return a, ys["a"]

    (eqn,) = scans(simplified(run, HIDDEN, XS))
    assert parts(eqn) == ([], ["f32[3,4]"], [], ["f32[3,4]"], ["f32[50,3,4]"])
    (body,) = eqn.prim.programs()
    assert names(body) == ["sin"]


def test_carries_that_never_change_are_constants() -> None:
    def run(w: Any, h: Any, xs: Any) -> Any:
        (w, h), _ = lax.scan(lambda c, x: ((c[0], c[1] @ (c[0] @ c[0]) + x), None), (w, h), xs)
        return w, h

    program = simplified(run, W, HIDDEN, XS)
    (eqn,) = scans(program)
    assert parts(eqn)[:2] == (["f32[4,4]"], ["f32[3,4]"])
    assert names(program) == ["dot_general", "scan"]
    assert program.results[0] is program.params[0]


def test_views_and_wider_casts_stay_in_the_loop() -> None:
    def run(w: Any, h: Any, xs: Any) -> Any:
        wide = w.astype("float32")
        return lax.scan(lambda h, x: (h @ wide.T + h @ jnp.exp(w).astype("float32"), None), h, xs)

    def inside(w: Any, h: Any, xs: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            return h @ w.astype("float32").T + h @ jnp.exp(w).astype("float32") + x, None

        return lax.scan(step, h, xs)[0]

    program = simplified(inside, W.astype(np.float16), HIDDEN, XS)
    assert names(program) == ["exp", "scan"]
    assert parts(scans(program)[0])[0] == ["f16[4,4]", "f16[4,4]"]


def test_equal_loops_run_once() -> None:
    def twice(w: Any, h: Any, xs: Any) -> Any:
        program = make_ir(cumulated)(w, h, xs)
        (eqn,) = program.eqns
        return [*bind_outs(eqn.prim, w, h, xs), *bind_outs(eqn.prim, w, h, xs)]

    assert names(simplified(twice, np.float32(2), HIDDEN, XS)) == ["scan"]


def test_nested_loops_are_simplified_and_lifted_all_the_way() -> None:
    def run(w: Any, h: Any, xs: Any) -> Any:
        def outer(h: Any, x: Any) -> Any:
            def inner(h: Any, _: Any) -> Any:
                return h @ (w @ w) + (x @ w) * 1.0, None

            return lax.scan(inner, h, None, 3)[0], None

        return lax.scan(outer, h, xs)[0]

    program = simplified(run, W, HIDDEN, XS)
    assert names(program) == ["dot_general", "scan"]
    (body,) = scans(program)[0].prim.programs()
    assert names(body) == ["dot_general", "scan"]


# -- cost ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 4])
def test_long_and_deep_loops_are_as_long_as_their_bodies(depth: int) -> None:
    """Equations of the gradient, all levels counted: the same for 10 turns and for 10,000."""

    def nest(h: Any, depth: int, length: int) -> Any:
        if depth == 0:
            return jnp.sin(h) * h
        return lax.scan(lambda h, _: (nest(h, depth - 1, length), None), h, None, length)[0]

    def count(program: Program) -> int:
        return sum(1 + sum(map(count, e.prim.programs())) for e in program.eqns)

    def size(length: int) -> int:
        return count(simplify(make_ir(vj.grad(lambda h: nest(h, depth, length)))(np.float32(1))))

    assert size(10) == size(10_000)
    assert size(10) < 30 * depth


def planned(length: int, chunk: int | None = None, *, backward: bool) -> int:
    """Bytes of temporaries that the plan has on the CPU for a GRU of (16, 16), or its gradient."""
    hidden, xs = np.zeros((16, 16), np.float32), np.zeros((length, 16, 16), np.float32)
    weights = {"b": np.zeros(48, np.float32)}
    weights |= {k: np.zeros((16, 48), np.float32) for k in "xh"}

    def loss(w: Any, h: Any, xs: Any) -> Any:
        def step(h: Any, x: Any) -> tuple[Any, None]:
            return gru_step(w, h, x), None

        return jnp.sum(lax.scan(step, h, xs, chunk=chunk)[0])

    with vj.default_device("cpu"):
        lowered = vj.jit(vj.grad(loss) if backward else loss).lower(weights, hidden, xs)
    return lowered.memory().temporaries


def test_planned_memory_grows_with_what_is_stacked() -> None:
    carry = 16 * 16 * 4
    assert planned(10, backward=False) == planned(10_000, backward=False)
    assert planned(1000, backward=True) - planned(100, backward=True) == 900 * 5 * carry
    # The carry before each of 32 chunks, and what the 32 turns of one chunk stack.
    fixed = planned(10, backward=True) - 10 * 5 * carry
    chunked = planned(1024, 32, backward=True)
    assert 32 * 6 * carry < chunked < 32 * 6 * carry + 2 * fixed + 8 * carry
