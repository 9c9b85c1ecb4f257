"""Device memory: a few large blocks, cut into spans that are handed out and taken back.

A span may be handed out again at once: whatever the device does with it next is ordered after all
that it did before. Only the host must wait, until submission ``Span.busy`` is finished.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections import defaultdict
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, final

from vkjit.errors import OutOfMemoryError
from vkjit.runtime.vulkan.features import BUDGET_EXTENSION, Capabilities
from vkjit.runtime.vulkan.ffi import NULL, Handle, check, constants, ffi, result_name, struct
from vkjit.runtime.vulkan.logical import LogicalDevice

ALIGNMENT = 256
_BLOCK_BYTES = 64 << 20
_USAGE: int = (
    constants.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT
    | constants.VK_BUFFER_USAGE_TRANSFER_SRC_BIT
    | constants.VK_BUFFER_USAGE_TRANSFER_DST_BIT
)
# The package's names of these two have no value.
_SHADER_ADDRESS = 0x20000  # VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT
_ALLOCATE_ADDRESS = 2  # VK_MEMORY_ALLOCATE_DEVICE_ADDRESS_BIT
_LOCAL: int = constants.VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT
_VISIBLE: int = (
    constants.VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | constants.VK_MEMORY_PROPERTY_HOST_COHERENT_BIT
)
_CACHED: int = constants.VK_MEMORY_PROPERTY_HOST_CACHED_BIT
_OUT_OF_MEMORY = (
    constants.VK_ERROR_OUT_OF_DEVICE_MEMORY,
    constants.VK_ERROR_OUT_OF_HOST_MEMORY,
)


class MemoryKind(Enum):
    """What a heap is for, as the memory properties to look for, best first."""

    UNIFIED = (_LOCAL | _VISIBLE | _CACHED,)  # arrays, where host and device share memory
    DEVICE = (_LOCAL,)  # arrays, elsewhere
    STAGING = (_VISIBLE | _CACHED, _VISIBLE)  # copies to and from the host
    TABLE = (_LOCAL | _VISIBLE, _VISIBLE)  # argument tables, written by the host at each call


@final
@dataclass(eq=False, slots=True)
class Block:
    """One allocation of the driver with one buffer over all of it.

    ``address`` is the device's, or 0; ``mapped`` the host's, or 0. ``free`` are the gaps as
    (offset, size), in order.
    """

    buffer: Handle
    memory: Handle
    size: int
    address: int
    mapped: int
    free: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


@final
@dataclass(eq=False, slots=True)
class Span:
    """A part of a block that has one owner."""

    block: Block
    offset: int
    size: int
    busy: int = 0

    @property
    def address(self) -> int:
        """Where the device sees it."""
        return self.block.address + self.offset

    @property
    def mapped(self) -> int:
        """Where the host sees it; 0 if it does not."""
        return self.block.mapped + self.offset if self.block.mapped else 0


@final
class Heap:
    """The blocks of one kind of memory.

    Spans given back are kept by size, for the next call of the same program. They are merged into
    the gaps of their blocks only when memory is short.
    """

    def __init__(self, device: LogicalDevice, capabilities: Capabilities, kind: MemoryKind) -> None:
        self._device = device
        self._capabilities = capabilities
        self._type, heap = _memory_type(device, kind)
        self.limit = _budget(device, capabilities, heap)
        self._kept: defaultdict[int, list[Span]] = defaultdict(list)
        self._blocks: list[Block] = []
        self._lock = threading.RLock()  # collection of garbage may give spans back at any point
        self._busy = 0  # gaps of former spans may be in use until this submission is finished
        self.live = 0
        self.peak = 0

    @property
    def reserved(self) -> int:
        """Bytes taken from the driver."""
        return sum(block.size for block in self._blocks)

    def take(self, nbytes: int) -> Span:
        """A span of at least ``nbytes``.

        Raises:
            OutOfMemoryError: neither the blocks nor the driver have room.
        """
        size = max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT
        with self._lock:
            kept = self._kept.get(size)
            span = kept.pop() if kept else self._carve(size)
            self.live += span.size
            self.peak = max(self.peak, self.live)
        return span

    def give(self, span: Span, busy: int) -> None:
        """Takes a span back that submissions up to ``busy`` may use."""
        with self._lock:
            span.busy = busy
            self.live -= span.size
            self._kept[span.size].append(span)

    def _carve(self, size: int) -> Span:
        span = self._from_gaps(size)
        if span is None and any(self._kept.values()):
            self._merge()
            span = self._from_gaps(size)
        if span is None:
            self._grow(size)
            span = self._from_gaps(size)
        assert span is not None
        return span

    def _from_gaps(self, size: int) -> Span | None:
        """The smallest gap that is large enough."""
        fits = [
            (length, index, block)
            for block in self._blocks
            for index, (_, length) in enumerate(block.free)
            if length >= size
        ]
        if not fits:
            return None
        length, index, block = min(fits, key=_first)
        offset, _ = block.free.pop(index)
        if length > size:
            insort(block.free, (offset + size, length - size))
        return Span(block, offset, size, self._busy)

    def _merge(self) -> None:
        """Turns all kept spans into gaps, and joins neighbours."""
        # Spans that collection of garbage gives back meanwhile go to a list of their own.
        kept, self._kept = self._kept, defaultdict(list)
        for spans in kept.values():
            for span in spans:
                self._busy = max(self._busy, span.busy)
                insort(span.block.free, (span.offset, span.size))
        for block in self._blocks:
            joined: list[tuple[int, int]] = []
            for offset, size in block.free:
                if joined and sum(joined[-1]) == offset:
                    joined[-1] = (joined[-1][0], joined[-1][1] + size)
                else:
                    joined.append((offset, size))
            block.free = joined

    # -- blocks -----------------------------------------------------------------------------------

    def _grow(self, size: int) -> None:
        """One more block; if the driver refuses, one of just the size, then without spares."""
        largest = min(self._capabilities.max_allocation, self._capabilities.max_buffer)
        if size > largest:
            raise OutOfMemoryError(
                f"vulkan: an array of {size} bytes, the device allows {largest} per allocation"
            )
        result = 0
        for attempt in (min(max(size, _BLOCK_BYTES), largest), size, None):
            if attempt is None:
                self.trim()
            block, result = self._new_block(attempt or size)
            if block is not None:
                self._blocks.append(block)
                return
        raise OutOfMemoryError(
            f"vulkan: {size} bytes asked, {self.live} in use of {self.limit} "
            f"({result_name(result)}); use smaller arrays or free some"
        )

    def trim(self) -> None:
        """Gives blocks without owner back to the driver, when nothing runs any more."""
        self._merge()
        check(self._device.functions.vkDeviceWaitIdle(self._device.handle), "vkDeviceWaitIdle")
        for block in list(self._blocks):
            if block.free == [(0, block.size)]:
                self._blocks.remove(block)
                self._destroy(block)

    def _new_block(self, size: int) -> tuple[Block | None, int]:
        """A block, or None and the result when memory is short."""
        device, vk = self._device, self._device.functions
        addressed = "bufferDeviceAddress" in self._capabilities.enabled
        usage = _USAGE | (_SHADER_ADDRESS if addressed else 0)
        buffer = device.create("Buffer", struct("VkBufferCreateInfo", size=size, usage=usage))
        needed = ffi.new("VkMemoryRequirements *")
        vk.vkGetBufferMemoryRequirements(device.handle, buffer, needed)
        flags = struct(
            "VkMemoryAllocateFlagsInfo",
            flags=_ALLOCATE_ADDRESS if addressed else 0,
        )
        info = struct(
            "VkMemoryAllocateInfo",
            pNext=flags,
            allocationSize=needed.size,
            memoryTypeIndex=self._type,
        )
        memory = ffi.new("VkDeviceMemory *")
        result = vk.vkAllocateMemory(device.handle, info, NULL, memory)
        if result != 0:
            device.destroy("Buffer", buffer)
            if result not in _OUT_OF_MEMORY:
                check(result, "vkAllocateMemory")
            return None, result
        device.count("DeviceMemory", 1)
        check(vk.vkBindBufferMemory(device.handle, buffer, memory[0], 0), "vkBindBufferMemory")
        block = Block(buffer, memory[0], size, 0, self._map(memory[0]))
        if addressed:
            info = struct("VkBufferDeviceAddressInfo", buffer=buffer)
            block.address = vk.vkGetBufferDeviceAddress(device.handle, info)
        block.free.append((0, size))
        return block, 0

    def _map(self, memory: Handle) -> int:
        if _type_flags(self._device, self._type) & _VISIBLE != _VISIBLE:
            return 0
        pointer = ffi.new("void **")
        map_memory = self._device.functions.vkMapMemory
        whole = (1 << 64) - 1
        check(map_memory(self._device.handle, memory, 0, whole, 0, pointer), "vkMapMemory")
        return int(ffi.cast("uintptr_t", pointer[0]))

    def _destroy(self, block: Block) -> None:
        self._device.destroy("Buffer", block.buffer)
        self._device.functions.vkFreeMemory(self._device.handle, block.memory, NULL)
        self._device.count("DeviceMemory", -1)

    def close(self) -> None:
        """Gives all memory back, in use or not."""
        with self._lock:
            for block in self._blocks:
                self._destroy(block)
            self._blocks.clear()
            self._kept.clear()


def _first(fit: tuple[int, int, Block]) -> int:
    return fit[0]


def _properties(device: LogicalDevice) -> Any:
    properties = ffi.new("VkPhysicalDeviceMemoryProperties *")
    device.instance.functions.vkGetPhysicalDeviceMemoryProperties(device.physical, properties)
    return properties


def _type_flags(device: LogicalDevice, index: int) -> int:
    flags: int = _properties(device).memoryTypes[index].propertyFlags
    return flags


def has_unified_memory(device: LogicalDevice) -> bool:
    """Whether some memory is the device's own and cached by the host."""
    properties = _properties(device)
    wanted = MemoryKind.UNIFIED.value[0]
    types = [properties.memoryTypes[i] for i in range(properties.memoryTypeCount)]
    return any(t.propertyFlags & wanted == wanted for t in types)


def _budget(device: LogicalDevice, capabilities: Capabilities, heap: int) -> int:
    """Bytes of a heap that this process may use now: what others leave, if the driver says it."""
    properties = _properties(device)
    size: int = properties.memoryHeaps[heap].size
    if BUDGET_EXTENSION not in capabilities.extensions:
        return size
    budget = struct("VkPhysicalDeviceMemoryBudgetPropertiesEXT")
    answer = struct("VkPhysicalDeviceMemoryProperties2", pNext=budget)
    device.instance.functions.vkGetPhysicalDeviceMemoryProperties2(device.physical, answer)
    return min(size, budget.heapBudget[heap])


def _memory_type(device: LogicalDevice, kind: MemoryKind) -> tuple[int, int]:
    """The index of the memory type for ``kind``, and that of its heap."""
    properties = _properties(device)
    for wanted in kind.value:
        fits: list[tuple[int, int]] = []
        for index in range(properties.memoryTypeCount):
            flags: int = properties.memoryTypes[index].propertyFlags
            if flags & wanted == wanted:
                # The type with fewest further properties: plain device memory before mapped one.
                fits.append(((flags & ~wanted).bit_count(), index))
        if fits:
            index = min(fits)[1]
            return index, properties.memoryTypes[index].heapIndex
    raise OutOfMemoryError(f"vulkan: the device has no {kind.name.lower()} memory")
