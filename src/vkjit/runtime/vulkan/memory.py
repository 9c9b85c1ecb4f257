"""Device memory: a few large blocks, cut into spans that are handed out and taken back.

A span may be handed out again at once: whatever the device does with it next is ordered after all
that it did before. Only the host must wait, until submission ``Span.busy`` is finished.
"""

from __future__ import annotations

import gc
import threading
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

from vkjit.errors import DeviceError, OutOfMemoryError
from vkjit.runtime.vulkan.features import Capabilities
from vkjit.runtime.vulkan.ffi import NULL, Handle, constants, ffi, result_name, struct
from vkjit.runtime.vulkan.logical import LogicalDevice
from vkjit.runtime.vulkan.memory_types import (
    MemoryKind,
    asked_limit,
    budget,
    is_cached,
    is_mapped,
    memory_type,
)

ALIGNMENT = 256
_SMALLEST_BLOCK = 64 << 20
_LARGEST_BLOCK = 1 << 30  # of several arrays; a larger array has a block of its own
_GROWTH = 4  # a new block is as large as this part of all before, within the two bounds
_GRANULE = 2 << 20  # blocks are multiples of the device's large pages
_USAGE: int = (
    constants.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT
    | constants.VK_BUFFER_USAGE_TRANSFER_SRC_BIT
    | constants.VK_BUFFER_USAGE_TRANSFER_DST_BIT
)
# The package's names of these two have no value.
_SHADER_ADDRESS = 0x20000  # VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT
_ALLOCATE_ADDRESS = 2  # VK_MEMORY_ALLOCATE_DEVICE_ADDRESS_BIT
_MEMORY_SHORT = (
    constants.VK_ERROR_OUT_OF_DEVICE_MEMORY,
    constants.VK_ERROR_OUT_OF_HOST_MEMORY,
    constants.VK_ERROR_MEMORY_MAP_FAILED,
    constants.VK_ERROR_TOO_MANY_OBJECTS,
)

Wait = Callable[[int], None]
"""Returns once the submission of this number is finished."""


@final
@dataclass(eq=False, slots=True)
class Block:
    """One allocation of the driver with one buffer over all of it.

    ``address`` is the device's, or 0; ``mapped`` the host's, or 0, which may read there only if the
    heap is ``cached``. ``free`` are the gaps as (offset, size), in order.
    """

    heap: Heap
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

    Args:
        device: whose memory it is.
        capabilities: of that device.
        kind: what the memory is for.
        wait: returns once a submission is finished.
        ceiling: most bytes to take from the driver; None leaves it to the driver.
    """

    def __init__(
        self,
        device: LogicalDevice,
        capabilities: Capabilities,
        kind: MemoryKind,
        wait: Wait,
        ceiling: int | None = None,
    ) -> None:
        self._wait = wait
        self._device = device
        self._capabilities = capabilities
        self._type, self._index = memory_type(device, kind)
        self._ceiling = ceiling
        self.is_mapped = is_mapped(device, self._type)
        self.is_cached = is_cached(device, self._type)
        self._kept: defaultdict[int, deque[Span]] = defaultdict(deque)
        self._blocks: list[Block] = []
        self._lock = threading.RLock()
        # Collection of garbage may come at any point and in any thread: it takes no lock.
        self._returned: deque[Span] = deque()
        self._busy = 0  # gaps of former spans may be in use until this submission is finished
        self._live = 0
        self.peak = 0

    @property
    def live(self) -> int:
        """Bytes of spans that have owners."""
        with self._lock:
            self._take_back()
            return self._live

    @property
    def reserved(self) -> int:
        """Bytes taken from the driver."""
        return sum(block.size for block in self._blocks)

    @property
    def limit(self) -> int:
        """Most bytes that this process may have now, as far as the driver knows."""
        allowed, _ = budget(self._device, self._capabilities, self._index, self.reserved)
        return allowed if self._ceiling is None else min(allowed, self._ceiling)

    @property
    def largest(self) -> int:
        """Most bytes of one array."""
        return min(self._capabilities.max_allocation, self._capabilities.max_buffer)

    def available(self) -> int:
        """Bytes that spans may still take: those pooled here and what the driver has left."""
        with self._lock:
            self._take_back()
            return self.reserved - self._live + self._room()

    def _room(self) -> int:
        """Bytes that may still be taken from the driver."""
        reserved = self.reserved
        _, room = budget(self._device, self._capabilities, self._index, reserved)
        return room if self._ceiling is None else min(room, max(self._ceiling - reserved, 0))

    def take(self, nbytes: int) -> Span:
        """A span of at least ``nbytes``.

        Raises:
            OutOfMemoryError: neither the blocks nor the driver have room.
        """
        size = rounded(nbytes)
        with self._lock:
            self._take_back()
            kept = self._kept.get(size)
            return self._owned(kept.pop() if kept else self._carve(size))

    def take_finished(self, nbytes: int, finished: int) -> Span:
        """A span that submissions after ``finished`` do not use, if there is one or room for one.

        Raises:
            OutOfMemoryError: neither the blocks nor the driver have room.
        """
        size = rounded(nbytes)
        with self._lock:
            self._take_back()
            kept = self._kept.get(size)
            if kept and kept[0].busy <= finished:
                return self._owned(kept.popleft())
            return self._owned(self._carve(size))

    def _owned(self, span: Span) -> Span:
        self._live += span.size
        self.peak = max(self.peak, self._live)
        return span

    def give(self, span: Span, busy: int) -> None:
        """Takes a span back that submissions up to ``busy`` may use; never waits for a lock."""
        span.busy = busy
        self._returned.append(span)

    def _take_back(self) -> None:
        """Files the spans that were given back since the last time."""
        while self._returned:
            span = self._returned.popleft()
            self._live -= span.size
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
        self._take_back()
        kept, self._kept = self._kept, defaultdict(deque)
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
        """One more block; if it cannot be had, one of just the size, then one without spares."""
        if size > self.largest:
            raise OutOfMemoryError(
                f"vulkan: an array of {size} bytes, the device allows {self.largest} per "
                "allocation; split the array"
            )
        result = 0
        for attempt in (self._preferred(size), size, None):
            if attempt is None and self._make_room(size):
                return
            block, result = self._new_block(attempt or size)
            if block is not None:
                self._blocks.append(block)
                return
        reason = result_name(result) if result else "the limit is reached"
        raise OutOfMemoryError(
            f"vulkan: {size} bytes asked, {self._live} in use of {self.limit} ({reason}); "
            "use smaller arrays or free some"
        )

    def _make_room(self, size: int) -> bool:
        """Takes back what only cycles of references hold; whether a gap is large enough now."""
        gc.collect()
        self.trim()
        return any(length >= size for block in self._blocks for _, length in block.free)

    def _preferred(self, size: int) -> int:
        """How large a block with room for ``size`` should be."""
        spare = min(max(self.reserved // _GROWTH, _SMALLEST_BLOCK), _LARGEST_BLOCK)
        return min(-(-max(size, spare) // _GRANULE) * _GRANULE, self.largest)

    def trim(self) -> None:
        """Gives blocks without owner back to the driver, once nothing uses them any more."""
        with self._lock:
            self._merge()
            self._wait(self._busy)
            for block in list(self._blocks):
                if block.free == [(0, block.size)]:
                    self._blocks.remove(block)
                    self._destroy(block.buffer, block.memory)

    def _new_block(self, size: int) -> tuple[Block | None, int]:
        """A block, or None and the result when memory is short."""
        if self._ceiling is not None and self.reserved + size > self._ceiling:
            return None, 0
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
            return None, _unless_short(result, "vkAllocateMemory")
        device.count("DeviceMemory", 1)
        mapped = ffi.new("void **")
        result = vk.vkBindBufferMemory(device.handle, buffer, memory[0], 0)
        if result == 0 and self.is_mapped:
            whole = (1 << 64) - 1
            result = vk.vkMapMemory(device.handle, memory[0], 0, whole, 0, mapped)
        if result != 0:
            self._destroy(buffer, memory[0])
            return None, _unless_short(result, "vkBindBufferMemory or vkMapMemory")
        block = Block(self, buffer, memory[0], size, 0, int(ffi.cast("uintptr_t", mapped[0])))
        if addressed:
            info = struct("VkBufferDeviceAddressInfo", buffer=buffer)
            block.address = vk.vkGetBufferDeviceAddress(device.handle, info)
        block.free.append((0, size))
        return block, 0

    def _destroy(self, buffer: Handle, memory: Handle) -> None:
        self._device.destroy("Buffer", buffer)
        self._device.functions.vkFreeMemory(self._device.handle, memory, NULL)
        self._device.count("DeviceMemory", -1)

    def close(self) -> None:
        """Gives all memory back, in use or not."""
        with self._lock:
            for block in self._blocks:
                self._destroy(block.buffer, block.memory)
            self._blocks.clear()
            self._kept.clear()
            self._returned.clear()


def rounded(nbytes: int) -> int:
    """The size of a span for ``nbytes``."""
    return max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT


def _unless_short(result: int, what: str) -> int:
    """``result`` if it says that memory is short.

    Raises:
        DeviceError: it says something else.
    """
    if result not in _MEMORY_SHORT:
        raise DeviceError(f"vulkan: {what} failed with {result_name(result)}")
    return result


def _first(fit: tuple[int, int, Block]) -> int:
    return fit[0]


def array_heap(
    device: LogicalDevice, capabilities: Capabilities, kind: MemoryKind, wait: Wait
) -> Heap:
    """The heap of the arrays, bounded by ``VKJIT_VULKAN_MEMORY_LIMIT``."""
    return Heap(device, capabilities, kind, wait, asked_limit())
