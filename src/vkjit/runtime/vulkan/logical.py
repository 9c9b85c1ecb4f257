"""A logical device: its handle and functions, and a count of every object made on it."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from typing import Any, final

from vkjit.runtime.vulkan.ffi import (
    NULL,
    Functions,
    Handle,
    array,
    check,
    ffi,
    strings,
    struct,
)
from vkjit.runtime.vulkan.instance import Instance


@final
class LogicalDevice:
    """A ``VkDevice`` with one queue. ``live`` counts objects by type: all zero after closing."""

    def __init__(
        self,
        instance: Instance,
        physical: Handle,
        family: int,
        features: Any,
        extensions: list[str],
    ) -> None:
        self.instance = instance
        self.physical = physical
        self.family = family
        self.live: Counter[str] = Counter()
        self._lock = threading.RLock()  # collection of garbage may destroy objects at any point
        queue = struct(
            "VkDeviceQueueCreateInfo",
            queueFamilyIndex=family,
            queueCount=1,
            pQueuePriorities=ffi.new("float[]", [1.0]),
        )
        info = struct(
            "VkDeviceCreateInfo",
            pNext=features,
            queueCreateInfoCount=1,
            pQueueCreateInfos=queue,
            enabledExtensionCount=len(extensions),
            ppEnabledExtensionNames=strings(extensions),
        )
        handle = ffi.new("VkDevice *")
        create = instance.functions.vkCreateDevice
        check(create(physical, info, NULL, handle), "vkCreateDevice")
        self.handle = handle[0]
        address_of = instance.functions.vkGetDeviceProcAddr
        self.functions = Functions(functools.partial(address_of, self.handle))

    def queue(self) -> Handle:
        """The only queue."""
        handle = ffi.new("VkQueue *")
        self.functions.vkGetDeviceQueue(self.handle, self.family, 0, handle)
        return handle[0]

    def create(self, kind: str, info: Any) -> Handle:
        """A new object through ``vkCreate<kind>``."""
        handle = ffi.new(f"Vk{kind} *")
        create = getattr(self.functions, f"vkCreate{kind}")
        check(create(self.handle, info, NULL, handle), f"vkCreate{kind}")
        self.count(kind, 1)
        return handle[0]

    def destroy(self, kind: str, handle: Handle) -> None:
        """The end of an object from :meth:`create`."""
        getattr(self.functions, f"vkDestroy{kind}")(self.handle, handle, NULL)
        self.count(kind, -1)

    def count(self, kind: str, change: int) -> None:
        """Notes objects made or destroyed by other functions."""
        with self._lock:
            self.live[kind] += change

    def allocate_commands(self, pool: Handle, level: int) -> Handle:
        """A command buffer of a ``VkCommandBufferLevel``, which lives as long as its pool."""
        info = struct(
            "VkCommandBufferAllocateInfo", commandPool=pool, level=level, commandBufferCount=1
        )
        handle = array("VkCommandBuffer", [NULL])
        allocate = self.functions.vkAllocateCommandBuffers
        check(allocate(self.handle, info, handle), "vkAllocateCommandBuffers")
        return handle[0]

    def close(self) -> None:
        """Destroys the device; every object on it must be gone."""
        self.functions.vkDestroyDevice(self.handle, NULL)
