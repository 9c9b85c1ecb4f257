"""Timestamps of a device: when each piece of a recording began and ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from vkjit.errors import MissingRuleError
from vkjit.runtime.vulkan.ffi import check, constants, ffi, listed, struct
from vkjit.runtime.vulkan.logical import LogicalDevice

if TYPE_CHECKING:
    from vkjit.runtime.vulkan.queue import Commands

_TOP: int = constants.VK_PIPELINE_STAGE_TOP_OF_PIPE_BIT
_BOTTOM: int = constants.VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT
_WAIT_64: int = constants.VK_QUERY_RESULT_64_BIT | constants.VK_QUERY_RESULT_WAIT_BIT


@final
class Timestamps:
    """A begin and an end for each of ``count`` pieces.

    Raises:
        MissingRuleError: the queue has no timestamps.
    """

    def __init__(self, device: LogicalDevice, count: int) -> None:
        self._device = device
        self._count = count
        self._period, self._bits = _clock(device)
        info = struct(
            "VkQueryPoolCreateInfo",
            queryType=constants.VK_QUERY_TYPE_TIMESTAMP,
            queryCount=2 * max(count, 1),
        )
        self._pool = device.create("QueryPool", info)

    def reset(self, commands: Commands, first: int, count: int) -> None:
        """Records that ``count`` pieces from ``first`` on have no times yet."""
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

    def read(self) -> list[tuple[float, float]]:
        """Begin and end of each piece in seconds of the device's clock; waits for them."""
        ticks = ffi.new("uint64_t[]", 2 * max(self._count, 1))
        get = self._device.functions.vkGetQueryPoolResults
        size, stride = ffi.sizeof(ticks), 8
        total = 2 * self._count
        result = get(self._device.handle, self._pool, 0, total, size, ticks, stride, _WAIT_64)
        check(result, "vkGetQueryPoolResults")
        mask = (1 << self._bits) - 1
        times = [(int(t) & mask) * self._period for t in ticks]
        return list(zip(times[0:total:2], times[1:total:2], strict=True))

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
