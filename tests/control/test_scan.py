"""lax.scan against Python loops: values, derivatives, batches, their compositions, every device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from vkjit import lax, tree
from vkjit.errors import ArgumentError, DTypeError, ShapeError

Step = Callable[[Any, Any], tuple[Any, Any]]


def looped(step: Step, carry: Any, xs: Any, *, reverse: bool = False) -> tuple[Any, Any]:
    """What scan means."""
    length = tree.leaves(xs)[0].shape[0]
    ys: list[Any] = []
    for t in reversed(range(length)) if reverse else range(length):
        carry, y = step(carry, tree.map(lambda x, t=t: x[t], xs))
        ys.append(y)
    if reverse:
        ys.reverse()
    return carry, tree.map(lambda *column: jnp.stack(column), ys[0], *ys[1:])


def random(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return [rng.uniform(-1, 1, shape).astype(np.float32) for shape in shapes]


# Each is (step of weights, weights, first carry, xs).


def gru(w: Any) -> Step:
    def step(h: Any, x: Any) -> tuple[Any, Any]:
        r, z, n = jnp.split(w["x"] @ x, 3)
        hr, hz, hn = jnp.split(w["h"] @ h, 3)
        gate = jnp.tanh(z + hz)
        h = gate * h + (1 - gate) * jnp.tanh(n + jnp.tanh(r + hr) * hn)
        return h, h

    return step


def lstm(w: Any) -> Step:
    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        c, h = carry["c"], carry["h"]
        f, i, o, g = jnp.split(w["x"] @ x + w["h"] @ h, 4)
        c = jnp.tanh(f) * c + jnp.tanh(i) * jnp.sin(g)
        h = jnp.tanh(o) * jnp.tanh(c)
        return {"c": c, "h": h}, (h, c * x.sum())

    return step


def recurrence(w: Any) -> Step:
    return lambda h, x: (w["a"] * h + x, None)


def pieces(w: Any) -> Step:
    """Carries that move, that do not and that count; outputs that are constant or the input."""

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        a, fixed, count, last = carry
        a = jnp.sin(a * w["a"]) + fixed * x["u"]
        return (a, fixed, count + 1, x["u"]), {
            "same": x["v"],
            "constant": w["a"] * 2,
            "last": last * count,
        }

    return step


PROBLEMS: dict[str, tuple[Callable[[Any], Step], Any, Any, Any]] = {
    "gru": (
        gru,
        dict(zip("xh", random(0, (12, 3), (12, 4)), strict=True)),
        random(1, (4,))[0],
        random(1, (5, 3))[0],
    ),
    "lstm": (
        lstm,
        dict(zip("xh", random(2, (8, 3), (8, 2)), strict=True)),
        dict(zip("ch", random(3, (2,), (2,)), strict=True)),
        random(4, (6, 3))[0],
    ),
    "recurrence": (
        recurrence,
        {"a": random(5, (3,))[0]},
        random(6, (3,))[0],
        random(6, (7, 3))[0],
    ),
    "pieces": (
        pieces,
        {"a": random(7, (2,))[0]},
        (*random(8, (2,), ()), 0, random(9, (2,))[0]),
        dict(zip("uv", random(10, (4, 2), (4, 3)), strict=True)),
    ),
}


@pytest.fixture(params=PROBLEMS)
def problem(request: pytest.FixtureRequest) -> tuple[Callable[..., Any], Callable[..., Any], Any]:
    """The scan and the loop as functions of their floats, and these."""
    make, weights, init, xs = PROBLEMS[request.param]

    def scanned(w: Any, init: Any, xs: Any) -> Any:
        return lax.scan(make(w), init, xs)

    def unrolled(w: Any, init: Any, xs: Any) -> Any:
        return looped(make(w), init, xs)

    return scanned, unrolled, (weights, init, xs)


def close(got: Any, want: Any, rtol: float = 2e-5) -> None:
    assert tree.structure(got) == tree.structure(want)
    for (path, g), w in zip(tree.leaves_with_path(got), tree.leaves(want), strict=True):
        assert np.asarray(g).shape == np.asarray(w).shape
        bound = rtol * max(float(np.abs(w).max(initial=0)), 1.0)
        np.testing.assert_allclose(g, w, 0, bound, err_msg=tree.keystr(path))


def total(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A float of all results, each with a weight of its own."""

    def summed(*args: Any) -> Any:
        leaves = [x.astype("float32") for x in tree.leaves(fn(*args))]
        return sum(((i + 1) * jnp.sum(jnp.sin(x)) for i, x in enumerate(leaves)), jnp.float32(0))

    return summed


def gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Of weights, floats of the first carry and xs."""

    def pulled(*args: Any) -> Any:
        value, pull = vj.vjp(total(fn), *args)
        return pull(jnp.ones_like(value))

    return pulled


def direction(args: Any, seed: int = 11) -> Any:
    """A tangent for each float."""
    rng = np.random.default_rng(seed)
    return tree.map(lambda x: jnp.asarray(rng.uniform(-1, 1, np.shape(x)), np.float32), args)


def pushed(fn: Callable[..., Any], args: Any) -> Any:
    return vj.jvp(fn, args, direction(args))[1]


def hessian_product(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: vj.jvp(gradient(fn), args, direction(args))[1]


def test_values_and_gradients_on_every_device(problem: Any, device: str) -> None:
    scanned, unrolled, args = problem
    with vj.default_device(device):
        close(vj.jit(scanned)(*args), unrolled(*args))
        close(vj.jit(gradient(scanned))(*args), gradient(unrolled)(*args))


def test_forward_and_second_derivatives(problem: Any) -> None:
    scanned, unrolled, args = problem
    close(pushed(scanned, args), pushed(unrolled, args))
    close(hessian_product(scanned)(*args), hessian_product(unrolled)(*args), 2e-4)
    twice = gradient(gradient(scanned))(*args), gradient(gradient(unrolled))(*args)
    close(*twice, 2e-4)


AXES: dict[str, Any] = {"all": 0, "weights": (0, None, None), "xs": (None, None, 0)}
EXAMPLES: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "values": lambda fn: fn,
    "gradient": gradient,
    "product": hessian_product,
}


@pytest.mark.parametrize(
    ("what", "axes"), [*[(w, a) for w in ("values", "gradient") for a in AXES], ("product", "all")]
)
def test_batches_equal_single_examples(problem: Any, what: str, axes: str) -> None:
    scanned, unrolled, args = problem
    mapped = (0, 0, 0) if AXES[axes] == 0 else AXES[axes]
    rows = [tree.map(lambda x, k=k: jnp.asarray(x) * (k + 1), args) for k in range(3)]
    stacked = tuple(
        tree.map(lambda *column: jnp.stack(column), *[row[i] for row in rows])
        if axis == 0
        else args[i]
        for i, axis in enumerate(mapped)
    )
    got = vj.vmap(EXAMPLES[what](scanned), mapped)(*stacked)
    for k, row in enumerate(rows):
        one = [row[i] if axis == 0 else args[i] for i, axis in enumerate(mapped)]
        close(tree.map(lambda x, k=k: x[k], got), EXAMPLES[what](unrolled)(*one), 3e-4)


def test_gradient_of_a_batch(problem: Any) -> None:
    scanned, unrolled, args = problem
    stacked = tree.map(lambda x: jnp.stack([jnp.asarray(x), jnp.asarray(x)]), args)
    got = gradient(vj.vmap(scanned))(*stacked)
    close(tree.map(lambda x: x[1], got), gradient(unrolled)(*args))


@pytest.mark.parametrize("options", [{"reverse": True}, {"unroll": 2}, {"unroll": True}])
def test_options(options: dict[str, Any]) -> None:
    for make, w, init, xs in PROBLEMS.values():

        def scanned(w: Any, init: Any, xs: Any, make: Any = make) -> Any:
            return lax.scan(make(w), init, xs, **options)

        def unrolled(w: Any, init: Any, xs: Any, make: Any = make) -> Any:
            return looped(make(w), init, xs, reverse="reverse" in options)

        close(scanned(w, init, xs), unrolled(w, init, xs))
        close(gradient(scanned)(w, init, xs), gradient(unrolled)(w, init, xs))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("chunk", "unroll"), [(1, 1), (2, 1), (3, 2), (5, 1), (9, 1)])
def test_chunks_give_the_same(chunk: int, unroll: int, *, reverse: bool) -> None:
    make, w, init, xs = PROBLEMS["gru"]

    def run(w: Any, init: Any, xs: Any, **options: Any) -> Any:
        return lax.scan(make(w), init, xs, None, reverse, **options)

    def chunked(*args: Any) -> Any:
        return run(*args, chunk=chunk, unroll=unroll)

    close(chunked(w, init, xs), run(w, init, xs))
    close(gradient(chunked)(w, init, xs), gradient(run)(w, init, xs))


def test_without_xs_and_without_carry() -> None:
    last, ys = lax.scan(lambda c, _: (c * 2, c), jnp.float32(1), None, 5)
    assert last == 32
    np.testing.assert_array_equal(ys, [1, 2, 4, 8, 16])
    nothing, ys = lax.scan(lambda c, x: (c, {"y": x + 1}), (), jnp.arange(4))
    assert nothing == ()
    np.testing.assert_array_equal(ys["y"], [1, 2, 3, 4])
    assert lax.scan(lambda c, _: (c, None), (), None, length=3) == ((), None)


@pytest.mark.parametrize("compiled", [False, True])
def test_zero_turns_and_empty_arrays(*, compiled: bool) -> None:
    def run(c: Any, xs: Any) -> Any:
        return lax.scan(lambda c, x: (c + x.sum(), c * x), c, xs)

    def both(c: Any, xs: Any) -> Any:
        return run(c, xs), gradient(run)(c, xs)

    run_both = vj.jit(both) if compiled else both
    c = np.array([1.5, 2.5], np.float32)
    for shape in ((0, 2), (3, 0)):
        carry = c if shape[1] else np.zeros(0, np.float32)
        (last, ys), (dc, dxs) = run_both(carry, np.zeros(shape, np.float32))
        np.testing.assert_array_equal(last, carry)
        assert ys.shape == shape
        np.testing.assert_allclose(dc, np.cos(carry), 1e-6)
        assert dxs.shape == shape


def test_carry_takes_the_dtype_that_the_body_gives() -> None:
    last, _ = lax.scan(lambda c, x: (c + x, None), 0, np.array([1.5, 2], np.float32))
    assert last == 3.5
    assert last.dtype == np.float32
    last, _ = lax.scan(lambda c, x: (c + x, None), 0.0, jnp.ones(3, "bfloat16"))
    assert last.dtype == jnp.bfloat16


def turn_that_grows(c: Any, x: Any) -> tuple[Any, Any]:
    return {"h": jnp.stack([c["h"], c["h"]])}, x


def turn_that_widens(c: Any, x: Any) -> tuple[Any, Any]:
    return {"h": c["h"].astype("float32")}, x


def turn_of_three(c: Any, x: Any) -> Any:
    return c, x, x


XS = np.zeros((3, 2), np.float32)


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (
            lambda: lax.scan(turn_that_grows, {"h": np.zeros(2, np.float32)}, XS),
            ShapeError,
            r"carry\['h'\] of turn_that_grows is f32\[2\] before a turn and f32\[2,2\] after it, "
            r"made at .*test_scan.py:\d+; expected one type",
        ),
        (
            lambda: lax.scan(turn_that_widens, {"h": np.float16(0)}, XS),
            DTypeError,
            r"carry\['h'\] of turn_that_widens is f16\[\] before a turn and f32\[\] after it",
        ),
        (lambda: lax.scan(turn_of_three, 0.0, XS), ArgumentError, "expected a pair"),
        (lambda: lax.scan(lambda c, x: ((c, c), x), 0.0, XS), ArgumentError, "expected one struct"),
        (lambda: lax.scan(lambda c, x: (c, x), 0.0), ArgumentError, "length=None without xs"),
        (lambda: lax.scan(lambda c, x: (c, x), 0.0, XS, 4), ShapeError, "length=4 for xs of len"),
        (
            lambda: lax.scan(lambda c, x: (c, x), 0.0, (XS, XS[:2])),
            ShapeError,
            r"leaves of xs are f32\[3,2\], f32\[2,2\]",
        ),
        (lambda: lax.scan(lambda c, x: (c, x), 0.0, 1.0), ShapeError, "expected a leading axis"),
        (lambda: lax.scan(lambda c, x: (c, x), 0.0, XS, unroll=0), ArgumentError, "unroll=0"),
        (lambda: lax.scan(lambda c, x: (c, x), 0.0, XS, chunk=0), ArgumentError, "chunk=0"),
    ],
)
def test_refusals(call: Callable[[], Any], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says) as caught:
        call()
    assert "test_scan.py:" in str(caught.value)


def test_map() -> None:
    x = random(20, (7, 3))[0]
    w = random(21, (3,))[0]

    def one(row: Any) -> Any:
        return {"dot": row @ w, "twice": row * 2, "fixed": jnp.ones(2)}

    want = vj.vmap(one)(x)
    for size in (None, 1, 3, 7, 10):

        def mapped(x: Any, size: Any = size) -> Any:
            return lax.map(one, x, batch_size=size)

        close(mapped(x), want)
        close(gradient(mapped)(x), gradient(vj.vmap(one))(x))
        close(vj.jit(mapped)(x), want)
    with pytest.raises(ArgumentError, match="batch_size=0"):
        lax.map(one, x, batch_size=0)


def join(left: Any, right: Any) -> Any:
    """The linear recurrence h = a h + b, as a product of pairs (a, b)."""
    return left[0] * right[0], left[1] * right[0] + right[1]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("size", [0, 1, 2, 7, 12])
def test_associative_scan(size: int, *, reverse: bool) -> None:
    a, b = random(30, (2, size), (2, size))

    def prefixes(a: Any, b: Any) -> Any:
        return lax.associative_scan(join, (a, b), reverse, axis=-1)

    got = prefixes(a, b)
    h, want = np.zeros(2, np.float32), np.zeros((2, size), np.float32)
    for t in reversed(range(size)) if reverse else range(size):
        want[:, t] = h = a[:, t] * h + b[:, t]
    np.testing.assert_allclose(got[1], want, 1e-5, 1e-6)
    close(vj.vmap(prefixes)(a, b), got)
    if size == 7:
        close(vj.jit(prefixes)(a, b), got)
    if size:
        sums = gradient(lambda x: lax.associative_scan(jnp.add, x))(b[0])[0]
        close(sums, gradient(jnp.cumsum)(b[0])[0])


def test_associative_scan_keeps_bits_and_refuses_other_shapes() -> None:
    x = np.array([-0.0, np.inf, np.nan, -0.0], np.float32)
    got = np.asarray(lax.associative_scan(lambda _, right: right, x))
    assert got.tobytes() == x.tobytes()
    with pytest.raises(ShapeError, match="expected the same structure"):
        lax.associative_scan(lambda a, b: a[:1], x)
    with pytest.raises(ShapeError, match="expected one size"):
        lax.associative_scan(jnp.add, (x, x[:2]))
