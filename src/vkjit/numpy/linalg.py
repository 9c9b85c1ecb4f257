"""Linear algebra that needs no factorisation: norms and products, under NumPy's names."""

from __future__ import annotations

from vkjit.numpy._linalg import cross, matmul, norm, outer, tensordot, vecdot
from vkjit.numpy._shape import matrix_transpose
from vkjit.numpy._take import diagonal, trace

__all__ = [
    "cross",
    "diagonal",
    "matmul",
    "matrix_transpose",
    "norm",
    "outer",
    "tensordot",
    "trace",
    "vecdot",
]
