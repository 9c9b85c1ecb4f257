"""A Vulkan device: arrays, plans and transfers over the objects of this package."""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, cast, final

import numpy as np
from numpy.typing import DTypeLike

from vkjit.errors import DeviceError, InternalError
from vkjit.lowering.artifact import Plan
from vkjit.lowering.target import Addressing
from vkjit.runtime.device import Device, DeviceBuffer, HostArray, MemoryStats
from vkjit.runtime.vulkan.buffer import VulkanBuffer
from vkjit.runtime.vulkan.features import Capabilities, query
from vkjit.runtime.vulkan.ffi import Handle, check, ffi
from vkjit.runtime.vulkan.instance import Instance
from vkjit.runtime.vulkan.loaded import Recording, VulkanLoaded
from vkjit.runtime.vulkan.logical import LogicalDevice
from vkjit.runtime.vulkan.memory import Heap, MemoryKind, Span, has_unified_memory
from vkjit.runtime.vulkan.pipeline import Pipelines
from vkjit.runtime.vulkan.queue import Place, Queue

_CHUNK = 16 << 20  # bytes of one staging copy
_STAGES = 2


@final
class VulkanDevice(Device):
    """One physical device with one queue; calls return before the device is done.

    ``lock`` guards recording and submission. ``memory`` holds arrays, ``tables`` what the host
    writes for each call.
    """

    def __init__(self, name: str, instance: Instance, physical: Handle) -> None:
        self.name = name
        self.closed = False
        self.lock = threading.RLock()
        self.capabilities: Capabilities = query(instance, physical)
        self.target = self.capabilities.target
        known = self.capabilities
        self.logical = LogicalDevice(
            instance, physical, known.family, known.chain, list(known.extensions)
        )
        self.queue = Queue(self.logical, spin=not known.is_software)
        self._unified = has_unified_memory(self.logical)
        kind = MemoryKind.UNIFIED if self._unified else MemoryKind.DEVICE
        self.memory = Heap(self.logical, known, kind)
        self.tables = Heap(self.logical, known, MemoryKind.TABLE)
        self._staging_heap = Heap(self.logical, known, MemoryKind.STAGING)
        self._staging: list[Span] = []
        self.pipelines = Pipelines(self.logical, known)
        # Also when the process ends without closing the device.
        weakref.finalize(self, self.pipelines.save)
        self._loaded: weakref.WeakSet[VulkanLoaded] = weakref.WeakSet()
        self._retired: deque[Recording] = deque()

    # -- buffers ----------------------------------------------------------------------------------

    def own(self, buffer: DeviceBuffer) -> VulkanBuffer:
        """``buffer``, which must be one of this device."""
        if not isinstance(buffer, VulkanBuffer) or buffer.device is not self:
            raise InternalError(f"{self.name}: a buffer of {buffer.device.name} was given")
        return buffer

    def give(self, span: Span) -> None:
        """Takes memory back that anything submitted so far may use."""
        if not self.closed:
            self.memory.give(span, self.queue.submitted)

    def allocate(self, nbytes: int) -> VulkanBuffer:
        """Uninitialised memory, aligned to 256 bytes."""
        self._require_open()
        return VulkanBuffer(self, self.memory.take(nbytes), nbytes, 0)

    def upload(self, array: HostArray) -> VulkanBuffer:
        """A copy of a C-contiguous array."""
        if not array.flags.c_contiguous:
            raise InternalError(
                f"{self.name}: upload of {array.dtype}{list(array.shape)}, not contiguous"
            )
        buffer = self.allocate(array.nbytes)
        if array.nbytes == 0:
            return buffer
        source = ffi.from_buffer("char[]", array.reshape(-1).view(np.uint8))
        span = buffer.span
        if span.mapped:
            # The device may still be at work on this memory for its former owner.
            self.queue.wait(span.busy)
            ffi.memmove(ffi.cast("char *", span.mapped), source, array.nbytes)
        else:
            buffer.written = self._stage_in(source, span, array.nbytes)
        return buffer

    def download(self, buffer: DeviceBuffer, dtype: DTypeLike, shape: tuple[int, ...]) -> HostArray:
        """A copy of the first elements, once they are written."""
        owned, kind = self.own(buffer), np.dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        if size > owned.nbytes:
            raise InternalError(
                f"{self.name}: {kind}{list(shape)} was asked of a buffer of {owned.nbytes} bytes"
            )
        result = np.empty(size, np.uint8)
        if size:
            target = ffi.from_buffer("char[]", result, require_writable=True)
            self.queue.wait(owned.written)
            if owned.span.mapped:
                ffi.memmove(target, ffi.cast("char *", owned.span.mapped), size)
            else:
                self._stage_out(owned.span, target, size)
        return cast(HostArray, result.view(kind).reshape(shape))

    def _stages(self) -> list[Span]:
        """Staging memory, made at the first transfer."""
        while len(self._staging) < _STAGES:
            self._staging.append(self._staging_heap.take(_CHUNK))
        return self._staging

    def _stage_in(self, source: Any, span: Span, size: int) -> int:
        """Copies host bytes to the device in chunks; the host fills one while one is copied."""
        with self.lock:
            value = 0
            for turn, start in enumerate(range(0, size, _CHUNK)):
                stage = self._stages()[turn % _STAGES]
                self.queue.wait(stage.busy)
                length = min(_CHUNK, size - start)
                ffi.memmove(ffi.cast("char *", stage.mapped), source + start, length)
                value = self._transfer(_place(stage), _place(span, start), length, "upload")
                stage.busy = value
            return value

    def _stage_out(self, span: Span, target: Any, size: int) -> None:
        """Copies device bytes to the host in chunks; one is copied while the host reads one."""
        with self.lock:
            pending: list[tuple[Span, int, int]] = []
            for turn, start in enumerate(range(0, size, _CHUNK)):
                if len(pending) == _STAGES:
                    self._read_stage(*pending.pop(0), target)
                stage = self._stages()[turn % _STAGES]
                self.queue.wait(stage.busy)
                length = min(_CHUNK, size - start)
                stage.busy = self._transfer(_place(span, start), _place(stage), length, "download")
                pending.append((stage, start, length))
            for stage, start, length in pending:
                self._read_stage(stage, start, length, target)

    def _read_stage(self, stage: Span, start: int, length: int, target: Any) -> None:
        self.queue.wait(stage.busy)
        ffi.memmove(target + start, ffi.cast("char *", stage.mapped), length)

    def _transfer(self, source: Place, target: Place, size: int, label: str) -> int:
        commands = self.queue.borrow()
        commands.begin()
        commands.copy(source, target, size)
        commands.end()
        value = self.queue.submit(commands, label)
        self.queue.give(commands, value)
        return value

    # -- plans ------------------------------------------------------------------------------------

    def load(self, plan: Plan, constants: Sequence[DeviceBuffer] = ()) -> VulkanLoaded:
        """Emits and compiles the kernels of ``plan`` that are new to the device."""
        self._require_open()
        with self.lock:
            self.reap()
            loaded = VulkanLoaded(self, plan, [self.own(c) for c in constants])
            self._loaded.add(loaded)
            return loaded

    def retire(self, recordings: Sequence[Recording]) -> None:
        """Keeps recordings that nobody needs any more until :meth:`reap`; takes no lock."""
        self._retired.extend(recordings)

    def reap(self) -> None:
        """Gives back what retired recordings hold, once they are finished."""
        while self._retired and not self.closed:
            with self.lock:
                try:
                    recording = self._retired.popleft()
                except IndexError:  # another thread was faster
                    return
                self.queue.wait(recording.busy)
                recording.close()

    def synchronize(self) -> None:
        """Waits until everything submitted is finished."""
        self.queue.wait(self.queue.submitted)

    # -- accounts ---------------------------------------------------------------------------------

    def memory_stats(self) -> MemoryStats:
        """Arrays and arenas of this process; the limit is what the driver had free at the start."""
        memory = self.memory
        pooled = memory.reserved - memory.live
        return MemoryStats(memory.live, memory.peak, pooled, memory.limit)

    def describe(self) -> str:
        """Hardware, driver, limits, and the features that are used and those that are not."""
        known, target = self.capabilities, self.target
        types = ", ".join(sorted(t.name for t in target.arithmetic))
        matrices = ", ".join(
            f"{s.a.name}*{s.b.name}+{s.accumulator.name} {s.m}x{s.n}x{s.k}"
            for s in target.coop_shapes
        )
        shared = " shared with the host" if self._unified else ""
        quirks = ", ".join(f"{q.name} ({q.link})" for q in target.quirks)
        off = "".join(f"\n    {name}: {reason}" for name, reason in known.refused)
        return "\n".join(
            (
                f"{self.name}: {known.name}, {known.driver}",
                f"  addressing {target.addressing.value}, {self._reach()}",
                f"  memory {self.memory.limit >> 20} MiB{shared}, {known.max_allocation >> 20} MiB "
                "in one allocation",
                f"  arithmetic in {types}",
                f"  subgroups of {', '.join(map(str, target.subgroup_sizes))}, sums across them "
                f"{'by shuffles' if self._shuffles() else 'in shared memory'}",
                f"  workgroups up to {target.max_invocations} with {target.shared_bytes >> 10} KiB "
                "shared memory",
                f"  cooperative matrices: {matrices or 'none'}",
                f"  kernels may use: {', '.join(sorted(target.features)) or 'no extras'}",
                f"  known faults worked around: {quirks or 'none'}",
                f"  used: {', '.join(sorted(known.enabled)) or 'none'}",
                f"  not used:{off or ' none'}",
                f"  validation layer {'on' if self.logical.instance.validation else 'off'}",
            )
        )

    def _reach(self) -> str:
        known = self.capabilities
        if self.target.addressing is Addressing.DEVICE_ADDRESS:
            return "arrays of any number and size"
        return f"{known.max_bindings} arrays of {known.max_storage_range} bytes for each kernel"

    def _shuffles(self) -> bool:
        return self.target.subgroup_ops and "subgroup_shuffle" in self.target.features

    def live_objects(self) -> dict[str, int]:
        """Vulkan objects in existence on this device by type; none after :meth:`close`."""
        self.reap()
        return {kind: count for kind, count in self.logical.live.items() if count}

    def close(self) -> None:
        """Waits for all work and destroys everything.

        Raises:
            DeviceError: the validation layer objects to something.
        """
        if self.closed:
            return
        with self.lock:
            self.synchronize()
            for loaded in list(self._loaded):
                loaded.close()
            self.reap()
            self.closed = True
            functions, handle = self.logical.functions, self.logical.handle
            check(functions.vkDeviceWaitIdle(handle), "vkDeviceWaitIdle")
            self.pipelines.close()
            self.queue.close()
            for heap in (self.memory, self.tables, self._staging_heap):
                heap.close()
            self.logical.close()
        if self.logical.instance.validation:
            self.logical.instance.raise_messages("closing the device")

    def _require_open(self) -> None:
        if self.closed:
            raise DeviceError(f"{self.name}: the device is closed")


def _place(span: Span, start: int = 0) -> Place:
    return span.block.buffer, span.offset + start
