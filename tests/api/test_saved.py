"""saved_residuals: what derivatives keep, why, and what that does to the peak of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import vkjit as vj
from tests.derivatives import of
from tests.strategies import programs
from tests.targets import LARGE_GPU
from vkjit import checkpoint_policies as policies
from vkjit import dtypes
from vkjit import numpy as vnp
from vkjit.api.flat import flatten_call
from vkjit.api.linearization import Linearization
from vkjit.api.saved import Residual
from vkjit.ir.program import Program
from vkjit.lowering.compile import compile_program
from vkjit.lowering.target import Target
from vkjit.passes.pipeline import simplify
from vkjit.runtime import get_device


def shape(*sizes: int, dtype: Any = np.float32) -> vj.ShapeDtypeStruct:
    return vj.ShapeDtypeStruct(sizes, dtype)


def layer(x: Any, w: Any) -> Any:
    h = vj.checkpoint_name(vnp.tanh(x @ w), "h")
    return x + h @ w


def loss_of(fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def loss(x: Any, w: Any) -> Any:
        return fn(fn(x, w), w).sum()

    return loss


X, W = shape(3, 4), shape(4, 4)


def inner(fn: Callable[..., Any], *args: Any) -> list[Residual]:
    """Residuals that are not arguments, largest first."""
    found = [r for r in vj.saved_residuals(fn, *args) if not r.is_argument]
    return sorted(found, key=lambda r: -r.nbytes)


@settings(max_examples=30)
@given(program=programs(max_steps=20, kinds=(dtypes.float32,), smooth=True, control=True))
def test_lists_what_a_linearization_saves(program: Program) -> None:
    args = [shape(*a.shape, dtype=a.dtype) for a in program.in_avals]
    found = vj.saved_residuals(of(program), *args)

    def saved(*leaves: Any) -> Any:
        flat, values = flatten_call(of(program), leaves)
        return Linearization(flat, values).residuals

    assert [r.aval for r in found] == list(vj.make_ir(saved)(*args).out_avals)


def test_names_arguments_and_constants() -> None:
    c = vnp.asarray(np.ones(4, np.float32))

    def fn(p: Any, *, scale: Any) -> Any:
        return (p["x"][0] * scale * c).sum()

    found = vj.saved_residuals(fn, {"x": [shape(4)]}, scale=shape(4))
    assert {r.reason for r in found} == {"argument 0['x'][0]", "argument 'scale'", "constant 0"}
    assert all(r.is_argument and not r.source for r in found)


def test_gives_the_line_that_makes_a_value() -> None:
    kept = inner(loss_of(layer), X, W)
    assert {r.reason for r in kept} == {"result of tanh", "result of add"}
    line = layer.__code__.co_firstlineno
    assert {r.source for r in kept} >= {f"{__file__}:{line + 1}", f"{__file__}:{line + 2}"}


@pytest.mark.parametrize(
    ("policy", "reasons"),
    [
        (None, []),
        (policies.dots_saveable, ["result of dot_general"] * 2),
        (policies.save_only_these_names("h"), ["named 'h'"] * 2),
        (policies.save_only_these_names("other"), []),
        (policies.save_any_names_but_these("h"), []),
        (policies.save_anything_except_these_names("h"), ["result of tanh"] * 2),
        (policies.everything_saveable, ["named 'h'"] * 2),
    ],
    ids=str,
)
def test_policies_decide(policy: policies.Policy | None, reasons: list[str]) -> None:
    kept = [r.reason for r in inner(loss_of(vj.checkpoint(layer, policy=policy)), X, W)]
    boundary = [r for r in kept if r.startswith("result of add")]
    assert len(boundary) == 1  # the first layer's result
    rest = sorted(r for r in kept if r not in boundary)
    assert rest == [f"{reason}, saved by {policy}" for reason in reasons]


def test_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    vj.print_saved(loss_of(vj.checkpoint(layer)), X, W)
    printed = capsys.readouterr().out
    assert "loss keeps 3 values" in printed
    assert "48 B  f32[3,4]  result of add, result of a checkpoint  " in printed
    assert "48 B besides 112 B of arguments and constants" in " ".join(printed.split())


# -- casts and copies -----------------------------------------------------------------------------

WINDOW, KV, HEADS, LAYERS = 256, 64, 4, 6
TARGETS: dict[str, Callable[[], Target]] = {
    "cpu": lambda: get_device("cpu").target,
    "gpu": lambda: LARGE_GPU,
}


def attention(x: Any, keys: Any, values: Any) -> Any:
    """Attention of rows (tokens, KV) to a cache (WINDOW, KV), each head by itself."""

    def heads(y: Any) -> Any:
        return y.reshape(y.shape[0], HEADS, -1).transpose(1, 0, 2)

    q, k, v = heads(x), heads(keys), heads(values)
    weights = vj.nn.softmax(q @ k.transpose(0, 2, 1), axis=-1)
    return x + (weights @ v).transpose(1, 0, 2).reshape(x.shape)


def read_cache(x: Any, caches: Any) -> Any:
    """Attention of all layers to caches in float16, computed in float32."""
    for keys, values in caches:
        x = attention(x, keys.astype(vnp.float32), values.astype(vnp.float32))
    return (x * x).sum()


def copied(x: Any, caches: Any) -> Any:
    """The same, where each layer copies its cache into buffers in float32."""
    for keys, values in caches:
        x = copied_layer(x, keys, values)
    return (x * x).sum()


def copied_layer(x: Any, keys: Any, values: Any) -> Any:
    wide = [vj.Ref(vnp.zeros((WINDOW, KV))) for _ in range(2)]
    for ref, narrow in zip(wide, (keys, values), strict=True):
        ref[...] = narrow
    return attention(x, wide[0][...], wide[1][...])


def checkpointed(x: Any, caches: Any) -> Any:
    """Copies inside checkpoints, which save nothing that they can compute again."""
    for keys, values in caches:
        x = vj.checkpoint(copied_layer)(x, keys, values)
    return (x * x).sum()


ROWS = shape(8, KV)
COPIES = WINDOW * 2 * KV * 4
"""Bytes of the keys and values of one layer in float32."""


def caches(layers: int) -> Any:
    return [(shape(WINDOW, KV, dtype=np.float16),) * 2] * layers


def wide_residuals(fn: Callable[..., Any]) -> list[Residual]:
    return [r for r in inner(fn, ROWS, caches(LAYERS)) if r.aval.shape == (WINDOW, KV)]


def growth(fn: Callable[..., Any], target: Target) -> float:
    """Planned bytes of one layer more, the caches aside."""
    arenas: list[int] = []
    for layers in (LAYERS, 2 * LAYERS):
        program = simplify(vj.make_ir(vj.value_and_grad(fn))(ROWS, caches(layers)))
        arenas.append(compile_program(program, target).plan.arena_bytes)
    return (arenas[1] - arenas[0]) / LAYERS


def test_a_cast_is_not_saved() -> None:
    assert wide_residuals(read_cache) == []


@pytest.mark.parametrize("fn", [copied, checkpointed])
def test_a_copy_is_saved(fn: Callable[..., Any]) -> None:
    kept = wide_residuals(fn)
    assert {r.reason for r in kept} == {"result of copy_into, which is never repeated"}
    assert sum(r.nbytes for r in kept) == COPIES * LAYERS


@pytest.mark.parametrize("target", TARGETS)
def test_bytes_of_casts_leave_the_peak(target: str) -> None:
    found = TARGETS[target]()
    cast, copy, again = (growth(fn, found) for fn in (read_cache, copied, checkpointed))
    # Side by side, steps of a GPU may take a little more.
    assert copy - cast == pytest.approx(COPIES, rel=0.005)
    assert again == pytest.approx(COPIES + 8 * KV * 4, rel=0.005)  # and the layer's result
