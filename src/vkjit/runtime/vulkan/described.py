"""Recordings whose arguments are descriptors; loops are unrolled, or driven by the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from vkjit.errors import InternalError
from vkjit.runtime.vulkan.ffi import NULL, array, check, constants, ffi, struct
from vkjit.runtime.vulkan.memory import Span
from vkjit.runtime.vulkan.outline import Replay, Work
from vkjit.runtime.vulkan.pipeline import Pipeline
from vkjit.runtime.vulkan.progress import Counters
from vkjit.runtime.vulkan.queue import Commands
from vkjit.runtime.vulkan.recording import BIND, Recording
from vkjit.runtime.vulkan.split import Piece

if TYPE_CHECKING:
    from vkjit.runtime.vulkan.device import VulkanDevice
    from vkjit.runtime.vulkan.stretch import Stretch

_STORAGE: int = constants.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER


@final
class DescribedRecording(Recording):
    """Arguments through one descriptor set per launch."""

    def __init__(self, device: VulkanDevice, stretch: Stretch, *, measures: bool) -> None:
        super().__init__(device, stretch, measures=measures)
        self._pool: Any = NULL
        self._sets: dict[Work, Any] = {}
        if stretch.layout.places:
            self._allocate()

    def _allocate(self) -> None:
        logical = self.device.logical
        sets = self._set_layouts()
        size = struct(
            "VkDescriptorPoolSize", type=_STORAGE, descriptorCount=len(self.stretch.layout.places)
        )
        info = struct(
            "VkDescriptorPoolCreateInfo",
            maxSets=len(sets),
            poolSizeCount=1,
            pPoolSizes=size,
        )
        self._pool = logical.create("DescriptorPool", info)
        info = struct(
            "VkDescriptorSetAllocateInfo",
            descriptorPool=self._pool,
            descriptorSetCount=len(sets),
            pSetLayouts=array("VkDescriptorSetLayout", list(sets.values())),
        )
        made = ffi.new("VkDescriptorSet[]", len(sets))
        allocate = logical.functions.vkAllocateDescriptorSets
        check(allocate(logical.handle, info, made), "vkAllocateDescriptorSets")
        self._sets = dict(zip(sets, made, strict=True))

    def _set_layouts(self) -> dict[Work, Any]:
        """The layout of each launch's set; slices share that of the whole."""
        stretch = self.stretch
        found: dict[Work, Any] = {}
        for work in stretch.launches:
            kernel = stretch.kernels[work]
            pipelines = (stretch.pipelines.get((kernel, is_slice)) for is_slice in (False, True))
            found[work] = next(p.sets for p in pipelines if p is not None)
        return found

    @property
    def reusable(self) -> bool:
        """Writing a descriptor set invalidates the commands that bind it."""
        return False

    def point_at(self, spans: Sequence[Span], turns: Sequence[int]) -> None:
        """Writes the descriptors of all arguments of all launches."""
        order = self.stretch.layout.order
        writes: list[dict[str, Any]] = []
        for work, descriptor_set in self._sets.items():
            for binding, moving in enumerate(work.places):
                place = moving.at(turns)
                span = spans[order[place.buffer]]
                info = struct(
                    "VkDescriptorBufferInfo",
                    buffer=span.block.buffer,
                    offset=span.offset + place.offset,
                    range=max(place.size, 4),
                )
                writes.append(
                    {
                        "sType": constants.VK_STRUCTURE_TYPE_WRITE_DESCRIPTOR_SET,
                        "dstSet": descriptor_set,
                        "dstBinding": binding,
                        "descriptorCount": 1,
                        "descriptorType": _STORAGE,
                        "pBufferInfo": info,
                    }
                )
        logical = self.device.logical
        logical.functions.vkUpdateDescriptorSets(
            logical.handle, len(writes), array("VkWriteDescriptorSet", writes), 0, NULL
        )

    def bind_arguments(
        self,
        commands: Commands,
        piece: Piece,
        pipeline: Pipeline,
        turn: tuple[Replay, int] | None,
    ) -> None:
        """Binds the set of the launch."""
        del turn
        if not piece.work.places:
            return
        sets = array("VkDescriptorSet", [self._sets[piece.work]])
        self.device.logical.functions.vkCmdBindDescriptorSets(
            commands.handle, BIND, pipeline.layout, 0, 1, sets, 0, NULL
        )

    def begin_loop(self, commands: Commands, loop: Replay, parity: int | None) -> None:
        """Never asked for.

        Raises:
            InternalError: descriptors cannot be advanced by the device.
        """
        raise InternalError("vulkan: a loop to replay was planned for descriptors")

    def advance(self, commands: Commands, loop: Replay, parity: int) -> None:
        """Never asked for; see ``begin_loop``.

        Raises:
            InternalError: descriptors cannot be advanced by the device.
        """
        raise InternalError("vulkan: a loop to replay was planned for descriptors")

    def counters(self, loop: Replay) -> Counters:
        """None: no loop is counted by the device."""
        del loop
        return {}

    def close(self) -> None:
        """Gives sets and commands back."""
        super().close()
        if self._pool != NULL:
            self.device.logical.destroy("DescriptorPool", self._pool)
