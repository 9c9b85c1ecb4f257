"""Dtypes of results against JAX's, from tests/data/promotion.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vkjit.device_array  # noqa: F401  installs device arrays and tracers with operators
import vkjit.numpy as jnp
from vkjit.trace import aval_of, trace

TABLE: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "promotion.json").read_text("utf-8")
)
OPERANDS: list[str] = TABLE["operands"]
SCALARS = {"int*": 1, "float*": 1.0, "bool*": True}


def operand(name: str) -> Any:
    return SCALARS[name] if name in SCALARS else np.ones(2, jnp.zeros((), name).dtype)


def result(name: str, *operands: str) -> str:
    try:
        staged = trace(lambda: [getattr(jnp, name)(*map(operand, operands))], [])
    except (TypeError, ValueError):
        return "error"
    return staged.program.out_avals[0].dtype.name


@pytest.mark.parametrize("name", TABLE["binary"])
def test_binary_functions_promote_as_jax(name: str) -> None:
    got = [" ".join(result(name, a, b) for b in OPERANDS) for a in OPERANDS]
    assert got == TABLE["binary"][name]


@pytest.mark.parametrize("name", TABLE["unary"])
def test_unary_functions_give_dtypes_of_jax(name: str) -> None:
    arrays = [a for a in OPERANDS if a not in SCALARS]
    assert " ".join(result(name, a) for a in arrays) == TABLE["unary"][name]


def test_python_scalars_stay_weak_through_operations() -> None:
    staged = trace(lambda: [jnp.exp(1.0) * 2, jnp.full((2,), 1.0) + 1, jnp.asarray(2) + 1], [])
    assert [str(a) for a in staged.program.out_avals] == ["f32[]*", "f32[2]*", "i32[]*"]


def test_integers_wrap_into_a_narrow_array() -> None:
    assert int(np.asarray(jnp.add(np.uint8(3), 300))) == 47
    assert int(np.asarray(jnp.add(np.uint8(3), -1))) == 2


def test_scalar_types_are_dtypes_and_make_arrays() -> None:
    assert np.zeros(1, jnp.bfloat16).dtype == jnp.bfloat16
    assert jnp.float32 == np.float32
    assert jnp.asarray(3, jnp.int8).dtype == jnp.int8
    assert aval_of(jnp.uint8(7)).dtype.name == "uint8"
    assert len({jnp.float32, np.dtype("float32")}) == 1


def test_dtype_questions() -> None:
    assert jnp.issubdtype(jnp.bfloat16, jnp.floating)
    assert jnp.issubdtype(np.uint8, jnp.unsignedinteger)
    assert jnp.issubdtype(np.integer, jnp.number)
    assert not jnp.issubdtype(jnp.bool_, jnp.integer)
    assert jnp.isdtype(jnp.float16, "real floating")
    assert jnp.isdtype(jnp.int8, ("bool", "integral"))
    assert jnp.result_type(np.float16, 1.0) == jnp.float16
    assert jnp.result_type(np.int32, 1.0) == jnp.float32
    assert jnp.promote_types("float16", "bfloat16") == jnp.float32
    assert jnp.finfo(jnp.bfloat16).nmant == 7
    assert jnp.iinfo(jnp.int16).max == 32767
    with pytest.raises(TypeError, match="use iinfo"):
        jnp.finfo(jnp.int32)
