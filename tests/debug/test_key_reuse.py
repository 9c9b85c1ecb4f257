"""debug.key_reuse: keys consumed twice, in programs, in loops, eagerly and between calls."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest

import vkjit as vj
from vkjit import debug, lax, random
from vkjit import numpy as vnp
from vkjit.errors import KeyReuseError

KEY = np.array([0, 42], np.uint32)
Function = Callable[..., Any]


@pytest.fixture(autouse=True, scope="module")
def on_cpu() -> Generator[None]:
    with vj.default_device("cpu"):
        yield


@pytest.fixture(params=["eager", "jit"])
def wrap(request: pytest.FixtureRequest) -> Callable[[Function], Function]:
    return vj.jit if request.param == "jit" else lambda fn: fn


def twice(key: Any) -> Any:
    a = random.normal(key, (2,))
    return a + random.uniform(key, (2,))


def after_split(key: Any) -> Any:
    left, right = random.split(key)
    return random.normal(left, (2,)) + random.normal(key, (2,)) + right[0]


def split_twice(key: Any) -> Any:
    return random.split(key)[0] + random.split(key)[1]


def same_part(key: Any) -> Any:
    keys = random.split(key, 3)
    return random.normal(keys[1], (2,)) + random.normal(keys[1], (2,))


def whole_and_part(key: Any) -> Any:
    keys = random.split(key, 3)
    many = vj.vmap(lambda k: random.normal(k, (2,)))(keys)
    return many + random.normal(keys[2], (2,))


def same_fold(key: Any) -> Any:
    return random.normal(random.fold_in(key, 1)) + random.normal(random.fold_in(key, 1))


def in_both_branches_and_before(key: Any) -> Any:
    before = random.normal(key)
    return before + lax.cond(before < 9, lambda: random.normal(key), lambda: 0.0)


def constant_of_a_scan(key: Any) -> Any:
    return lax.scan(lambda c, _: (c + random.normal(key), None), np.float32(0), length=3)[0]


def carry_that_does_not_change(key: Any) -> Any:
    def body(state: Any, _: Any) -> Any:
        key, total = state
        return (key, total + random.normal(key)), None

    return lax.scan(body, (key, np.float32(0)), length=3)[0][1]


def constant_of_a_while(key: Any) -> Any:
    return lax.while_loop(lambda c: c < 3, lambda c: c + 1 + vnp.abs(random.normal(key)), 0.0)


def slices_of_two_scans(key: Any) -> Any:
    keys = random.split(key, 3)

    def total() -> Any:
        return lax.scan(lambda c, k: (c + random.normal(k), None), np.float32(0), keys)[0]

    return total() + total()


@pytest.mark.parametrize(
    "fn",
    [
        twice, after_split, split_twice, same_part, whole_and_part, same_fold,
        in_both_branches_and_before, constant_of_a_scan, carry_that_does_not_change,
        constant_of_a_while, slices_of_two_scans,
    ],
)  # fmt: skip
def test_reuse_is_reported_with_both_lines(wrap: Any, fn: Function) -> None:
    with debug.key_reuse(), pytest.raises(KeyReuseError) as caught:
        wrap(fn)(KEY)
    text = str(caught.value)
    assert text.count(__file__) == (1 if "in each turn of a loop" in text else 2)
    wrap(fn)(KEY)  # nothing is watched outside the block


def test_the_report_names_functions_and_lines() -> None:
    first = twice.__code__.co_firstlineno + 1
    with debug.key_reuse(), pytest.raises(KeyReuseError) as caught:
        vj.jit(twice)(KEY)
    assert str(caught.value).startswith(
        f"key_reuse: uniform at {__file__}:{first + 1} consumes a random key that normal at "
        f"{__file__}:{first} consumed"
    )


def parts(key: Any) -> Any:
    a, b, *rest = random.split(key, 5)
    return random.normal(a, (2,)) + random.uniform(b, (2,)) + random.randint(rest[0], (2,), 0, 9)


def folded(key: Any) -> Any:
    return sum(random.normal(random.fold_in(key, i)) for i in range(3))


def either_branch(key: Any) -> Any:
    return lax.cond(key[1] > 3, lambda: random.normal(key), lambda: random.uniform(key))


def scan_over_keys(key: Any) -> Any:
    keys = random.split(key, 3)
    return lax.scan(lambda c, k: (c + random.normal(k), None), np.float32(0), keys)[0]


def carried_and_split(key: Any) -> Any:
    def body(key: Any, _: Any) -> Any:
        key, own = random.split(key)
        return key, random.normal(own)

    return lax.scan(body, key, length=3)[1]


def folded_in_a_loop(key: Any) -> Any:
    def body(i: Any, total: Any) -> Any:
        return total + random.normal(random.fold_in(key, i))

    return lax.fori_loop(0, 3, body, np.float32(0))


def batched(key: Any) -> Any:
    return vj.vmap(lambda k: random.normal(k, (2,)))(random.split(key, 3))


def recomputed(key: Any) -> Any:
    def f(x: Any) -> Any:
        noise = random.normal(key, (4,))
        return vnp.sum(vnp.sin(x * noise))

    return vj.grad(vj.checkpoint(f))(vnp.ones(4))


def shuffled(key: Any) -> Any:
    a, b = random.split(key)
    return random.permutation(a, 8) + random.choice(b, 8, (8,))


@pytest.mark.parametrize(
    "fn",
    [
        parts, folded, either_branch, scan_over_keys, carried_and_split, folded_in_a_loop, batched,
        recomputed, shuffled,
    ],
)  # fmt: skip
def test_proper_use_is_not_reported(wrap: Any, fn: Function) -> None:
    want = np.asarray(wrap(fn)(KEY))
    with debug.key_reuse():
        got = np.asarray(wrap(fn)(KEY))
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_calls_share_what_they_consumed() -> None:
    draw = vj.jit(lambda key: random.normal(key, (2,)))
    with debug.key_reuse():
        a, b = random.split(random.PRNGKey(1))
        draw(a)
        draw(b)
        with pytest.raises(KeyReuseError, match="uniform"):
            random.uniform(a)
        with pytest.raises(KeyReuseError):
            draw(b)
    with debug.key_reuse():
        draw(a)  # a new block begins anew


def test_a_key_that_a_function_closes_over_is_new_once() -> None:
    key = random.PRNGKey(7)
    draw = vj.jit(lambda x: x + random.normal(key, (2,)))
    with debug.key_reuse():
        draw(np.zeros(2, np.float32))
        with pytest.raises(KeyReuseError):
            draw(np.zeros(2, np.float32))


def test_keys_that_come_back_consumed_are_known() -> None:
    def f(key: Any) -> Any:
        own, rest = random.split(key)
        return random.normal(own), own, rest

    with debug.key_reuse():
        _, own, rest = vj.jit(f)(KEY)
        random.normal(rest)
        with pytest.raises(KeyReuseError):
            random.normal(own)
