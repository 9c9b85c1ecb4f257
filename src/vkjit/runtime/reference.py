"""The reference device: interprets kernels in NumPy. Slow, and the judge of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never, final

import numpy as np

from vkjit.errors import ArgumentError, InternalError
from vkjit.lowering.artifact import Branch, Copy, HostCall, Launch, Loop, Plan, Step, While
from vkjit.lowering.kernel.interpret import run
from vkjit.lowering.kernel.interpret_ops import DTYPES
from vkjit.lowering.target import REFERENCE, Target
from vkjit.runtime.device import Device, DeviceBuffer, DeviceClass, DeviceInfo
from vkjit.runtime.host import Bytes, HostDevice, HostLoaded, arguments_of, bytes_of


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
        _run(self.plan.steps, memory, ())


def _run(steps: Sequence[Step], memory: Sequence[Bytes], turns: tuple[int, ...]) -> None:
    """Runs steps in the given turns of the loops around them, outermost first."""
    for step in steps:
        match step:
            case Launch():
                _launch(step, memory, turns)
            case Copy():
                bytes_of(memory, step.target, turns)[:] = bytes_of(memory, step.source, turns)
            case Loop():
                for turn in range(step.length):
                    _run(step.body.steps, memory, (*turns, turn))
            case While():
                _run(step.condition.steps, memory, turns)
                while bytes_of(memory, step.predicate, turns).any():
                    _run(step.body.steps, memory, turns)
                    _run(step.condition.steps, memory, turns)
            case Branch():
                index = int(bytes_of(memory, step.index, turns).view(np.int32)[0])
                chosen = min(max(index, 0), len(step.branches) - 1)
                _run(step.branches[chosen].steps, memory, turns)
            case HostCall():
                step.function(*arguments_of(memory, step, turns))
            case _:
                assert_never(step)


def _launch(step: Launch, memory: Sequence[Bytes], turns: tuple[int, ...]) -> None:
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
        arrays.append(bytes_of(memory, place, turns)[:size].view(DTYPES[buffer.elem]))
    run(kernel, arrays)
