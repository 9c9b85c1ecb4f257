"""Vulkan devices, ``vulkan:0`` and on in the order of the loader.

Importing this package raises ``OSError`` where no Vulkan loader is installed.
"""

from __future__ import annotations

from vkjit.errors import ArgumentError
from vkjit.runtime.device import DeviceClass, DeviceInfo
from vkjit.runtime.vulkan.device import VulkanDevice
from vkjit.runtime.vulkan.features import query
from vkjit.runtime.vulkan.ffi import constants, ffi, text
from vkjit.runtime.vulkan.instance import instance

__all__ = ["discover", "open_device"]

_CLASSES = {
    constants.VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU: DeviceClass.DISCRETE_GPU,
    constants.VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU: DeviceClass.INTEGRATED_GPU,
    constants.VK_PHYSICAL_DEVICE_TYPE_VIRTUAL_GPU: DeviceClass.VIRTUAL_GPU,
}


def discover() -> list[DeviceInfo]:
    """Every Vulkan device, with the reason where one cannot be used."""
    found: list[DeviceInfo] = []
    shared = instance()
    for index, physical in enumerate(shared.physical_devices()):
        properties = ffi.new("VkPhysicalDeviceProperties *")
        shared.functions.vkGetPhysicalDeviceProperties(physical, properties)
        refused = shared.refusal(physical)
        if refused is None and "timelineSemaphore" not in query(shared, physical).enabled:
            refused = "no timeline semaphores"
        found.append(
            DeviceInfo(
                f"vulkan:{index}",
                _CLASSES.get(properties.deviceType, DeviceClass.SOFTWARE),
                text(properties.deviceName),
                refused,
            )
        )
    return found


def open_device(name: str) -> VulkanDevice:
    """The device with the number after the colon.

    Raises:
        ArgumentError: there is no such device.
    """
    shared = instance()
    devices = shared.physical_devices()
    _, _, number = name.partition(":")
    index = int(number) if number.isdecimal() else len(devices)
    if index >= len(devices):
        raise ArgumentError(f"device: {name!r} does not exist, there are {len(devices)} of Vulkan")
    return VulkanDevice(name, shared, devices[index])
