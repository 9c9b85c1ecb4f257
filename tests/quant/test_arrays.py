"""QuantizedArray as an object: bytes in, blocks out, indexing, trees, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vkjit as vj
from tests.quantized import GOLDEN, golden_blocks
from vkjit import blocks, lax, quant, tree
from vkjit import numpy as jnp
from vkjit.blocks import BLOCK_TYPES
from vkjit.errors import ArgumentError, DTypeError, ShapeError


def golden(name: str = "Q4_K") -> quant.QuantizedArray:
    raw, _ = golden_blocks(BLOCK_TYPES[name])
    return quant.from_bytes(raw.tobytes(), name, (len(raw), 512))


# -- quantize -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0"])
def test_devices_quantize_to_ggmls_bytes(device: str, name: str) -> None:
    raw, _ = golden_blocks(BLOCK_TYPES[name])
    block = BLOCK_TYPES[name]
    rng = np.random.default_rng(0)
    hard = rng.normal(size=(4, 64)).astype("f4")
    hard[0, :32] = 0  # a block of zeros
    hard[1, :32] = 1e-6 * np.arange(32)  # a scale that float16 holds as a subnormal number
    hard[2] = np.tile(np.linspace(-127, 127, 32, dtype="f4").round() + 0.5, 2)  # ties
    hard[3, 3], hard[3, 7] = -3, 3  # which of two extremes gives the sign of the scale
    with vj.default_device(device):
        made, more = vj.jit(lambda *xs: [quant.quantize(x, name) for x in xs])(
            GOLDEN["source"], hard
        )
    assert np.asarray(made.blocks).tobytes() == raw.tobytes()
    assert np.asarray(more.blocks).tobytes() == blocks.encode(block, hard).tobytes()


@pytest.mark.parametrize("name", ["Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
def test_the_host_quantizes_the_other_types(name: str) -> None:
    raw, _ = golden_blocks(BLOCK_TYPES[name])
    made = quant.quantize(GOLDEN["source"], name.lower())
    assert np.asarray(made.blocks).tobytes() == raw.tobytes()
    with pytest.raises(DTypeError, match=r"quantize: traced operand .* as q"):
        vj.jit(lambda x: quant.quantize(x, name))(GOLDEN["source"])


def test_quantized_numbers_come_back_within_half_a_step() -> None:
    x = np.random.default_rng(1).normal(size=(5, 96)).astype("f4")
    made = np.asarray(vj.jit(lambda x: quant.dequantize(quant.quantize(x, "q8_0")))(x))
    step = np.abs(x.reshape(5, 3, 32)).max(-1, keepdims=True) / 127
    assert (np.abs(made - x).reshape(5, 3, 32) <= 0.51 * step + 2e-4).all()


# -- the object -----------------------------------------------------------------------------------


def test_shape_counts_numbers_and_bytes_count_blocks() -> None:
    w = golden("Q6_K")
    assert (w.shape, w.ndim, w.size, len(w)) == ((3, 512), 2, 1536, 3)
    assert (w.dtype, w.block_type, w.nbytes) == (blocks.Q6_K.dtype, blocks.Q6_K, 3 * 2 * 210)
    assert repr(w) == "QuantizedArray(Q6_K, shape=(3, 512))"
    assert w.T.shape == (512, 3)
    np.testing.assert_array_equal(np.asarray(w.T), np.asarray(w).T)


def test_it_is_a_tree_of_its_blocks() -> None:
    w = golden().T
    leaves, structure = tree.flatten({"w": w})
    assert [leaf.shape for leaf in leaves] == [(3, 2)]
    again = tree.unflatten(structure, leaves)["w"]
    assert (again.shape, again.block_type) == (w.shape, w.block_type)
    shapes = vj.eval_shape(lambda w: w, golden())
    assert shapes.blocks.shape == (3, 2)
    assert shapes.blocks.dtype == blocks.Q4_K.dtype


@given(st.integers(-3, 2), st.slices(3))
def test_leading_axes_are_indexed(row: int, rows: slice) -> None:
    w = golden("Q5_0")
    values = np.asarray(w)
    np.testing.assert_array_equal(np.asarray(w[row]), values[row])
    np.testing.assert_array_equal(np.asarray(w[rows]), values[rows])
    np.testing.assert_array_equal(np.asarray(w[rows, :]), values[rows, :])


@pytest.mark.parametrize("on_device", [False, True])
def test_compiled_functions_index_what_they_close_over(on_device: bool) -> None:  # noqa: FBT001
    w = golden("Q8_0")
    values = np.asarray(w)
    held = vj.device_put(w) if on_device else w
    numbers = vj.jit(lambda i: held[i].dequantize())(np.array([2, 0], np.int32))
    np.testing.assert_array_equal(numbers, values[[2, 0]])


def test_on_a_device_it_stays_in_blocks() -> None:
    w = golden("Q6_K")
    placed = vj.device_put({"w": w, "x": 1.0})["w"]
    assert isinstance(placed, quant.QuantizedArray)
    assert isinstance(placed.blocks, vj.Array)
    assert placed.nbytes == w.nbytes
    np.testing.assert_array_equal(np.asarray(placed), np.asarray(w))


def test_numpy_leaves_products_to_it() -> None:
    w = golden("Q8_0")
    product = np.ones((2, 512), np.float32) @ w.T
    assert isinstance(product, vj.Array)
    np.testing.assert_allclose(product, np.asarray(w).sum(-1)[None].repeat(2, 0), atol=1e-4)


def test_eager_functions_read_it() -> None:
    w, values = golden("Q5_K"), np.asarray(golden("Q5_K"))
    np.testing.assert_array_equal(jnp.take(w, np.array([2, 0]), axis=0), values[[2, 0]])
    np.testing.assert_array_equal(jnp.exp(w), jnp.exp(values))
    np.testing.assert_array_equal(jnp.asarray(w), values)
    x = np.ones((2, 512), "f4")
    numbers = (((1,), (1,)), ((), ()))
    np.testing.assert_allclose(lax.dot_general(x, w, numbers), x @ values.T, rtol=1e-5, atol=1e-4)


def as_given(x: Any) -> Any:
    return x


@pytest.mark.parametrize("where", [as_given, vj.device_put])
def test_arrays_of_blocks_stay_blocks(where: Callable[[Any], Any]) -> None:
    held, row = golden().blocks, golden().blocks[:1]
    kind = blocks.Q4_K.dtype
    wanted = np.asarray(held)
    for made in (jnp.asarray(where(held)), jnp.array(where(held), kind)):
        assert np.asarray(made).tobytes() == wanted.tobytes()
        assert made.dtype == kind
    stacked = jnp.asarray([where(row), where(row)])
    assert stacked.shape == (2, 1, 2)
    assert np.asarray(stacked)[1].tobytes() == np.asarray(row).tobytes()
    assert np.asarray(jnp.asarray(where(held)[2, 1])).tobytes() == wanted[2, 1].tobytes()


def test_a_shape_and_dtype_stand_for_blocks() -> None:
    given = vj.ShapeDtypeStruct((3, 2), blocks.Q4_K.dtype)
    made = vj.eval_shape(quant.dequantize, given)
    assert (made.shape, made.dtype) == ((3, 512), jnp.float32)
    assert quant.QuantizedArray(given).nbytes == golden().nbytes
    assert "q4_k[3,2]" in vj.jit(quant.dequantize).lower(given).as_text()


# -- what is refused ------------------------------------------------------------------------------

ARITHMETIC: dict[str, Callable[[Any], Any]] = {
    "add": lambda x: x + 1,
    "mul": lambda x: x * x,
    "reduce_sum": jnp.sum,
    "exp": jnp.exp,
    "eq": lambda x: x == x,
    "select": lambda x: jnp.where(True, x, x),
    "cast": lambda x: x.astype("float32"),
    "dot_general": lambda x: jnp.matmul(x, x.T),
    "cumsum": jnp.cumsum,
    "argsort": jnp.sort,
    "pad": lambda x: jnp.pad(x, 1),
    "array": lambda x: jnp.asarray(x, jnp.float32),
    "isnan": jnp.isnan,
    "any": jnp.any,
    "at.set": lambda x: x.at[0].set(x[1]),
}


@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize("compiled", [False, True])
def test_nothing_computes_with_blocks(name: str, compiled: bool) -> None:  # noqa: FBT001
    fn = ARITHMETIC[name]
    held = vj.device_put(golden().blocks)
    with pytest.raises(DTypeError, match=r"q4_k\[3,2\]|q4_k\[6\]|q4_k is|q4_k, ") as caught:
        (vj.jit(fn) if compiled else fn)(held)
    assert "quantize" in str(caught.value)


def test_blocks_of_numpy_are_not_cast() -> None:
    with pytest.raises(DTypeError, match=r"array: operands q4_k\[3,2\]; .*quant.dequantize"):
        jnp.asarray(np.asarray(golden().blocks), "float32")


def test_blocks_have_no_gradient() -> None:
    with pytest.raises(DTypeError, match=r"q4_k\[3,2\], expected a float"):
        vj.grad(lambda w: jnp.sum(w.dequantize()))(golden())


REFUSED: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "bytes missing": (
        ArgumentError,
        "from_bytes: 287 bytes for q4_k of shape .*; expected 288",
        lambda: quant.from_bytes(bytes(287), "q4_k", (1, 512)),
    ),
    "rows": (ShapeError, "multiple of 256", lambda: quant.from_bytes(b"", "Q4_K", (1, 100))),
    "type": (DTypeError, "'q3_x' is not a block", lambda: quant.from_bytes(b"", "q3_x", (1, 32))),
    "numbers": (DTypeError, "expected an array of blocks", lambda: quant.dequantize(np.ones(3))),
    "dtype": (DTypeError, "expected float32", lambda: golden().dequantize("int32")),
    "last axis": (ArgumentError, "dequantize", lambda: golden()[0, 3]),
    "reshape": (ShapeError, "last axis of 512", lambda: golden().reshape(3, 2, 256)),
    "transpose": (ShapeError, "use mT", lambda: golden().reshape(1, 3, 512).T),
    "mapped transpose": (ShapeError, "as they lie", lambda: vj.vmap(quant.dequantize)(golden().T)),
    "integers": (DTypeError, "expected floats", lambda: quant.quantize(np.arange(32), "q8_0")),
    "short rows": (ShapeError, "multiple of 32", lambda: quant.quantize(np.ones(33, "f4"), "q8_0")),
    "asked dtype": (DTypeError, "block type", lambda: jnp.zeros(3, blocks.Q8_0.dtype)),
    "fill": (
        DTypeError,
        "no value for places outside",
        lambda: jnp.take(golden().blocks, jnp.int32([9]), axis=0),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_operands_are_refused_in_words(case: str) -> None:
    kind, message, act = REFUSED[case]
    with pytest.raises(kind, match=message):
        act()
