"""Loops and branches of compiled functions: what a turn costs, beside JAX.

A GRU over a long sequence, forward and with its gradient; turns so small that only the loop itself
costs anything; loops in loops; loops that end by a condition; a choice in each turn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from benchmarks.case import Array, Case, Namespace, Tree

Kind = Literal["forward", "gradient"]


def _case(name: str, function: str, turns: int, kind: Kind = "forward", **sizes: int) -> Case:
    params = {"function": function, "turns": turns, **sizes}
    argnums: int | tuple[int, ...] = (0, 1) if function == "gru" else 0
    quick = turns <= 512
    return Case(name, kind, params, tolerance=2e-4, argnums=argnums, on="both", quick=quick)


CASES = (
    _case("GRU 512 turns, 8x256", "gru", 512, batch=8, width=256),
    _case("GRU 512 turns, 8x256 gradient", "gru", 512, "gradient", batch=8, width=256),
    _case("scan of 64 floats, 512 turns", "scan", 512),
    _case("scan of 64 floats, 8192 turns", "scan", 8192),
    _case("scan in scan, 64 x 128 turns", "nested", 8192),
    _case("fori_loop of 4 floats, 100000 turns", "fori", 100_000),
    _case("while_loop of 64 floats, 200 turns", "while", 200),
    _case("cond in scan, 200 turns", "cond", 200),
)


def inputs(case: Case) -> tuple[Tree, ...]:
    """Weights, first state and sequence of the GRU; the sequence, or the first carry, of others."""
    generator, s = np.random.default_rng(12), case.params

    def normal(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape, dtype=np.float32) * np.float32(0.1)

    match s["function"]:
        case "gru":
            width, batch = s["width"], s["batch"]
            weights = normal(width, 3 * width), normal(width, 3 * width)
            return (*weights, normal(batch, width), normal(s["turns"], batch, width))
        case "nested":
            return (normal(64, 128, 64),)
        case "fori":
            return (normal(4),)
        case "while":
            return (normal(64),)
        case _:
            return (normal(s["turns"], 64),)


def _gru(ns: Namespace) -> Callable[..., Array]:
    np_ = ns.np

    def sigmoid(x: Array) -> Array:
        return 1.0 / (1.0 + np_.exp(-x))

    def gru(wx: Array, wh: Array, first: Array, xs: Array) -> Array:
        def turn(h: Array, x: Array) -> tuple[Array, Array]:
            xr, xz, xn = np_.split(x @ wx, 3, axis=-1)
            hr, hz, hn = np_.split(h @ wh, 3, axis=-1)
            z = sigmoid(xz + hz)
            h = (1.0 - z) * np_.tanh(xn + sigmoid(xr + hr) * hn) + z * h
            return h, h

        _, states = ns.lax.scan(turn, first, xs)
        return np_.mean(states * states)

    return gru


def _small(ns: Namespace, turns: int) -> dict[str, Callable[[Array], Array]]:
    np_, lax = ns.np, ns.lax

    def scan(xs: Array) -> Array:
        return lax.scan(lambda c, x: (c * 0.9 + x, c), xs[0], xs)[1]

    def nested(xs: Array) -> Array:
        def outer(c: Array, rows: Array) -> tuple[Array, Array]:
            c, inside = lax.scan(lambda d, x: (np_.tanh(d + x), d), c, rows)
            return c * 0.5, np_.sum(inside, 0)

        return lax.scan(outer, xs[0, 0], xs)[1]

    def fori(x: Array) -> Array:
        return lax.fori_loop(0, turns, lambda i, c: c * 0.5 + 1.0, x)

    def until(x: Array) -> Array:
        def body(c: tuple[Array, Array]) -> tuple[Array, Array]:
            return c[0] * 0.9 + 1.0, c[1] + 1

        return lax.while_loop(lambda c: c[1] < turns, body, (x, 0))[0]

    def cond(xs: Array) -> Array:
        def turn(c: Array, x: Array) -> tuple[Array, Array]:
            c = lax.cond(np_.sum(x) > 0, lambda c: c * 0.5 + 1.0, lambda c: c - 1.0, c)
            return c, c

        return lax.scan(turn, xs[0], xs)[1]

    return {"scan": scan, "nested": nested, "fori": fori, "while": until, "cond": cond}


def program(ns: Namespace, case: Case) -> Callable[..., Array]:
    """The loop in an array namespace."""
    name = case.params["function"]
    return _gru(ns) if name == "gru" else _small(ns, case.params["turns"])[name]


def torch_program(
    torch: Any, case: Case, given: tuple[Tree, ...], wrap: Callable[..., Any]
) -> Callable[[], Any]:
    """PyTorch has no such loops: its Python loops are another thing."""
    del torch, case, given, wrap
    raise NotImplementedError("control_flow: vkjit and JAX only")


if __name__ == "__main__":
    from benchmarks import harness

    sys.exit(harness.main("control_flow", CASES, default=("vkjit", "jax")))
