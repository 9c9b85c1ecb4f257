"""The planned peak of a training step against what its steps keep alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import vkjit as vj
from tests.targets import LARGE_GPU
from vkjit.lowering.artifact import Plan, Range, Role
from vkjit.lowering.compile import compile_program
from vkjit.lowering.plan.hazards import footprint
from vkjit.lowering.target import Target
from vkjit.passes.pipeline import simplify
from vkjit.runtime import get_device

LAYERS, ROWS, WIDTH, HEADS, RANK = 24, 128, 64, 4, 4
UNIT = 256
"""Bytes that are counted together; arrays start at multiples of it."""
TARGETS: dict[str, Callable[[], Target]] = {
    "cpu": lambda: get_device("cpu").target,
    "gpu": lambda: LARGE_GPU,
}


def live_maximum(plan: Plan, results: int = 0) -> int:
    """The most bytes that hold something at one step that is read later.

    Arguments and constants count all the time; results from the step that writes them, or with
    ``results`` bytes all the time.
    """
    needed = [np.full(-(-b.size // UNIT), b.role is not Role.ARENA) for b in plan.buffers]
    fixed = (Role.INPUT, Role.CONSTANT)
    always = sum(b.size for b in plan.buffers if b.role in fixed) + results
    counted = (Role.ARENA,) if results else (Role.ARENA, Role.OUTPUT)
    inner = [b.role in counted and b.donated is None for b in plan.buffers]
    most = 0

    def marked(r: Range) -> slice:
        return slice(r.offset // UNIT, -(-(r.offset + r.size) // UNIT))

    for step in reversed(plan.steps):
        found = footprint(step)
        during = [n.copy() for n in needed]
        for r in (*found.reads, *found.writes):
            during[r.buffer][marked(r)] = True
        most = max(most, sum(int(d.sum()) for d, own in zip(during, inner, strict=True) if own))
        for r in found.writes:
            needed[r.buffer][marked(r)] = False
        for r in found.reads:
            needed[r.buffer][marked(r)] = True
    return always + most * UNIT


def norm(x: Any) -> Any:
    return x * vj.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def layer(x: Any, p: Any) -> Any:
    def heads(y: Any) -> Any:
        return y.reshape(ROWS, HEADS, WIDTH // HEADS).transpose(1, 0, 2)

    h = norm(x)
    q, k, v = (heads(h @ p[name]) for name in ("q", "k", "v"))
    weights = vj.nn.softmax(q @ k.transpose(0, 2, 1), axis=-1)
    x = x + (weights @ v).transpose(1, 0, 2).reshape(ROWS, WIDTH) @ p["o"]
    h = norm(x)
    return x + (vj.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def shape(*sizes: int) -> vj.ShapeDtypeStruct:
    return vj.ShapeDtypeStruct(sizes, np.float32)


def weights() -> list[dict[str, Any]]:
    square, wide = shape(WIDTH, WIDTH), shape(WIDTH, 4 * WIDTH)
    names = {"q": square, "k": square, "v": square, "o": square, "gate": wide, "up": wide}
    return [{**names, "down": shape(4 * WIDTH, WIDTH)} for _ in range(LAYERS)]


def loss_of(fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def loss(ps: Any, x: Any) -> Any:
        for p in ps:
            x = fn(x, p)
        return (x * x).mean()

    return loss


def planned(fn: Callable[[Any, Any], Any], target: Target, *, donate: bool) -> Plan:
    program = simplify(vj.make_ir(fn)(weights(), shape(ROWS, WIDTH)))
    donated = range(len(program.params) - 1) if donate else ()
    return compile_program(program, target, donated=donated).plan


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("fn", [layer, vj.checkpoint(layer)], ids=["plain", "checkpoint"])
def test_training_step_holds_what_it_needs(target: str, fn: Callable[[Any, Any], Any]) -> None:
    """Gradients are temporaries, and new weights take the memory of the old ones."""

    def update(ps: Any, x: Any) -> Any:
        value, gradient = vj.value_and_grad(loss_of(fn))(ps, x)
        return value, vj.tree.map(lambda p, g: p - 0.1 * g, ps, gradient)

    plan = planned(update, TARGETS[target](), donate=True)
    assert plan.peak_bytes <= 1.1 * live_maximum(plan)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("fn", [layer, vj.checkpoint(layer)], ids=["plain", "checkpoint"])
def test_gradient_step_holds_what_it_needs(target: str, fn: Callable[[Any, Any], Any]) -> None:
    """Results are memory of their own, handed to the caller; they count from the start."""
    plan = planned(vj.value_and_grad(loss_of(fn)), TARGETS[target](), donate=False)
    results = sum(b.size for b in plan.buffers if b.role is Role.OUTPUT)
    assert plan.peak_bytes <= 1.1 * live_maximum(plan, results)
