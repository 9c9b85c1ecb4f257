"""Products out of quantized blocks, forward and backward, by rows of activations.

``forward`` is x W^T of a weight (out, in) in blocks along ``in``; ``backward`` is dy W, from the
same blocks. ``vkjit-numbers`` and the peers have the decoded float32 weight, so that the ratio is
what reading blocks costs, or saves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.case import Array, Case, Namespace, Tree
from benchmarks.packed import BITS, random_blocks

WEIGHTS = {"576x576": (576, 576), "1536x576": (1536, 576), "576x1536": (576, 1536)}
"""Those of a layer of SmolLM2-135M, (out, in)."""
LARGE = {"1536x1536": (1536, 1536), "4096x2048": (4096, 2048)}
"""Whole blocks of 256 along both sizes."""
ROWS = (1, 8, 64, 512)
QUICK = (("Q4_1", "1536x576"), ("Q4_K", "1536x1536"))


def _case(kind: str, name: str, weight: tuple[int, int], rows: int, layout: str) -> Case:
    out, into = weight
    params = {"out": out, "in": into, "rows": rows, "layout": layout}
    byte = out * into * BITS[kind] / 8 + 4.0 * rows * (out + into)
    return Case(
        f"{kind} {name} {rows} rows {layout}",
        "forward",
        params,
        flop=2.0 * rows * out * into,
        byte=byte,
        quick=rows in (1, 512) and (kind, name) in QUICK,
        on="both",
        blocks=(kind, kind),
    )


CASES = tuple(
    _case(kind, name, weight, rows, layout)
    for kind in BITS
    for name, weight in ((WEIGHTS if kind in ("Q4_1", "Q8_0") else {}) | LARGE).items()
    for rows in ROWS
    for layout in ("forward", "backward")
)


def inputs(case: Case) -> tuple[Tree, ...]:
    """Activations, or their cotangent, standard normal, and the weight."""
    p = case.params
    assert case.blocks
    generator = np.random.default_rng(1)
    size = p["in"] if p["layout"] == "forward" else p["out"]
    rows = generator.standard_normal((p["rows"], size), dtype=np.float32)
    return rows, random_blocks(generator, case.blocks[0], (p["out"], p["in"]), p["in"] ** -0.5)


def _product(case: Case) -> Callable[[Array, Array], Array]:
    if case.params["layout"] == "forward":
        return lambda x, w: x @ w.T
    return lambda x, w: x @ w


def program(_ns: Namespace, case: Case) -> Callable[..., Array]:
    """The product."""
    return _product(case)


def torch_program(
    torch: Any, case: Case, given: tuple[Tree, ...], wrap: Callable[..., Any]
) -> Callable[[], Any]:
    """The product in PyTorch, of float32 numbers."""
    x, w = given
    operands = torch.from_numpy(x), torch.from_numpy(w)
    product = wrap(_product(case))
    return lambda: product(*operands)


if __name__ == "__main__":
    from benchmarks import harness

    default = ("vkjit", "vkjit-numbers", *harness.PEERS)
    sys.exit(harness.main("quant_gemm", CASES, default=default))
