"""cond and switch: values, derivatives, batches, residuals, messages; on every device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vkjit as vj
import vkjit.numpy as jnp
from tests.control.elementwise import at_points, compiled, evaluated, primitives
from vkjit import dtypes, lax, tree
from vkjit.api.staged import make_ir
from vkjit.control.branch import Cond
from vkjit.errors import ArgumentError, DTypeError, ShapeError
from vkjit.ir.program import Eqn, Program

W = np.random.default_rng(0).uniform(-1, 1, (4, 4)).astype(np.float32)

PIECES = (
    lambda x: jnp.sin(x) * x,
    lambda x: jnp.exp(-x * x),
    lambda x: x**3 - 2.0 * x,
)
POINTS = np.array([-1.5, -0.5, 0.25, 0.75, 1.25, 2.5])
TAKEN = (0, 0, 1, 1, 2, 2)


def by_switch(x: Any) -> Any:
    number = jnp.where(x < 0, 0, jnp.where(x < 1, 1, 2))
    return lax.switch(number, PIECES, x)


def by_cond(x: Any) -> Any:
    """Nested, with values that the branches close over."""
    scale = 2.0 * x
    return lax.cond(
        x < 0,
        lambda: jnp.sin(x) * scale * 0.5,
        lambda: lax.cond(x < 1, lambda y: jnp.exp(-y * x), lambda y: y * x * x - scale, x),
    )


def by_cond_in_scan(x: Any) -> Any:
    """Each turn adds a third of the value."""

    def turn(total: Any, third: Any) -> tuple[Any, None]:
        return total + third * by_switch(x), None

    return lax.scan(turn, jnp.zeros_like(x), jnp.full(3, 1 / 3, x.dtype))[0]


def by_scan_in_cond(x: Any) -> Any:
    def power(y: Any) -> Any:
        return lax.fori_loop(0, 3, lambda i, p: p * y, 1.0 + 0.0 * y)

    pieces = (PIECES[0], PIECES[1], lambda y: power(y) - 2.0 * y)
    return lax.switch(jnp.where(x < 0, 0, jnp.where(x < 1, 1, 2)), pieces, x)


FUNCTIONS = (by_switch, by_cond, by_cond_in_scan, by_scan_in_cond)
SEQUENCES = (
    (),
    ("jvp",),
    ("grad",),
    ("linearize",),
    ("vmap",),
    ("grad", "vmap"),
    ("vmap", "grad"),
    ("jvp", "grad"),
    ("grad", "jvp"),
    ("grad", "grad"),
    ("grad", "vmap", "grad"),
    ("vmap", "grad", "jvp"),
    ("jvp", "vmap", "grad"),
    ("grad", "grad", "vmap"),
    ("linearize", "grad", "vmap"),
)


def of_pieces(names: Sequence[str]) -> Any:
    with dtypes.enable_x64():
        rows = [at_points(piece, names, POINTS, evaluated) for piece in PIECES]
    return np.stack(rows)[TAKEN, np.arange(len(POINTS))]


@pytest.mark.parametrize("names", SEQUENCES, ids="-".join)
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_transformations_are_those_of_the_branch_that_is_taken(fn: Any, names: Any) -> None:
    with dtypes.enable_x64():
        got = at_points(fn, names, POINTS, evaluated)
    np.testing.assert_allclose(got, of_pieces(names), 1e-12, 1e-12)


@pytest.mark.parametrize("names", [("grad",), ("grad", "vmap"), ("vmap", "grad")], ids="-".join)
@pytest.mark.parametrize("fn", [by_cond, by_cond_in_scan])
def test_transformations_on_devices(fn: Any, names: Any, device: str) -> None:
    with vj.default_device(device):
        got = at_points(fn, names, POINTS.astype(np.float32), compiled)
    np.testing.assert_allclose(got, of_pieces(names), 2e-5, 2e-5)


def test_only_the_branch_that_is_taken_runs(device: str) -> None:
    """The other one would never end."""

    def endless(x: Any) -> Any:
        return lax.while_loop(lambda c: c > 0.0, lambda c: c + 1.0, lax.stop_gradient(x * x) + 1.0)

    def fn(x: Any) -> Any:
        return lax.cond(x > 0, jnp.sqrt, endless, x)

    with vj.default_device(device):
        assert float(vj.jit(fn)(np.float32(4))) == 2.0
        assert float(vj.jit(vj.grad(fn))(np.float32(4))) == 0.25
    assert float(fn(np.float32(4))) == 2.0


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32"])
def test_numbers_beyond_the_ends_are_clamped(dtype: str) -> None:
    branches = [functools.partial(jnp.add, i) for i in range(3)]
    info = np.iinfo(dtype)
    for number in (info.min, 0, 1, 2, 3, info.max):
        index = np.asarray(number, dtype)
        want = min(max(int(number), 0), 2) + 10
        assert int(lax.switch(index, branches, 10)) == want
        assert int(vj.jit(lambda i: lax.switch(i, branches, 10))(index)) == want
        batched = vj.vmap(lambda i: lax.switch(i, branches, 10))(index[None])
        assert batched.tolist() == [want]


def test_predicates_are_values_of_rank_0() -> None:
    both = (lambda x: x + 1, lambda x: x - 1)
    for true in (True, 1, 2.5, np.bool_(True), np.float32(-1), jnp.asarray(True), float("nan")):
        assert int(lax.cond(true, *both, 5)) == 6
    for false in (False, 0, -0.0, np.bool_(False), jnp.asarray(0)):
        assert int(lax.cond(false, *both, 5)) == 4
    assert int(lax.cond(True, *both, operand=5)) == 6
    assert lax.cond(True, lambda x: 1, lambda x: 2, operand=None).dtype == np.int32


def test_a_known_predicate_leaves_no_choice() -> None:
    fn = functools.partial(lax.cond, True, jnp.sin, jnp.cos)
    lowered = vj.jit(fn).lower(np.float32(1))
    assert primitives(make_ir(fn)(np.float32(1))).count("cond") == 1
    assert "cond" not in lowered.as_text()
    assert "cos" not in lowered.as_text()


def test_results_are_trees_and_pass_operands_through() -> None:
    def fn(number: Any, x: Any, y: Any) -> Any:
        return lax.switch(
            number,
            [
                lambda t: {"a": (t[0], t[1]), "b": None},
                lambda t: {"a": (t[0], t[1] * 2), "b": None},
                lambda t: {"a": (t[0], t[1] + t[0].sum()), "b": None},
            ],
            (x, y),
        )

    x, y = np.arange(3, dtype=np.float32), np.float32(2)
    for number, want in enumerate((2, 4, 5)):
        for run in (fn, vj.jit(fn)):
            out = run(number, x, y)
            assert out["b"] is None
            np.testing.assert_array_equal(out["a"][0], x)
            assert float(out["a"][1]) == want
    (eqn,) = conds(make_ir(fn)(0, x, y))
    assert len(eqn.outs) == 1, "x is the same in every branch"


def conds(program: Program) -> list[Eqn]:
    return [eqn for eqn in program.eqns if isinstance(eqn.prim, Cond)]


def test_weak_types_join() -> None:
    strong, half = np.float32(2), np.float16(2)
    assert lax.cond(True, lambda x: 1.0, lambda x: 2.0, strong).weak_type
    assert not lax.cond(True, lambda x: 1.0, lambda x: x, strong).weak_type
    with pytest.raises(DTypeError, match=r"f32\[\]\*.* f16\[\]"):
        lax.cond(True, lambda x: 1.0, lambda x: x, half)


def test_residuals_of_branches_share_memory() -> None:
    """Each branch keeps what its derivative reads; one slot serves all branches."""

    def loss(number: Any, x: Any) -> Any:
        def layer(scale: float, y: Any) -> Any:
            return jnp.sum(jnp.sin(scale * (y @ W)) @ W)

        branches = [functools.partial(layer, s) for s in (1.0, 2.0, 3.0)]
        return lax.switch(number, [*branches, jnp.sum], x)

    x = np.ones((5, 4), np.float32)
    known, linear = conds(make_ir(vj.grad(loss, argnums=1))(0, x))
    residuals = [v for v in known.outs if v in linear.args]
    assert [v.aval.shape for v in residuals] == [(5, 4)]
    for number in range(4):
        want = vj.grad(functools.partial(loss, number))(x)
        np.testing.assert_array_equal(vj.grad(loss, argnums=1)(number, x), want)


def test_operands_that_the_derivative_reads_are_not_copied() -> None:
    def loss(pred: Any, w: Any, x: Any) -> Any:
        return lax.cond(pred, lambda: jnp.sum(x @ w), lambda: jnp.sum(w))

    w = np.ones((4, 4), np.float32)
    made = conds(make_ir(vj.grad(loss, argnums=(1, 2)))(True, w, w))
    residuals = [v for v in made[0].outs if v in made[-1].args]
    assert residuals == []


def test_unread_results_and_operands_go() -> None:
    def fn(pred: Any, x: Any, y: Any) -> Any:
        return lax.cond(pred, lambda: (jnp.sin(x), jnp.exp(y)), lambda: (x, y))[0]

    text = vj.jit(fn).lower(True, np.float32(1), np.float32(2)).as_text()
    assert "sin" in text
    assert "exp" not in text


@pytest.mark.parametrize("order", [("grad", "vmap"), ("vmap", "grad")])
def test_branches_that_an_example_does_not_take_give_no_nan(order: Any) -> None:
    xs = np.array([4.0, 0.0, -1.0], np.float32)

    def fn(x: Any) -> Any:
        return lax.cond(x > 0, jnp.sqrt, lambda u: 0.0 * u, x)

    np.testing.assert_array_equal(at_points(fn, order, xs, evaluated), [0.25, 0, 0])

    def shared(scale: Any) -> Any:
        def one(x: Any) -> Any:
            return lax.cond(x > 0, lambda: jnp.sqrt(scale * x), lambda: 0.0 * scale)

        return jnp.sum(vj.vmap(one)(xs))

    assert float(vj.grad(shared)(np.float32(4))) == 0.5


def test_one_choice_for_a_whole_batch_stays_a_choice() -> None:
    def fn(pred: Any, x: Any, w: Any) -> Any:
        return lax.cond(pred, lambda: (x * w, w), lambda: (x + w, w * 2))

    xs, w = np.arange(6, dtype=np.float32).reshape(3, 2), np.ones(2, np.float32)
    mapped = vj.vmap(fn, in_axes=(None, 0, None))
    assert primitives(make_ir(mapped)(True, xs, w)).count("cond") == 1
    for pred in (True, False):
        for got, want in zip(mapped(pred, xs, w), fn(pred, xs, w), strict=True):
            np.testing.assert_array_equal(got, np.broadcast_to(want, (3, 2)))
    apart = vj.vmap(fn, in_axes=(0, 0, None))(np.array([True, False, True]), xs, w)
    np.testing.assert_array_equal(apart[0], [[0, 1], [3, 4], [4, 5]])
    np.testing.assert_array_equal(apart[1], [[1, 1], [2, 2], [1, 1]])


@pytest.mark.parametrize("size", [0, 3])
def test_empty_arrays(size: int, device: str) -> None:
    x = np.arange(size, dtype=np.float32)
    numbers = np.arange(size, dtype=np.int32)

    def fn(number: Any, x: Any) -> Any:
        return lax.switch(number, [jnp.sin, lambda v: v * 2, jnp.cos], x)

    with vj.default_device(device):
        assert vj.jit(fn)(1, x).tolist() == (x * 2).tolist()
        assert vj.jit(vj.grad(lambda x: jnp.sum(fn(1, x))))(x).tolist() == [2.0] * size
        assert vj.jit(vj.vmap(fn))(numbers, x).shape == (size,)


def test_integers_have_no_derivative() -> None:
    def fn(x: Any, n: Any) -> Any:
        y, m = lax.cond(n > 1, lambda: (x * n, n + 1), lambda: (x, n))
        return y * m

    value, gradient = vj.value_and_grad(fn)(np.float32(3), np.int32(2))
    assert (float(value), float(gradient)) == (18.0, 6.0)


@given(
    taken=st.integers(0, 1),
    names=st.lists(st.sampled_from(["jvp", "grad", "linearize"]), max_size=2),
    where=st.none() | st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_random_sequences(taken: int, names: list[str], where: int | None, seed: int) -> None:
    xs = np.random.default_rng(seed).uniform(-2, 2, 4)
    if where is not None:
        names.insert(min(where, len(names)), "vmap")
    piece = (PIECES[2], PIECES[0])[taken]

    def fn(x: Any) -> Any:
        return lax.cond(taken, *PIECES[::2], x)

    with dtypes.enable_x64():
        got = at_points(fn, names, xs, evaluated)
        want = at_points(piece, names, xs, evaluated)
    np.testing.assert_allclose(got, want, 1e-12, 1e-12)


def one(x: Any) -> Any:
    return {"a": (x, x)}


def other(x: Any) -> Any:
    return {"a": (x, jnp.ones(3))}


REFUSED = {
    "shapes": (
        lambda: lax.cond(True, one, other, 1.0),
        ShapeError,
        r"cond: true_fun \(one at .*test_branch.py:\d+\) returns at \['a'\]\[1\] f32\[\]\*, "
        r"false_fun \(other at .*test_branch.py:\d+\) returns f32\[3\]",
    ),
    "structures": (
        lambda: lax.switch(0, [one, one, jnp.sin], 1.0),
        ShapeError,
        r"switch: branches\[2\] .*structure \*, branches\[0\] .*'a'",
    ),
    "dtypes": (
        lambda: lax.cond(True, lambda: 1, lambda: 1.0),
        DTypeError,
        r"true_fun .*i32\[\]\*, false_fun .*f32\[\]\*",
    ),
    "predicates": (
        lambda: lax.cond(jnp.ones(2) > 0, one, one, 1.0),
        ShapeError,
        r"cond: pred bool\[2\].*where",
    ),
    "indices": (lambda: lax.switch(1.0, [one, one], 1.0), DTypeError, r"switch: index f32\[\]"),
    "no branches": (lambda: lax.switch(0, [], 1.0), ArgumentError, "switch: no branches"),
    "no functions": (lambda: lax.switch(0, [1, 2]), ArgumentError, r"branches\[0\] is int"),  # type: ignore[list-item]
}


@pytest.mark.parametrize("name", REFUSED)
def test_messages_name_the_branch_the_leaf_and_the_line(name: str) -> None:
    call, kind, match = REFUSED[name]
    with pytest.raises(kind, match=match) as caught:
        call()
    assert "\n  at " in str(caught.value)
    assert __file__ in str(caught.value)


def test_trees_of_operands_may_be_empty() -> None:
    assert tree.leaves(lax.cond(True, lambda: (), lambda: ())) == []


def test_guards_of_derivatives_are_gone_where_nothing_is_differentiated() -> None:
    def fn(x: Any) -> Any:
        return lax.cond(x > 0, jnp.sin, jnp.cos, x)

    xs = np.array([1.0, -1.0], np.float32)
    assert primitives(make_ir(vj.vmap(fn))(xs)).count("select") == 3
    assert "stop_gradient" not in vj.jit(vj.vmap(fn)).lower(xs).as_text()
    assert vj.jit(vj.vmap(fn)).lower(xs).as_text().count("select") == 1
