"""A Vulkan device with cooperative matrices; ``make test-matrix`` brings one in software.

There ``VKJIT_TEST_MATRIX`` is set, and a device without them is an error instead of a reason to
skip.
"""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

from vkjit.lowering.target import Addressing


def missing(what: str) -> NoReturn:
    if os.environ.get("VKJIT_TEST_MATRIX"):
        pytest.fail(what)
    pytest.skip(f"{what}; `make test-matrix` brings a driver")


def opened(addressing: Addressing):
    """Without the validation layer: what is installed is older than the extensions."""
    try:
        from vkjit.runtime.vulkan.instance import Instance  # noqa: PLC0415  needs a Vulkan loader
    except OSError as error:
        missing(f"no Vulkan loader: {error}")
    from vkjit.runtime.vulkan.device import VulkanDevice  # noqa: PLC0415  needs a Vulkan loader

    instance = Instance(validation=False)
    found = instance.physical_devices()
    if not found:
        missing("no Vulkan driver")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VKJIT_VULKAN_ADDRESSING", addressing.value)
        patch.setenv("VKJIT_CACHE", "0")
        device = VulkanDevice("vulkan:0", instance, found[0])
    if not device.target.coop_shapes:
        name = device.target.name
        device.close()
        missing(f"{name} has no cooperative matrices")
    return device


@pytest.fixture(scope="session")
def matrices():
    """The device, its buffers reached by address."""
    device = opened(Addressing.DEVICE_ADDRESS)
    yield device
    device.close()


@pytest.fixture(scope="session", params=list(Addressing), ids=lambda mode: mode.value)
def in_both_modes(request: pytest.FixtureRequest):
    """The device, its buffers reached by address, and by descriptors."""
    device = opened(request.param)
    yield device
    device.close()
