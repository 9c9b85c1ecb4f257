"""A device that runs nothing and remembers what it was asked to run: for tests and dry runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from vkjit.lowering.artifact import Plan, Step
from vkjit.lowering.target import Target
from vkjit.runtime.device import DeviceBuffer
from vkjit.runtime.host import Bytes, HostDevice, HostLoaded


@final
class NullDevice(HostDevice):
    """Takes plans for any target. ``steps`` are the steps of all runs, in order.

    Outputs are memory that nothing has written, unless they take over an input.
    """

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.name = "null"
        self.target = target
        self.steps: list[Step] = []

    def load(self, plan: Plan, constants: Sequence[DeviceBuffer] = ()) -> NullLoaded:
        """Keeps the plan."""
        return NullLoaded(self, plan, constants)

    def describe(self) -> str:
        """One line."""
        return f"null: records steps for {self.target.name}, runs nothing"


@final
class NullLoaded(HostLoaded):
    """Records the steps."""

    __slots__ = ("_recorder",)

    def __init__(self, device: NullDevice, plan: Plan, constants: Sequence[DeviceBuffer]) -> None:
        super().__init__(device, plan, constants)
        self._recorder = device

    def execute(self, memory: Sequence[Bytes]) -> None:
        """Remembers the steps of the plan."""
        self._recorder.steps.extend(self.plan.steps)
