"""Which memory a device has: types for each use, and what its heaps have left."""

from __future__ import annotations

import os
from enum import Enum
from typing import Any

from vkjit.errors import ConfigError, OutOfMemoryError
from vkjit.runtime.vulkan.features import BUDGET_EXTENSION, Capabilities
from vkjit.runtime.vulkan.ffi import constants, ffi, struct
from vkjit.runtime.vulkan.logical import LogicalDevice

_LOCAL: int = constants.VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT
_VISIBLE: int = (
    constants.VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | constants.VK_MEMORY_PROPERTY_HOST_COHERENT_BIT
)
_CACHED: int = constants.VK_MEMORY_PROPERTY_HOST_CACHED_BIT
_LIMIT_VARIABLE = "VKJIT_VULKAN_MEMORY_LIMIT"


class MemoryKind(Enum):
    """What a heap is for, as the memory properties to look for, best first."""

    UNIFIED = (_LOCAL | _VISIBLE | _CACHED,)  # arrays, where host and device share memory
    DEVICE = (_LOCAL,)  # arrays, elsewhere
    DIRECT = (_LOCAL | _VISIBLE,)  # small arrays that the host writes, beside DEVICE
    STAGING = (_VISIBLE | _CACHED, _VISIBLE)  # copies to and from the host
    TABLE = (_LOCAL | _VISIBLE, _VISIBLE)  # argument tables, written by the host at each call


def has_memory(device: LogicalDevice, kind: MemoryKind) -> bool:
    """Whether the device has memory of this kind."""
    return bool(_fitting(device, kind))


def memory_type(device: LogicalDevice, kind: MemoryKind) -> tuple[int, int]:
    """The index of the memory type for ``kind``, and that of its heap.

    Among types that fit it is the one with the fewest further properties: plain device memory
    before mapped one.

    Raises:
        OutOfMemoryError: there is no such memory.
    """
    found = _fitting(device, kind)
    if not found:
        raise OutOfMemoryError(f"vulkan: the device has no {kind.name.lower()} memory")
    return found[0], memory_properties(device).memoryTypes[found[0]].heapIndex


def _fitting(device: LogicalDevice, kind: MemoryKind) -> list[int]:
    """Indices of the types with the best properties that any type has, plainest first."""
    properties = memory_properties(device)
    flags = [properties.memoryTypes[i].propertyFlags for i in range(properties.memoryTypeCount)]
    for wanted in kind.value:
        fits = [i for i, has in enumerate(flags) if has & wanted == wanted]
        if fits:
            return sorted(fits, key=[has.bit_count() for has in flags].__getitem__)
    return []


def memory_properties(device: LogicalDevice) -> Any:
    """``VkPhysicalDeviceMemoryProperties``."""
    properties = ffi.new("VkPhysicalDeviceMemoryProperties *")
    device.instance.functions.vkGetPhysicalDeviceMemoryProperties(device.physical, properties)
    return properties


def is_mapped(device: LogicalDevice, index: int) -> bool:
    """Whether the host may address memory of this type."""
    flags: int = memory_properties(device).memoryTypes[index].propertyFlags
    return flags & _VISIBLE == _VISIBLE


def is_cached(device: LogicalDevice, index: int) -> bool:
    """Whether the host may read memory of this type at full speed."""
    flags: int = memory_properties(device).memoryTypes[index].propertyFlags
    return bool(flags & _CACHED)


def budget(
    device: LogicalDevice, capabilities: Capabilities, heap: int, reserved: int
) -> tuple[int, int]:
    """Bytes of a heap that this process may use now, and those that it may still allocate.

    Where the driver does not say what other processes leave, it is the heap's size less
    ``reserved``.
    """
    size: int = memory_properties(device).memoryHeaps[heap].size
    if BUDGET_EXTENSION not in capabilities.extensions:
        return size, max(size - reserved, 0)
    answer = struct("VkPhysicalDeviceMemoryBudgetPropertiesEXT")
    query = struct("VkPhysicalDeviceMemoryProperties2", pNext=answer)
    device.instance.functions.vkGetPhysicalDeviceMemoryProperties2(device.physical, query)
    allowed: int = min(size, answer.heapBudget[heap])
    return allowed, max(allowed - answer.heapUsage[heap], 0)


def asked_limit() -> int | None:
    """``VKJIT_VULKAN_MEMORY_LIMIT``: most bytes that arrays may take.

    Raises:
        ConfigError: it is not a number of bytes.
    """
    asked = os.environ.get(_LIMIT_VARIABLE)
    if not asked:
        return None
    if not asked.isdecimal():
        raise ConfigError(f"{_LIMIT_VARIABLE}: got {asked!r}, expected a number of bytes")
    return int(asked)
