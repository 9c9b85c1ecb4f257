"""Plans on the Vulkan device: command buffers recorded once and replayed.

A call needs a recording that is not running: there is a small ring of them per plan. With device
addresses a recording holds only the address of its own argument table, which the host rewrites for
each call. Recordings with descriptors, or with copies to and from arrays of the caller, are made
again when the arrays are others than last time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, assert_never, final

import numpy as np
from numpy.typing import NDArray

from vkjit.errors import InternalError, MissingRuleError
from vkjit.lowering.artifact import Copy, Launch, Plan, Range, Role
from vkjit.lowering.target import Addressing
from vkjit.runtime.device import DeviceBuffer, Loaded, indices, taken_over
from vkjit.runtime.vulkan.buffer import VulkanBuffer
from vkjit.runtime.vulkan.ffi import NULL, array, check, constants, ffi, struct
from vkjit.runtime.vulkan.memory import Block, Span
from vkjit.runtime.vulkan.pipeline import COMPUTE, Pipeline

if TYPE_CHECKING:
    from vkjit.runtime.vulkan.device import VulkanDevice

_RING = 4  # calls in flight before the host waits for the oldest
_BIND: int = constants.VK_PIPELINE_BIND_POINT_COMPUTE
_STORAGE: int = constants.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER
_VECTOR_BYTES = 16  # the alignment that emitted accesses count on


class Recording(ABC):
    """One command buffer for the plan; ``busy`` is the submission that runs it."""

    def __init__(self, loaded: VulkanLoaded) -> None:
        self.loaded = loaded
        self.commands = loaded.device.queue.commands()
        self.busy = 0
        self._bound: list[tuple[Block, int]] | None = None

    def prepare(self, spans: Sequence[Span]) -> None:
        """Makes the commands work on these spans, one for each planned buffer."""
        bound = [(span.block, span.offset) for span in spans]
        changed = bound != self._bound
        if changed:
            self.point_at(spans)
        if self._bound is None or (changed and not self.reusable):
            self._record(spans)
        self._bound = bound

    def _record(self, spans: Sequence[Span]) -> None:
        commands = self.commands
        commands.begin()
        current: Pipeline | None = None
        launch = 0
        for position, step in enumerate(self.loaded.plan.steps):
            if position in self.loaded.plan.barriers:
                commands.barrier()
            match step:
                case Launch():
                    pipeline = self.loaded.pipelines[launch]
                    self._dispatch(step, launch, pipeline, bind=pipeline is not current)
                    current, launch = pipeline, launch + 1
                case Copy():
                    source, target = (
                        (spans[r.buffer].block.buffer, spans[r.buffer].offset + r.offset)
                        for r in (step.source, step.target)
                    )
                    if step.source.size:
                        commands.copy(source, target, step.source.size)
                case _:
                    assert_never(step)
        commands.end()

    def _dispatch(self, step: Launch, launch: int, pipeline: Pipeline, *, bind: bool) -> None:
        vk = self.loaded.device.logical.functions
        if bind:
            vk.vkCmdBindPipeline(self.commands.handle, _BIND, pipeline.handle)
        if step.kernel.buffers:
            self.bind_arguments(launch, pipeline)
        vk.vkCmdDispatch(self.commands.handle, *step.kernel.grid)

    @property
    @abstractmethod
    def reusable(self) -> bool:
        """Whether the recorded commands hold for other spans, too."""

    @abstractmethod
    def point_at(self, spans: Sequence[Span]) -> None:
        """Writes table or descriptors."""

    @abstractmethod
    def bind_arguments(self, launch: int, pipeline: Pipeline) -> None:
        """Records how the launch of this number finds its arguments."""

    def close(self) -> None:
        """Gives everything back; the commands must not be running."""
        self.loaded.device.queue.give(self.commands, self.busy)


@final
class _Addressed(Recording):
    """Arguments through a table of addresses in memory that the host can write."""

    def __init__(self, loaded: VulkanLoaded) -> None:
        super().__init__(loaded)
        layout = loaded.layout
        self._span = loaded.device.tables.take(8 * max(len(layout.buffers), 1))
        loaded.device.queue.wait(self._span.busy)
        view = ffi.buffer(ffi.cast("char *", self._span.mapped), 8 * len(layout.buffers))
        self._table: NDArray[np.uint64] = np.frombuffer(view, np.uint64)

    @property
    def reusable(self) -> bool:
        """Copies name their buffers; launches do not."""
        return not self.loaded.layout.copies_outside

    def point_at(self, spans: Sequence[Span]) -> None:
        """Writes the addresses of all arguments of all launches."""
        layout = self.loaded.layout
        addresses = np.array([span.address for span in spans], np.uint64)
        np.add(addresses[layout.buffers], layout.offsets, out=self._table)

    def bind_arguments(self, launch: int, pipeline: Pipeline) -> None:
        """Pushes the address of the launch's part of the table."""
        device = self.loaded.device
        address = self._span.address + 8 * self.loaded.layout.starts[launch]
        pushed = ffi.new("uint64_t *", address)
        device.logical.functions.vkCmdPushConstants(
            self.commands.handle, pipeline.layout, COMPUTE, 0, 8, pushed
        )

    def close(self) -> None:
        """Gives table and commands back."""
        super().close()
        self.loaded.device.tables.give(self._span, self.busy)


@final
class _Described(Recording):
    """Arguments through one descriptor set per launch."""

    def __init__(self, loaded: VulkanLoaded) -> None:
        super().__init__(loaded)
        self._pool: Any = NULL
        self._sets: list[Any] = []
        if len(loaded.layout.buffers):
            self._allocate()

    def _allocate(self) -> None:
        logical = self.loaded.device.logical
        pipelines = self.loaded.pipelines
        count = len(self.loaded.layout.buffers)
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
        writes: list[dict[str, Any]] = []
        for descriptor_set, step in zip(self._sets, self.loaded.layout.launches, strict=True):
            for binding, place in enumerate(step.arguments):
                span = spans[place.buffer]
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

    def bind_arguments(self, launch: int, pipeline: Pipeline) -> None:
        """Binds the set of the launch."""
        sets = array("VkDescriptorSet", [self._sets[launch]])
        self.loaded.device.logical.functions.vkCmdBindDescriptorSets(
            self.commands.handle, _BIND, pipeline.layout, 0, 1, sets, 0, NULL
        )

    def close(self) -> None:
        """Gives sets and commands back."""
        super().close()
        if self._pool != NULL:
            self.loaded.device.logical.destroy("DescriptorPool", self._pool)


@final
class _Layout:
    """Where the arguments of all launches stand in one table.

    ``buffers`` and ``offsets`` have an entry per argument; ``starts`` is the first entry of each
    launch. ``copies_outside`` tells whether a copy touches an array that changes between calls.
    """

    def __init__(self, plan: Plan) -> None:
        self.launches = [step for step in plan.steps if isinstance(step, Launch)]
        places: list[Range] = []
        self.starts: list[int] = []
        for step in self.launches:
            self.starts.append(len(places))
            places.extend(step.arguments)
        self.buffers = np.array([p.buffer for p in places], np.intp)
        self.offsets = np.array([p.offset for p in places], np.uint64)
        copies = [step for step in plan.steps if isinstance(step, Copy)]
        self.copies_outside = any(
            plan.buffers[place.buffer].role is not Role.CONSTANT
            for step in copies
            for place in (step.source, step.target)
        )


@final
class VulkanLoaded(Loaded):
    """A plan with its pipelines and a ring of recordings."""

    __slots__ = (
        "__weakref__",
        "_arenas",
        "_constants",
        "_inputs",
        "_label",
        "_needed",
        "_outputs",
        "_ring",
        "_taken",
        "device",
        "layout",
        "pipelines",
        "plan",
    )

    def __init__(
        self, device: VulkanDevice, plan: Plan, constants_: Sequence[VulkanBuffer]
    ) -> None:
        self.device = device
        self.plan = plan
        self._ring: list[Recording] = []
        self._constants = dict(zip(indices(plan, Role.CONSTANT), constants_, strict=True))
        self._inputs = indices(plan, Role.INPUT)
        self._outputs = [
            (index, plan.buffers[index].size, plan.buffers[index].donated)
            for index in indices(plan, Role.OUTPUT)
        ]
        self._arenas = indices(plan, Role.ARENA)
        self._needed = [plan.buffers[index].size for index in self._inputs]
        self._taken = taken_over(plan)
        self.layout = _Layout(plan)
        _check_ranges(device, plan, self.layout)
        kernels = [step.kernel for step in self.layout.launches]
        self._label = f"{plan.name} (kernels {', '.join(kernel.name for kernel in kernels)})"
        self.pipelines = device.pipelines.get(kernels)

    def __del__(self) -> None:
        # Collection of garbage may come at any point and in any thread: no lock can be taken.
        ring, self._ring = self._ring, []
        self.device.retire(ring)

    def run(
        self, inputs: Sequence[DeviceBuffer], donated: Collection[int] = ()
    ) -> list[DeviceBuffer]:
        """Submits the plan once; see ``Loaded.run``."""
        device = self.device
        given = [device.own(buffer) for buffer in inputs]
        self._check_inputs(given, donated)
        with device.lock:
            device.reap()
            spans, fresh = self._spans(given)
            try:
                recording = self._recording()
                recording.prepare(spans)
                recording.busy = value = device.queue.submit(recording.commands, self._label)
            except BaseException:
                for span in fresh:
                    device.give(span)
                raise
            outputs: list[DeviceBuffer] = []
            for index, size, taken in self._outputs:
                if taken is not None:
                    given[taken].moved()
                outputs.append(VulkanBuffer(device, spans[index], size, value))
            for index in self._arenas:
                device.give(spans[index])
            for position in donated:
                given[position].release()
        return outputs

    def _check_inputs(self, given: Sequence[VulkanBuffer], donated: Collection[int]) -> None:
        if len(given) != len(self._inputs) or not self._taken.issubset(donated):
            raise InternalError(
                f"{self.device.name}: {len(given)} inputs with {sorted(donated)} donated to "
                f"{self.plan.name}, expected {len(self._inputs)} with {sorted(self._taken)}"
            )
        for buffer, needed in zip(given, self._needed, strict=True):
            if buffer.nbytes < needed:
                raise InternalError(
                    f"{self.device.name}: an input of {self.plan.name} has {buffer.nbytes} bytes, "
                    f"expected {needed}"
                )

    def _spans(self, given: Sequence[VulkanBuffer]) -> tuple[list[Span], list[Span]]:
        """The memory of each planned buffer, and those spans among them that are new."""
        spans: list[Span] = []
        fresh: list[Span] = []
        try:
            for index, planned in enumerate(self.plan.buffers):
                if planned.role is Role.INPUT:
                    span = given[planned.position].span
                elif planned.role is Role.CONSTANT:
                    span = self._constants[index].span
                elif planned.donated is not None:
                    span = given[planned.donated].span
                else:
                    span = self.device.memory.take(planned.size)
                    fresh.append(span)
                spans.append(span)
        except BaseException:
            for span in fresh:
                self.device.give(span)
            raise
        return spans, fresh

    def _recording(self) -> Recording:
        """One that is not running: the oldest, or a new one while the ring has room."""
        queue, ring = self.device.queue, self._ring
        oldest = min(ring, key=_busy) if ring else None
        if oldest is None or (len(ring) < _RING and oldest.busy > queue.finished()):
            is_addressed = self.device.target.addressing is Addressing.DEVICE_ADDRESS
            made = _Addressed(self) if is_addressed else _Described(self)
            ring.append(made)
            return made
        queue.wait(oldest.busy)
        return oldest

    def close(self) -> None:
        """Waits for this plan and gives its recordings back."""
        ring, self._ring = self._ring, []
        self.device.retire(ring)
        self.device.reap()


def _busy(recording: Recording) -> int:
    return recording.busy


def _check_ranges(device: VulkanDevice, plan: Plan, layout: _Layout) -> None:
    """Refuses arguments that start where kernels cannot read, or are too long to bind."""
    described = device.target.addressing is Addressing.DESCRIPTOR
    limits = device.capabilities
    alignment = max(_VECTOR_BYTES, limits.storage_alignment if described else 0)
    for step in layout.launches:
        for buffer, place in zip(step.kernel.buffers, step.arguments, strict=True):
            where = f"{device.name}: {buffer.name} of kernel {step.kernel.name} in {plan.name}"
            if place.offset % alignment:
                raise InternalError(f"{where}: offset {place.offset}, expected * {alignment}")
            if described and place.size > limits.max_storage_range:
                raise MissingRuleError(
                    f"{where}: {place.size} bytes, descriptors reach {limits.max_storage_range}; "
                    "use device addresses (unset VKJIT_VULKAN_ADDRESSING) or the cpu"
                )
            if place.size < buffer.length * buffer.elem.bytes:
                raise InternalError(
                    f"{where}: {place.size} bytes for {buffer.length} {buffer.elem}"
                )
