"""Arrays on a device, and how operations run when no trace is open.

Outside ``jit`` an operation runs at once, by the NumPy evaluator on the host; its result goes to
the device of its operands. ``jit`` is what compiles.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, final

import numpy as np

from vkjit import tree
from vkjit.array import Array
from vkjit.concrete import concretization_error
from vkjit.dtypes import of_array
from vkjit.errors import DonatedBufferError
from vkjit.ir.avals import Aval, aval
from vkjit.ir.primitive import Primitive, Value
from vkjit.runtime import default_device_name, get_device
from vkjit.runtime.device import Device, DeviceBuffer
from vkjit.trace import Hooks, Tracer, aval_of, is_numpy

NumpyArray = np.ndarray[Any, Any]


@final
class _State(threading.local):
    """The device asked for by ``default_device`` in this thread."""

    def __init__(self) -> None:
        self.name: str | None = None


_state = _State()


def current_device() -> Device:
    """The device on which new arrays are made."""
    return get_device(_state.name or default_device_name())


@contextmanager
def default_device(name: str) -> Generator[Device]:
    """Makes new arrays on device ``name`` inside the block.

    Raises:
        ArgumentError: there is no such device, or it cannot be used.
    """
    device = get_device(name)
    before, _state.name = _state.name, name
    try:
        yield device
    finally:
        _state.name = before


@final
class DeviceArray(Array):
    """An array in device memory; dense, row-major, immutable."""

    __slots__ = ("__weakref__", "aval", "buffer")

    def __init__(self, of: Aval, buffer: DeviceBuffer) -> None:
        self.aval = of
        self.buffer = buffer

    @property
    def device(self) -> str:
        """Name of the device that holds the array."""
        return self.buffer.device.name

    def is_deleted(self) -> bool:
        """Whether the array was donated to a jitted call."""
        return self.buffer.released

    def delete(self) -> None:
        """Gives the memory back; the array cannot be read afterwards."""
        self.buffer.release()

    def numpy(self) -> NumpyArray:
        """The values, read only where they share memory with the device.

        Raises:
            DonatedBufferError: the array was donated.
        """
        if self.buffer.released:
            raise DonatedBufferError(
                f"array: {self.aval} was donated to a jitted call and is gone; use the call's "
                "result, or do not donate it (donate_argnums)"
            )
        return self.buffer.device.download(self.buffer, self.aval.dtype, self.aval.shape)

    def __array__(self, dtype: object = None, copy: bool | None = None) -> NumpyArray:  # noqa: FBT001  NumPy's protocol
        values = self.numpy()
        if dtype is not None and np.dtype(dtype) != values.dtype:  # type: ignore[call-overload]
            return values.astype(np.dtype(dtype))  # type: ignore[call-overload]
        return values.copy() if copy or not values.flags.writeable else values

    def block_until_ready(self) -> DeviceArray:
        """The array itself, once the work that writes it is done."""
        self.buffer.wait()
        return self

    def is_ready(self) -> bool:
        """Whether the work that writes the array is done; reading it earlier waits for that."""
        return self.buffer.is_ready()

    def __dlpack__(self, **kwargs: Any) -> Any:
        return np.array(self.numpy()).__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # kDLCPU: values are handed over in host memory

    def __repr__(self) -> str:
        if self.aval.block is not None:
            return f"Array({self.aval})"
        body = np.array2string(self.numpy(), separator=", ", prefix="Array(", precision=6)
        weak = ", weak_type=True" if self.aval.weak else ""
        return f"Array({body}, dtype={self.aval.dtype.name}{weak})"

    def __str__(self) -> str:
        return str(self.numpy())


@final
class TracedArray(Array, Tracer):
    """An array while a function is traced: a shape and dtype without values."""

    __slots__ = ()

    def __array__(self, dtype: object = None, copy: bool | None = None) -> NumpyArray:  # noqa: FBT001  NumPy's protocol
        raise concretization_error(self, "array")

    def __repr__(self) -> str:
        return f"Traced<{self.aval}>"


def from_numpy(values: NumpyArray, of: Aval | None = None, device: Device | None = None) -> Value:
    """A copy of NumPy values on a device; 64-bit dtypes narrow unless enabled."""
    made = of or aval(values.shape, of_array(values.dtype))
    dense = np.ascontiguousarray(values, made.dtype).reshape(made.shape)
    return DeviceArray(made, (device or current_device()).upload(dense))


def device_put(values: Any, device: str | None = None) -> Any:
    """A pytree of arrays on ``device`` (the default one without a name).

    Those that are there already stay what they are.
    """

    def put(leaf: Value) -> DeviceArray:
        return placed(leaf, device)

    return tree.map(put, values)


def placed(value: Value, device: str | None = None) -> DeviceArray:
    """An array, NumPy value or Python scalar on ``device``; itself if it is there already."""
    target = get_device(device) if device else current_device()
    if isinstance(value, DeviceArray) and value.buffer.device is target:
        return value
    return from_numpy(host_values(value), aval_of(value), target)


def host_values(value: Value) -> NumpyArray:
    """The values of an array, NumPy value or Python scalar in host memory."""
    if isinstance(value, DeviceArray):
        return value.numpy()
    if is_numpy(value):
        return np.asarray(value, of_array(value.dtype))
    return np.asarray(value, aval_of(value).dtype)


def _eager(prim: Primitive, values: Sequence[Value], outs: Sequence[Aval]) -> Sequence[Value]:
    device = next((v.buffer.device for v in values if isinstance(v, DeviceArray)), None)
    results = prim.evaluate_outs(*[host_values(v) for v in values])
    return [from_numpy(r, of, device) for r, of in zip(results, outs, strict=True)]


Hooks.eager = staticmethod(_eager)
Hooks.constant = staticmethod(from_numpy)
Hooks.box = TracedArray
