"""No pass recurses: 20,000 operations in a row pass through everything, and quickly."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator

import numpy as np
import pytest

import vkjit as vj
from vkjit.api.staged import make_ir
from vkjit.ir.check import check
from vkjit.ir.evaluate import evaluate
from vkjit.ir.parse import parse
from vkjit.ir.text import text
from vkjit.lowering.plan.partition import partition
from vkjit.ops.registry import PRIMITIVES
from vkjit.passes.pipeline import simplify

LENGTH = 20_000
SECONDS = 20.0
"""Of processor time for one test; a pass of quadratic time would need minutes."""


@pytest.fixture(autouse=True)
def in_time() -> Generator[None]:
    assert sys.getrecursionlimit() <= 1000 + 200, "the limit was raised"
    start = time.process_time()
    yield
    assert time.process_time() - start < SECONDS


def chain(x: vj.Array) -> vj.Array:
    for _ in range(LENGTH // 2):
        x = vj.numpy.sin(x) * x
    return x


X = np.linspace(0.1, 1.0, 4, dtype=np.float32)


def test_trace_check_text_and_passes() -> None:
    program = make_ir(chain)(X)
    assert len(program.eqns) == LENGTH
    made = check(simplify(check(program)))
    assert len(made.eqns) == LENGTH
    assert text(parse(text(made), PRIMITIVES)) == text(made)
    assert len(partition(made).groups) >= 1
    evaluate(made, [X])


def test_gradient() -> None:
    program = make_ir(vj.grad(lambda x: chain(x).sum()))(X)
    made = check(simplify(program))
    (gradient,) = evaluate(made, [X])
    assert gradient.shape == X.shape
    assert np.isfinite(gradient).all()


def test_forward_mode_and_batching() -> None:
    forward = make_ir(lambda x, t: vj.jvp(chain, (x,), (t,))[1])(X, X)
    check(simplify(forward))
    batched = make_ir(vj.vmap(chain))(np.stack([X, X]))
    assert len(batched.eqns) == LENGTH
