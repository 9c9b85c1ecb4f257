"""The driver's pipeline cache on disk, by device and driver; shared by processes.

A driver trusts the data that it is given, so a file is used only if its checksum is right and its
header names this very device and driver.
"""

from __future__ import annotations

import struct as binary
from typing import Any, final

from vkjit.runtime.cache import cache_key, open_cache
from vkjit.runtime.vulkan.features import Capabilities
from vkjit.runtime.vulkan.ffi import NULL, Handle, array, check, constants, ffi, struct
from vkjit.runtime.vulkan.logical import LogicalDevice

_HEADER = binary.Struct("<IIII16s")  # VkPipelineCacheHeaderVersionOne
_VERSION_ONE = 1
_INCOMPLETE: int = constants.VK_INCOMPLETE
_LARGEST = 256 << 20  # a cache beyond this costs more to read than it saves: start anew


@final
class DriverCache:
    """A ``VkPipelineCache``, ``handle``, that begins with what earlier processes left."""

    def __init__(self, device: LogicalDevice, capabilities: Capabilities) -> None:
        self._device = device
        self._disk = open_cache("vulkan")
        self._key = cache_key(
            (capabilities.target.name, capabilities.driver, capabilities.uuid, "2")
        )
        self._identity = _identity(device)
        self._read = self._saved()
        self.handle = self._create(self._read)

    def _saved(self) -> bytes:
        data = (self._disk.get(self._key) if self._disk else None) or b""
        return data if len(data) <= _LARGEST and has_header(data, self._identity) else b""

    def _create(self, saved: bytes) -> Handle:
        data = ffi.from_buffer("char[]", saved) if saved else NULL
        info = struct("VkPipelineCacheCreateInfo", initialDataSize=len(saved), pInitialData=data)
        return self._device.create("PipelineCache", info)

    def save(self) -> None:
        """Writes the cache, together with what other processes wrote meanwhile."""
        if self._disk is None:
            return
        device = self._device
        saved = self._saved()
        if saved and saved != self._read:
            other = self._create(saved)
            merge = device.functions.vkMergePipelineCaches
            sources = array("VkPipelineCache", [other])
            check(merge(device.handle, self.handle, 1, sources), "vkMergePipelineCaches")
            device.destroy("PipelineCache", other)
        self._read = self._data()
        self._disk.put(self._key, self._read)

    def _data(self) -> bytes:
        """What the driver has cached; other threads may add to it meanwhile."""
        size, result = ffi.new("size_t *"), _INCOMPLETE
        get = self._device.functions.vkGetPipelineCacheData
        data: Any = NULL
        while result == _INCOMPLETE:
            check(get(self._device.handle, self.handle, size, NULL), "vkGetPipelineCacheData")
            data = ffi.new("char[]", size[0])
            result = get(self._device.handle, self.handle, size, data)
        check(result, "vkGetPipelineCacheData")
        return bytes(ffi.buffer(data, size[0]))

    def close(self) -> None:
        """Destroys the driver's object."""
        self._device.destroy("PipelineCache", self.handle)


def _identity(device: LogicalDevice) -> tuple[int, int, bytes]:
    """Vendor, device and UUID of the driver's caches."""
    properties = ffi.new("VkPhysicalDeviceProperties *")
    device.instance.functions.vkGetPhysicalDeviceProperties(device.physical, properties)
    uuid = bytes(ffi.buffer(properties.pipelineCacheUUID))
    return properties.vendorID, properties.deviceID, uuid


def has_header(data: bytes, identity: tuple[int, int, bytes]) -> bool:
    """Whether cache data begin with the header of the device of this identity."""
    if len(data) < _HEADER.size:
        return False
    size, version, *found = _HEADER.unpack_from(data)
    fits = _HEADER.size <= size <= len(data) and version == _VERSION_ONE
    return fits and tuple(found) == identity
