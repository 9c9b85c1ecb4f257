"""Copies between host and device: straight into mapped memory, or through a ring of staging memory.

The host reads only memory that it caches: reading mapped device memory is a thousand times slower
than a copy by the device. Several threads fill and drain the staging memory, since one moves a
fifth of what the bus does, and the device copies one stage while the host is at the next.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import final

from vkjit.runtime.vulkan.features import Capabilities
from vkjit.runtime.vulkan.logical import LogicalDevice
from vkjit.runtime.vulkan.memory import Heap, Span
from vkjit.runtime.vulkan.memory_types import MemoryKind
from vkjit.runtime.vulkan.queue import Queue

CHUNK = 16 << 20
"""Bytes of one stage."""
STAGES = 4
_THREADS = min(4, os.cpu_count() or 1)
_WORTH_THREADS = 1 << 20  # bytes; handing out parts costs as long as copying a few hundred KiB


@final
class Transfers:
    """The staging ring of a device. ``lock`` guards recording and submission."""

    def __init__(
        self,
        device: LogicalDevice,
        capabilities: Capabilities,
        queue: Queue,
        lock: threading.RLock,
    ) -> None:
        self._queue = queue
        self._lock = lock
        self._heap = Heap(device, capabilities, MemoryKind.STAGING, queue.settle)
        self._idle: deque[Span] = deque()
        self._made = 0
        self._pool: ThreadPoolExecutor | None = None

    def write(self, source: int, span: Span, size: int) -> int:
        """Copies ``size`` bytes at a host address to the device.

        The host's memory may change as soon as this returns.

        Returns:
            the submission after which the bytes are there; 0 if they are there already.
        """
        if span.mapped:
            # The device may still be at work on this memory for its former owner.
            self._queue.wait(span.busy)
            self._move(span.mapped, source, size)
            return 0
        with self._lock:
            value = 0
            for start in range(0, size, CHUNK):
                stage = self._stage()
                try:
                    length = min(CHUNK, size - start)
                    self._move(stage.mapped, source + start, length)
                    stage.busy = value = self._submit((stage, 0), (span, start), length)
                finally:
                    self._idle.append(stage)
            return value

    def read(self, span: Span, target: int, size: int) -> None:
        """Copies ``size`` bytes, which must have been written, to a host address."""
        if span.mapped and span.block.heap.is_cached:
            self._move(target, span.mapped, size)
            return
        with self._lock:
            pending: deque[tuple[Span, int, int]] = deque()
            try:
                for start in range(0, size, CHUNK):
                    if len(pending) == STAGES:
                        self._drain(target, pending)
                    length = min(CHUNK, size - start)
                    pending.append((self._stage(), start, length))
                    stage = pending[-1][0]
                    stage.busy = self._submit((span, start), (stage, 0), length)
                while pending:
                    self._drain(target, pending)
            finally:
                self._idle.extend(stage for stage, _, _ in pending)

    def _drain(self, target: int, pending: deque[tuple[Span, int, int]]) -> None:
        """Copies the first pending stage to the host and frees it."""
        stage, start, length = pending[0]
        self._queue.wait(stage.busy)
        self._move(target + start, stage.mapped, length)
        pending.popleft()
        self._idle.append(stage)

    def _stage(self) -> Span:
        """The stage used longest ago once it is free; or a new one, as long as few are made."""
        if self._made < STAGES and (not self._idle or self._idle[0].busy > self._queue.finished()):
            made = self._heap.take(CHUNK)
            self._made += 1
            return made
        stage = self._idle.popleft()
        self._queue.wait(stage.busy)
        return stage

    def _submit(self, source: tuple[Span, int], target: tuple[Span, int], size: int) -> int:
        commands = self._queue.borrow()
        commands.begin()
        commands.copy(_place(*source), _place(*target), size)
        commands.end()
        value = self._queue.submit(commands, f"a transfer of {size} bytes")
        self._queue.give(commands, value)
        return value

    def _move(self, target: int, source: int, size: int) -> None:
        """Copies host memory; ``ctypes`` gives up Python's lock meanwhile, ``cffi`` does not."""
        if size < _WORTH_THREADS or _THREADS == 1:
            ctypes.memmove(target, source, size)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS - 1, "vkjit-transfer")
        part = -(-size // _THREADS)
        others = [
            self._pool.submit(ctypes.memmove, target + s, source + s, min(part, size - s))
            for s in range(part, size, part)
        ]
        ctypes.memmove(target, source, part)
        for other in others:
            other.result()

    def close(self) -> None:
        """Gives the staging memory back; nothing may be running."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self._idle.clear()
        self._heap.close()


def _place(span: Span, start: int) -> tuple[object, int]:
    return span.block.buffer, span.offset + start
