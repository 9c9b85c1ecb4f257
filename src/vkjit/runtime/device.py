"""What every device offers: buffers, plans loaded and run, memory accounts.

Nothing outside a device reads its memory except through :meth:`Device.download`, which waits for
the work that writes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any, final

from numpy.typing import DTypeLike, NDArray

from vkjit.errors import MissingRuleError
from vkjit.lowering.artifact import Plan, Role
from vkjit.lowering.target import Target

HostArray = NDArray[Any]
"""An array in host memory, of any dtype."""


class DeviceClass(Enum):
    """What executes the kernels; decides the default device."""

    DISCRETE_GPU = "discrete gpu"
    INTEGRATED_GPU = "integrated gpu"
    VIRTUAL_GPU = "virtual gpu"
    CPU = "cpu"
    SOFTWARE = "software"  # a Vulkan driver on the CPU, or the interpreter: for correctness only


@final
@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device found on this machine, opened or not.

    ``name`` is what ``get_device`` takes; ``refused`` is the reason why it cannot be used, or None.
    """

    name: str
    device_class: DeviceClass
    description: str
    refused: str | None = None


@final
@dataclass(frozen=True, slots=True)
class Hardware:
    """What measurements on a device are valid for: its name, and driver and device together.

    ``uuid`` changes with the device and its driver (Vulkan's ``pipelineCacheUUID``).
    """

    name: str
    uuid: str = ""
    driver: str = ""


@final
@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Bytes of a device's memory: in use, most ever in use, kept for reuse, and the limit."""

    live_bytes: int
    peak_bytes: int
    pooled_bytes: int
    limit_bytes: int


class DeviceBuffer(ABC):
    """``nbytes`` of device memory, given back to the device's pool on collection or ``release``."""

    __slots__ = ("__weakref__", "nbytes")

    nbytes: int

    @property
    @abstractmethod
    def device(self) -> Device:
        """The device that owns the memory."""

    @property
    @abstractmethod
    def released(self) -> bool:
        """Whether the memory was given back or taken over by an output."""

    def is_ready(self) -> bool:
        """Whether the work that writes the memory is done."""
        return True

    def wait(self) -> None:
        """Returns once the work that writes the memory is done."""
        self.device.synchronize()

    @abstractmethod
    def release(self) -> None:
        """Gives the memory back; safe while work that uses it is in flight, and safe to repeat."""


@final
@dataclass(frozen=True, slots=True)
class StepTime:
    """When a step began, by ``time.perf_counter``, and how long it took, in seconds.

    A step inside a loop has as many ``runs`` as there were turns, shown as one of all their time;
    in a branch it may have none.
    """

    begin: float
    seconds: float
    runs: int = 1


class Loaded(ABC):
    """A plan made ready to run on one device, with its constants."""

    __slots__ = ()

    @abstractmethod
    def run(
        self, inputs: Sequence[DeviceBuffer], donated: Collection[int] = ()
    ) -> list[DeviceBuffer]:
        """Runs the plan once and returns its outputs in order of their position.

        May return before the work is done. ``donated`` are the positions of the inputs that the
        caller gives up; they are ``released`` on return. It must hold every input that an output
        of the plan takes over (:func:`taken_over`); the memory of the others goes to the pool.

        Raises:
            OutOfMemoryError: an output or the arena could not be allocated.
            DeviceError: the device failed.
        """

    def timed(
        self, inputs: Sequence[DeviceBuffer], donated: Collection[int] = ()
    ) -> tuple[list[DeviceBuffer], list[StepTime]]:
        """As :meth:`run`, step by step, with the time of each leaf of the plan; waits for it.

        The times stand in the order of ``leaves(plan.steps)``.

        Raises:
            MissingRuleError: the device cannot measure its steps.
        """
        name = type(self).__name__
        raise MissingRuleError(f"profile: {name} has no clock for its steps; use cpu or vulkan:N")


class Device(ABC):
    """One place where plans run. ``target`` says what code it takes."""

    name: str
    target: Target

    @property
    def hardware(self) -> Hardware:
        """What measurements on this device are valid for."""
        return Hardware(self.target.name)

    @abstractmethod
    def allocate(self, nbytes: int) -> DeviceBuffer:
        """Uninitialised memory of ``nbytes`` bytes, aligned for every element type."""

    @abstractmethod
    def upload(self, array: HostArray) -> DeviceBuffer:
        """A copy of a C-contiguous array; later changes of ``array`` do not show."""

    @abstractmethod
    def download(self, buffer: DeviceBuffer, dtype: DTypeLike, shape: tuple[int, ...]) -> HostArray:
        """The first elements of ``buffer`` as an array, once the work that writes them is done.

        The result may be read only, and may share memory with ``buffer``, which it keeps alive.
        """

    @abstractmethod
    def load(self, plan: Plan, constants: Sequence[DeviceBuffer] = ()) -> Loaded:
        """Generates or fetches the code of ``plan``; ``constants`` stand in order of position."""

    def prepare(self, plan: Plan) -> list[Future[Any]]:
        """Begins to compile a plan in other threads, where the device can; returns what goes on.

        ``load`` waits for it and says what failed.

        Raises:
            VkjitError: no code can be generated for the plan.
        """
        del plan
        return []

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until all work handed to the device is done."""

    @abstractmethod
    def memory_stats(self) -> MemoryStats:
        """Memory in use now and at most."""

    @abstractmethod
    def describe(self) -> str:
        """A few lines for people: hardware, driver, features in use, and what is switched off."""

    @abstractmethod
    def close(self) -> None:
        """Waits for all work and frees everything; the device cannot be used afterwards."""


def taken_over(plan: Plan) -> frozenset[int]:
    """Positions of the inputs whose memory outputs of ``plan`` take over."""
    return frozenset(
        b.donated for b in plan.buffers if b.role is Role.OUTPUT and b.donated is not None
    )


def indices(plan: Plan, role: Role) -> list[int]:
    """Indices into ``plan.buffers`` of one role, in order of position."""
    found = [i for i, b in enumerate(plan.buffers) if b.role is role]
    return sorted(found, key=lambda i: plan.buffers[i].position)
