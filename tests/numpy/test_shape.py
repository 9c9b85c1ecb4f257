"""Creation and shape functions against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import vkjit.numpy as jnp
from vkjit.errors import ArgumentError, DTypeError, ShapeError, TracerError

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
M = np.arange(12, dtype=np.int32).reshape(3, 4)
V = np.array([3, 1, 2], np.float32)

# The same lambda runs on NumPy and on vkjit; n is the module.
CALLS: dict[str, Any] = {
    "reshape": lambda n, x: n.reshape(x, (4, -1)),
    "ravel": lambda n, x: n.ravel(x),
    "transpose": lambda n, x: n.transpose(x),
    "transpose axes": lambda n, x: n.transpose(x, (1, -1, 0)),
    "matrix_transpose": lambda n, x: n.matrix_transpose(x),
    "swapaxes": lambda n, x: n.swapaxes(x, 0, -1),
    "moveaxis": lambda n, x: n.moveaxis(x, (0, 1), (-1, 0)),
    "expand_dims": lambda n, x: n.expand_dims(x, (0, -2)),
    "squeeze": lambda n, x: n.squeeze(n.expand_dims(x, (0, 2))),
    "squeeze axis": lambda n, x: n.squeeze(n.expand_dims(x, (0, 2)), -3),
    "broadcast_to": lambda n, x: n.broadcast_to(x[:, :1], (5, 2, 3, 4)),
    "concatenate": lambda n, x: n.concatenate([x, x * 2, x[:, :0]], 1),
    "concatenate flat": lambda n, x: n.concatenate([x, x[0]], None),
    "stack": lambda n, x: n.stack([x, x + 1], -1),
    "vstack": lambda n, x: n.vstack([x[0, 0], x[0]]),
    "hstack": lambda n, x: n.hstack([x, x]),
    "hstack vectors": lambda n, x: n.hstack([x[0, 0], x[0, 0]]),
    "dstack": lambda n, x: n.dstack([x[0], x[1]]),
    "column_stack": lambda n, x: n.column_stack([x[0, :, 0], x[1]]),
    "split": lambda n, x: n.split(x, 2, -1),
    "split at": lambda n, x: n.split(x, [1, 3, 9], 2),
    "array_split": lambda n, x: n.array_split(x, 3, 2),
    "tile": lambda n, x: n.tile(x, (2, 1, 3)),
    "tile more axes": lambda n, x: n.tile(x[0, 0], (2, 2)),
    "repeat": lambda n, x: n.repeat(x, 3, 1),
    "repeat flat": lambda n, x: n.repeat(x, 2),
    "repeat counts": lambda n, x: n.repeat(x, [2, 0, 1], 1),
    "roll": lambda n, x: n.roll(x, 5),
    "roll axes": lambda n, x: n.roll(x, (1, -2), (0, 2)),
    "flip": lambda n, x: n.flip(x),
    "flip axis": lambda n, x: n.flip(x, (0, -1)),
    "fliplr": lambda n, x: n.fliplr(x),
    "flipud": lambda n, x: n.flipud(x),
    "rot90": lambda n, x: n.rot90(x, 3, (0, 2)),
    "rot90 twice": lambda n, x: n.rot90(x, 2, (1, 2)),
    "atleast_3d": lambda n, x: n.atleast_3d(x[0]),
    "atleast_2d": lambda n, x: n.atleast_2d(x[0, 0]),
    "diagonal": lambda n, x: n.diagonal(x, 1, 1, 2),
    "diagonal below": lambda n, x: n.diagonal(x, -1, 0, 2),
    "diagonal outside": lambda n, x: n.diagonal(x, 9),
    "trace": lambda n, x: n.trace(x, 0, 2, 1),
    "diag": lambda n, x: n.diag(x[0]),
    "diag of vector": lambda n, x: n.diag(x[0, 0], 2),
    "diag below": lambda n, x: n.diag(x[0, 0], -1),
    "diagflat": lambda n, x: n.diagflat(x[0, :2]),
    "tril": lambda n, x: n.tril(x, 1),
    "triu": lambda n, x: n.triu(x, -1),
    "pad": lambda n, x: n.pad(x, ((1, 0), (0, 2), (3, 3))),
    "pad value": lambda n, x: n.pad(x, 1, constant_values=7),
    "pad values": lambda n, x: n.pad(x[0], 1, constant_values=((1, 2), (3, 4))),
    "pad edge": lambda n, x: n.pad(x, (2, 1), mode="edge"),
    "pad reflect": lambda n, x: n.pad(x[0], (2, 1), mode="reflect"),
    "pad symmetric": lambda n, x: n.pad(x, (1, 2), mode="symmetric"),
    "pad wrap": lambda n, x: n.pad(x, (2, 5), mode="wrap"),
    "take": lambda n, x: n.take(x, np.array([[0, -1], [1, 2]]), 1),
    "take flat": lambda n, x: n.take(x, np.array([23, 0, -3])),
    "take scalar": lambda n, x: n.take(x, 1, 2),
    "take_along_axis": lambda n, x: n.take_along_axis(x, np.array([[[0, -1, 2, 1]]]), 1),
    "meshgrid": lambda n, x: n.meshgrid(x[0, 0], x[0, :, 0], x[:, 0, 0]),
    "meshgrid ij": lambda n, x: n.meshgrid(x[0, 0], x[0, :, 0], indexing="ij", sparse=True),
    "vander": lambda n, x: n.vander(x[0, 0], 3),
    "broadcast_arrays": lambda n, x: n.broadcast_arrays(x, x[0, :, :1]),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_shape_functions(name: str, run: Any, same: Any) -> None:
    want = CALLS[name](np, X)
    want = list(want) if isinstance(want, tuple) else want
    got = run(lambda x: CALLS[name](jnp, x), jnp.asarray(X))
    same(got, want)


CREATED: dict[str, Any] = {
    "zeros": lambda n: n.zeros((2, 3), "int8"),
    "ones": lambda n: n.ones(4, "float16"),
    "full": lambda n: n.full((2, 2), 7, "uint8"),
    "full of a row": lambda n: n.full((2, 3), V),
    "arange": lambda n: n.arange(7, dtype="int32"),
    "arange down": lambda n: n.arange(9, -3, -2, dtype="int32"),
    "arange floats": lambda n: n.arange(0.5, 3, 0.25, dtype="float32"),
    "arange as float": lambda n: n.arange(2, 5, dtype="float32"),
    "arange empty": lambda n: n.arange(5, 2, dtype="int32"),
    "linspace": lambda n: n.linspace(-1, 2, 7, dtype="float32"),
    "linspace open": lambda n: n.linspace(0, 1, 4, endpoint=False, dtype="float32"),
    "linspace one": lambda n: n.linspace(3, 9, 1, dtype="float32"),
    "linspace rows": lambda n: n.linspace(V, V, 3, dtype="float32"),
    "logspace": lambda n: n.logspace(0, 2, 3).astype("float32"),
    "eye": lambda n: n.eye(3, 4, 1, "float32"),
    "identity": lambda n: n.identity(3, "int32"),
    "tri": lambda n: n.tri(3, 4, -1, "float32"),
    "tril_indices": lambda n: [i.astype("int32") for i in n.tril_indices(3, 1, 4)],
    "array": lambda n: n.array([[1, 2], [3, 4]], "float32"),
    "array ndmin": lambda n: n.array([1, 2], "int32", ndmin=3),
    "array of arrays": lambda n: n.array([n.zeros(2, "float32"), n.ones(2, "float32")]),
    "zeros_like": lambda n: n.zeros_like(M),
    "ones_like": lambda n: n.ones_like(M, dtype="float32"),
    "full_like": lambda n: n.full_like(M, 3, shape=(2,)),
}


@pytest.mark.parametrize("name", CREATED)
def test_creation(name: str, run: Any, same: Any) -> None:
    same(run(lambda: CREATED[name](jnp)), CREATED[name](np))


def test_python_data_has_default_dtypes() -> None:
    assert jnp.asarray([1, 2]).dtype == jnp.int32
    assert jnp.asarray([1, 2.5]).dtype == jnp.float32
    assert jnp.asarray([True, False]).dtype == jnp.bool_
    assert jnp.asarray(np.arange(3)).dtype == jnp.int32
    assert jnp.asarray(np.zeros(2)).dtype == jnp.float32
    assert jnp.asarray([]).dtype == jnp.float32
    assert jnp.asarray(2.5).weak_type
    assert not jnp.asarray(np.float32(2.5)).weak_type


def test_sequences_may_hold_traced_values(run: Any, same: Any) -> None:
    out = run(lambda x: jnp.array([[x[0], 1.0], [x[1] * 2, 2]]), jnp.asarray(V))
    same(out, np.array([[3, 1], [2, 2]], np.float32))


def test_take_modes(run: Any, same: Any) -> None:
    far = jnp.asarray([0, 5, -1, -4])
    x = jnp.asarray(V)
    same(run(lambda v: jnp.take(v, far), x), np.array([3, np.nan, 2, np.nan], np.float32))
    same(run(lambda v: jnp.take(v, far, mode="clip"), x), np.array([3, 2, 2, 3], np.float32))
    same(run(lambda v: jnp.take(v, far, mode="wrap"), x), np.array([3, 2, 2, 2], np.float32))
    filled = run(lambda v: jnp.take(v, far, fill_value=-1), x)
    same(filled, np.array([3, -1, 2, -1], np.float32))
    along = run(lambda v: jnp.take_along_axis(v, far, 0), x)
    same(along, np.array([3, np.nan, 2, np.nan], np.float32))
    whole = run(lambda v: jnp.take(v, far), jnp.asarray(V.astype(np.int32)))
    same(whole, np.array([3, -(2**31), 2, -(2**31)], np.int32))


def test_zero_sizes(run: Any, same: Any) -> None:
    x = np.zeros((0, 3), np.float32)
    same(run(lambda v: jnp.reshape(v, (3, -1)), jnp.asarray(x)), np.zeros((3, 0), np.float32))
    same(run(lambda v: jnp.concatenate([v, v + 1]), jnp.asarray(x)), x)
    same(run(lambda v: v.T @ v, jnp.asarray(x)), np.zeros((3, 3), np.float32))


def test_casts_saturate_and_wrap(run: Any, same: Any) -> None:
    x = np.array([np.nan, np.inf, -np.inf, 300.7, -300.7], np.float32)
    same(
        run(lambda v: v.astype("int8"), jnp.asarray(x)),
        np.array([0, 127, -128, 127, -128], np.int8),
    )
    whole = np.array([300, -1], np.int32)
    same(run(lambda v: v.astype(jnp.uint8), jnp.asarray(whole)), np.array([44, 255], np.uint8))
    same(run(lambda v: v.view("uint32"), jnp.asarray(V)), V.view(np.uint32))


def test_a_traced_size_is_refused() -> None:
    def wrong(n: Any) -> Any:
        return jnp.zeros(n)

    from vkjit.trace import aval_of, trace  # noqa: PLC0415  one test needs a bare trace

    with pytest.raises(TracerError, match=r"full: got the traced value i32\[\]"):
        trace(lambda n: [wrong(n)], [aval_of(np.int32(3))])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: jnp.reshape(X, (5, -1)), ShapeError, r"f32\[2,3,4\] with 24 elements"),
        (lambda: jnp.reshape(X, (4, 6), order="F"), ArgumentError, "order 'F'"),
        (lambda: jnp.squeeze(X, 0), ShapeError, "expected sizes of 1"),
        (lambda: jnp.transpose(X, (0, 0, 1)), ShapeError, "name an axis twice"),
        (lambda: jnp.concatenate([X, M]), ShapeError, r"f32\[2,3,4\], f32\[3,4\] along axis 0"),
        (lambda: jnp.concatenate([]), ShapeError, "no arrays"),
        (lambda: jnp.stack([X, X[0]]), ShapeError, "expected one shape"),
        (lambda: jnp.split(X, 3, 0), ShapeError, "use array_split"),
        (lambda: jnp.expand_dims(X, 7), ShapeError, "axis 7 is out of range"),
        (lambda: jnp.sum(X, 3), ShapeError, "axis 3 is out of range for an array with 3 axes"),
        (lambda: jnp.zeros((2, -1)), ShapeError, "negative size"),
        (lambda: jnp.arange(0, 5, 0), ArgumentError, "step 0"),
        (lambda: jnp.asarray("text"), DTypeError, "given str"),
        (lambda: jnp.asarray([[1, 2], [3]]), ShapeError, "different lengths"),
        (lambda: jnp.zeros(3, "complex64"), DTypeError, "not supported"),
        (lambda: jnp.take(X, np.float32(1)), DTypeError, "expected integers"),
        (lambda: jnp.pad(X, -1), ArgumentError, "slice to remove"),
        (lambda: jnp.repeat(X, [1, 2], 2), ShapeError, "expected 4 counts"),
        (lambda: jnp.take_along_axis(X, np.array([0])), ShapeError, "expand_dims"),
    ],
)
def test_wrong_arguments_are_named(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()
