"""Timestamps of a device: when each piece of a recording began and ended."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, final

from vkjit.errors import MissingRuleError
from vkjit.runtime.vulkan.ffi import check, constants, ffi, listed, struct
from vkjit.runtime.vulkan.logical import LogicalDevice

if TYPE_CHECKING:
    from vkjit.runtime.vulkan.queue import Commands
    from vkjit.runtime.vulkan.split import Parts

_TOP: int = constants.VK_PIPELINE_STAGE_TOP_OF_PIPE_BIT
_BOTTOM: int = constants.VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT
_WAIT_64: int = constants.VK_QUERY_RESULT_64_BIT | constants.VK_QUERY_RESULT_WAIT_BIT


@final
class Timestamps:
    """A begin and an end for everything in the parts and segments of a recording.

    ``of_parts`` and ``of_segments`` are the numbers of their first ones. A segment that is executed
    many times leaves the times of the last one.

    Raises:
        MissingRuleError: the queue has no timestamps.
    """

    def __init__(self, device: LogicalDevice, parts: Parts) -> None:
        self._device = device
        self._period, self._bits = _clock(device)
        lengths = [len(part) for part in parts.parts]
        lengths += [len(segment.pieces) for segment in parts.segments]
        firsts = [0, *itertools.accumulate(lengths)]
        count = len(parts.parts)
        self.of_parts, self.of_segments = firsts[:count], firsts[count:-1]
        self._lengths = lengths
        info = struct(
            "VkQueryPoolCreateInfo",
            queryType=constants.VK_QUERY_TYPE_TIMESTAMP,
            queryCount=2 * max(firsts[-1], 1),
        )
        self._pool = device.create("QueryPool", info)

    def reset_part(self, commands: Commands, number: int) -> None:
        """Records that a part has no times yet."""
        self._reset(commands, self.of_parts[number], self._lengths[number])

    def reset_segment(self, commands: Commands, number: int) -> None:
        """Records that a segment has no times yet."""
        length = self._lengths[len(self.of_parts) + number]
        self._reset(commands, self.of_segments[number], length)

    def _reset(self, commands: Commands, first: int, count: int) -> None:
        if count:
            vk = self._device.functions
            vk.vkCmdResetQueryPool(commands.handle, self._pool, 2 * first, 2 * count)

    def begin(self, commands: Commands, piece: int) -> None:
        """Records the time at which a piece begins."""
        self._write(commands, _TOP, 2 * piece)

    def end(self, commands: Commands, piece: int) -> None:
        """Records the time at which a piece is finished."""
        self._write(commands, _BOTTOM, 2 * piece + 1)

    def _write(self, commands: Commands, stage: int, query: int) -> None:
        vk = self._device.functions
        vk.vkCmdWriteTimestamp(commands.handle, stage, self._pool, query)

    def of_part(self, number: int) -> list[tuple[float, float]]:
        """Begin and end of everything in a part, in seconds of the device's clock; waits."""
        return self._read(self.of_parts[number], self._lengths[number])

    def of_segment(self, number: int) -> list[tuple[float, float]]:
        """Begin and end of the pieces of a segment when it was executed last; waits."""
        length = self._lengths[len(self.of_parts) + number]
        return self._read(self.of_segments[number], length)

    def _read(self, first: int, count: int) -> list[tuple[float, float]]:
        if not count:
            return []
        ticks = ffi.new("uint64_t[]", 2 * count)
        get = self._device.functions.vkGetQueryPoolResults
        size, stride = ffi.sizeof(ticks), 8
        place = (self._pool, 2 * first, 2 * count)
        check(
            get(self._device.handle, *place, size, ticks, stride, _WAIT_64), "vkGetQueryPoolResults"
        )
        mask = (1 << self._bits) - 1
        times = [(int(t) & mask) * self._period for t in ticks]
        return list(zip(times[0::2], times[1::2], strict=True))

    def close(self) -> None:
        """Destroys the queries; they must not be in use."""
        self._device.destroy("QueryPool", self._pool)


def _clock(device: LogicalDevice) -> tuple[float, int]:
    """Seconds per tick, and the valid bits of a timestamp."""
    functions = device.instance.functions
    listing = functions.vkGetPhysicalDeviceQueueFamilyProperties
    families = listed(listing, "VkQueueFamilyProperties", device.physical)
    bits: int = families[device.family].timestampValidBits
    properties = ffi.new("VkPhysicalDeviceProperties *")
    functions.vkGetPhysicalDeviceProperties(device.physical, properties)
    name = ffi.string(properties.deviceName).decode(errors="replace")
    if not bits:
        raise MissingRuleError(f"profile: {name} has no timestamps; profile on another device")
    return properties.limits.timestampPeriod * 1e-9, bits
