"""Precision of float32 products: names, the setting of a block, what transformations keep."""

from __future__ import annotations

import enum
import threading

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from vkjit import lax
from vkjit.errors import ArgumentError
from vkjit.lowering.kernel.specs import Precision
from vkjit.ops.contract import DotGeneral

X = np.random.default_rng(0).standard_normal((33, 47)).astype(np.float32)
Y = np.random.default_rng(1).standard_normal((47, 29)).astype(np.float32)


def precisions(function, *args) -> list[Precision]:
    program = vj.make_ir(function)(*args)
    return [e.prim.precision for e in program.eqns if isinstance(e.prim, DotGeneral)]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (None, Precision.HIGHEST),
        ("highest", Precision.HIGHEST),
        ("float32", Precision.HIGHEST),
        ("high", Precision.HIGH),
        ("HIGH", Precision.HIGH),
        ("BF16_BF16_F32_X3", Precision.HIGH),
        ("bfloat16", Precision.BFLOAT16),
        ("F16_F16_F32_X3", Precision.F16X3),
        (("high", "high"), Precision.HIGH),
    ],
)
def test_names(name, wanted):
    products = (
        lambda x, y: jnp.matmul(x, y, precision=name),
        lambda x, y: jnp.dot(x, y, precision=name),
        lambda x, y: jnp.einsum("ij,jk->ik", x, y, precision=name),
        lambda x, y: jnp.tensordot(x, y, 1, precision=name),
        lambda x, y: lax.dot_general(x, y, (((1,), (0,)), ((), ())), precision=name),
    )
    for product in products:
        assert precisions(product, X, Y) == [wanted]


def test_members_of_an_enum_count_by_name():
    peer = enum.Enum("Precision", ["DEFAULT", "HIGH", "HIGHEST"])
    assert precisions(lambda x, y: jnp.matmul(x, y, precision=peer.HIGH), X, Y) == [Precision.HIGH]


def test_a_block_sets_it_for_its_thread():
    seen = []
    with vj.default_matmul_precision("bfloat16"):
        thread = threading.Thread(target=lambda: seen.extend(precisions(jnp.matmul, X, Y)))
        thread.start()
        thread.join()
        assert precisions(jnp.matmul, X, Y) == [Precision.BFLOAT16]
        assert precisions(lambda x, y: jnp.matmul(x, y, precision="highest"), X, Y) == [
            Precision.HIGHEST
        ]
    assert seen == precisions(jnp.matmul, X, Y) == [Precision.HIGHEST]


def test_a_jitted_function_is_traced_again_under_another_setting():
    product = vj.jit(jnp.matmul)
    assert "precision=" not in product.lower(X, Y).as_text()
    with vj.default_matmul_precision("high"):
        assert "precision='high'" in product.lower(X, Y).as_text()
    assert "precision='high'" not in product.lower(X, Y).as_text()


def test_transposed_and_batched_products_keep_it():
    def loss(x, y):
        return jnp.sum(jnp.matmul(x, y, precision="high") ** 2)

    assert set(precisions(vj.grad(loss, argnums=(0, 1)), X, Y)) == {Precision.HIGH}
    batched = vj.vmap(lambda x: jnp.matmul(x, Y, precision="high"))
    assert precisions(batched, np.stack([X, X])) == [Precision.HIGH]


def test_other_types_are_multiplied_as_they_are():
    half = [v.astype(np.float16) for v in (X, Y)]
    assert precisions(lambda x, y: jnp.matmul(x, y, precision="bfloat16"), *half) == [
        Precision.HIGHEST
    ]


@pytest.mark.parametrize(
    ("name", "error"),
    [("highest", 2e-6), ("F16_F16_F32_X3", 4e-6), ("high", 6e-5), ("bfloat16", 8e-3)],
)
def test_errors_stay_below_what_the_name_says(device: str, name: str, error: float):
    wide = X.astype(np.float64) @ Y
    terms = np.abs(X).astype(np.float64) @ np.abs(Y)
    with vj.default_device(device):
        got = vj.jit(lambda x, y: jnp.matmul(x, y, precision=name))(X, Y)
    assert np.max(np.abs(np.asarray(got) - wide) / terms) <= error


@pytest.mark.parametrize("name", ["hihgest", 3.5, ("high", "highest")])
def test_unknown_names_are_refused(name):
    with pytest.raises(ArgumentError, match="precision"):
        jnp.matmul(X, Y, precision=name)
