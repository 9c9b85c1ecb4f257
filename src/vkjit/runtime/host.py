"""Buffers that are NumPy byte arrays, for devices that run plans in Python."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import cast, final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from vkjit.errors import InternalError
from vkjit.lowering.artifact import HostCall, Plan, Range, Role
from vkjit.runtime.device import (
    Device,
    DeviceBuffer,
    HostArray,
    Loaded,
    MemoryStats,
    indices,
    taken_over,
)

Bytes = NDArray[np.uint8]

POISON = 0xFF
"""Every byte of fresh memory: NaN in every float type, so that reads of it show."""

_UNLIMITED = 1 << 62


@final
class HostBuffer(DeviceBuffer):
    """Bytes of host memory; None once released."""

    __slots__ = ("_device", "data")

    def __init__(self, device: HostDevice, data: Bytes) -> None:
        self.data: Bytes | None = data
        self.nbytes = data.nbytes
        self._device = device
        device.account(self.nbytes)

    def __del__(self) -> None:
        self.release()

    @property
    def device(self) -> HostDevice:
        """The device that owns the memory."""
        return self._device

    @property
    def released(self) -> bool:
        """Whether the memory was given back or taken over by an output."""
        return self.data is None

    def release(self) -> None:
        """Drops the memory."""
        if self.data is not None:
            self.data = None
            self._device.account(-self.nbytes)

    def bytes(self) -> Bytes:
        """The memory.

        Raises:
            InternalError: the buffer was released.
        """
        if self.data is None:
            raise InternalError(f"{self._device.name}: a released buffer was used")
        return self.data


class HostDevice(Device):
    """Accounts and copies of a device whose memory is NumPy arrays."""

    def __init__(self) -> None:
        self._live = 0
        self._peak = 0

    def account(self, nbytes: int) -> None:
        """Notes that ``nbytes`` more, or fewer, are in use."""
        self._live += nbytes
        self._peak = max(self._peak, self._live)

    def allocate(self, nbytes: int) -> HostBuffer:
        """Memory in which every byte is ``POISON``."""
        return HostBuffer(self, np.full(nbytes, POISON, np.uint8))

    def upload(self, array: HostArray) -> HostBuffer:
        """A copy of a C-contiguous array."""
        if not array.flags.c_contiguous:
            raise InternalError(
                f"{self.name}: upload of {array.dtype}{list(array.shape)}, not contiguous"
            )
        return HostBuffer(self, array.reshape(-1).view(np.uint8).copy())

    def download(self, buffer: DeviceBuffer, dtype: DTypeLike, shape: tuple[int, ...]) -> HostArray:
        """A copy of the first elements of ``buffer``."""
        kind = np.dtype(dtype)
        data = own(self, buffer).bytes()[: math.prod(shape) * kind.itemsize]
        return cast(HostArray, data.copy().view(kind).reshape(shape))

    def synchronize(self) -> None:
        """Does nothing: runs are synchronous."""

    def memory_stats(self) -> MemoryStats:
        """Bytes of the buffers in existence, and at most; arenas are not counted."""
        return MemoryStats(self._live, self._peak, 0, _UNLIMITED)

    def close(self) -> None:
        """Does nothing: memory goes with its buffers."""


class HostLoaded(Loaded):
    """A plan whose buffers are byte arrays; subclasses run the steps."""

    __slots__ = ("constants", "device", "plan")

    def __init__(self, device: HostDevice, plan: Plan, constants: Sequence[DeviceBuffer]) -> None:
        self.device = device
        self.plan = plan
        self.constants = [own(device, constant) for constant in constants]
        wanted = len(indices(plan, Role.CONSTANT))
        if len(self.constants) != wanted:
            raise InternalError(
                f"{device.name}: plan {plan.name} was given {len(constants)} constants, "
                f"expected {wanted}"
            )

    @abstractmethod
    def execute(self, memory: Sequence[Bytes]) -> None:
        """Runs the steps on the bytes of each planned buffer."""

    def run(
        self, inputs: Sequence[DeviceBuffer], donated: Collection[int] = ()
    ) -> list[DeviceBuffer]:
        """Runs the plan once; see ``Loaded.run``."""
        plan, device = self.plan, self.device
        given = [own(device, buffer) for buffer in inputs]
        wanted = len(indices(plan, Role.INPUT))
        if len(given) != wanted or not taken_over(plan).issubset(donated):
            raise InternalError(
                f"{device.name}: {len(given)} inputs with {sorted(donated)} donated, expected "
                f"{wanted} with {sorted(taken_over(plan))}"
            )
        memory: list[Bytes] = []
        outputs: dict[int, Bytes] = {}
        for planned in plan.buffers:
            data = self._memory(planned.role, planned.position, given)
            if planned.role is Role.OUTPUT and planned.donated is not None:
                data = given[planned.donated].bytes()
            if data is None:
                data = np.full(planned.size, POISON, np.uint8)
            if data.nbytes < planned.size:
                raise InternalError(
                    f"{device.name}: {planned.role.value} {planned.position} of {plan.name} has "
                    f"{data.nbytes} bytes, expected {planned.size}"
                )
            memory.append(data)
            if planned.role is Role.OUTPUT:
                outputs[planned.position] = data
        self.execute(memory)
        for position in donated:
            given[position].release()
        return [HostBuffer(device, outputs[position]) for position in sorted(outputs)]

    def _memory(self, role: Role, position: int, given: Sequence[HostBuffer]) -> Bytes | None:
        """The bytes that exist before the call."""
        if role is Role.INPUT:
            return given[position].bytes()
        return self.constants[position].bytes() if role is Role.CONSTANT else None


def own(device: HostDevice, buffer: DeviceBuffer) -> HostBuffer:
    """``buffer``, which must be one of ``device``."""
    if not isinstance(buffer, HostBuffer) or buffer.device is not device:
        raise InternalError(f"{device.name}: a buffer of {buffer.device.name} was given")
    return buffer


def bytes_of(memory: Sequence[Bytes], place: Range, turns: Sequence[int] = ()) -> Bytes:
    """The bytes of a range in these turns of the loops around it, outermost first."""
    at = place.at(turns)
    return memory[at.buffer][at.offset : at.offset + at.size]


def arguments_of(
    memory: Sequence[Bytes], call: HostCall, turns: Sequence[int] = ()
) -> list[HostArray]:
    """Copies of the arguments of a call of the host."""
    found: list[HostArray] = []
    for place, (dtype, shape) in zip(call.arguments, call.types, strict=True):
        data = bytes_of(memory, place, turns)[: math.prod(shape) * dtype.itemsize]
        found.append(data.copy().view(dtype).reshape(shape))
    return found
