"""Recordings: the command buffers of one plan, with a way to point them at the arrays of a call.

With device addresses a recording holds only the address of its own argument table, which the host
rewrites for each call. Recordings with descriptors, or with copies to and from arrays of the
caller, are made again when the arrays are others than last time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, assert_never, final

from vkjit.lowering.artifact import Copy, Launch
from vkjit.runtime.vulkan.ffi import NULL, array, check, constants, ffi, struct
from vkjit.runtime.vulkan.memory import Span
from vkjit.runtime.vulkan.pipeline import COMPUTE, Pipeline
from vkjit.runtime.vulkan.progress import Progress
from vkjit.runtime.vulkan.queue import Commands
from vkjit.runtime.vulkan.split import ORIGIN, Part, Piece
from vkjit.runtime.vulkan.timestamps import Timestamps

if TYPE_CHECKING:
    from vkjit.runtime.vulkan.loaded import VulkanLoaded

_BIND: int = constants.VK_PIPELINE_BIND_POINT_COMPUTE
_STORAGE: int = constants.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER
_ADDRESS: Callable[[Span], int] = attrgetter("address")


class Recording(ABC):
    """The submissions of one call of a plan; ``busy`` is the last of them.

    ``times`` are there where the recording was made to measure: then a barrier stands before every
    piece, so that each has its own time.
    """

    def __init__(self, loaded: VulkanLoaded, times: Timestamps | None = None) -> None:
        device = loaded.device
        self.loaded = loaded
        self.busy = 0
        self.times = times
        self._parts = [(pieces, device.queue.commands()) for pieces in loaded.parts]
        self._bound: list[Span] | None = None
        self._word = device.tables.take(4)
        device.queue.wait(self._word.busy)
        self._progress = Progress(loaded.plan, self._word)

    def submit(self, spans: list[Span]) -> int:
        """Runs the plan on these spans, which stand in the order of ``loaded.layout``.

        Returns:
            the number of the last submission.

        Raises:
            DeviceError: the device is lost.
        """
        if spans != self._bound:
            is_recorded = self._bound is not None and self.reusable
            self._bound = (
                None  # until all of it is done: should this fail, the next call begins anew
            )
            self.point_at(spans)
            if not is_recorded:
                self._record(spans)
            self._bound = spans
        self._progress.reset()
        queue, progress = self.loaded.device.queue, self._progress.describe
        try:
            for _, commands in self._parts:
                queue.submit(commands, progress)
        finally:
            self.busy = queue.submitted  # also when a later part, or the validation layer, refuses
        return self.busy

    def fits(self, spans: list[Span]) -> bool:
        """Whether the recorded commands can run on these spans."""
        return self._bound is not None and (self.reusable or spans == self._bound)

    def _record(self, spans: Sequence[Span]) -> None:
        first = 0
        for pieces, commands in self._parts:
            commands.begin()
            if self.times is not None:
                self.times.reset(commands, first, len(pieces))
            self._record_part(commands, pieces, spans, first)
            commands.end()
            first += len(pieces)

    def _record_part(
        self, commands: Commands, pieces: Part, spans: Sequence[Span], first: int
    ) -> None:
        steps, times = self.loaded.plan.steps, self.times
        bound: Pipeline | None = None
        for number, piece in enumerate(pieces, first):
            if piece.barrier or (times is not None and number > first):
                commands.barrier()
            if piece.mark:
                self._progress.mark(commands, piece.position)
            if times is not None:
                times.begin(commands, number)
            step = steps[piece.position]
            match step:
                case Launch():
                    bound = self._dispatch(commands, piece, bound)
                case Copy():
                    self._copy(commands, step, spans)
                case _:
                    assert_never(step)
            if times is not None:
                times.end(commands, number)

    def _dispatch(self, commands: Commands, piece: Piece, bound: Pipeline | None) -> Pipeline:
        """Records a launch or a slice of it; returns its pipeline, which stays bound."""
        vk = self.loaded.device.logical.functions
        launch = self.loaded.layout.launch_at[piece.position]
        pipeline = self.loaded.pipelines[launch]
        if pipeline is not bound:
            vk.vkCmdBindPipeline(commands.handle, _BIND, pipeline.handle)
        self.bind_arguments(commands, launch, pipeline)
        if piece.base == ORIGIN:
            vk.vkCmdDispatch(commands.handle, *piece.grid)
        else:
            vk.vkCmdDispatchBase(commands.handle, *piece.base, *piece.grid)
        return pipeline

    def _copy(self, commands: Commands, step: Copy, spans: Sequence[Span]) -> None:
        order = self.loaded.layout.order
        source, target = (
            (spans[order[r.buffer]].block.buffer, spans[order[r.buffer]].offset + r.offset)
            for r in (step.source, step.target)
        )
        if step.source.size:
            commands.copy(source, target, step.source.size)

    @property
    @abstractmethod
    def reusable(self) -> bool:
        """Whether the recorded commands hold for other spans, too."""

    @abstractmethod
    def point_at(self, spans: Sequence[Span]) -> None:
        """Writes table or descriptors."""

    @abstractmethod
    def bind_arguments(self, commands: Commands, launch: int, pipeline: Pipeline) -> None:
        """Records how the launch of this number finds its arguments."""

    def close(self) -> None:
        """Gives everything back; the commands must not be running."""
        device = self.loaded.device
        self._progress.close()
        device.tables.give(self._word, self.busy)
        for _, commands in self._parts:
            device.queue.give(commands, self.busy)
        if self.times is not None:
            self.times.close()


@final
class AddressedRecording(Recording):
    """Arguments through a table of addresses in memory that the host can write."""

    def __init__(self, loaded: VulkanLoaded, times: Timestamps | None = None) -> None:
        super().__init__(loaded, times)
        layout, device = loaded.layout, loaded.device
        count = len(layout.places)
        self._span = device.tables.take(8 * max(count, 1))
        device.queue.wait(self._span.busy)
        self._memory = ffi.buffer(ffi.cast("char *", self._span.mapped), 8 * count)

    @property
    def reusable(self) -> bool:
        """Copies name their buffers; launches do not."""
        return not self.loaded.layout.copies_outside

    def point_at(self, spans: Sequence[Span]) -> None:
        """Writes the addresses of all arguments of all launches."""
        self._memory[:] = self.loaded.layout.table(list(map(_ADDRESS, spans)))

    def bind_arguments(self, commands: Commands, launch: int, pipeline: Pipeline) -> None:
        """Pushes the address of the launch's part of the table."""
        address = self._span.address + 8 * self.loaded.layout.starts[launch]
        pushed = ffi.new("uint64_t *", address)
        self.loaded.device.logical.functions.vkCmdPushConstants(
            commands.handle, pipeline.layout, COMPUTE, 0, 8, pushed
        )

    def close(self) -> None:
        """Gives table and commands back."""
        super().close()
        self.loaded.device.tables.give(self._span, self.busy)


@final
class DescribedRecording(Recording):
    """Arguments through one descriptor set per launch."""

    def __init__(self, loaded: VulkanLoaded, times: Timestamps | None = None) -> None:
        super().__init__(loaded, times)
        self._pool: Any = NULL
        self._sets: list[Any] = []
        if loaded.layout.places:
            self._allocate()

    def _allocate(self) -> None:
        logical = self.loaded.device.logical
        pipelines = self.loaded.pipelines
        count = len(self.loaded.layout.places)
        size = struct("VkDescriptorPoolSize", type=_STORAGE, descriptorCount=count)
        info = struct(
            "VkDescriptorPoolCreateInfo",
            maxSets=len(pipelines),
            poolSizeCount=1,
            pPoolSizes=size,
        )
        self._pool = logical.create("DescriptorPool", info)
        info = struct(
            "VkDescriptorSetAllocateInfo",
            descriptorPool=self._pool,
            descriptorSetCount=len(pipelines),
            pSetLayouts=array("VkDescriptorSetLayout", [p.sets for p in pipelines]),
        )
        sets = ffi.new("VkDescriptorSet[]", len(pipelines))
        allocate = logical.functions.vkAllocateDescriptorSets
        check(allocate(logical.handle, info, sets), "vkAllocateDescriptorSets")
        self._sets = list(sets)

    @property
    def reusable(self) -> bool:
        """Writing a descriptor set invalidates the commands that bind it."""
        return False

    def point_at(self, spans: Sequence[Span]) -> None:
        """Writes the descriptors of all arguments of all launches."""
        layout = self.loaded.layout
        writes: list[dict[str, Any]] = []
        for descriptor_set, step in zip(self._sets, layout.launches, strict=True):
            for binding, place in enumerate(step.arguments):
                span = spans[layout.order[place.buffer]]
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
        logical = self.loaded.device.logical
        logical.functions.vkUpdateDescriptorSets(
            logical.handle, len(writes), array("VkWriteDescriptorSet", writes), 0, NULL
        )

    def bind_arguments(self, commands: Commands, launch: int, pipeline: Pipeline) -> None:
        """Binds the set of the launch."""
        if not self.loaded.layout.launches[launch].arguments:
            return
        sets = array("VkDescriptorSet", [self._sets[launch]])
        self.loaded.device.logical.functions.vkCmdBindDescriptorSets(
            commands.handle, _BIND, pipeline.layout, 0, 1, sets, 0, NULL
        )

    def close(self) -> None:
        """Gives sets and commands back."""
        super().close()
        if self._pool != NULL:
            self.loaded.device.logical.destroy("DescriptorPool", self._pool)
