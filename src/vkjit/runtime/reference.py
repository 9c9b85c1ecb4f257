"""The reference device: interprets kernels in NumPy. Slow, and the judge of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never, final

from vkjit.errors import ArgumentError, InternalError
from vkjit.lowering.artifact import Copy, Launch, Plan
from vkjit.lowering.kernel.interpret import run
from vkjit.lowering.kernel.interpret_ops import DTYPES
from vkjit.lowering.target import REFERENCE, Target
from vkjit.runtime.device import Device, DeviceBuffer, DeviceClass, DeviceInfo
from vkjit.runtime.host import Bytes, HostDevice, HostLoaded, bytes_of


def discover() -> list[DeviceInfo]:
    """The interpreter, which every machine has."""
    description = "NumPy interpreter of the kernel IR, for tests"
    return [DeviceInfo("reference", DeviceClass.SOFTWARE, description)]


def open_device(name: str) -> Device:
    """The reference device."""
    if name != "reference":
        raise ArgumentError(f"device: {name!r} does not exist, there is one 'reference'")
    return ReferenceDevice()


@final
class ReferenceDevice(HostDevice):
    """Runs plans of any target; ``target`` decides what schedules are made for it."""

    def __init__(self, target: Target = REFERENCE) -> None:
        super().__init__()
        self.name = "reference"
        self.target = target

    def load(self, plan: Plan, constants: Sequence[DeviceBuffer] = ()) -> ReferenceLoaded:
        """Keeps the plan; there is nothing to compile."""
        return ReferenceLoaded(self, plan, constants)

    def describe(self) -> str:
        """One line."""
        return f"reference: NumPy interpreter of kernels for {self.target.name}"


@final
class ReferenceLoaded(HostLoaded):
    """Interprets the steps in order."""

    __slots__ = ()

    def execute(self, memory: Sequence[Bytes]) -> None:
        """Runs each step to its end before the next."""
        for step in self.plan.steps:
            match step:
                case Launch():
                    _launch(step, memory)
                case Copy():
                    bytes_of(memory, step.target)[:] = bytes_of(memory, step.source)
                case _:
                    assert_never(step)


def _launch(step: Launch, memory: Sequence[Bytes]) -> None:
    """Runs a kernel on typed views of its ranges."""
    kernel = step.kernel
    arrays: list[Bytes] = []
    for buffer, place in zip(kernel.buffers, step.arguments, strict=True):
        size = buffer.length * buffer.elem.bytes
        if size > place.size:
            raise InternalError(
                f"reference: kernel {kernel.name} declares {buffer.name} with {size} bytes, but "
                f"gets {place.size}"
            )
        arrays.append(bytes_of(memory, place)[:size].view(DTYPES[buffer.elem]))
    run(kernel, arrays)
