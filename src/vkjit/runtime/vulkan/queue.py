"""The queue: command buffers, submission in order, one timeline that says what is finished.

Every submission gets the next number of a timeline semaphore. Command buffers of this package begin
with a barrier against everything before, so submissions follow each other like calls.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

from vkjit.errors import DeviceError
from vkjit.runtime.vulkan.ffi import (
    NULL,
    Handle,
    array,
    check,
    constants,
    ffi,
    result_name,
    struct,
)
from vkjit.runtime.vulkan.logical import LogicalDevice

_WAIT_NANOSECONDS = 100_000_000  # then Python may handle signals, and the wait goes on
_SPIN_SECONDS = 50e-6  # waking up from a wait costs a GPU's user about as much
_REMEMBERED = 64  # labels of submissions, for the message of a lost device
_PRIMARY: int = constants.VK_COMMAND_BUFFER_LEVEL_PRIMARY
_SECONDARY: int = constants.VK_COMMAND_BUFFER_LEVEL_SECONDARY
_AGAIN: int = constants.VK_COMMAND_BUFFER_USAGE_SIMULTANEOUS_USE_BIT
_TIMEOUT: int = constants.VK_TIMEOUT
_TRANSFER: int = constants.VK_PIPELINE_STAGE_TRANSFER_BIT
_COMPUTE: int = constants.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT
_HOST: int = constants.VK_PIPELINE_STAGE_HOST_BIT
_WRITES: int = constants.VK_ACCESS_SHADER_WRITE_BIT | constants.VK_ACCESS_TRANSFER_WRITE_BIT
_ACCESSES: int = (
    _WRITES | constants.VK_ACCESS_SHADER_READ_BIT | constants.VK_ACCESS_TRANSFER_READ_BIT
)


@final
class Commands:
    """A command buffer that can be recorded again, with its submission prepared.

    A ``segment`` is executed by others instead, any number of times.
    """

    def __init__(
        self, device: LogicalDevice, pool: Handle, semaphore: Handle, *, segment: bool = False
    ) -> None:
        self.handle = device.allocate_commands(pool, _SECONDARY if segment else _PRIMARY)
        self._device = device
        self.is_segment = segment
        self._value = ffi.new("uint64_t *")
        timeline = struct(
            "VkTimelineSemaphoreSubmitInfo",
            signalSemaphoreValueCount=1,
            pSignalSemaphoreValues=self._value,
        )
        self.submission = struct(
            "VkSubmitInfo",
            pNext=timeline,
            commandBufferCount=1,
            pCommandBuffers=array("VkCommandBuffer", [self.handle]),
            signalSemaphoreCount=1,
            pSignalSemaphores=array("VkSemaphore", [semaphore]),
        )
        inherited = struct("VkCommandBufferInheritanceInfo") if segment else NULL
        self._begin = struct(
            "VkCommandBufferBeginInfo", flags=_AGAIN if segment else 0, pInheritanceInfo=inherited
        )
        self._work = _memory_barrier(_WRITES, _ACCESSES)
        self._host = _memory_barrier(_WRITES, constants.VK_ACCESS_HOST_READ_BIT)

    def signals(self, value: int) -> None:
        """Sets the timeline value of the next submission."""
        self._value[0] = value

    def begin(self, *, again: bool = False) -> None:
        """Starts recording, after everything submitted earlier; a segment stands anywhere.

        With ``again`` the commands may be submitted while they are running.
        """
        vk = self._device.functions
        if not self.is_segment:
            self._begin.flags = _AGAIN if again else 0
        check(vk.vkBeginCommandBuffer(self.handle, self._begin), "vkBeginCommandBuffer")
        if not self.is_segment:
            self.barrier()

    def barrier(self) -> None:
        """All work so far finishes, and its writes are visible, before what follows."""
        self._barrier(_COMPUTE | _TRANSFER, self._work)

    def end(self) -> None:
        """Ends recording; the host may read the results once the submission is finished."""
        if not self.is_segment:
            self._barrier(_HOST, self._host)
        check(self._device.functions.vkEndCommandBuffer(self.handle), "vkEndCommandBuffer")

    def execute(self, segments: Sequence[Commands]) -> None:
        """Executes recorded segments in order."""
        handles = ffi.new("VkCommandBuffer[]", [segment.handle for segment in segments])
        self._device.functions.vkCmdExecuteCommands(self.handle, len(handles), handles)

    def fill(self, target: Place, value: int) -> None:
        """Writes one 32-bit word."""
        self._device.functions.vkCmdFillBuffer(self.handle, *target, 4, value)

    def copy(self, source: Place, target: Place, size: int) -> None:
        """Copies bytes between two buffers."""
        region = struct("VkBufferCopy", srcOffset=source[1], dstOffset=target[1], size=size)
        vk = self._device.functions
        vk.vkCmdCopyBuffer(self.handle, source[0], target[0], 1, region)

    def _barrier(self, later: int, memory: Any) -> None:
        self._device.functions.vkCmdPipelineBarrier(
            self.handle, _COMPUTE | _TRANSFER, later, 0, 1, memory, 0, NULL, 0, NULL
        )


Place = tuple[Handle, int]
"""A ``VkBuffer`` and an offset in bytes."""
Label = str | Callable[[], str]
"""What a submission does, or a function that can say how far it came; for error messages."""


def _memory_barrier(before: int, after: int) -> Any:
    return struct("VkMemoryBarrier", srcAccessMask=before, dstAccessMask=after)


@final
class Queue:
    """Submits in order. ``submitted`` is the number of the last submission.

    ``spin`` polls for a moment before it sleeps: right where the GPU, not the CPU, is at work.
    ``lost`` is the message of a lost device, which every later call raises at once.
    """

    def __init__(self, device: LogicalDevice, *, spin: bool) -> None:
        self.submitted = 0
        self.lost: str | None = None
        self._device = device
        self._spin = _SPIN_SECONDS if spin else 0.0
        self._handle = device.queue()
        self._lock = threading.RLock()  # collection of garbage may come at any point
        self._running: deque[tuple[int, Label]] = deque(maxlen=_REMEMBERED)
        self._finished = 0
        self._counter = ffi.new("uint64_t *")
        kind = struct(
            "VkSemaphoreTypeCreateInfo", semaphoreType=constants.VK_SEMAPHORE_TYPE_TIMELINE
        )
        self._semaphore = device.create("Semaphore", struct("VkSemaphoreCreateInfo", pNext=kind))
        reset = constants.VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT
        info = struct("VkCommandPoolCreateInfo", flags=reset, queueFamilyIndex=device.family)
        self._pool = device.create("CommandPool", info)
        self._idle: deque[tuple[int, Commands]] = deque()
        self._idle_segments: deque[tuple[int, Commands]] = deque()

    def commands(self) -> Commands:
        """A command buffer to keep."""
        return Commands(self._device, self._pool, self._semaphore)

    def segment(self) -> Commands:
        """A command buffer that others execute; :meth:`give` it back as those of ``borrow``."""
        if self._idle_segments and self.is_finished(self._idle_segments[0][0]):
            return self._idle_segments.popleft()[1]
        return Commands(self._device, self._pool, self._semaphore, segment=True)

    def borrow(self) -> Commands:
        """A command buffer for one submission; :meth:`give` it back with the number of that."""
        if self._idle and self.is_finished(self._idle[0][0]):
            return self._idle.popleft()[1]
        return self.commands()

    def give(self, commands: Commands, value: int) -> None:
        """Takes back a command buffer that submission ``value`` runs."""
        idle = self._idle_segments if commands.is_segment else self._idle
        idle.append((value, commands))

    def submit(self, commands: Commands, label: Label) -> int:
        """Hands recorded commands to the device and returns their number.

        Raises:
            DeviceError: the device is lost, or validation objects.
        """
        with self._lock:
            if self.lost is not None:
                raise DeviceError(self.lost)
            value = self.submitted + 1
            commands.signals(value)
            vk = self._device.functions
            result = vk.vkQueueSubmit(self._handle, 1, commands.submission, NULL)
            # Also what the driver refuses: it is what a lost device was asked last.
            self._running.append((value, label))
            if result != 0:
                raise self._failure("vkQueueSubmit", result)
            self.submitted = value
        if self._device.instance.validation:
            self._device.instance.raise_messages(_text(label))
        return value

    def finished(self) -> int:
        """The number of the last finished submission.

        Raises:
            DeviceError: the device is lost.
        """
        if self.lost is not None:
            raise DeviceError(self.lost)
        vk = self._device.functions
        result = vk.vkGetSemaphoreCounterValue(self._device.handle, self._semaphore, self._counter)
        if result != 0:
            raise self._failure("vkGetSemaphoreCounterValue", result)
        self._finished = self._counter[0]
        return self._finished

    def is_finished(self, value: int) -> bool:
        """Whether submission ``value`` is finished; asks the driver only if need be."""
        return value <= self._finished or value <= self.finished()

    def wait(self, value: int) -> None:
        """Returns once submission ``value`` is finished.

        Raises:
            DeviceError: the device is lost; the message names what was running.
        """
        if self.is_finished(value) or self._polled(value):
            return
        values, semaphores = ffi.new("uint64_t *", value), ffi.new("VkSemaphore *", self._semaphore)
        info = struct(
            "VkSemaphoreWaitInfo", semaphoreCount=1, pSemaphores=semaphores, pValues=values
        )
        vk, result = self._device.functions, _TIMEOUT
        while result == _TIMEOUT:
            result = vk.vkWaitSemaphores(self._device.handle, info, _WAIT_NANOSECONDS)
        if result != 0:
            raise self._failure("vkWaitSemaphores", result)
        self._finished = max(self._finished, value)
        if self._device.instance.validation:
            self._device.instance.raise_messages("a wait")

    def _polled(self, value: int) -> bool:
        """Whether ``value`` was seen to finish within the time worth polling for it."""
        deadline = time.perf_counter() + self._spin
        while self._spin and time.perf_counter() < deadline:
            if value <= self.finished():
                return True
        return False

    def settle(self, value: int) -> None:
        """Returns once nothing up to submission ``value`` runs; a lost device runs nothing."""
        try:
            self.wait(value)
        except DeviceError:
            if self.lost is None:
                raise

    def _failure(self, what: str, result: int) -> DeviceError:
        """The error to raise; if the device is lost, all later calls raise the same."""
        labels = [label for value, label in self._running if value > self._finished]
        running = dict.fromkeys(map(_text, labels))  # once for all submissions of a plan
        message = f"vulkan: {what} failed with {result_name(result)}"
        if result == constants.VK_ERROR_DEVICE_LOST:
            self.lost = message = (
                f"vulkan: the device was lost ({what}: {result_name(result)}); "
                f"{self._finished} submissions were finished, then: "
                f"{'; '.join(running) or 'nothing was submitted'}. Its arrays are gone; "
                "vkjit.runtime.close_devices() lets it be opened anew"
            )
        return DeviceError(message)

    def close(self) -> None:
        """Destroys pool and semaphore; nothing may be running."""
        self._idle.clear()
        self._idle_segments.clear()
        self._device.destroy("CommandPool", self._pool)
        self._device.destroy("Semaphore", self._semaphore)


def _text(label: Label) -> str:
    return label if isinstance(label, str) else label()
