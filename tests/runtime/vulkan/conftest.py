"""A Vulkan device per addressing mode, under the validation layer where it is installed."""

from __future__ import annotations

import gc

import pytest

from vkjit.errors import DeviceError
from vkjit.lowering.target import Addressing


@pytest.fixture(scope="session")
def vulkan_instance():
    """An instance that reports every fault and hazard that the validation layer sees."""
    try:
        from vkjit.runtime.vulkan.instance import Instance  # noqa: PLC0415  needs a Vulkan loader
    except OSError as error:
        pytest.skip(f"no Vulkan loader: {error}")
    try:
        instance = Instance(validation=True)
    except DeviceError as error:
        pytest.skip(str(error))
    if not instance.physical_devices():
        pytest.skip("no Vulkan driver")
    return instance


def open_with(instance, addressing: Addressing):
    from vkjit.runtime.vulkan.device import VulkanDevice  # noqa: PLC0415  needs a Vulkan loader

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VKJIT_VULKAN_ADDRESSING", addressing.value)
        patch.setenv("VKJIT_CACHE", "0")
        return VulkanDevice("vulkan:0", instance, instance.physical_devices()[0])


@pytest.fixture(scope="module", params=list(Addressing), ids=lambda mode: mode.value)
def vulkan(request: pytest.FixtureRequest, vulkan_instance):
    """An open device; closing it leaves no object behind and no message unread."""
    device = open_with(vulkan_instance, request.param)
    yield device
    device.close()
    gc.collect()
    assert device.live_objects() == {}
    assert vulkan_instance.messages == []


@pytest.fixture
def fresh(request: pytest.FixtureRequest, vulkan_instance):
    """Opens devices of its own for a test, and closes them."""
    opened = []

    def open_fresh(addressing: Addressing):
        opened.append(open_with(vulkan_instance, addressing))
        return opened[-1]

    yield open_fresh
    for device in opened:
        device.close()
    vulkan_instance.messages.clear()
