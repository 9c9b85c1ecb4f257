"""NumPy's functions on vkjit arrays, with JAX's promotion and 32-bit dtypes.

Names, arguments and results follow ``jax.numpy``; ``docs/differences.md`` lists what differs.
Python scalars are weakly typed, 64-bit dtypes narrow to 32 bits, everything is differentiable
where JAX is. Functions whose result's shape depends on values are absent and say so.
"""

# ruff: noqa: F403, F405  every module lists its public names in __all__
from __future__ import annotations

import math as _pymath

import numpy as _np

from vkjit.numpy import (
    _creation,
    _einsum,
    _elementwise,
    _linalg,
    _logic,
    _math,
    _reduce,
    _shape,
    _sort,
    _take,
    _types,
    linalg,
)
from vkjit.numpy._core import Shape
from vkjit.numpy._core import broadcast_shapes as _broadcast_shapes
from vkjit.numpy._creation import *
from vkjit.numpy._creation import dynamic_shape as _dynamic_shape
from vkjit.numpy._einsum import *
from vkjit.numpy._elementwise import *
from vkjit.numpy._linalg import *
from vkjit.numpy._logic import *
from vkjit.numpy._math import *
from vkjit.numpy._reduce import *
from vkjit.numpy._shape import *
from vkjit.numpy._sort import *
from vkjit.numpy._take import *
from vkjit.numpy._types import *

__all__ = [
    "argwhere",
    "bool",
    "broadcast_shapes",
    "compress",
    "dtype",
    "e",
    "euler_gamma",
    "extract",
    "flatnonzero",
    "inf",
    "linalg",
    "nan",
    "newaxis",
    "nonzero",
    "pi",
    "unique",
]
__all__ += _creation.__all__
__all__ += _einsum.__all__
__all__ += _elementwise.__all__
__all__ += _linalg.__all__
__all__ += _logic.__all__
__all__ += _math.__all__
__all__ += _reduce.__all__
__all__ += _shape.__all__
__all__ += _sort.__all__
__all__ += _take.__all__
__all__ += _types.__all__

bool = bool_
dtype = _np.dtype
pi, e, euler_gamma, inf, nan = _pymath.pi, _pymath.e, _np.euler_gamma, _pymath.inf, _pymath.nan
newaxis = None

nonzero, flatnonzero = _dynamic_shape("nonzero"), _dynamic_shape("flatnonzero")
argwhere, extract = _dynamic_shape("argwhere"), _dynamic_shape("extract")
unique, compress = _dynamic_shape("unique"), _dynamic_shape("compress")


def broadcast_shapes(*shapes: Shape) -> Shape:
    """NumPy's broadcast of shapes."""
    return _broadcast_shapes("broadcast_shapes", *shapes)
