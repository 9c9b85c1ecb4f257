"""Matrix products in float32: squares 64 to 2048 and the shapes of a rank-16 LoRA step.

``nn`` is A B, ``nt`` is A B^T (a linear layer whose weight is stored (out, in), or an input
gradient), ``tn`` is A^T B (a weight gradient).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.case import Array, Case, Namespace, Tree


def _case(name: str, sizes: tuple[int, int, int], layout: str = "nn", **options: Any) -> Case:
    m, n, k = sizes
    batch = options.pop("batch", 1)
    params = {"m": m, "n": n, "k": k, "layout": layout, "batch": batch}
    byte = 4.0 * batch * (m * k + k * n + m * n)
    return Case(name, "forward", params, flop=2.0 * m * n * k * batch, byte=byte, **options)


CASES = (
    _case("64^3", (64, 64, 64)),
    _case("128^3", (128, 128, 128), quick=False),
    _case("256^3", (256, 256, 256)),
    _case("512^3", (512, 512, 512)),
    _case("1024^3", (1024, 1024, 1024)),
    _case("2048^3", (2048, 2048, 2048), quick=False),
    _case("1024^3 nt", (1024, 1024, 1024), "nt"),
    _case("1024^3 tn", (1024, 1024, 1024), "tn"),
    _case("LoRA down 512x16x576", (512, 16, 576)),
    _case("LoRA up 512x1536x16", (512, 1536, 16)),
    _case("LoRA outer 4096x1536x16", (4096, 1536, 16)),
    _case("LoRA outer 4096x1536x16 tn", (4096, 1536, 16), "tn"),
    _case("LoRA down 16x1536x4096", (16, 1536, 4096)),
    _case("head 512x49152x576 nt", (512, 49152, 576), "nt", quick=False),
    _case("odd 1000x777x555", (1000, 777, 555)),
    _case("batched 16x256^3", (256, 256, 256), batch=16),
    _case("gemv 1x4096x4096", (1, 4096, 4096)),
)


def inputs(case: Case) -> tuple[Tree, ...]:
    """A and B, standard normal, stored as the layout says."""
    p = case.params
    generator = np.random.default_rng(1)
    left = (p["k"], p["m"]) if p["layout"] == "tn" else (p["m"], p["k"])
    right = (p["n"], p["k"]) if p["layout"] == "nt" else (p["k"], p["n"])
    batch = (p["batch"],) if p["batch"] > 1 else ()
    return tuple(generator.standard_normal((*batch, *s), dtype=np.float32) for s in (left, right))


def _product(matmul: Callable[[Array, Array], Array], layout: str) -> Callable[..., Array]:
    if layout == "tn":
        return lambda a, b: matmul(a.T, b)
    if layout == "nt":
        return lambda a, b: matmul(a, b.T)
    return matmul


def program(ns: Namespace, case: Case) -> Callable[..., Array]:
    """The product in an array namespace."""
    return _product(ns.np.matmul, case.params["layout"])


def torch_program(
    torch: Any, case: Case, given: tuple[Tree, ...], wrap: Callable[..., Any]
) -> Callable[[], Any]:
    """The product in PyTorch."""
    a, b = (torch.from_numpy(x) for x in given)
    product = wrap(_product(torch.matmul, case.params["layout"]))
    return lambda: product(a, b)


if __name__ == "__main__":
    from benchmarks import harness

    sys.exit(harness.main("gemm", CASES))
