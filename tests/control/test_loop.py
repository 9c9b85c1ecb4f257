"""while_loop and fori_loop: values, derivatives, batches, messages; on every device."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vkjit as vj
import vkjit.numpy as jnp
from tests.control.elementwise import at_points, compiled, evaluated, primitives
from vkjit import dtypes, lax
from vkjit.api.staged import make_ir
from vkjit.control.loop import While
from vkjit.control.registry import CONTROL
from vkjit.errors import ArgumentError, DTypeError, ShapeError
from vkjit.ir.parse import parse
from vkjit.ir.program import Eqn, Program
from vkjit.ops.registry import PRIMITIVES

POINTS = np.array([-1.5, -0.5, 0.25, 0.75, 1.25, 2.5])


def turned(x: Any) -> Any:
    """The sine of the sine of ..., four times in all, and each turn's square added."""
    total = 0.0 * x
    for _ in range(4):
        x = jnp.sin(x) + 0.1
        total = total + x * x
    return total


def by_while(x: Any) -> Any:
    def turn(carried: Any) -> Any:
        i, y, total = carried
        y = jnp.sin(y) + 0.1
        return i + 1, y, total + y * y

    return lax.while_loop(lambda c: c[0] < 4, turn, (0, x, 0.0 * x))[2]


def by_fori(x: Any) -> Any:
    def turn(i: Any, carried: Any) -> Any:
        y = jnp.sin(carried[0]) + 0.1
        return y, carried[1] + y * y

    return lax.fori_loop(-1, 3, turn, (x, 0.0 * x))[1]


def by_nested(x: Any) -> Any:
    """A loop in a loop, and one of them chosen."""

    def turn(i: Any, carried: Any) -> Any:
        def step(j: Any, y: Any) -> Any:
            return lax.cond(i < 99, lambda: jnp.sin(y), lambda: y)

        y = lax.fori_loop(0, 1, step, carried[0]) + 0.1
        return y, carried[1] + y * y

    return lax.fori_loop(0, 4, turn, (x, 0.0 * x))[1]


def by_while_in_fori(x: Any) -> Any:
    def turn(_: Any, carried: Any) -> Any:
        halves = lax.while_loop(
            lambda c: c[0] < 1, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, *carried[:1])
        )
        y = halves[1] + 0.1
        return y, carried[1] + y * y

    return lax.fori_loop(0, 4, turn, (x, 0.0 * x))[1]


REVERSIBLE = (by_fori, by_nested)
FORWARD = (by_while, by_while_in_fori)
ANY = ((), ("jvp",), ("vmap",), ("jvp", "vmap"), ("vmap", "jvp"), ("jvp", "jvp"), ("linearize",))
FORWARD_ONLY = (*ANY, ("jvp", "vmap", "jvp"), ("vmap", "linearize", "jvp"))
BACKWARD = (
    ("grad",),
    ("grad", "vmap"),
    ("vmap", "grad"),
    ("grad", "grad"),
    ("grad", "vmap", "jvp"),
    ("jvp", "vmap", "grad"),
)
CASES = [(fn, names) for fn in FORWARD for names in FORWARD_ONLY]
CASES += [(fn, names) for fn in REVERSIBLE for names in (*ANY, *BACKWARD)]


def label(value: Any) -> str:
    return "-".join(value) or "plain" if isinstance(value, tuple) else value.__name__


@pytest.mark.parametrize(("fn", "names"), CASES, ids=label)
def test_transformations_are_those_of_the_turns(fn: Any, names: Any) -> None:
    with dtypes.enable_x64():
        got = at_points(fn, names, POINTS, evaluated)
        want = at_points(turned, names, POINTS, evaluated)
    np.testing.assert_allclose(got, want, 1e-12, 1e-12)


@pytest.mark.parametrize("names", [("jvp",), ("vmap", "jvp")], ids=label)
@pytest.mark.parametrize("fn", [by_while, by_while_in_fori])
def test_transformations_on_devices(fn: Any, names: Any, device: str) -> None:
    xs = POINTS.astype(np.float32)
    with vj.default_device(device):
        got = at_points(fn, names, xs, compiled)
    np.testing.assert_allclose(got, at_points(turned, names, xs, evaluated), 2e-5, 2e-5)


@pytest.mark.parametrize("fn", REVERSIBLE)
def test_gradients_on_devices(fn: Any, device: str) -> None:
    xs = POINTS.astype(np.float32)
    with vj.default_device(device):
        got = at_points(fn, ("grad", "vmap"), xs, compiled)
    np.testing.assert_allclose(got, at_points(turned, ("grad", "vmap"), xs, evaluated), 2e-5, 2e-5)


def collatz(n: Any) -> Any:
    """Turns until 1."""

    def turn(carried: Any) -> Any:
        n, count = carried
        return lax.cond(n % 2 == 0, lambda: n // 2, lambda: 3 * n + 1), count + 1

    return lax.while_loop(lambda c: c[0] > 1, turn, (n, 0))[1]


def test_turns_go_on_until_every_example_is_done(device: str) -> None:
    numbers = np.array([1, 2, 27, 3, 97, 6], np.int32)
    want = [0, 1, 111, 7, 118, 8]
    with vj.default_device(device):
        assert vj.jit(vj.vmap(collatz))(numbers).tolist() == want
        assert int(vj.jit(collatz)(np.int32(27))) == 111
    assert vj.vmap(collatz)(numbers).tolist() == want
    assert vj.vmap(vj.vmap(collatz))(numbers.reshape(2, 3)).tolist() == [want[:3], want[3:]]


def test_examples_that_are_done_keep_their_values() -> None:
    """Another turn would make infinities, and NaN of them."""

    def fn(x: Any) -> Any:
        return lax.while_loop(lambda y: y < 1e3, lambda y: y * y * y, x)

    xs = np.array([2.0, 1e31, 30.0], np.float32)
    with np.errstate(over="raise"):
        want = [float(fn(x)) for x in xs]
    got, moved = vj.jvp(vj.vmap(fn), (xs,), (np.ones_like(xs),))
    np.testing.assert_allclose(got, want, 1e-5)
    assert float(moved[1]) == 1.0
    assert np.isfinite(np.asarray(moved)).all()


def loops(program: Program) -> list[Eqn]:
    return [eqn for eqn in program.eqns if isinstance(eqn.prim, While)]


def test_a_shared_condition_stays_shared_under_vmap() -> None:
    def fn(n: Any, x: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 2), (0, x))

    mapped = vj.vmap(fn, in_axes=(None, 0))
    xs = np.arange(3, dtype=np.float32)
    (loop,) = loops(make_ir(mapped)(5, xs))
    assert [v.aval.shape for v in loop.outs] == [(), (3,)]
    counts, values = mapped(5, xs)
    assert counts.tolist() == [5, 5, 5]
    assert values.tolist() == [0, 32, 64]


def test_what_the_body_passes_through_is_a_constant() -> None:
    def fn(x: Any, n: Any) -> Any:
        init = (0, n, x, jnp.zeros_like(x))
        return lax.while_loop(
            lambda c: c[0] < c[1], lambda c: (c[0] + 1, c[1], c[2], c[3] + c[2]), init
        )

    (loop,) = loops(make_ir(fn)(np.ones(3, np.float32), 4))
    assert len(loop.outs) == 2
    out = vj.jit(fn)(np.ones(3, np.float32), 4)
    assert [np.asarray(v).tolist() for v in out] == [4, 4, [1, 1, 1], [4, 4, 4]]


def test_carries_that_nobody_reads_go() -> None:
    def fn(x: Any) -> Any:
        def turn(c: Any) -> Any:
            return c[0] + 1, jnp.sin(c[1]), jnp.exp(c[2])

        return lax.while_loop(lambda c: c[0] < 4, turn, (0, x, x))[1]

    text = vj.jit(fn).lower(np.float32(1)).as_text()
    assert "sin" in text
    assert "exp" not in text
    np.testing.assert_allclose(vj.jit(fn)(np.float32(1)), fn(np.float32(1)), 1e-6)


def test_carries_that_do_not_move_can_be_differentiated_beside() -> None:
    def fn(x: Any) -> Any:
        fixed = lax.stop_gradient(x)
        count, power = lax.while_loop(
            lambda c: c[1] < 100.0, lambda c: (c[0] + 1, c[1] * fixed), (0, fixed)
        )
        return x * power * count

    value, gradient = vj.value_and_grad(fn)(np.float32(3))
    assert (float(value), float(gradient)) == (3 * 243 * 4, 243 * 4)


def test_linearized_loops_compute_known_carries_once_before_and_in_each_application() -> None:
    def fn(x: Any) -> Any:
        def turn(c: Any) -> Any:
            return c[0] + 1, c[1] * c[1]

        return lax.while_loop(lambda c: c[0] < 3, turn, (0, x))[1]

    value, pushed = vj.linearize(fn, np.float32(1.5))
    assert float(value) == 1.5**8
    assert float(pushed(np.float32(2))) == 2 * 8 * 1.5**7


@pytest.mark.parametrize("bounds", [(0, 5), (3, 3), (5, 2), (-2, 1), (np.int8(1), np.int8(4))])
def test_bounds(bounds: Any, device: str) -> None:
    want = sum(range(int(bounds[0]), int(bounds[1])))

    def fn(lower: Any, upper: Any) -> Any:
        return lax.fori_loop(lower, upper, lambda i, total: total + i, np.int32(0))

    with vj.default_device(device):
        assert int(vj.jit(lambda: fn(*bounds))()) == want
        assert int(vj.jit(fn)(*bounds)) == want
    assert int(fn(*bounds)) == want


def test_counters_and_weak_values() -> None:
    seen: list[Any] = []

    def turn(i: Any, total: Any) -> Any:
        seen.append(i.aval)
        return total + i

    assert lax.fori_loop(0, 5, turn, 0).dtype == np.int32
    assert float(lax.fori_loop(0, 5, turn, 0.0)) == 10.0
    assert lax.fori_loop(0, np.int32(5), turn, np.float16(1)).dtype == np.float16
    assert vj.jit(lambda n: lax.fori_loop(np.int8(0), n, turn, 0.0))(np.int8(3)).dtype == np.float32
    assert {str(of) for of in seen} <= {"i32[]*", "i8[]"}
    seen.clear()
    lax.fori_loop(np.int8(0), np.int8(3), turn, 0.0)
    assert {str(of) for of in seen} == {"i8[]"}
    grown = lax.while_loop(lambda c: c < 10, lambda c: c + np.float32(1.5), 0)
    assert (grown.dtype, float(grown)) == (np.float32, 10.5)


@pytest.mark.parametrize("length", [9, 10, 11])
def test_numbers_of_turns_are_listed_or_counted(
    length: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results and derivatives are the same; listed numbers cost no step of a turn."""
    monkeypatch.setattr("vkjit.lax._branches._LISTED", 10)

    def fn(x: Any) -> Any:
        return lax.fori_loop(2, 2 + length, lambda i, y: 0.5 * y + jnp.sin(i * x), x)

    def written(x: Any) -> Any:
        y = x
        for i in range(2, 2 + length):
            y = 0.5 * y + jnp.sin(i * x)
        return y

    x = POINTS.astype(np.float32)
    with vj.default_device(device):
        compiled = vj.jit(fn)
        plan = compiled.lower(x).as_text("plan").splitlines()
        inside = [line for line in plan if line.startswith("    ") and "pointwise" in line]
        assert len(inside) == (2 if length > 10 else 1)
        np.testing.assert_allclose(compiled(x), written(x), rtol=1e-5, atol=1e-6)
        slopes = vj.jit(vj.grad(lambda x: fn(x).sum()))(x)
    want = vj.grad(lambda x: written(x).sum())(x)
    np.testing.assert_allclose(slopes, want, rtol=1e-4, atol=1e-5)


def test_unroll() -> None:
    def fn(n: Any, unroll: Any) -> Any:
        return lax.fori_loop(0, n, lambda i, x: x * 2 + i, np.int32(1), unroll=unroll)

    want = int(fn(7, None))
    for unroll in (1, 2, 3, True, False):
        assert int(fn(7, unroll)) == want
    with pytest.raises(ArgumentError, match=r"fori_loop: unroll=2 with bounds .* run time"):
        vj.jit(lambda n: fn(n, 2))(7)


@pytest.mark.parametrize("size", [0, 3])
def test_empty_arrays(size: int, device: str) -> None:
    x = np.arange(size, dtype=np.float32)

    def fn(x: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, x))[1]

    with vj.default_device(device):
        assert vj.jit(fn)(x).tolist() == (x * 8).tolist()
        assert vj.jit(vj.vmap(fn))(x).tolist() == (x * 8).tolist()


def test_text_can_be_read_back() -> None:
    program = make_ir(vj.vmap(collatz))(np.arange(3, dtype=np.int32))
    printed = str(program)
    assert str(parse(printed, (*PRIMITIVES, *CONTROL))) == printed
    assert "while" in primitives(program)


@given(
    turns=st.integers(0, 5),
    factor=st.floats(-1.5, 1.5, width=32),
    names=st.lists(st.sampled_from(["jvp", "linearize"]), max_size=2),
    where=st.none() | st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_random_sequences(
    turns: int, factor: float, names: list[str], where: int | None, seed: int
) -> None:
    xs = np.random.default_rng(seed).uniform(-1, 1, 3)
    if where is not None:
        names.insert(min(where, len(names)), "vmap")

    def step(x: Any) -> Any:
        return jnp.sin(x * factor) + x

    def dynamic(x: Any) -> Any:
        # As many turns as said, by a bound that no trace can know.
        return lax.fori_loop(0, turns + jnp.int32(0 * x), lambda i, y: step(y), x)

    def plain(x: Any) -> Any:
        for _ in range(turns):
            x = step(x)
        return x

    with dtypes.enable_x64():
        got = at_points(dynamic, names, xs, evaluated)
        want = at_points(plain, names, xs, evaluated)
    np.testing.assert_allclose(got, want, 1e-12, 1e-12)


def test_reverse_mode_says_what_to_use() -> None:
    def fn(x: Any) -> Any:
        return lax.while_loop(lambda y: y < 10.0, lambda y: y * 2.0, x)

    line = fn.__code__.co_firstlineno + 1
    match = rf"while_loop \(made at .*test_loop.py:{line}\).*lax.scan.*lax.fori_loop.*jvp"
    with pytest.raises(ArgumentError, match=match):
        vj.grad(fn)(np.float32(1))
    with pytest.raises(ArgumentError, match=r"while_loop \(made at .*test_loop.py"):
        vj.jit(vj.grad(lambda x, n: lax.fori_loop(0, n, lambda i, y: y * 2.0, x)))(1.0, 3)


def pair(c: Any) -> Any:
    return c, c


def longer(c: Any) -> Any:
    return {"a": c["a"] + 1.0, "b": jnp.ones(3)}


REFUSED = {
    "shapes": (
        lambda: lax.while_loop(lambda c: c["a"] < 9, longer, {"a": 0.0, "b": jnp.ones(2)}),
        ShapeError,
        r"while_loop: body_fun \(longer at .*test_loop.py:\d+\) returns at \['b'\] f32\[3\], "
        r"init_val has f32\[2\]",
    ),
    "structures": (
        lambda: lax.while_loop(lambda c: c < 9, pair, np.int32(0)),
        ShapeError,
        r"body_fun \(pair .* structure \(\*, \*\), init_val has \*",
    ),
    "dtypes": (
        lambda: lax.while_loop(lambda c: c < 9, lambda c: c + 1.5, np.int32(0)),
        DTypeError,
        r"returns f32\[\], init_val has i32\[\]",
    ),
    "conditions": (
        lambda: lax.while_loop(lambda c: c, lambda c: c, np.int32(0)),
        DTypeError,
        r"cond_fun .* returns i32\[\], expected a boolean of rank 0",
    ),
    "conditions of rank 1": (
        lambda: lax.while_loop(lambda c: c > 0, lambda c: c, np.zeros(2)),
        ShapeError,
        r"cond_fun .* returns bool\[2\].*any",
    ),
    "bounds": (
        lambda: lax.fori_loop(0.0, 5, lambda i, c: c, 1.0),
        DTypeError,
        r"fori_loop: bounds f32\[\]\* and i32\[\]\*",
    ),
    "bounds of rank 1": (
        lambda: lax.fori_loop(0, jnp.ones(2, jnp.int32), lambda i, c: c, 1.0),
        ShapeError,
        r"fori_loop: bounds i32\[\]\* and i32\[2\], expected rank 0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_messages_name_the_leaf_and_the_line(name: str) -> None:
    call, kind, match = REFUSED[name]
    with pytest.raises(kind, match=match) as caught:
        call()
    assert f"\n  at {__file__}" in str(caught.value)


def branched(x: Any) -> Any:
    if x > 0:
        return x
    return -x


def repeated(x: Any) -> Any:
    while x < 10:
        x = x * 2
    return x


def ranged(x: Any) -> Any:
    return sum(i for i in range(x))


@pytest.mark.parametrize(
    ("fn", "construct", "instead"),
    [
        (branched, "`if`", "vkjit.lax.cond"),
        (repeated, "`while`", "vkjit.lax.while_loop"),
        (lambda x: x if x > 0 else -x, "`if ... else`", "vkjit.numpy.where"),
        (lambda x: x > 0 and x < 1, "`and`, `or` or `not`", "& | ~"),
        (ranged, "`range`", "vkjit.lax.fori_loop"),
    ],
)
def test_python_constructs_on_traced_values(fn: Any, construct: str, instead: str) -> None:
    with pytest.raises(TypeError) as caught:
        vj.jit(fn)(1)
    message = str(caught.value)
    assert construct in message
    assert instead in message
    assert f"\n  at {__file__}:" in message


def test_python_loops_may_call_jitted_loops() -> None:
    step = vj.jit(functools.partial(lax.fori_loop, 0, 3, lambda i, x: x + i))
    x = np.int32(0)
    for _ in range(3):
        x = step(x)
    assert int(x) == 9


def test_costly_work_on_constants_is_done_before_the_loop() -> None:
    def fn(w: Any, x: Any, n: Any) -> Any:
        return lax.fori_loop(0, n, lambda i, y: jnp.tanh(y + jnp.sum(w @ w)), x)

    w = np.full((3, 3), 0.1, np.float32)
    lowered = vj.jit(fn).lower(w, np.float32(0), 3)
    loop = next(e for e in lowered.program.eqns if e.prim.name == "while")
    assert "dot_general" not in primitives(loop.prim.programs()[1])
    assert "dot_general" in primitives(lowered.program)
    for n in (0, 3):
        np.testing.assert_allclose(
            vj.jit(fn)(w, np.float32(0.5), n), fn(w, np.float32(0.5), n), 1e-6
        )


def test_carries_that_a_derivative_passes_through_are_no_results_of_the_loop() -> None:
    def fn(x: Any, n: Any) -> Any:
        return lax.fori_loop(0, n, lambda i, c: (c[0], c[1] * x), (x, x))

    text = vj.jit(lambda x, n: vj.jvp(lambda x: fn(x, n), (x,), (x,))).lower(1.5, 3).as_text()
    (line,) = [line for line in text.splitlines() if "= while" in line]
    assert line.count(": ") == 3, "a counter, a value and its tangent"


def test_a_loop_that_needs_the_outer_condition_to_end_stays_inside_it() -> None:
    def f(step: Any) -> Any:
        def turn(carried: Any) -> Any:
            i, total = carried
            count = lax.while_loop(lambda c: c[0] < 10, lambda c: (c[0] + step, c[1] + 1), (0, 0))
            return i + 1, total + count[1]

        return lax.while_loop(lambda c: (c[0] < 2) & (step > 0), turn, (0, 0))[1]

    assert vj.jit(f)(5) == 4
    assert vj.jit(f)(0) == 0  # the inner loop would never end
