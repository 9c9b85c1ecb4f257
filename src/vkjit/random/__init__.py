"""Random numbers from explicit keys, the same bits as JAX's default generator.

A key is a uint32 array of two words (``PRNGKey``); it is never changed, only split. Bits are
Threefry-2x32 of the key and the row-major position in the result, as in JAX with
``jax_threefry_partitionable``. Integers, bits and uniforms on [0, 1) equal JAX's bit for bit;
distributions that go through logarithms or erf_inv agree up to float rounding.
"""

from __future__ import annotations

from vkjit.random._distributions import (
    bernoulli,
    categorical,
    exponential,
    gumbel,
    laplace,
    logistic,
    normal,
    rademacher,
    truncated_normal,
)
from vkjit.random._integers import (
    PAIRWISE_LIMIT,
    choice,
    permutation,
    randint,
)
from vkjit.random._keys import (
    PRNGKey,
    bits,
    fold_in,
    key,
    key_data,
    split,
    uniform,
)

__all__ = [
    "PAIRWISE_LIMIT",
    "PRNGKey",
    "bernoulli",
    "bits",
    "categorical",
    "choice",
    "exponential",
    "fold_in",
    "gumbel",
    "key",
    "key_data",
    "laplace",
    "logistic",
    "normal",
    "permutation",
    "rademacher",
    "randint",
    "split",
    "truncated_normal",
    "uniform",
]
