"""The benchmarks' judge finds what is wrong, and their floor and processes do what they say."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks import elementwise, gemm, lora_step, mlp_step, rows
from benchmarks.case import ADAMW, Case, Check, Namespace, numpy_namespace, tree_leaves
from benchmarks.machine import Rates
from benchmarks.process import Process

GRADIENT = Case("softmax", "gradient", {"function": "softmax", "shape": (64, 16)}, tolerance=1e-5)


def softmax_gradient(x: np.ndarray, cotangent: np.ndarray) -> np.ndarray:
    y = np.exp(x - x.max(-1, keepdims=True))
    y /= y.sum(-1, keepdims=True)
    return y * (cotangent - (y * cotangent).sum(-1, keepdims=True))


def judge(case: Case, module: Any) -> Check:
    return Check(case, module.program(numpy_namespace(), case), module.inputs(case))


def test_the_right_gradient_passes() -> None:
    check = judge(GRADIENT, rows)
    assert check.error([softmax_gradient(*check.inputs)]) < GRADIENT.tolerance


@pytest.mark.parametrize(
    "break_",
    [
        lambda g: np.concatenate([-g[:1], g[1:]]),
        lambda g: g * 1.001,
        lambda g: g * np.nan,
        lambda g: g[:-1],
        lambda g: np.zeros_like(g),
    ],
    ids=["one row", "scale", "nan", "shape", "zero"],
)
def test_a_wrong_gradient_fails(break_: Callable[[np.ndarray], np.ndarray]) -> None:
    check = judge(GRADIENT, rows)
    assert not check.error([break_(softmax_gradient(*check.inputs))]) <= GRADIENT.tolerance


def test_a_wrong_value_fails() -> None:
    case = next(c for c in gemm.CASES if c.name == "64^3")
    check = judge(case, gemm)
    product = check.inputs[0] @ check.inputs[1]
    assert check.error([product]) < case.tolerance
    product[3, 5] *= 1.01
    assert check.error([product]) > case.tolerance


def test_adamw_moves_by_the_rate_at_first() -> None:
    params = {"w": np.ones(3, np.float32)}
    state = ADAMW.update(numpy_namespace(), ADAMW.start(params), {"w": np.array([2.0, -3.0, 0.0])})
    # The first bias-corrected step is sign(g), to within epsilon / |g|; then decay.
    expected = 1.0 - ADAMW.rate * (np.array([1.0, -1.0, 0.0]) + ADAMW.decay)
    np.testing.assert_allclose(state["params"]["w"], expected, rtol=1e-6)
    assert state["count"] == 1


@pytest.mark.parametrize("module", [mlp_step, lora_step], ids=["mlp", "lora"])
def test_losses_start_near_that_of_guessing(module: Any) -> None:
    case = min(module.CASES, key=lambda c: c.flop)
    given = module.inputs(case)
    loss = float(module.program(numpy_namespace(), case)(*given))
    classes = case.params.get("vocabulary") or case.params["widths"][-1]
    assert 0.5 * np.log(classes) < loss < 2.0 * np.log(classes)


def test_inputs_are_the_same_in_every_process() -> None:
    for module in (gemm, elementwise, rows, mlp_step, lora_step):
        case = min(module.CASES, key=lambda c: c.flop + c.byte)
        first, second = (tree_leaves(list(module.inputs(case))) for _ in range(2))
        for a, b in zip(first, second, strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_floor_is_the_scarcer_resource() -> None:
    rates = Rates(flops=100.0, bandwidth=10.0)
    assert rates.floor(flop=100.0, byte=1.0) == 1.0
    assert rates.floor(flop=100.0, byte=20.0) == 2.0


def test_the_reference_namespace_refuses_gradients() -> None:
    ns: Namespace = numpy_namespace()
    with pytest.raises(NotImplementedError, match="values only"):
        ns.value_and_grad(lambda x: x)


def test_a_framework_that_is_missing_is_a_failure_not_a_hang() -> None:
    process = Process(sys.executable, ("no_such_framework", "cpu"), limit=60.0)
    try:
        hello = process.read()
        assert not hello["ok"]
        assert "no_such_framework" in hello["failure"]
    finally:
        process.close()


def test_a_process_that_dies_is_a_failure() -> None:
    process = Process("/bin/false", ("vkjit", "cpu"), limit=60.0)
    try:
        assert process.read() == {"ok": False, "failure": "process died"}
        assert not process.ask("time", budget=1.0, most=3)["ok"]
    finally:
        process.close()
