"""Arrays of the Vulkan device: spans of its memory with an owner."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from vkjit.errors import InternalError
from vkjit.runtime.device import DeviceBuffer
from vkjit.runtime.vulkan.memory import Span

if TYPE_CHECKING:
    from vkjit.runtime.vulkan.device import VulkanDevice


@final
class VulkanBuffer(DeviceBuffer):
    """``nbytes`` of device memory. ``written`` is the submission that writes them last."""

    __slots__ = ("_device", "_span", "written")

    def __init__(self, device: VulkanDevice, span: Span, nbytes: int, written: int) -> None:
        self.nbytes = nbytes
        self.written = written
        self._device = device
        self._span: Span | None = span

    def __del__(self) -> None:
        self.release()

    @property
    def device(self) -> VulkanDevice:
        """The device that owns the memory."""
        return self._device

    @property
    def released(self) -> bool:
        """Whether the memory was given back or taken over by an output."""
        return self._span is None

    @property
    def span(self) -> Span:
        """The memory.

        Raises:
            InternalError: the buffer was released.
        """
        if self._span is None:
            raise InternalError(f"{self._device.name}: a released buffer was used")
        return self._span

    def is_ready(self) -> bool:
        """Whether the submission that writes the memory is finished."""
        return self._device.queue.is_finished(self.written)

    def wait(self) -> None:
        """Returns once the submission that writes the memory is finished."""
        self._device.queue.wait(self.written)

    def release(self) -> None:
        """Gives the memory back; what is submitted may still use it."""
        if self._span is not None:
            span, self._span = self._span, None
            self._device.give(span)

    def moved(self) -> Span:
        """The memory, for a new owner."""
        span, self._span = self.span, None
        return span
