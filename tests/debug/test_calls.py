"""debug.print, callback, grad_print and check: eagerly and in compiled programs, on each device."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest

import vkjit as vj
from tests.devices import names
from vkjit import debug, lax
from vkjit import numpy as vnp
from vkjit.errors import ArgumentError, CheckError, DTypeError

X = np.arange(3, dtype=np.float32)


# Outside jit operations run on the host, whatever the device.
pytestmark = pytest.mark.parametrize(
    "device, how",  # noqa: PT006  the form that tests.devices looks for
    [("reference", "eager"), *((name, "jit") for name in names())],
    indirect=["device"],
)


@pytest.fixture(autouse=True)
def on_device(device: str) -> Generator[None]:
    with vj.default_device(device):
        yield


@pytest.fixture(autouse=True)
def wrap(how: str) -> Callable[[Any], Any]:
    return vj.jit if how == "jit" else lambda fn: fn


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_print_formats_values_trees_and_strings(wrap: Any, capsys: Any) -> None:
    def f(x: Any) -> Any:
        debug.print("{} {y:.2f} {} {z[a]}", x, "text", y=x[1] * 1.5, z={"a": 2 * x})
        return x + 1

    np.testing.assert_array_equal(wrap(f)(X), X + 1)
    assert lines(capsys) == ["[0. 1. 2.] 1.50 text [0. 2. 4.]"]


def test_print_without_arguments_runs_each_time(capsys: Any) -> None:
    @vj.jit
    def f(x: Any) -> Any:
        debug.print("here")
        return x

    f(X)
    f(X)
    assert lines(capsys) == ["here"] * 2


def test_calls_keep_their_order_among_themselves(wrap: Any, capsys: Any) -> None:
    def f(x: Any) -> Any:
        for i in range(4):
            debug.print("{}: {}", i, x[0])
            x = x * 2 + 1
        return x

    wrap(f)(X)
    assert lines(capsys) == ["0: 0.0", "1: 1.0", "2: 3.0", "3: 7.0"]


def test_dtypes_reach_the_function_as_they_are(wrap: Any) -> None:
    values = [
        np.array([1.5, np.nan], np.float32), np.array([[True, False]]), np.array(-7, np.int32),
        np.array([3, 250], np.uint8), np.array([0.5], np.float16), np.zeros((0, 2), np.float32),
    ]  # fmt: skip
    seen: list[np.ndarray] = []
    wrap(lambda *args: debug.callback(lambda *got: seen.extend(got), *args))(*values)
    for got, value in zip(seen, values, strict=True):
        assert got.dtype == value.dtype
        np.testing.assert_array_equal(got, value)


def test_scan_calls_in_each_turn(wrap: Any, capsys: Any) -> None:
    def f(xs: Any) -> Any:
        def body(c: Any, x: Any) -> Any:
            debug.print("{} {}", c, x)
            return c + x, c

        return lax.scan(body, np.float32(0), xs)

    total, _ = wrap(f)(X)
    assert float(total) == 3
    assert lines(capsys) == ["0.0 0.0", "0.0 1.0", "1.0 2.0"]


def test_while_and_cond_call_where_they_go(wrap: Any, capsys: Any) -> None:
    def f(n: Any) -> Any:
        def body(i: Any) -> Any:
            lax.cond(i > 1, lambda: debug.print("big {}", i), lambda: debug.print("small {}", i))
            return i + 1

        return lax.while_loop(lambda i: i < n, body, np.int32(0))

    assert int(wrap(f)(np.int32(4))) == 4
    assert lines(capsys) == ["small 0", "small 1", "big 2", "big 3"]


def test_vmap_calls_once_for_each_example_in_order(wrap: Any, capsys: Any) -> None:
    def f(x: Any, y: Any) -> Any:
        debug.print("{} {}", x, y)
        return x * y

    wrap(vj.vmap(f, in_axes=(0, None)))(X, np.float32(5))
    assert lines(capsys) == ["0.0 5.0", "1.0 5.0", "2.0 5.0"]
    wrap(vj.vmap(vj.vmap(f), in_axes=(0, None)))(np.outer(X, X)[:2], X)
    assert lines(capsys) == [f"{a} {b}" for row in np.outer(X, X)[:2] for a, b in zip(row, X)]  # noqa: B905


def test_vmap_of_cond_calls_for_the_examples_that_take_a_branch(wrap: Any, capsys: Any) -> None:
    def f(x: Any) -> Any:
        def big() -> Any:
            debug.print("big {}", x)
            debug.check(x > 1, "not big: {}", x)
            return x * 2

        def small() -> Any:
            debug.print("small {}", x)
            return x

        return lax.cond(x > 1, big, small)

    np.testing.assert_array_equal(wrap(vj.vmap(f))(X), [0, 1, 4])
    assert sorted(lines(capsys)) == ["big 2.0", "small 0.0", "small 1.0"]


def test_loops_in_branches_call_for_the_examples_that_take_them(wrap: Any, capsys: Any) -> None:
    def f(x: Any) -> Any:
        def big() -> Any:
            def body(c: Any, t: Any) -> Any:
                debug.print("{} in {}", x, t)
                debug.print("turn {}", t)
                return c + t, None

            lax.cond(x > 2, lambda: debug.print("very big {}", x), lambda: None)
            return lax.scan(body, x, vnp.arange(2))[0]

        return lax.cond(x > 1, big, lambda: x)

    x = np.array([[0, 2], [3, 1]], np.float32)
    np.testing.assert_array_equal(wrap(vj.vmap(vj.vmap(f)))(x), [[0, 3], [4, 1]])
    turns = [["2.0 in {0}", "3.0 in {0}", "turn {0}", "turn {0}"] for _ in range(2)]
    want = [line.format(t) for t, turn in enumerate(turns) for line in turn]
    assert lines(capsys) == ["very big 3.0", *want]


@pytest.mark.parametrize("around", ["scan", "while", "cond", "checkpoint", "custom"])
def test_what_all_examples_share_calls_for_those_that_take_the_branch(
    wrap: Any, capsys: Any, around: str
) -> None:
    def told(n: Any) -> Any:
        debug.print("told {}", n)
        return n + 1

    custom = vj.custom_jvp(told)
    custom.defjvp(lambda primals, tangents: (primals[0] + 1, tangents[0]))
    runs: dict[str, Callable[[], Any]] = {
        "scan": lambda: lax.fori_loop(0, 2, lambda i, n: told(n), 0),
        "while": lambda: lax.while_loop(lambda n: n < 2, told, 0),
        "cond": lambda: lax.cond(vnp.sum(X) > 0, told, lambda n: n, 0),
        "checkpoint": lambda: vj.checkpoint(told)(0),
        "custom": lambda: custom(0),
    }

    def f(take: Any) -> Any:
        return lax.cond(take, runs[around], lambda: -1)

    last = 2 if around in ("scan", "while") else 1
    got = wrap(vj.vmap(f))(np.array([True, False, True]))
    np.testing.assert_array_equal(got, [last, -1, last])
    assert lines(capsys) == [f"told {n}" for n in range(last) for _ in range(2)]
    wrap(vj.vmap(f))(np.zeros(2, np.bool_))
    assert lines(capsys) == []


def test_vmap_of_while_calls_for_the_examples_that_go_on(wrap: Any, capsys: Any) -> None:
    def f(n: Any) -> Any:
        def body(i: Any) -> Any:
            debug.check(i < n, "done")
            debug.print("{} of {}", i, n)
            return i + 1

        return lax.while_loop(lambda i: i < n, body, np.int32(0))

    wrap(vj.vmap(f))(np.array([2, 0, 1], np.int32))
    assert lines(capsys) == ["0 of 2", "0 of 1", "1 of 2"]


def test_linearize_of_while_calls_once(wrap: Any, capsys: Any) -> None:
    def f(x: Any) -> Any:
        def told(j: Any, n: Any) -> Any:
            debug.print("{} and {}", n, j)
            return n + j

        def goes_on(carried: Any) -> Any:
            debug.print("test {}", carried[0])
            return carried[0] < 2

        def turn(carried: Any) -> Any:
            i, y = carried
            count = lax.fori_loop(0, 2, told, i)
            return i + 1, vnp.sin(y) * count

        return lax.while_loop(goes_on, turn, (0, x))[1]

    def both(x: Any) -> Any:
        value, tangent = vj.linearize(f, x)
        return value, tangent(1.0), tangent(2.0)

    value, one, two = wrap(both)(np.float32(0.5))
    inner = np.sin(np.float32(0.5))
    slope = 2 * np.cos(inner) * np.cos(np.float32(0.5))
    np.testing.assert_allclose([value, one, two], [2 * np.sin(inner), slope, 2 * slope], rtol=1e-5)
    turns = [[f"test {i}", f"{i} and 0", f"{i} and 1"] for i in range(2)]
    assert lines(capsys) == [*turns[0], *turns[1], "test 2"]


def test_derivatives_call_with_primal_values_once(wrap: Any, capsys: Any) -> None:
    def f(x: Any) -> Any:
        debug.print("x {}", x)
        return vnp.sum(vnp.sin(x))

    wrap(vj.grad(f))(X)
    assert lines(capsys) == ["x [0. 1. 2.]"]
    wrap(lambda x: vj.jvp(f, (x,), (x,)))(X)
    assert lines(capsys) == ["x [0. 1. 2.]"]
    wrap(vj.hessian(f))(X)
    assert lines(capsys) == ["x [0. 1. 2.]"]


def test_checkpoint_calls_once(wrap: Any, capsys: Any) -> None:
    @vj.checkpoint
    def inner(x: Any) -> Any:
        y = vnp.sin(x)
        debug.print("y {:.3f}", y[1])
        return vnp.sin(y)

    wrap(vj.grad(lambda x: vnp.sum(inner(x))))(X)
    assert lines(capsys) == ["y 0.841"]


def test_grad_print_shows_the_cotangent(wrap: Any, capsys: Any) -> None:
    def f(x: Any) -> Any:
        y = debug.grad_print(x * 2, "y")
        return vnp.sum(y * y)

    assert float(wrap(f)(X)) == 20
    assert lines(capsys) == []
    np.testing.assert_array_equal(wrap(vj.grad(f))(X), 8 * X)
    assert lines(capsys) == ["y cotangent: [0. 4. 8.]"]
    wrap(vj.vmap(vj.grad(f)))(X[:, None])
    assert lines(capsys) == ["y cotangent: [0.]", "y cotangent: [4.]", "y cotangent: [8.]"]


def test_grad_print_shows_the_tangent_in_forward_mode(wrap: Any, capsys: Any) -> None:
    def f(x: Any) -> Any:
        return vnp.sum(debug.grad_print(x, "x") ** 2)

    _, tangent = wrap(lambda x: vj.jvp(f, (x,), (vnp.ones_like(x),)))(X)
    assert float(tangent) == 6
    assert lines(capsys) == ["x tangent: [1. 1. 1.]"]


def test_grad_print_in_a_scan_shows_each_turn_backwards(wrap: Any, capsys: Any) -> None:
    def f(xs: Any) -> Any:
        return lax.scan(lambda c, x: (debug.grad_print(c, "c") * x, None), np.float32(1), xs)[0]

    wrap(vj.grad(f))(X + 1)
    assert lines(capsys) == ["c cotangent: 3.0", "c cotangent: 6.0", "c cotangent: 6.0"]


def test_check_raises_with_message_values_and_line(wrap: Any) -> None:
    def f(x: Any) -> Any:
        debug.check(x < 2, "x too large: {worst}", "tag", worst=vnp.max(x), also=x)
        return x

    np.testing.assert_array_equal(wrap(f)(X[:2]), X[:2])
    with pytest.raises(CheckError) as caught:
        wrap(f)(X)
    text = str(caught.value)
    assert "x too large: 2.0 (1 of 3 elements are false, the first at [2])" in text
    assert "argument 0 = tag" in text
    assert "also = [0. 1. 2.]" in text
    line = f.__code__.co_firstlineno + 1
    assert f"at {__file__}:{line}" in text


def test_check_under_vmap_names_the_example(wrap: Any) -> None:
    def f(x: Any) -> Any:
        debug.check(x < 2, "x is {}", x)
        return x

    with pytest.raises(CheckError, match=r"x is 2\.0\n.*\n  in example 2 of vmap") as caught:
        wrap(vj.vmap(f))(X)
    assert caught.value.examples == (2,)
    with pytest.raises(CheckError) as caught:
        wrap(vj.vmap(vj.vmap(f)))(np.array([[0, 1], [1, 3]], np.float32))
    assert caught.value.examples == (1, 1)


def test_a_failed_check_stops_a_loop_at_once(capsys: Any) -> None:
    @vj.jit
    def f(xs: Any) -> Any:
        def body(c: Any, x: Any) -> Any:
            debug.print("{}", x)
            debug.check(x != 1, "one")
            return c + x, None

        return lax.scan(body, np.float32(0), xs)[0]

    with pytest.raises(CheckError):
        f(X)
    assert lines(capsys) == ["0.0", "1.0"]
    assert float(f(X[[0, 2]])) == 2  # the compiled function still runs


def test_check_and_derivatives(wrap: Any) -> None:
    def f(x: Any) -> Any:
        debug.check(x >= 0, "negative")
        return vnp.sum(vnp.sqrt(x))

    wrap(vj.grad(f))(X + 1)
    with pytest.raises(CheckError, match="negative"):
        wrap(vj.grad(f))(X - 1)


def test_what_a_callback_raises_reaches_the_caller(wrap: Any) -> None:
    def fail(x: np.ndarray) -> None:
        raise LookupError(f"got {x}")

    with pytest.raises(LookupError, match="got 0"):
        wrap(lambda x: debug.callback(fail, x[0]))(X)


def test_arguments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ArgumentError, match="more fields than the 1 positional"):
        debug.print("{} {}", 1)
    with pytest.raises(ArgumentError, match="asks for y=, which is not given"):
        debug.print("{y}", x=1)
    with pytest.raises(ArgumentError, match="does not use argument 0"):
        debug.print("x", 1)
    with pytest.raises(ArgumentError, match="expected a function"):
        debug.callback("print", 1)  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match="expected booleans"):
        debug.check(1, "one")
    with pytest.raises(DTypeError, match="has no gradient"):
        debug.grad_print(np.arange(3), "x")
