"""Vulkan devices, ``vulkan:0`` and on in the order of the loader.

Importing this package raises ``OSError`` where no Vulkan loader is installed.
"""

from __future__ import annotations

from vkjit.errors import ArgumentError, DeviceError
from vkjit.runtime.device import DeviceClass, DeviceInfo
from vkjit.runtime.vulkan.device import VulkanDevice
from vkjit.runtime.vulkan.features import query
from vkjit.runtime.vulkan.ffi import Handle, constants, ffi, text
from vkjit.runtime.vulkan.instance import Instance, instance
from vkjit.runtime.vulkan.manifests import driver_faults, where_drivers_come_from

__all__ = ["discover", "open_device"]

_CLASSES = {
    constants.VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU: DeviceClass.DISCRETE_GPU,
    constants.VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU: DeviceClass.INTEGRATED_GPU,
    constants.VK_PHYSICAL_DEVICE_TYPE_VIRTUAL_GPU: DeviceClass.VIRTUAL_GPU,
}


def discover() -> list[DeviceInfo]:
    """Every Vulkan device, with the reason where one cannot be used.

    Drivers that the loader could not load are refused devices, too.
    """
    faults = [
        DeviceInfo("vulkan", DeviceClass.SOFTWARE, "a driver", refused=fault)
        for fault in driver_faults()
    ]
    try:
        shared = instance()
        devices = shared.physical_devices()
    except DeviceError as error:
        if faults:
            return faults
        return [DeviceInfo("vulkan", DeviceClass.SOFTWARE, "the loader", refused=str(error))]
    found = [_info(shared, index, device) for index, device in enumerate(devices)]
    if not found and not faults:
        reason = f"no driver has a device; drivers come from {where_drivers_come_from()}"
        return [DeviceInfo("vulkan", DeviceClass.SOFTWARE, "the loader", refused=reason)]
    return found + faults


def _info(shared: Instance, index: int, physical: Handle) -> DeviceInfo:
    """One device; a driver that fails to answer costs no other device."""
    properties = ffi.new("VkPhysicalDeviceProperties *")
    shared.functions.vkGetPhysicalDeviceProperties(physical, properties)
    refused = shared.refusal(physical)
    if refused is None:
        try:
            if "timelineSemaphore" not in query(shared, physical).enabled:
                refused = "no timeline semaphores"
        except DeviceError as error:
            refused = str(error)
    return DeviceInfo(
        f"vulkan:{index}",
        _CLASSES.get(properties.deviceType, DeviceClass.SOFTWARE),
        text(properties.deviceName),
        refused,
    )


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
