"""Dtypes as this package's users write them: callable scalar types, finfo, iinfo, promotion."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from vkjit import dtypes
from vkjit.dtypes import DType
from vkjit.errors import DTypeError
from vkjit.ir.primitive import Value
from vkjit.numpy._core import DTypeLike, is_sequence, limits_of, operand_aval
from vkjit.numpy._creation import array

__all__ = [
    "bfloat16",
    "bool_",
    "can_cast",
    "finfo",
    "float16",
    "float32",
    "float64",
    "float_",
    "floating",
    "generic",
    "iinfo",
    "inexact",
    "int8",
    "int16",
    "int32",
    "int64",
    "int_",
    "integer",
    "isdtype",
    "isscalar",
    "issubdtype",
    "number",
    "promote_types",
    "result_type",
    "signedinteger",
    "uint",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "unsignedinteger",
]


@final
class ScalarType:
    """A dtype that makes arrays when called: ``float32(1)``; usable wherever a dtype is."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype

    def __call__(self, value: Any) -> Value:
        return array(value, self.dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (ScalarType, np.dtype, type, str)) and self.dtype == other

    def __hash__(self) -> int:
        return hash(self.dtype)

    def __repr__(self) -> str:
        return f"vkjit.numpy.{self.dtype.name}"

    @property
    def name(self) -> str:
        """The dtype's name."""
        return self.dtype.name


bool_ = ScalarType(dtypes.bool_)
int8, int16 = ScalarType(dtypes.int8), ScalarType(dtypes.int16)
int32, int64 = ScalarType(dtypes.int32), ScalarType(dtypes.int64)
uint8, uint16 = ScalarType(dtypes.uint8), ScalarType(dtypes.uint16)
uint32, uint64 = ScalarType(dtypes.uint32), ScalarType(dtypes.uint64)
float16, bfloat16 = ScalarType(dtypes.float16), ScalarType(dtypes.bfloat16)
float32, float64 = ScalarType(dtypes.float32), ScalarType(dtypes.float64)
int_, float_, uint = int32, float32, uint32

floating, inexact, number = np.floating, np.inexact, np.number
integer, signedinteger, unsignedinteger = np.integer, np.signedinteger, np.unsignedinteger
generic = np.generic


def _plain(dtype: DTypeLike) -> DType:
    try:
        return np.dtype(dtype)
    except TypeError as error:
        raise DTypeError(f"dtype: {dtype!r} is not a dtype") from error


def finfo(dtype: DTypeLike) -> Any:
    """Limits of a float dtype: min, max, eps, tiny, bits, nmant...

    Raises:
        DTypeError: not a float dtype.
    """
    found = _plain(dtype)
    if not dtypes.is_float(found):
        raise DTypeError(f"finfo: {found.name}, expected a float dtype; use iinfo")
    return limits_of(found)


def iinfo(dtype: DTypeLike) -> Any:
    """Limits of an integer dtype: min, max, bits.

    Raises:
        DTypeError: not an integer dtype.
    """
    found = _plain(dtype)
    if not dtypes.is_int(found):
        raise DTypeError(f"iinfo: {found.name}, expected an integer dtype; use finfo")
    return np.iinfo(found)


_ABSTRACT: tuple[Any, ...] = (
    np.generic,
    np.number,
    np.inexact,
    np.floating,
    np.integer,
    np.signedinteger,
    np.unsignedinteger,
)
_CLASSES: dict[Any, Any] = {
    np.floating: dtypes.is_float,
    np.inexact: dtypes.is_float,
    np.integer: dtypes.is_int,
    np.signedinteger: dtypes.is_signed,
}


def issubdtype(arg1: DTypeLike, arg2: DTypeLike) -> bool:
    """Whether a dtype is of a class (``floating``, ``integer``...) or is that dtype.

    bfloat16 counts as floating, which NumPy does not know.
    """
    if arg1 in _ABSTRACT:
        return bool(np.issubdtype(arg1, arg2))
    found = _plain(arg1)
    if arg2 in (np.number, np.generic):
        return arg2 is np.generic or dtypes.is_float(found) or dtypes.is_int(found)
    if arg2 is np.unsignedinteger:
        return dtypes.is_int(found) and not dtypes.is_signed(found)
    test = _CLASSES.get(arg2) if isinstance(arg2, type) else None
    return bool(test(found)) if test is not None else found == _plain(arg2)


def isdtype(dtype: DTypeLike, kind: Any) -> bool:
    """Whether a dtype is that dtype or of a kind: "bool", "real floating", "integral"..."""
    if is_sequence(kind):
        return any(isdtype(dtype, k) for k in kind)
    found = _plain(dtype)
    signed, whole, real = dtypes.is_signed(found), dtypes.is_int(found), dtypes.is_float(found)
    kinds = {
        "bool": found == dtypes.bool_,
        "signed integer": signed,
        "unsigned integer": whole and not signed,
        "integral": whole,
        "real floating": real,
        "complex floating": False,
        "numeric": whole or real,
    }
    return kinds[kind] if isinstance(kind, str) and kind in kinds else found == _plain(kind)


def promote_types(a: DTypeLike, b: DTypeLike) -> DType:
    """The dtype that holds both, by JAX's lattice."""
    return dtypes.promote_types(a, b)


_DTYPES: tuple[Any, ...] = (np.dtype, type, str, ScalarType)


def result_type(*args: Any) -> DType:
    """The dtype of an operation on arrays, scalars and dtypes; Python scalars are weak."""
    operands: list[tuple[DType, bool]] = []
    for arg in args:
        if isinstance(arg, _DTYPES):
            operands.append((dtypes.canonical(arg), False))
        else:
            of = operand_aval("result_type", arg)
            operands.append((of.dtype, of.weak))
    return dtypes.promote(*operands)[0]


def can_cast(from_: DTypeLike, to: DTypeLike, casting: str = "safe") -> bool:
    """NumPy's rule for casts between dtypes."""
    return bool(np.can_cast(_plain(from_), _plain(to), casting=casting))  # type: ignore[arg-type]


def isscalar(element: Any) -> bool:
    """Whether a Python or NumPy scalar, or an array of rank 0."""
    return isinstance(element, (bool, int, float, np.generic)) or (
        hasattr(element, "aval") and element.aval.shape == ()
    )
