"""Products against NumPy: matmul, einsum, tensordot, norms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import vkjit.numpy as jnp
from vkjit.errors import ArgumentError, ShapeError

RNG = np.random.default_rng(1)


def whole(*shape: int) -> np.ndarray:
    """Small integers as floats, so that products are exact."""
    return RNG.integers(-4, 5, shape).astype(np.float32)


MATMUL = [
    ((3,), (3,)),
    ((3,), (3, 4)),
    ((2, 3), (3,)),
    ((2, 3), (3, 4)),
    ((5, 2, 3), (3, 4)),
    ((3,), (5, 3, 4)),
    ((5, 2, 3), (3,)),
    ((2, 3), (5, 3, 4)),
    ((5, 2, 3), (5, 3, 4)),
    ((5, 1, 2, 3), (4, 3, 2)),
    ((1, 2, 3), (5, 3, 4)),
    ((2, 0), (0, 3)),
    ((6, 2, 2, 3), (6, 1, 3, 2)),
]


@pytest.mark.parametrize(("left", "right"), MATMUL)
def test_matmul(left: Any, right: Any, run: Any, same: Any) -> None:
    x, y = whole(*left), whole(*right)
    same(run(jnp.matmul, jnp.asarray(x), jnp.asarray(y)), np.matmul(x, y), rtol=0)
    same(run(lambda a, b: a @ b, jnp.asarray(x), jnp.asarray(y)), np.matmul(x, y), rtol=0)


EINSUM = [
    ("ij,jk->ik", (2, 3), (3, 4)),
    ("ij,jk", (2, 3), (3, 4)),
    ("bij,bjk->bik", (5, 2, 3), (5, 3, 4)),
    ("bthd,bshd->bhts", (2, 3, 4, 5), (2, 6, 4, 5)),
    ("i,j->ij", (3,), (4,)),
    ("ij->ji", (2, 3)),
    ("ij->", (2, 3)),
    ("ii", (3, 3)),
    ("ii->i", (3, 3)),
    ("iij->j", (3, 3, 2)),
    ("iii->i", (3, 3, 3)),
    ("...ij,...jk->...ik", (5, 2, 3), (4, 5, 3, 2)),
    ("...i->...", (2, 3, 4)),
    ("i...,i...", (3, 2), (3, 2)),
    ("ij,ij->", (2, 3), (2, 3)),
    ("ij,ik->ijk", (2, 3), (2, 4)),
    ("ab,bc,cd->ad", (2, 3), (3, 4), (4, 5)),
    ("ab,cd,bc->ad", (2, 3), (4, 5), (3, 4)),
    ("i,i,i->i", (3,), (3,), (3,)),
    ("ij,jk->i", (2, 3), (3, 4)),
    ("...ij,...j->...i", (2, 1, 3, 3), (2, 4, 3)),
    ("bij,jk->bik", (1, 2, 3), (3, 4)),
    ("ba->ab", (2, 3)),
    (",ij->ij", (), (2, 3)),
    ("ij,j->ij", (2, 1), (3,)),
    ("abc,bc->a...", (2, 3, 4), (3, 4)),
]


@pytest.mark.parametrize("case", EINSUM, ids=lambda c: c[0])
def test_einsum(case: Any, run: Any, same: Any) -> None:
    text, *shapes = case
    operands = [whole(*shape) for shape in shapes]
    want = np.einsum(text, *operands)
    same(run(lambda *v: jnp.einsum(text, *v), *map(jnp.asarray, operands)), want, rtol=0)


PRODUCTS: dict[str, Any] = {
    "dot": lambda n, x, y: n.dot(x, n.swapaxes(y, 0, 1)),
    "dot of vectors": lambda n, x, y: n.dot(x[0, 0], y[:, 0, 0]),
    "dot with a scalar": lambda n, x, y: n.dot(x, 2),
    "vdot": lambda n, x, y: n.vdot(x, x + 1),
    "inner": lambda n, x, y: n.inner(x, x[0]),
    "outer": lambda n, x, y: n.outer(x[0], y[0]),
    "tensordot": lambda n, x, y: n.tensordot(x, y, 1),
    "tensordot axes": lambda n, x, y: n.tensordot(x, y, ((2, 0), (0, 1))),
    "tensordot none": lambda n, x, y: n.tensordot(x[0], y[0], 0),
    "kron": lambda n, x, y: n.kron(x[0], y[0, 0]),
    "cross": lambda n, x, y: n.cross(x[..., :3], x[..., 1:]),
    "vecdot": lambda n, x, y: n.vecdot(x, x[0]),
    "norm": lambda n, x, y: n.linalg.norm(x),
    "norm axis": lambda n, x, y: n.linalg.norm(x, axis=1, keepdims=True),
    "norm 1": lambda n, x, y: n.linalg.norm(x, 1, axis=-1),
    "norm inf": lambda n, x, y: n.linalg.norm(x, np.inf, axis=-1),
    "norm 0": lambda n, x, y: n.linalg.norm(x, 0, axis=0),
    "norm 3": lambda n, x, y: n.linalg.norm(x, 3, axis=0),
    "norm frobenius": lambda n, x, y: n.linalg.norm(x, "fro", axis=(0, 2)),
    "diff": lambda n, x, y: n.diff(x, 2),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str, run: Any, same: Any) -> None:
    x, y = whole(2, 3, 4), whole(4, 2, 5)
    got = run(lambda a, b: PRODUCTS[name](jnp, a, b), jnp.asarray(x), jnp.asarray(y))
    same(got, PRODUCTS[name](np, x, y))


def test_half_floats_accumulate_in_f32_and_integers_wrap(run: Any, same: Any) -> None:
    x = np.full((1, 4096), 0.1, np.float16)
    want = np.array([[4096 * float(np.float16(0.1))]], np.float16)
    same(run(lambda a: a @ jnp.ones((4096, 1), "float16"), jnp.asarray(x)), want)
    wide = run(lambda a: jnp.matmul(a, a.T, preferred_element_type="float32"), jnp.asarray(x))
    assert wide.dtype == np.float32
    bytes_ = np.full((2, 3), 100, np.int8)
    same(run(lambda a: a @ a.T, jnp.asarray(bytes_)), bytes_ @ bytes_.T)
    flags = np.array([[True, False], [False, False]])
    same(run(lambda a: a @ a, jnp.asarray(flags)), flags @ flags)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: jnp.matmul(whole(2, 3), whole(2, 3)),
            ShapeError,
            r"f32\[2,3\] and f32\[2,3\]",
        ),
        (lambda: jnp.matmul(whole(2, 3), 1.0), ShapeError, r"use \*"),
        (lambda: jnp.matmul(whole(2, 1, 3), whole(3, 3, 1)), ShapeError, "cannot be broadcast"),
        (lambda: jnp.dot(whole(3), whole(4)), ShapeError, "summed sizes 3 and 4"),
        (lambda: jnp.tensordot(whole(3), whole(3), 2), ArgumentError, "2 axes of operands"),
        (lambda: jnp.einsum("ij,jk->ik", whole(2, 3)), ArgumentError, "names 2 operands, given 1"),
        (lambda: jnp.einsum("ij->k", whole(2, 3)), ArgumentError, "result 'k'"),
        (lambda: jnp.einsum("i->i", whole(2, 3)), ShapeError, "1 letters for an operand with 2"),
        (lambda: jnp.einsum("ij,jk", whole(2, 3), whole(4, 2)), ShapeError, "'j' .* is 3 and 4"),
        (lambda: jnp.einsum("i1->i", whole(2, 3)), ArgumentError, "expected letters"),
        (lambda: jnp.linalg.norm(whole(2, 3), "nuc"), ArgumentError, "expected None, 'fro'"),
    ],
)
def test_operands_that_do_not_fit_are_named(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()
