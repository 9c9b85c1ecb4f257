"""A GPU in the interpreter whose time is what a test says."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import DTypeLike

from vkjit.lowering.artifact import Launch, Plan
from vkjit.lowering.kernel.nodes import Kernel
from vkjit.lowering.kernel.types import F32, I32, ScalarType
from vkjit.lowering.kernel.views import dense
from vkjit.lowering.plan.groups import (
    ArrayInfo,
    ContractGroup,
    LoadStep,
    ProductStep,
    StoreStep,
)
from vkjit.lowering.plan.schedule import NaiveSchedule
from vkjit.lowering.target import ALL_SCALARS, Target, TargetKind
from vkjit.runtime.device import Device, DeviceBuffer, Hardware, Loaded, MemoryStats, taken_over
from vkjit.runtime.reference import ReferenceDevice
from vkjit.tuning.case import Case

GPU = Target(
    name="fake-gpu",
    kind=TargetKind.GPU,
    index_type=I32,
    storage=ALL_SCALARS,
    arithmetic=ALL_SCALARS,
    max_workgroup=(1024, 1024, 64),
    max_invocations=1024,
    shared_bytes=49152,
    subgroup_sizes=(32,),
)
DEFAULT, FAST, SLOW = NaiveSchedule(4, 8), NaiveSchedule(8, 8), NaiveSchedule(2, 2)
"""Schedules with different workgroups, by which the fake tells them apart."""
SECONDS = {DEFAULT: 3.0, FAST: 1.0, SLOW: 20.0}


def workgroup(schedule: NaiveSchedule) -> tuple[int, int, int]:
    return (schedule.columns, schedule.rows, 1)


@final
class FakeClock:
    """Seconds that pass when a kernel runs."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@final
class FakeGpu(Device):
    """Interprets plans that are checked, and only lets time pass for those that are timed."""

    def __init__(self, seconds: dict[NaiveSchedule, float] = SECONDS) -> None:
        self.name = "fake:0"
        self.target = GPU
        self.clock = FakeClock()
        self.costs = {workgroup(s): cost for s, cost in seconds.items()}
        self.timed: list[tuple[int, int, int]] = []
        self.inner = ReferenceDevice(GPU)
        self._hardware = Hardware("Fake GPU", "0123", "driver 1")

    @property
    def hardware(self) -> Hardware:
        return self._hardware

    @hardware.setter
    def hardware(self, value: Hardware) -> None:
        self._hardware = value

    def allocate(self, nbytes: int) -> DeviceBuffer:
        return self._own(self.inner.allocate(nbytes))

    def upload(self, array: np.ndarray[Any, Any]) -> DeviceBuffer:
        return self._own(self.inner.upload(array))

    def download(
        self, buffer: DeviceBuffer, dtype: DTypeLike, shape: tuple[int, ...]
    ) -> np.ndarray[Any, Any]:
        return self.inner.download(_inner(buffer), dtype, shape)

    def load(self, plan: Plan, constants: Sequence[DeviceBuffer] = ()) -> Loaded:
        return _Timed(self, plan, constants)

    def synchronize(self) -> None: ...

    def memory_stats(self) -> MemoryStats:
        return self.inner.memory_stats()

    def describe(self) -> str:
        return "fake"

    def close(self) -> None: ...

    def pass_time(self, kernel: Kernel) -> None:
        self.timed.append(kernel.workgroup)
        self.clock.now += self.costs.get(kernel.workgroup, 1.0)

    def _own(self, buffer: DeviceBuffer) -> DeviceBuffer:
        return _Buffer(self, buffer)


@final
class _Buffer(DeviceBuffer):
    """A buffer of the interpreter that belongs to the fake."""

    __slots__ = ("_device", "inner")

    def __init__(self, device: FakeGpu, inner: DeviceBuffer) -> None:
        self._device = device
        self.inner = inner
        self.nbytes = inner.nbytes

    @property
    def device(self) -> Device:
        return self._device

    @property
    def released(self) -> bool:
        return self.inner.released

    def release(self) -> None:
        self.inner.release()


def _inner(buffer: DeviceBuffer) -> DeviceBuffer:
    assert isinstance(buffer, _Buffer)
    return buffer.inner


@final
class _Timed(Loaded):
    """A plan; those whose outputs take over no memory and are named ``tuning`` are timed only."""

    __slots__ = ("device", "inner", "plan")

    def __init__(self, device: FakeGpu, plan: Plan, constants: Sequence[DeviceBuffer]) -> None:
        self.device = device
        self.plan = plan
        self.inner = device.inner.load(plan, [_inner(c) for c in constants])

    def run(
        self, inputs: Sequence[DeviceBuffer], donated: Collection[int] = ()
    ) -> list[DeviceBuffer]:
        for step in self.plan.steps:
            assert isinstance(step, Launch)
            if self.plan.name == "tuning" and not taken_over(self.plan):
                self.device.pass_time(step.kernel)
        if self.plan.name == "tuning" and not taken_over(self.plan):
            return []
        outs = self.inner.run([_inner(b) for b in inputs], donated)
        return [_Buffer(self.device, out) for out in outs]


def product(
    m: int = 10, n: int = 12, k: int = 9, elem: ScalarType = F32, out: ScalarType | None = None
) -> Case:
    """A plain product of row-major arrays."""
    lhs, rhs = LoadStep(0, dense((m, k)), elem), LoadStep(1, dense((k, n)), elem)
    result = out or elem
    stores = (StoreStep(0, 2, dense((m, n))),)
    accumulate = F32 if elem.kind == "float" else elem
    group = ContractGroup((), m, n, k, lhs, rhs, accumulate, (ProductStep(result),), stores)
    infos = (ArrayInfo(elem, m * k), ArrayInfo(elem, k * n), ArrayInfo(result, m * n))
    return Case(group, infos)
