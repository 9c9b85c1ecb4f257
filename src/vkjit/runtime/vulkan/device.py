"""A Vulkan device: arrays, plans and transfers over the objects of this package."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, cast, final

import numpy as np
from numpy.typing import DTypeLike

from vkjit.errors import DeviceError, InternalError, OutOfMemoryError
from vkjit.lowering.artifact import Launch, Plan, leaves
from vkjit.lowering.legalize import FUSED_FMA
from vkjit.lowering.target import Addressing, Target
from vkjit.runtime.device import Device, DeviceBuffer, Hardware, HostArray, MemoryStats
from vkjit.runtime.vulkan.addressed import AddressedRecording
from vkjit.runtime.vulkan.buffer import VulkanBuffer
from vkjit.runtime.vulkan.described import DescribedRecording
from vkjit.runtime.vulkan.drive import Driver
from vkjit.runtime.vulkan.features import Capabilities, query
from vkjit.runtime.vulkan.ffi import Handle, check
from vkjit.runtime.vulkan.instance import Instance
from vkjit.runtime.vulkan.loaded import VulkanLoaded
from vkjit.runtime.vulkan.logical import LogicalDevice
from vkjit.runtime.vulkan.memory import Heap, Span, array_heap
from vkjit.runtime.vulkan.memory_types import MemoryKind, has_memory
from vkjit.runtime.vulkan.pipeline import Pipelines
from vkjit.runtime.vulkan.probe import has_fused_fma
from vkjit.runtime.vulkan.queue import Queue
from vkjit.runtime.vulkan.recording import Recording
from vkjit.runtime.vulkan.stretch import Stretch
from vkjit.runtime.vulkan.transfers import Transfers

_SMALL = 64 << 10  # bytes that the host writes into device memory faster than it submits a copy
_SMALL_CEILING = 64 << 20  # mapped device memory can be as little as 256 MiB


_opened: weakref.WeakSet[VulkanDevice] = weakref.WeakSet()


@final
class VulkanDevice(Device):
    """One physical device with one queue; calls return before the device is done.

    ``lock`` guards recording and submission. ``memory`` holds arrays, ``away`` those
    kept in memory of the host, ``tables`` what the host writes for each call.
    """

    def __init__(self, name: str, instance: Instance, physical: Handle) -> None:
        self.name = name
        self.closed = False
        self._why_closed = "the device is closed"
        self.lock = threading.RLock()
        self.capabilities: Capabilities = query(instance, physical)
        self.target = self.capabilities.target
        known = self.capabilities
        self.logical = LogicalDevice(
            instance, physical, known.family, known.chain, list(known.extensions)
        )
        self.queue = Queue(self.logical, spin=not known.is_software)
        self._unified = has_memory(self.logical, MemoryKind.UNIFIED)
        kind = MemoryKind.UNIFIED if self._unified else MemoryKind.DEVICE
        self.memory = array_heap(self.logical, known, kind, self.queue.settle)
        self._small = self._small_heap()
        self.tables = Heap(self.logical, known, MemoryKind.TABLE, self.queue.settle)
        self.away = Heap(self.logical, known, MemoryKind.STAGING, self.queue.settle)
        self._transfers = Transfers(self.logical, known, self.queue, self.lock)
        self.pipelines = Pipelines(self.logical, known)
        # Also when the process ends without closing the device.
        weakref.finalize(self, self.pipelines.save)
        self._loaded: weakref.WeakSet[VulkanLoaded] = weakref.WeakSet()
        self._retired: deque[Recording | Driver] = deque()
        _opened.add(self)
        if self.target.quirks and has_fused_fma(self):
            self.target = replace(self.target, features=self.target.features | {FUSED_FMA})

    def _small_heap(self) -> Heap | None:
        """Memory for small arrays that the host writes without a submission, if there is any."""
        if self._unified:
            return self.memory
        if not has_memory(self.logical, MemoryKind.DIRECT):
            return None
        wait = self.queue.settle
        return Heap(self.logical, self.capabilities, MemoryKind.DIRECT, wait, _SMALL_CEILING)

    # -- buffers ----------------------------------------------------------------------------------

    def own(self, buffer: DeviceBuffer) -> VulkanBuffer:
        """``buffer``, which must be one of this device."""
        if not isinstance(buffer, VulkanBuffer) or buffer.device is not self:
            raise InternalError(f"{self.name}: a buffer of {buffer.device.name} was given")
        return buffer

    def give(self, span: Span) -> None:
        """Takes memory back that anything submitted so far may use."""
        if not self.closed:
            span.block.heap.give(span, self.queue.submitted)

    def allocate(self, nbytes: int) -> VulkanBuffer:
        """Uninitialised memory, aligned to 256 bytes."""
        self._require_open()
        return VulkanBuffer(self, self.memory.take(nbytes), nbytes, 0)

    def upload(self, array: HostArray) -> VulkanBuffer:
        """A copy of a C-contiguous array, which may lie in a mapped file."""
        if not array.flags.c_contiguous:
            raise InternalError(
                f"{self.name}: upload of {array.dtype}{list(array.shape)}, not contiguous"
            )
        self._require_open()
        buffer = VulkanBuffer(self, self._span_for_upload(array.nbytes), array.nbytes, 0)
        if array.nbytes:
            buffer.written = self._transfers.write(array.ctypes.data, buffer.span, array.nbytes)
        return buffer

    def _span_for_upload(self, nbytes: int) -> Span:
        """Memory that the host can write at once, for a small array where there is such memory."""
        if nbytes <= _SMALL and self._small is not None:
            with contextlib.suppress(OutOfMemoryError):
                return self._small.take_finished(nbytes, self.queue.finished())
        return self.memory.take(nbytes)

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
            self.queue.wait(owned.written)
            self._transfers.read(owned.span, result.ctypes.data, size)
        return cast(HostArray, result.view(kind).reshape(shape))

    def read(self, span: Span, array: HostArray) -> None:
        """Fills a host array with memory that is written."""
        self._transfers.read(span, array.ctypes.data, array.nbytes)

    # -- plans ------------------------------------------------------------------------------------

    def load(self, plan: Plan, constants: Sequence[DeviceBuffer] = ()) -> VulkanLoaded:
        """Emits and compiles the kernels of ``plan`` that are new to the device."""
        self._require_open()
        with self.lock:
            self.reap()
            loaded = VulkanLoaded(self, plan, [self.own(c) for c in constants])
            self._loaded.add(loaded)
            return loaded

    def prepare(self, plan: Plan) -> list[Future[Any]]:
        """Emits the kernels of ``plan``; drivers compile them in other threads."""
        self._require_open()
        with self.lock:
            kernels = [step.kernel for step in leaves(plan.steps) if isinstance(step, Launch)]
            return [*self.pipelines.begin(list(dict.fromkeys(kernels)))]

    def recording(self, stretch: Stretch, *, measures: bool) -> Recording:
        """A new recording in the target's way of addressing; with ``measures`` it has times."""
        if self.target.addressing is Addressing.DEVICE_ADDRESS:
            return AddressedRecording(self, stretch, measures=measures)
        return DescribedRecording(self, stretch, measures=measures)

    def retire(self, recordings: Sequence[Recording | Driver]) -> None:
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
                self.queue.settle(recording.busy)
                recording.close()

    def synchronize(self) -> None:
        """Waits until everything submitted is finished."""
        self.queue.wait(self.queue.submitted)

    @property
    def hardware(self) -> Hardware:
        """What measurements on this device are valid for."""
        known = self.capabilities
        return Hardware(known.name, known.uuid, known.driver)

    # -- accounts ---------------------------------------------------------------------------------

    def memory_stats(self) -> MemoryStats:
        """Arrays and arenas of this process; the limit is what the driver allows it now."""
        heaps = {self.memory, self._small} - {None}
        live = sum(heap.live for heap in heaps if heap)
        peak = sum(heap.peak for heap in heaps if heap)
        pooled = sum(heap.reserved for heap in heaps if heap) - live
        return MemoryStats(live, peak, pooled, self.memory.limit)

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
                f"  of flexible dimensions: {_tensor_shapes(target) or 'none'}",
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
        """Waits for all work, unless the device is lost, and destroys everything.

        Raises:
            DeviceError: the validation layer objects to something.
        """
        if self.closed:
            return
        with self.lock:
            self.queue.settle(self.queue.submitted)
            for loaded in list(self._loaded):
                loaded.close()
            self.reap()
            self.closed = True
            result = self.logical.functions.vkDeviceWaitIdle(self.logical.handle)
            if self.queue.lost is None:
                check(result, "vkDeviceWaitIdle")
            self.pipelines.close()
            self.queue.close()
            self._transfers.close()
            for heap in (self.memory, self._small, self.tables, self.away):
                if heap is not None:
                    heap.close()
            self.logical.close()
        if self.logical.instance.validation:
            self.logical.instance.raise_messages("closing the device")

    def _require_open(self) -> None:
        if self.closed:
            raise DeviceError(f"{self.name}: {self._why_closed}")

    def disown(self) -> None:
        """In a forked process: no driver works there with what its parent opened."""
        self.closed = True
        self._why_closed = (
            "the device was opened before this process was forked; start processes by the "
            "'spawn' method, or open the device after the fork"
        )
        unusable: Any = _Unusable(f"{self.name}: {self._why_closed}")
        self.lock = self.queue = unusable
        self.pipelines.disown()


@final
class _Unusable:
    """Stands for lock and queue in a forked process: whoever would wait for ever is told why."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __getattr__(self, name: str) -> Any:
        raise DeviceError(self._message)

    def __enter__(self) -> None:
        raise DeviceError(self._message)

    def __exit__(self, *_: object) -> None:
        """Never entered."""


def _disown_all() -> None:
    for device in list(_opened):
        device.disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_all)


def _tensor_shapes(target: Target) -> str:
    return ", ".join(
        f"{s.a.name}*{s.b.name}+{s.accumulator.name} by {s.m}x{s.n}x{s.k} in "
        + (f"workgroups of {s.invocations}" if s.invocations else "subgroups")
        for s in target.tensor_shapes
    )
