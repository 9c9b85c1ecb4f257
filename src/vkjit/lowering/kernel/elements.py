"""The kernel type of each dtype: signs are the operations' business, booleans are ``i1``."""

from __future__ import annotations

from vkjit import dtypes
from vkjit.dtypes import DType
from vkjit.lowering.kernel.types import BF16, F16, F32, F64, I1, I8, I16, I32, I64, ScalarType

_SCALARS: dict[DType, ScalarType] = {
    dtypes.bool_: I1,
    dtypes.int8: I8,
    dtypes.uint8: I8,
    dtypes.int16: I16,
    dtypes.uint16: I16,
    dtypes.int32: I32,
    dtypes.uint32: I32,
    dtypes.int64: I64,
    dtypes.uint64: I64,
    dtypes.float16: F16,
    dtypes.bfloat16: BF16,
    dtypes.float32: F32,
    dtypes.float64: F64,
}


def scalar_type(dtype: DType) -> ScalarType:
    """The kernel type of a value of ``dtype``; in memory booleans are bytes."""
    return _SCALARS[dtype]


def memory_type(elem: ScalarType) -> ScalarType:
    """How an element lies in memory: booleans as bytes."""
    return I8 if elem is I1 else elem
