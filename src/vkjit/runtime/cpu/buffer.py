"""Host memory as device buffers, and NumPy views of it."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, cast, final

import numpy as np
from numpy.typing import DTypeLike

from vkjit.errors import InternalError
from vkjit.runtime.cpu.memory import class_bytes
from vkjit.runtime.device import DeviceBuffer, HostArray

if TYPE_CHECKING:
    from vkjit.runtime.cpu.device import CpuDevice


SMALL = 4096
"""Up to this many bytes a copy is cheaper than a view."""


@final
class CpuBuffer(DeviceBuffer):
    """Host memory at ``address``, which is 0 once it has gone elsewhere.

    A NumPy view keeps the buffer, and the buffer the memory. So a buffer that is released while
    views exist keeps its memory until the last of them is gone.
    """

    __slots__ = ("_device", "_released", "_size", "_views", "address")

    def __init__(self, device: CpuDevice, nbytes: int, size: int, address: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self._device = device
        self._size = size
        self._views = 0
        self._released = False

    @staticmethod
    def allocate(device: CpuDevice, nbytes: int) -> CpuBuffer:
        """Uninitialised memory from the pool of ``device``."""
        size = class_bytes(nbytes)
        return CpuBuffer(device, nbytes, size, device.memory.take(size))

    def __del__(self) -> None:
        if self.address:
            self._device.memory.give(self.address, self._size)

    @property
    def device(self) -> CpuDevice:
        """The device that owns the memory."""
        return self._device

    @property
    def released(self) -> bool:
        """Whether the memory was given back or taken over by an output."""
        return self._released

    def release(self) -> None:
        """Gives the memory back, once the last view of it is gone."""
        self._released = True
        if self.address and not self._views:
            self._device.memory.give(self.address, self._size)
            self.address = 0

    def moved(self) -> CpuBuffer:
        """A new owner of the memory; this one is released.

        Memory that has views is copied instead, since a view must not see later writes.
        """
        if self._released:
            raise InternalError("cpu: a released buffer was donated, or one buffer twice")
        if self._views:
            made = CpuBuffer.allocate(self._device, self.nbytes)
            ctypes.memmove(made.address, self.address, self.nbytes)
        else:
            made = CpuBuffer(self._device, self.nbytes, self._size, self.address)
            self.address = 0
        self._released = True
        return made

    def as_numpy(self, dtype: DTypeLike, shape: tuple[int, ...]) -> HostArray:
        """The first elements as a read-only array.

        Unless it is small, it shares the memory and keeps it alive.
        """
        if self._released:
            raise InternalError("cpu: a released buffer was read")
        kind = np.dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        if size > self.nbytes:
            raise InternalError(
                f"cpu: {kind}{list(shape)} was asked of a buffer of {self.nbytes} bytes"
            )
        if size <= SMALL:
            data = ctypes.string_at(self.address, size)
            return cast(HostArray, np.frombuffer(data, kind).reshape(shape))
        self._views += 1
        raw = np.asarray(_View(self, size))
        return cast(HostArray, raw.view(kind).reshape(shape))

    def view_gone(self) -> None:
        """Notes that one view of the memory exists no more."""
        self._views -= 1


@final
class _View:
    """What NumPy holds as the base of a view: it keeps the buffer and counts."""

    __slots__ = ("__array_interface__", "_buffer")

    def __init__(self, buffer: CpuBuffer, size: int) -> None:
        self._buffer = buffer
        self.__array_interface__ = {
            "version": 3,
            "data": (buffer.address, True),  # True: read only
            "typestr": "|u1",
            "shape": (size,),
        }

    def __del__(self) -> None:
        self._buffer.view_gone()
