"""Vulkan devices in descriptor mode under the validation layer, whose silence is checked first.

Synchronisation validation follows accesses through descriptors and sees none through device
addresses. So every test with the argument ``device`` runs in both modes: as ``vulkan:0``, and as
``vulkan:0+descriptors`` with the layer, where it is installed. Before the first of these tests,
barriers are taken out of the plan of a training step, and the layer must report each of them;
after that it must report nothing.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, final

import numpy as np
import pytest

import vkjit as vj
from vkjit import numpy as vnp
from vkjit import runtime
from vkjit.errors import DeviceError
from vkjit.lowering.target import Addressing

if TYPE_CHECKING:
    from vkjit.runtime.vulkan.device import VulkanDevice
    from vkjit.runtime.vulkan.instance import Instance

SUFFIX = "+descriptors"
"""Behind the name of a device: the same device with descriptors."""


def loss(w: Any, x: Any) -> Any:
    transposed = w.T * 0.5  # stored once, read by products forward and backward
    return vnp.sum(vnp.tanh(x @ transposed) ** 2)


def step(w: Any, x: Any) -> Any:
    value, gradient = vj.value_and_grad(loss)(w, x)
    return w - 0.1 * gradient, value


@final
class Watch:
    """The watched devices of a session. ``planted`` counts hazards, ``tests`` what ran since."""

    def __init__(self) -> None:
        self.planted = 0
        self.tests = 0
        self.missing: str | None = None
        self._instance: Instance | None = None
        self._expected = 0
        self._devices: dict[str, VulkanDevice] = {}

    def open(self, name: str) -> None:
        """Opens the device ``name`` unless it is open, and has its barriers reported."""
        if name in self._devices:
            return
        device = self._devices[name] = self._opened(name)
        runtime._open[name] = device
        if self.missing is None:
            self._plant(device)

    def _opened(self, name: str) -> VulkanDevice:
        from vkjit.runtime.vulkan.device import (  # noqa: PLC0415  needs a Vulkan loader
            VulkanDevice,
        )

        if self._instance is None:
            self._instance = self._layered()
        index = int(name.removesuffix(SUFFIX).partition(":")[2])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VKJIT_VULKAN_ADDRESSING", Addressing.DESCRIPTOR.value)
            return VulkanDevice(name, self._instance, self._instance.physical_devices()[index])

    def _layered(self) -> Instance:
        """An instance with the layer, or else without."""
        from vkjit.runtime.vulkan.instance import (  # noqa: PLC0415  needs a Vulkan loader
            Instance,
        )

        try:
            return Instance(validation=True)
        except DeviceError as error:
            self.missing = str(error)
            return Instance(validation=False)

    def _plant(self, device: VulkanDevice) -> None:
        """Takes each barrier out of a plan by itself; the layer must report every one."""
        assert self._instance is not None
        w, x = (np.full(shape, 0.5, np.float32) for shape in ((20, 24), (16, 24)))
        with vj.default_device(device.name):
            plan = vj.jit(step).lower(w, x).plan
        assert plan.barriers
        for position in sorted(plan.barriers):
            without = dataclasses.replace(plan, barriers=plan.barriers - {position})
            try:
                device.load(without).run([device.upload(w), device.upload(x)])
                device.synchronize()
            except DeviceError as error:
                if "SYNC-HAZARD" not in str(error):
                    raise
                self.planted += 1
            else:
                pytest.fail(
                    f"{device.name}: the validation layer did not report the missing barrier "
                    f"before step {position}; that it reports nothing else shows nothing"
                )
        device.synchronize()
        self._expected = self._instance.received

    def unexpected(self) -> int:
        """How many messages came that were not planted."""
        return 0 if self._instance is None else self._instance.received - self._expected

    def check(self, name: str) -> None:
        """Fails a test during which the layer reported something, also what was caught."""
        device = self._devices.get(name)
        if device is None:
            return
        self.tests += 1
        before = self.unexpected()
        device.synchronize()
        if self._instance is not None and self._instance.messages:
            reported, self._instance.messages = self._instance.messages, []
            pytest.fail("validation layer:\n" + "\n".join(reported))
        assert self.unexpected() == before

    def close(self) -> None:
        """Closes the devices."""
        for name, device in self._devices.items():
            runtime._open.pop(name, None)
            device.close()

    def summary(self) -> str | None:
        """One line on what was watched, or that it was not."""
        if not self._devices:
            return None
        names = ", ".join(self._devices)
        if self.missing is not None:
            return f"!!! NOT VALIDATED: {self.tests} tests on {names}: {self.missing} !!!"
        return (
            f"{names} under validation: {self.planted} planted hazards reported, then "
            f"{self.unexpected()} messages in {self.tests} tests"
        )


_WATCH = pytest.StashKey[Watch]()


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The name of an open device, or of one that opens when it is asked for."""
    name: str = request.param
    if name.endswith(SUFFIX):
        request.config.stash[_WATCH].open(name)
    return name


@pytest.fixture(autouse=True)
def nothing_reported(request: pytest.FixtureRequest) -> Generator[None]:
    """No test makes the validation layer report anything."""
    yield
    if "device" in request.fixturenames:
        request.config.stash[_WATCH].check(request.getfixturevalue("device"))


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_WATCH] = Watch()


def pytest_sessionfinish(session: pytest.Session) -> None:
    watch = session.config.stash[_WATCH]
    watch.close()
    gc.collect()
    if watch.unexpected():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    line = config.stash[_WATCH].summary()
    if line is not None:
        terminalreporter.write_sep("=", line, bold=True)
