"""check_grads passes on right derivatives and names what is wrong with others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from tests import devices
from vkjit.api.check_grads import DEVICE_TOLERANCE
from vkjit.errors import ArgumentError, GradientError

RNG = np.random.default_rng(1)
W = RNG.standard_normal((6, 8)).astype(np.float32)
X = RNG.standard_normal((3, 6)).astype(np.float32)


def network(params: Any, x: Any, n: Any) -> Any:
    return {"y": jnp.tanh(x @ params["w"]) * n, "n": n + 1}


def wrong_at(index: tuple[int, ...], by: float) -> Any:
    """Identity, whose gradient is wrong in one element."""

    @vj.custom_jvp
    def identity(x: Any) -> Any:
        return x * 1.0

    @identity.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        factor = np.ones(primals[0].shape, np.float32)
        factor[index] += by
        return identity(*primals), tangents[0] * factor

    return identity


@pytest.mark.parametrize("order", [1, 2])
def test_right_derivatives_pass(order: int):
    vj.check_grads(network, ({"w": W}, X, np.int32(2)), order)
    vj.check_grads(lambda x: jnp.exp(jnp.sin(x)).sum(), (X,), order)


def test_right_derivatives_pass_in_64_bits_with_narrow_tolerance():
    with vj.enable_x64():
        args = {"w": W.astype(np.float64)}, X.astype(np.float64), np.int32(2)
        vj.check_grads(network, args, 2, atol=1e-8, rtol=1e-7)


def test_half_precision_inside_is_allowed_for():
    def half(x: Any) -> Any:
        return (x.astype("float16") * x.astype("float16")).astype("float32").sum()

    vj.check_grads(half, (X,))


@pytest.mark.parametrize("mode", ["fwd", "rev"])
@pytest.mark.parametrize("by", [0.05, np.nan])
def test_the_worst_element_is_named(mode: str, by: float):
    identity = wrong_at((4, 7), by)

    def loss(params: Any, x: Any) -> Any:
        return {"y": identity(params["w"]) * 1.0, "x": (x * x).sum()}

    leaf = r"result \['y'\]" if mode == "fwd" else r"argument \[0\]\['w'\]"
    kind = {"fwd": "jvp", "rev": "vjp"}[mode]
    with pytest.raises(GradientError, match=rf"check_grads loss: {kind}: {leaf}, index \(4, 7\)"):
        vj.check_grads(loss, ({"w": W}, X), modes=[mode])


def test_an_element_of_a_large_leaf_is_found():
    identity = wrong_at((3, 57, 11), 1.0)
    x = RNG.standard_normal((5, 64, 16)).astype(np.float32)
    with pytest.raises(GradientError, match=r"index \(3, 57, 11\): -?2, expected -?(1|0\.99)"):
        vj.check_grads(identity, (x,), modes=["rev"])


def test_second_order_is_checked():
    @vj.custom_vjp
    def square(x: Any) -> Any:
        return x * x

    square.defvjp(lambda x: (x * x, x), lambda x, g: (2 * g * vj.stop_gradient(x),))
    vj.check_grads(square, (X,), 1, modes=["rev"])
    with pytest.raises(GradientError, match="vjp of vjp"):
        vj.check_grads(square, (X,), 2, modes=["rev"])


def test_devices_are_checked_and_compared():
    names = [name for name in devices.names() if "+" not in name]
    vj.check_grads(network, ({"w": W}, X, np.int32(2)), devices=names)
    identity = wrong_at((1, 2), 0.1)
    with pytest.raises(GradientError, match=rf"jvp on {names[0]}"):
        vj.check_grads(identity, (X,), devices=names)


def test_devices_that_differ_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(DEVICE_TOLERANCE, "float32", 1e-12)
    with pytest.raises(GradientError, match=r"network: vjp.*index .* on reference, .* on cpu"):
        vj.check_grads(network, ({"w": W}, X, np.int32(2)), devices=("cpu", "reference"))


def test_arguments_are_checked():
    with pytest.raises(ArgumentError, match="modes"):
        vj.check_grads(jnp.sin, (1.0,), modes=["both"])
    with pytest.raises(ArgumentError, match="order 0"):
        vj.check_grads(jnp.sin, (1.0,), 0)
