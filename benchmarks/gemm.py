"""Matrix products: squares and the shapes of a rank-16 LoRA step, on GPUs in 16 bits, too.

``nn`` is A B, ``nt`` is A B^T (a linear layer whose weight is stored (out, in), or an input
gradient), ``tn`` is A^T B (a weight gradient).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.case import Array, Case, Namespace, Tree

SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
TOLERANCES = {"float32": 1e-5, "bfloat16": 4e-3, "float16": 5e-4}
"""Of the whole result: sums in float32, rounded once to the operands' type."""
MANY_ROWS = 1024
"""From so many rows on, every 32nd is compared with float64."""


def _case(name: str, sizes: tuple[int, int, int], layout: str = "nn", **options: Any) -> Case:
    m, n, k = sizes
    batch = options.pop("batch", 1)
    params = {"m": m, "n": n, "k": k, "layout": layout, "batch": batch}
    byte = 4.0 * batch * (m * k + k * n + m * n)
    return Case(name, "forward", params, flop=2.0 * m * n * k * batch, byte=byte, **options)


def _gpu(name: str, sizes: tuple[int, int, int], dtype: str, layout: str = "nn") -> Case:
    m, n, k = sizes
    size = 4.0 if dtype == "float32" else 2.0
    return Case(
        f"{SHORT[dtype]} {name} {layout}",
        "forward",
        {"m": m, "n": n, "k": k, "layout": layout, "batch": 1},
        tolerance=TOLERANCES[dtype],
        flop=2.0 * m * n * k,
        byte=size * (m * k + k * n + m * n),
        dtype=dtype,
        low=(0, 1),
        on="gpu",
    )


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
    *(_gpu(f"{n}^3", (n, n, n), d) for d in SHORT for n in (1024, 2048, 4096, 8192)),
    *(_gpu("4096^3", (4096, 4096, 4096), d, s) for d in SHORT for s in ("nt", "tn")),
    *(
        _gpu("x".join(map(str, sizes)), sizes, d, layout)
        for d in ("float32", "bfloat16")
        for sizes, layout in (
            ((4096, 1536, 16), "nn"),
            ((4096, 1536, 16), "tn"),
            ((16, 1536, 4096), "nn"),
            ((4096, 16, 1536), "nt"),
            ((512, 576, 576), "nt"),
            ((512, 1536, 576), "nt"),
            ((512, 576, 1536), "nn"),
            ((512, 16, 576), "nt"),
            ((576, 16, 512), "tn"),
            ((512, 49152, 576), "nt"),
            ((1, 4096, 4096), "nn"),
        )
    ),
)


def sampled_rows(case: Case) -> tuple[int, int] | None:
    """The axis of A that is the product's rows, and which of them are compared."""
    p = case.params
    return None if p["m"] < MANY_ROWS else (1 if p["layout"] == "tn" else 0, 32)


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
    a, b = (torch.from_numpy(x).to(getattr(torch, case.dtype)) for x in given)
    product = wrap(_product(torch.matmul, case.params["layout"]))
    return lambda: product(a, b)


if __name__ == "__main__":
    from benchmarks import harness

    sys.exit(harness.main("gemm", CASES))
