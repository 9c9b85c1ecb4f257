"""The argument ``device``: a test with it runs once per device of this machine.

``reference``, ``cpu`` and every Vulkan device found, lavapipe included: as ``vulkan:0`` with device
addresses, and as ``vulkan:0+descriptors`` with descriptors under the validation layer, where it is
installed. Synchronisation validation follows accesses through descriptors and sees none through
addresses. Before the first test of such a device, each barrier is taken out of the plan of a
training step, and the layer must report it; after that it must report nothing.
``VKJIT_TEST_DEVICES=cpu,vulkan:0`` narrows the list.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
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
@dataclasses.dataclass
class Report:
    """What one process saw: hazards ``planted`` and reported, ``tests`` and ``messages`` since.

    ``missing`` says why nothing was validated.
    """

    planted: int = 0
    tests: int = 0
    messages: int = 0
    missing: str = ""


@final
class Watch:
    """The watched devices of a process."""

    def __init__(self) -> None:
        self.report = Report()
        self._instance: Instance | None = None
        self._expected = 0
        self._devices: dict[str, VulkanDevice] = {}

    def open(self, name: str) -> None:
        """Opens the device ``name`` unless it is open, and has its barriers reported."""
        if name in self._devices:
            return
        device = runtime._open[name] = self._opened(name)
        if not self.report.missing:
            self._plant(device)
        self._devices[name] = device

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
            self.report.missing = str(error)
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
                self.report.planted += 1
            else:
                pytest.fail(
                    f"{device.name}: the validation layer did not report the missing barrier "
                    f"before step {position}; that it reports nothing else shows nothing"
                )
        device.synchronize()
        self._expected = self._instance.received

    def check(self, name: str) -> None:
        """Fails a test during which the layer reported something, also what was caught."""
        device, instance = self._devices.get(name), self._instance
        if device is None or instance is None:
            return
        self.report.tests += 1
        device.synchronize()
        messages = instance.received - self._expected
        new, self.report.messages = messages - self.report.messages, messages
        text = "\n".join(instance.messages) or "caught and not shown again"
        instance.messages.clear()
        if new:
            pytest.fail(f"{new} messages of the validation layer:\n{text}")

    def close(self) -> None:
        """Closes the devices."""
        for name, device in self._devices.items():
            runtime._open.pop(name, None)
            device.close()
        gc.collect()
        if self._instance is not None:
            self.report.messages = self._instance.received - self._expected


_WATCH = pytest.StashKey[Watch]()
_REPORTS = pytest.StashKey[list[Report]]()


@functools.cache
def names() -> tuple[str, ...]:
    """Names of the devices that tests run on, cheapest first."""
    chosen = os.environ.get("VKJIT_TEST_DEVICES")
    if chosen:
        return tuple(name.strip() for name in chosen.split(","))
    found = runtime.available_devices()
    return (*found, *(name + SUFFIX for name in found if name.startswith("vulkan:")))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames and not _parametrized(metafunc, "device"):
        metafunc.parametrize("device", names(), indirect=True, scope="session")


def _parametrized(metafunc: pytest.Metafunc, name: str) -> bool:
    """True if the test or its class lists its own values for the argument `name`."""
    marks = metafunc.definition.iter_markers("parametrize")
    return any(name in str(mark.args[0]).replace(" ", "").split(",") for mark in marks)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The name of a device, which is open or opens when it is asked for."""
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
    config.stash[_WATCH], config.stash[_REPORTS] = Watch(), []


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Collects the report of a process of pytest-xdist, which ends before the session does."""
    output = getattr(node, "workeroutput", {})
    if "watched" in output:
        node.config.stash[_REPORTS].append(Report(**output["watched"]))


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    watch, reports = config.stash[_WATCH], config.stash[_REPORTS]
    watch.close()
    output: dict[str, Any] | None = getattr(config, "workeroutput", None)
    if output is not None:
        output["watched"] = dataclasses.asdict(watch.report)
    reports.append(watch.report)
    if any(report.messages for report in reports):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    lines = {_line(report) for report in config.stash[_REPORTS] if report.missing}
    found = [report for report in config.stash[_REPORTS] if report.planted]
    if found:
        planted, tests, messages = (
            sum(getattr(report, field) for report in found)
            for field in ("planted", "tests", "messages")
        )
        lines.add(
            f"descriptors under validation: {planted} planted hazards reported, then {messages} "
            f"messages in {tests} tests"
        )
    if not any(name.startswith("vulkan:") for name in names()):
        lines.add("!!! NOT TESTED: Vulkan, for want of a device; see `vkjit info` !!!")
    for line in sorted(lines):
        terminalreporter.write_sep("=", line, bold=True)


def _line(report: Report) -> str:
    return f"!!! NOT VALIDATED: barriers and accesses through descriptors: {report.missing} !!!"
