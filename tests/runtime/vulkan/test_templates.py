"""GPU templates on the device in the forms that only larger arrays get; validated, both modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from vkjit.ir.evaluate import evaluate
from vkjit.lowering.compile import compile_program

CASES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "vectors": (lambda x, r: jnp.maximum(x * 2 + r, 0.5), ((64, 1028), (1028,))),
    "unaligned vectors": (lambda x: x[:, 3:1027] * 2, ((64, 1028),)),
    "softmax of long rows": (vj.nn.softmax, ((3, 2048),)),
    "columns": (lambda x: (jnp.sum(x, axis=0), jnp.argmax(x, axis=0)), ((90, 70),)),
    "parts of rows": (lambda x: (jnp.sum(x), jnp.argmax(x)), ((70001,),)),
    "parts of columns": (lambda x: jnp.max(x, axis=0), ((40000, 40),)),
    "ragged vectors": (lambda x: x * 2 + 1, ((65539,),)),
    "turned tiles": (lambda x, y: x.T + y, ((270, 250), (250, 270))),
    "turned halves": (lambda x: x.astype(jnp.float16).T, ((256, 256),)),
    "rows of subgroups": (lambda x: vj.nn.rms_norm(x), ((5, 100),)),
    "short rows": (vj.nn.softmax, ((37, 12),)),
    "columns in vectors": (lambda x: (jnp.sum(x, axis=0), jnp.argmax(x, axis=0)), ((70, 96),)),
    "scan of lines": (lambda x: jnp.cumsum(x, axis=1), ((5, 700),)),
    "scan of short lines": (lambda x: jnp.cumsum(x, axis=1), ((50, 12),)),
    "scan in parts": (lambda x: jnp.cumsum(x)[::-1], ((20000,),)),
    "scan of columns": (lambda x: vj.lax.cummax(x, 0, reverse=True), ((150, 8),)),
    "scatter": (lambda x, u: x.at[jnp.arange(60) % 7].add(u), ((9, 8), (60, 8))),
    "medium tiles": (lambda x, y: jnp.tanh(x @ y), ((33, 66, 20), (33, 20, 68))),
    "large tiles": (jnp.matmul, ((33, 130, 20), (33, 20, 250))),
}


@pytest.mark.parametrize("case", CASES)
def test_templates(vulkan, case: str):
    function, shapes = CASES[case]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    program = vj.make_ir(function)(*arrays)
    loaded = vulkan.load(compile_program(program, vulkan.target).plan)
    outs = loaded.run([vulkan.upload(a) for a in arrays])
    for out, want, of in zip(outs, evaluate(program, arrays), program.out_avals, strict=True):
        got = vulkan.download(out, of.dtype, of.shape)
        scale = float(np.abs(want).max())
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=4e-6 * scale)
