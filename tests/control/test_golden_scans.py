"""Recurrent operations as scans against PyTorch and transformers, forward and backward.

The smaller cases are in tests/data/scans, the others in ../shared/golden/ops, which says how they
were computed. Errors are relative to the largest entry of an array.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import vkjit as vj
import vkjit.numpy as jnp
from vkjit import lax, nn
from vkjit.runtime import discovered_devices
from vkjit.runtime.device import DeviceClass

HERE = Path(__file__).parents[1] / "data" / "scans"
SHARED = Path(__file__).resolve().parents[3] / "shared" / "golden" / "ops"
RELATIVE = 4e-6  # a few roundings in each turn, most of which decay
Inputs = dict[str, Any]


@pytest.fixture(autouse=True)
def on(device: str) -> Generator[None]:
    with vj.default_device(device):
        yield


def gru_turn(h: Any, x: Any, w: tuple[Any, Any, Any, Any]) -> Any:
    """torch.nn.GRUCell: the reset gate multiplies after the hidden product and its bias."""
    weight_ih, weight_hh, bias_ih, bias_hh = w
    xr, xz, xn = jnp.split(x @ weight_ih.T + bias_ih, 3, -1)
    hr, hz, hn = jnp.split(h @ weight_hh.T + bias_hh, 3, -1)
    r, z = nn.sigmoid(xr + hr), nn.sigmoid(xz + hz)
    n = jnp.tanh(xn + r * hn)
    return (1 - z) * n + z * h


def gru_cell(a: Inputs) -> Inputs:
    w = tuple(a[f"{kind}_{part}"] for kind in ("weight", "bias") for part in ("ih", "hh"))
    return {"y": gru_turn(a["h"], a["x"], w)}


def gru_layers(a: Inputs, at: Callable[[Any], Any] = lambda h: h) -> Inputs:
    ys, last = jnp.swapaxes(a["x"], 0, 1), []
    for layer in range(3):
        names = [f"{kind}_{part}_l{layer}" for kind in ("weight", "bias") for part in ("ih", "hh")]
        w = tuple(a[name] for name in names)

        def turn(h: Any, x: Any, w: Any = w) -> tuple[Any, Any]:
            h = at(gru_turn(h, x, w))
            return h, h

        h, ys = lax.scan(turn, a["h0"][layer], ys)
        last.append(h)
    return {"y": jnp.swapaxes(ys, 0, 1), "hn": jnp.stack(last)}


@vj.custom_vjp
def clamped(h: Any) -> Any:
    """The value; its cotangent within 0.75 of zero."""
    return h


clamped.defvjp(lambda h: (h, None), lambda _, ct: (jnp.clip(ct, -0.75, 0.75),))


def gru_clamped(a: Inputs) -> Inputs:
    return gru_layers(a, clamped)


def l2norm(x: Any) -> Any:
    return x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


def gated_delta(a: Inputs, *, normed: bool = False) -> Inputs:
    """S <- e^g S; S <- S + k (beta (v - S'k))'; o = S'q. Source: transformers, Qwen3.5."""
    groups = a["v"].shape[2] // a["q"].shape[2]
    q, k = (l2norm(a[n]) if normed else a[n] for n in "qk")
    q, k = (jnp.repeat(x, groups, 2) for x in (q * q.shape[-1] ** -0.5, k))

    def turn(state: Any, at: Any) -> tuple[Any, Any]:
        q, k, v, g, beta = at
        state = jnp.exp(g)[..., None, None] * state
        seen = jnp.einsum("bhkv,bhk->bhv", state, k)
        state += jnp.einsum("bhk,bhv->bhkv", k, beta[..., None] * (v - seen))
        return state, jnp.einsum("bhkv,bhk->bhv", state, q)

    xs = tuple(jnp.swapaxes(x, 0, 1) for x in (q, k, a["v"], a["g"], a["beta"]))
    state, o = lax.scan(turn, a["state"], xs)
    return {"o": jnp.swapaxes(o, 0, 1), "state_out": state}


def gated_delta_normed(a: Inputs) -> Inputs:
    return gated_delta(a, normed=True)


def mamba1(a: Inputs) -> Inputs:
    """Turn by turn h = exp(d A) h + d B x and y = sum over states of C h."""
    d = nn.softplus(a["dt"] + (a["dt_bias"][:, None] if "dt_bias" in a else 0))

    def turn(h: Any, at: Any) -> tuple[Any, Any]:
        x, d, b, c = at
        h = jnp.exp(d[..., None] * a["A"]) * h + (d * x)[..., None] * b[:, None]
        return h, jnp.einsum("bcn,bn->bc", h, c)

    batch, channels, _ = a["x"].shape
    xs = tuple(jnp.moveaxis(v, -1, 0) for v in (a["x"], d, a["B"], a["C"]))
    state, y = lax.scan(turn, jnp.zeros((batch, channels, a["A"].shape[1])), xs)
    y = jnp.moveaxis(y, 0, -1)
    if "D" in a:
        y = (y + a["D"][:, None] * a["x"]) * nn.silu(a["z"])
    return {"y": y, "state_out": state}


def mamba2(a: Inputs) -> Inputs:
    """Turn by turn h = exp(d A) h + (d x) outer B and y = h C."""
    d = nn.softplus(a["dt"] + a.get("dt_bias", 0))
    groups = a["x"].shape[2] // a["B"].shape[2]
    b, c = (jnp.repeat(a[n], groups, 2) for n in "BC")

    def turn(h: Any, at: Any) -> tuple[Any, Any]:
        x, d, b, c = at
        added = jnp.einsum("bhp,bhn->bhpn", x * d[..., None], b)
        h = jnp.exp(d * a["A"])[..., None, None] * h + added
        return h, jnp.einsum("bhpn,bhn->bhp", h, c)

    state, y = lax.scan(turn, a["state"], tuple(jnp.swapaxes(v, 0, 1) for v in (a["x"], d, b, c)))
    y = jnp.swapaxes(y, 0, 1)
    if "D" in a:
        y += a["D"][:, None] * a["x"]
    return {"y": y, "state_out": state}


CASES: dict[str, Callable[[Inputs], Inputs]] = {
    "gru_cell": gru_cell,
    "gru_3layer": gru_layers,
    "gru_3layer_clamped_bptt": gru_clamped,
    "gated_delta_tiny": gated_delta,
    "gated_delta_k_scale_free": gated_delta,
    "gated_delta_decode": gated_delta_normed,
    "gated_delta_grouped_l2": gated_delta_normed,
    "gated_delta_long_strong_decay": gated_delta_normed,
    "ssm_scan_mamba1_small": mamba1,
    "ssm_scan_mamba1_gated_D": mamba1,
    "ssm_scan_mamba2_small": mamba2,
    "ssm_scan_mamba2_groups_D": mamba2,
}
SMALL = ("gru_cell", "gated_delta_tiny", "ssm_scan_mamba1_small", "ssm_scan_mamba2_small")
ON_VULKAN = ("gru_3layer_clamped_bptt", "gated_delta_tiny", "ssm_scan_mamba1_small")


def loaded(name: str) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a case; skips where they are not there."""
    for folder in (HERE, SHARED):
        path = folder / f"{name}.safetensors"
        if path.is_file():
            return load_file(path)
    pytest.skip("no ../shared folder beside the checkout: its reference data is not there")


def is_software(device: str) -> bool:
    """Whether a Vulkan device is a driver on the CPU."""
    classes = {info.name: info.device_class for info in discovered_devices()}
    return classes.get(device.partition("+")[0]) is DeviceClass.SOFTWARE


@pytest.mark.parametrize("name", CASES)
def test_recurrence(name: str, device: str) -> None:
    if device == "reference" and name not in SMALL:
        pytest.skip("seconds in the interpreter, which has the smallest ones")
    if device != "reference" and is_software(device) and name not in ON_VULKAN:
        pytest.skip("seconds of a software driver's compiler, which has one of each kind")
    data = loaded(name)
    given = {k[3:]: jnp.asarray(v) for k, v in data.items() if k.startswith("in.")}
    cotangents = {k[2:]: given.pop(k) for k in list(given) if k.startswith("d_")}

    @vj.jit
    def run(given: Inputs, cotangents: Inputs) -> tuple[Inputs, Inputs]:
        outs, pull = vj.vjp(CASES[name], given)
        return outs, pull({k: cotangents.get(k, jnp.zeros_like(v)) for k, v in outs.items()})[0]

    outs, grads = run(given, cotangents)
    got = {**outs, **{f"grad.{k}": v for k, v in grads.items()}}
    wanted = {k[4:]: v for k, v in data.items() if k.startswith("out.")}
    assert set(wanted) <= set(got)
    for key, want in wanted.items():
        bound = RELATIVE * max(np.abs(want).max(), 1e-3)
        np.testing.assert_allclose(np.asarray(got[key]), want, rtol=0, atol=bound, err_msg=key)
