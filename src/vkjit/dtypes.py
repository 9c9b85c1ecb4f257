"""Array dtypes: short names, classes, JAX's promotion lattice and the 32-bit rule.

A dtype is a ``numpy.dtype``; bfloat16 comes from ``ml_dtypes``. Python scalars have *weak* types:
they take part in promotion as the nodes ``int*`` and ``float*`` of the lattice and do not widen an
array of their own kind. Source: JAX's "Type promotion semantics".
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from functools import cache
from typing import Any, cast

import ml_dtypes
import numpy as np

from vkjit.blocks import BLOCK_TYPES, block_of
from vkjit.errors import DTypeError

DType = np.dtype[Any]

bool_ = np.dtype(np.bool_)
int8, int16 = np.dtype(np.int8), np.dtype(np.int16)
int32, int64 = np.dtype(np.int32), np.dtype(np.int64)
uint8, uint16 = np.dtype(np.uint8), np.dtype(np.uint16)
uint32, uint64 = np.dtype(np.uint32), np.dtype(np.uint64)
bfloat16, float16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
float32, float64 = np.dtype(np.float32), np.dtype(np.float64)

SHORT: dict[DType, str] = {
    bool_: "bool",
    int8: "i8",
    int16: "i16",
    int32: "i32",
    int64: "i64",
    uint8: "u8",
    uint16: "u16",
    uint32: "u32",
    uint64: "u64",
    bfloat16: "bf16",
    float16: "f16",
    float32: "f32",
    float64: "f64",
}
BY_SHORT = {name: dtype for dtype, name in SHORT.items()}
NAMED = BY_SHORT | {block.short: block.dtype for block in BLOCK_TYPES.values()}
"""All dtypes of arrays by the names that ``short`` gives."""

_FLOATS = frozenset({bfloat16, float16, float32, float64})
_SIGNED = frozenset({int8, int16, int32, int64})
_UNSIGNED = frozenset({uint8, uint16, uint32, uint64})
_NARROWED = {int64: int32, uint64: uint32, float64: float32}
_CANONICAL: dict[DType, DType] = {d: _NARROWED.get(d, d) for d in SHORT}
_state = threading.local()


def short(dtype: DType) -> str:
    """The name of a dtype in printed programs: ``f32``, ``q4_k``."""
    block = block_of(dtype)
    return block.short if block is not None else SHORT[dtype]


def is_float(dtype: DType) -> bool:
    """Whether ``dtype`` is a floating-point type."""
    return dtype in _FLOATS


def is_int(dtype: DType) -> bool:
    """Whether ``dtype`` is a signed or unsigned integer type."""
    return dtype in _SIGNED or dtype in _UNSIGNED


def is_signed(dtype: DType) -> bool:
    """Whether ``dtype`` is a signed integer type."""
    return dtype in _SIGNED


def x64_enabled() -> bool:
    """Whether 64-bit dtypes are kept in this thread."""
    return getattr(_state, "x64", False)


@contextlib.contextmanager
def enable_x64() -> Generator[None]:
    """Keeps 64-bit dtypes inside the block; elsewhere they narrow to 32 bits, as in JAX."""
    before = x64_enabled()
    _state.x64 = True
    try:
        yield
    finally:
        _state.x64 = before


def canonical(dtype: object) -> DType:
    """The supported dtype for a dtype, scalar type or name; 64-bit narrows unless enabled.

    Raises:
        DTypeError: the argument names no supported dtype.
    """
    if isinstance(dtype, np.dtype) and not x64_enabled():
        known = _CANONICAL.get(cast("DType", dtype))
        if known is not None:
            return known
    try:
        found: DType = np.dtype(dtype)  # type: ignore[call-overload]
    except TypeError as error:
        raise DTypeError(f"dtype: {dtype!r} is not a dtype; expected one of {names()}") from error
    block = block_of(found)
    if block is not None:
        raise DTypeError(
            f"dtype: {block} is a block type, which numbers cannot be converted to; expected one "
            f"of {names()}; use quant.quantize and quant.dequantize"
        )
    if found not in SHORT:
        raise DTypeError(f"dtype: {found} is not supported; expected one of {names()}")
    return found if x64_enabled() else _NARROWED.get(found, found)


def of_array(dtype: object) -> DType:
    """The dtype of the array that holds values of ``dtype``: a number dtype, or that of blocks.

    Raises:
        DTypeError: arrays cannot hold such values.
    """
    if isinstance(dtype, np.dtype):
        given = cast("DType", dtype)
        return given if block_of(given) is not None else canonical(given)
    return canonical(dtype)


def names() -> str:
    """The names of all supported dtypes, for messages."""
    return ", ".join(d.name for d in SHORT)


def default_int() -> DType:
    """The dtype of a Python integer."""
    return int64 if x64_enabled() else int32


def default_float() -> DType:
    """The dtype of a Python float."""
    return float64 if x64_enabled() else float32


_WEAK_INT, _WEAK_FLOAT = "int*", "float*"
_Node = DType | str
_ABOVE: dict[_Node, tuple[_Node, ...]] = {
    bool_: (_WEAK_INT,),
    _WEAK_INT: (uint8, int8),
    uint8: (int16, uint16),
    uint16: (int32, uint32),
    uint32: (int64, uint64),
    uint64: (_WEAK_FLOAT,),
    int8: (int16,),
    int16: (int32,),
    int32: (int64,),
    int64: (_WEAK_FLOAT,),
    _WEAK_FLOAT: (bfloat16, float16),
    bfloat16: (float32,),
    float16: (float32,),
    float32: (float64,),
    float64: (),
}


@cache
def _upper_bounds(node: _Node) -> frozenset[_Node]:
    found, todo = {node}, [node]
    while todo:
        for above in _ABOVE[todo.pop()]:
            if above not in found:
                found.add(above)
                todo.append(above)
    return frozenset(found)


@cache
def _join(a: _Node, b: _Node) -> _Node:
    """The least upper bound of two lattice nodes."""
    common = _upper_bounds(a) & _upper_bounds(b)
    return next(n for n in common if common <= _upper_bounds(n))


def _node(dtype: DType, weak: bool) -> _Node:  # noqa: FBT001  a pair that mirrors Aval
    if not weak or dtype == bool_:
        return dtype
    return _WEAK_FLOAT if is_float(dtype) else _WEAK_INT


def promote(*operands: tuple[DType, bool]) -> tuple[DType, bool]:
    """Result dtype and weakness of ``(dtype, weak)`` operands, after narrowing to 32 bits."""
    node = _node(*operands[0])
    for operand in operands[1:]:
        node = _join(node, _node(*operand))
    if isinstance(node, str):
        return (default_float() if node == _WEAK_FLOAT else default_int()), True
    if not x64_enabled() and not any(d in _NARROWED for d, weak in operands if not weak):
        node = _NARROWED.get(node, node)
    return node, all(weak for _, weak in operands)


def promote_types(a: object, b: object) -> DType:
    """The dtype that holds both, by JAX's lattice."""
    return promote((canonical(a), False), (canonical(b), False))[0]
