"""Runs functions at once and inside a trace, and compares dtypes and values with NumPy's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import vkjit.device_array  # noqa: F401  installs device arrays and tracers with operators
from vkjit import tree
from vkjit.dtypes import canonical
from vkjit.ir.evaluate import evaluate
from vkjit.trace import aval_of, trace

Run = Callable[..., Any]


def at_once(fn: Callable[..., Any], *args: Any) -> Any:
    return tree.map(np.asarray, fn(*args))


def traced(fn: Callable[..., Any], *args: Any) -> Any:
    shape: list[Any] = []

    def flat(*inputs: Any) -> list[Any]:
        out, structure = tree.flatten(fn(*inputs))
        shape.append(structure)
        return out

    staged = trace(flat, [aval_of(a) for a in args])
    values = [np.asarray(v, canonical(aval_of(v).dtype)) for v in (*staged.captured, *args)]
    return tree.unflatten(shape[0], [np.asarray(v) for v in evaluate(staged.program, values)])


@pytest.fixture(params=[at_once, traced], ids=["eager", "traced"])
def run(request: pytest.FixtureRequest) -> Run:
    """``run(fn, *args)``: the result in NumPy, by the eager path or through a program."""
    return request.param


@pytest.fixture
def same() -> Callable[..., None]:
    """``same(got, want)``: equal shapes, narrowed dtypes and, within float32, values."""

    def check(got: Any, want: Any, rtol: float = 2e-6, atol: float = 1e-6) -> None:
        gots, wants = tree.leaves(got), tree.leaves(want)
        assert len(gots) == len(wants)
        for g, w in zip(gots, wants, strict=True):
            w = np.asarray(w)
            assert g.shape == w.shape, (g.shape, w.shape)
            assert g.dtype == canonical(w.dtype), (g.dtype, w.dtype)
            wide = np.float64 if w.dtype.kind not in "biu" else w.dtype
            np.testing.assert_allclose(g.astype(wide), w.astype(wide), rtol=rtol, atol=atol)

    return check
