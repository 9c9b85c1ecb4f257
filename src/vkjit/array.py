"""The public array type: operators, methods and properties, over ``vkjit.numpy``.

Device arrays and the tracers that stand for them in a traced function are both an ``Array``.
Subclasses keep an ``aval`` and say what ``__array__`` does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, ClassVar, SupportsIndex, cast

import numpy as np

import vkjit.numpy as jnp
from vkjit.concrete import concretization_error
from vkjit.dtypes import DType
from vkjit.errors import UserError
from vkjit.ir.avals import Aval
from vkjit.numpy import _scatter
from vkjit.numpy._at import At
from vkjit.trace import Tracer, aval_of

ArrayLike = Any
Axis = SupportsIndex | Sequence[SupportsIndex] | None


class Array(ABC):
    """An n-dimensional array of one dtype on a device; immutable.

    Operators promote dtypes by JAX's lattice and broadcast as NumPy does; ``x.at[i].set(v)`` gives
    a changed copy.
    """

    __slots__ = ()
    __array_priority__: ClassVar[int] = 1000
    __hash__: ClassVar[None]  # type: ignore[assignment]  equality is elementwise

    aval: Aval

    @abstractmethod
    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray[Any, Any]:  # noqa: FBT001  NumPy's protocol
        """The values in NumPy, copied from the device.

        Raises:
            TracerError: this is a traced value.
        """

    # -- what it is -----------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return self.aval.shape

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self.aval.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.aval.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.aval.size

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.aval.nbytes

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.aval.dtype.itemsize

    @property
    def weak_type(self) -> bool:
        """Whether the dtype came from a Python scalar and yields to others."""
        return self.aval.weak

    def __len__(self) -> int:
        if not self.aval.shape:
            raise TypeError("len: the array has rank 0; expected at least one axis")
        return self.aval.shape[0]

    def __array_namespace__(self, *, api_version: str | None = None) -> ModuleType:
        return jnp

    def block_until_ready(self) -> Array:
        """The array itself, once its values are there."""
        return self

    # -- concrete values ------------------------------------------------------------------------

    def _read(self, kind: str) -> np.ndarray[Any, Any]:
        if isinstance(self, Tracer):
            raise concretization_error(self, kind)
        return np.asarray(self)

    def _scalar(self, kind: str) -> Any:
        if self.size != 1:
            raise ValueError(
                f"{kind}: an array of shape {self.shape} has {self.size} elements; expected one; "
                "use .any() or .all(), or index it"
            )
        return self._read(kind).reshape(())[()].item()

    def __bool__(self) -> bool:
        return bool(self._scalar("bool"))

    def __int__(self) -> int:
        return int(self._scalar("int"))

    def __float__(self) -> float:
        return float(self._scalar("float"))

    def __complex__(self) -> complex:
        return complex(self._scalar("complex"))

    def __index__(self) -> int:
        if self.ndim or not np.issubdtype(self.dtype, np.integer):
            raise TypeError(f"index: given {self.aval}, expected an integer array of rank 0")
        return int(self._scalar("index"))

    def __iter__(self) -> Iterator[Array]:
        if not self.aval.shape:
            raise TypeError("iter: the array has rank 0; expected at least one axis")
        return iter([self[i] for i in range(self.aval.shape[0])])

    def __contains__(self, item: ArrayLike) -> bool:
        return bool((self == item).any())

    def __format__(self, spec: str) -> str:
        if isinstance(self, Tracer) or self.ndim:
            return format(str(self), spec)
        return format(self._scalar("float"), spec)

    def item(self, *args: int) -> bool | int | float:
        """The only element, or the one at ``args``, as a Python scalar."""
        return cast("bool | int | float", self._read("float").item(*args))

    def tolist(self) -> Any:
        """Nested lists of Python scalars."""
        return self._read("array").tolist()

    # -- indexing -------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Array:
        return _scatter.get(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError(
            "setitem: arrays are immutable; use x = x.at[index].set(value) instead of "
            "x[index] = value"
        )

    @property
    def at(self) -> At:
        """Changed copies: ``x.at[index].set(v)``, ``add``, ``multiply``, ``min``, ``max``..."""
        return At(self)

    # -- arithmetic -----------------------------------------------------------------------------

    def __neg__(self) -> Array:
        return jnp.negative(self)

    def __pos__(self) -> Array:
        return jnp.positive(self)

    def __abs__(self) -> Array:
        return jnp.abs(self)

    def __invert__(self) -> Array:
        return jnp.invert(self)

    def __add__(self, other: ArrayLike) -> Array:
        return jnp.add(self, other)

    def __radd__(self, other: ArrayLike) -> Array:
        return jnp.add(other, self)

    def __sub__(self, other: ArrayLike) -> Array:
        return jnp.subtract(self, other)

    def __rsub__(self, other: ArrayLike) -> Array:
        return jnp.subtract(other, self)

    def __mul__(self, other: ArrayLike) -> Array:
        return jnp.multiply(self, other)

    def __rmul__(self, other: ArrayLike) -> Array:
        return jnp.multiply(other, self)

    def __truediv__(self, other: ArrayLike) -> Array:
        return jnp.true_divide(self, other)

    def __rtruediv__(self, other: ArrayLike) -> Array:
        return jnp.true_divide(other, self)

    def __floordiv__(self, other: ArrayLike) -> Array:
        return jnp.floor_divide(self, other)

    def __rfloordiv__(self, other: ArrayLike) -> Array:
        return jnp.floor_divide(other, self)

    def __mod__(self, other: ArrayLike) -> Array:
        return jnp.remainder(self, other)

    def __rmod__(self, other: ArrayLike) -> Array:
        return jnp.remainder(other, self)

    def __divmod__(self, other: ArrayLike) -> tuple[Array, Array]:
        return jnp.divmod(self, other)

    def __rdivmod__(self, other: ArrayLike) -> tuple[Array, Array]:
        return jnp.divmod(other, self)

    def __pow__(self, other: ArrayLike) -> Array:
        return jnp.power(self, other)

    def __rpow__(self, other: ArrayLike) -> Array:
        return jnp.power(other, self)

    def __matmul__(self, other: ArrayLike) -> Array:
        return jnp.matmul(self, other)

    def __rmatmul__(self, other: ArrayLike) -> Array:
        return jnp.matmul(other, self)

    def __and__(self, other: ArrayLike) -> Array:
        return jnp.bitwise_and(self, other)

    def __rand__(self, other: ArrayLike) -> Array:
        return jnp.bitwise_and(other, self)

    def __or__(self, other: ArrayLike) -> Array:
        return jnp.bitwise_or(self, other)

    def __ror__(self, other: ArrayLike) -> Array:
        return jnp.bitwise_or(other, self)

    def __xor__(self, other: ArrayLike) -> Array:
        return jnp.bitwise_xor(self, other)

    def __rxor__(self, other: ArrayLike) -> Array:
        return jnp.bitwise_xor(other, self)

    def __lshift__(self, other: ArrayLike) -> Array:
        return jnp.left_shift(self, other)

    def __rlshift__(self, other: ArrayLike) -> Array:
        return jnp.left_shift(other, self)

    def __rshift__(self, other: ArrayLike) -> Array:
        return jnp.right_shift(self, other)

    def __rrshift__(self, other: ArrayLike) -> Array:
        return jnp.right_shift(other, self)

    # -- comparison -----------------------------------------------------------------------------

    def __eq__(self, other: object) -> Any:
        return jnp.equal(self, other) if _is_operand(other) else NotImplemented

    def __ne__(self, other: object) -> Any:
        return jnp.not_equal(self, other) if _is_operand(other) else NotImplemented

    def __lt__(self, other: ArrayLike) -> Array:
        return jnp.less(self, other)

    def __le__(self, other: ArrayLike) -> Array:
        return jnp.less_equal(self, other)

    def __gt__(self, other: ArrayLike) -> Array:
        return jnp.greater(self, other)

    def __ge__(self, other: ArrayLike) -> Array:
        return jnp.greater_equal(self, other)

    # -- shape ----------------------------------------------------------------------------------

    @property
    def T(self) -> Array:
        """The axes in reverse order."""
        return jnp.transpose(self)

    @property
    def mT(self) -> Array:
        """The last two axes swapped."""
        return jnp.matrix_transpose(self)

    def reshape(self, *shape: Any) -> Array:
        """The elements in another shape; one size may be -1. See ``vkjit.numpy.reshape``."""
        return jnp.reshape(self, shape[0] if len(shape) == 1 else shape)

    def ravel(self) -> Array:
        """One axis."""
        return jnp.ravel(self)

    def flatten(self) -> Array:
        """One axis."""
        return jnp.ravel(self)

    def transpose(self, *axes: Any) -> Array:
        """The axes in the order ``axes``; reversed without arguments."""
        if not axes or axes == (None,):
            return jnp.transpose(self)
        return jnp.transpose(
            self, axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
        )

    def swapaxes(self, axis1: SupportsIndex, axis2: SupportsIndex) -> Array:
        """Two axes exchanged."""
        return jnp.swapaxes(self, axis1, axis2)

    def squeeze(self, axis: Axis = None) -> Array:
        """Without the axes of size 1, or without ``axis``."""
        return jnp.squeeze(self, axis)

    def repeat(self, repeats: Any, axis: SupportsIndex | None = None) -> Array:
        """Each element repeated. See ``vkjit.numpy.repeat``."""
        return jnp.repeat(self, repeats, axis)

    def take(
        self, indices: ArrayLike, axis: SupportsIndex | None = None, mode: str | None = None
    ) -> Array:
        """Elements at ``indices``. See ``vkjit.numpy.take``."""
        return jnp.take(self, indices, axis, mode=mode)

    def diagonal(
        self, offset: int = 0, axis1: SupportsIndex = 0, axis2: SupportsIndex = 1
    ) -> Array:
        """A diagonal as last axis."""
        return jnp.diagonal(self, offset, axis1, axis2)

    def trace(self, offset: int = 0, axis1: SupportsIndex = 0, axis2: SupportsIndex = 1) -> Array:
        """Sum of a diagonal."""
        return jnp.trace(self, offset, axis1, axis2)

    # -- values ---------------------------------------------------------------------------------

    @property
    def real(self) -> Array:
        """The array itself: there are no complex dtypes."""
        return self

    def astype(self, dtype: Any) -> Array:
        """The values in another dtype. See ``vkjit.numpy.astype``."""
        return jnp.astype(self, dtype)

    def view(self, dtype: Any) -> Array:
        """The bits read as another dtype of the same width."""
        return jnp.view(self, dtype)

    def copy(self) -> Array:
        """The values in a new array."""
        return jnp.array(self)

    def conj(self) -> Array:
        """The array itself: there are no complex dtypes."""
        return self

    def clip(self, min: ArrayLike = None, max: ArrayLike = None) -> Array:
        """Values limited to ``[min, max]``."""
        return jnp.clip(self, min, max)

    def round(self, decimals: int = 0) -> Array:
        """Rounded half to even."""
        return jnp.round(self, decimals)

    def dot(self, b: ArrayLike) -> Array:
        """Dot product. See ``vkjit.numpy.dot``."""
        return jnp.dot(self, b)

    # -- reductions -----------------------------------------------------------------------------

    def sum(
        self, axis: Axis = None, dtype: Any = None, *, keepdims: bool = False, where: Any = None
    ) -> Array:
        """Sum over ``axis``."""
        return jnp.sum(self, axis, dtype, keepdims=keepdims, where=where)

    def prod(
        self, axis: Axis = None, dtype: Any = None, *, keepdims: bool = False, where: Any = None
    ) -> Array:
        """Product over ``axis``."""
        return jnp.prod(self, axis, dtype, keepdims=keepdims, where=where)

    def mean(
        self, axis: Axis = None, dtype: Any = None, *, keepdims: bool = False, where: Any = None
    ) -> Array:
        """Mean over ``axis``."""
        return jnp.mean(self, axis, dtype, keepdims=keepdims, where=where)

    def var(
        self, axis: Axis = None, dtype: Any = None, *, ddof: int = 0, keepdims: bool = False
    ) -> Array:
        """Variance over ``axis``."""
        return jnp.var(self, axis, dtype, ddof=ddof, keepdims=keepdims)

    def std(
        self, axis: Axis = None, dtype: Any = None, *, ddof: int = 0, keepdims: bool = False
    ) -> Array:
        """Standard deviation over ``axis``."""
        return jnp.std(self, axis, dtype, ddof=ddof, keepdims=keepdims)

    def max(
        self, axis: Axis = None, *, keepdims: bool = False, initial: Any = None, where: Any = None
    ) -> Array:
        """Largest value over ``axis``."""
        return jnp.max(self, axis, keepdims=keepdims, initial=initial, where=where)

    def min(
        self, axis: Axis = None, *, keepdims: bool = False, initial: Any = None, where: Any = None
    ) -> Array:
        """Smallest value over ``axis``."""
        return jnp.min(self, axis, keepdims=keepdims, initial=initial, where=where)

    def any(self, axis: Axis = None, *, keepdims: bool = False) -> Array:
        """Whether any element over ``axis`` is true."""
        return jnp.any(self, axis, keepdims=keepdims)

    def all(self, axis: Axis = None, *, keepdims: bool = False) -> Array:
        """Whether all elements over ``axis`` are true."""
        return jnp.all(self, axis, keepdims=keepdims)

    def argmax(self, axis: SupportsIndex | None = None, *, keepdims: bool = False) -> Array:
        """Index of the first largest value."""
        return jnp.argmax(self, axis, keepdims=keepdims)

    def argmin(self, axis: SupportsIndex | None = None, *, keepdims: bool = False) -> Array:
        """Index of the first smallest value."""
        return jnp.argmin(self, axis, keepdims=keepdims)

    def cumsum(self, axis: SupportsIndex | None = None, dtype: Any = None) -> Array:
        """Running sum."""
        return jnp.cumsum(self, axis, dtype)

    def cumprod(self, axis: SupportsIndex | None = None, dtype: Any = None) -> Array:
        """Running product."""
        return jnp.cumprod(self, axis, dtype)

    def ptp(self, axis: Axis = None, *, keepdims: bool = False) -> Array:
        """Largest minus smallest value over ``axis``."""
        return jnp.ptp(self, axis, keepdims=keepdims)


def _is_operand(value: object) -> bool:
    try:
        aval_of(value)
    except UserError:
        return False
    return True
