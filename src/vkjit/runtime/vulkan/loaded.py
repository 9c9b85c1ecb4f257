"""Plans on the Vulkan device: command buffers recorded once and replayed.

A call needs a recording that is not running: there is a small ring of them per plan. Its outputs
are promises: the submission that writes them may not have begun when the call returns.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, final

from vkjit.errors import InternalError, OutOfMemoryError
from vkjit.lowering.artifact import Plan, Role
from vkjit.lowering.target import Addressing
from vkjit.runtime.device import DeviceBuffer, Loaded, StepTime, indices, taken_over
from vkjit.runtime.vulkan.buffer import VulkanBuffer
from vkjit.runtime.vulkan.forecast import Forecast
from vkjit.runtime.vulkan.layout import Layout, check_ranges
from vkjit.runtime.vulkan.memory import Span
from vkjit.runtime.vulkan.recording import AddressedRecording, DescribedRecording, Recording
from vkjit.runtime.vulkan.split import DEFAULT_SECONDS, ORIGIN, split, submit_seconds
from vkjit.runtime.vulkan.timestamps import Timestamps

if TYPE_CHECKING:
    from vkjit.runtime.vulkan.device import VulkanDevice

_RING = 8  # calls in flight before the host waits for the oldest
_NBYTES: Callable[[DeviceBuffer], int] = attrgetter("nbytes")


@final
class VulkanLoaded(Loaded):
    """A plan with its pipelines and a ring of recordings, the oldest first."""

    __slots__ = (
        "__weakref__",
        "_arenas",
        "_constant_spans",
        "_constants",
        "_forecast",
        "_inputs",
        "_made",
        "_needed",
        "_outputs",
        "_ring",
        "_taken",
        "_timed",
        "device",
        "layout",
        "parts",
        "pipelines",
        "plan",
    )

    def __init__(self, device: VulkanDevice, plan: Plan, constants: Sequence[VulkanBuffer]) -> None:
        self.device = device
        self.plan = plan
        self._ring: deque[Recording] = deque()
        self._timed: Recording | None = None
        self._constants = list(constants)  # keeps the memory
        self._constant_spans = [constant.span for constant in constants]
        self._inputs = len(indices(plan, Role.INPUT))
        outputs = [plan.buffers[i] for i in indices(plan, Role.OUTPUT)]
        arenas = [plan.buffers[i] for i in indices(plan, Role.ARENA)]
        self._outputs = [(b.size, b.donated) for b in outputs]
        self._made = [(b.size, b.donated) for b in (*outputs, *arenas)]
        first = self._inputs + len(outputs)
        self._arenas = range(first, first + len(arenas))
        self._needed = [plan.buffers[i].size for i in indices(plan, Role.INPUT)]
        self._taken = taken_over(plan)
        if len(self._constants) != len(indices(plan, Role.CONSTANT)):
            raise InternalError(f"{device.name}: {plan.name} was given {len(constants)} constants")
        self._forecast = Forecast(device.name, device.memory, plan)
        self._forecast.require_possible()
        self.layout = Layout(plan)
        check_ranges(device, plan, self.layout)
        watched = not device.capabilities.is_software
        self.parts = split(plan, submit_seconds(DEFAULT_SECONDS if watched else math.inf))
        sliced = {
            self.layout.launch_at[piece.position]
            for part in self.parts
            for piece in part
            if piece.base != ORIGIN
        }
        kernels = [step.kernel for step in self.layout.launches]
        self.pipelines = device.pipelines.get(kernels, sliced)

    def __del__(self) -> None:
        # Collection of garbage may come at any point and in any thread: no lock can be taken.
        self.device.retire(self._dropped())

    def run(
        self, inputs: Sequence[DeviceBuffer], donated: Collection[int] = ()
    ) -> list[DeviceBuffer]:
        """Submits the plan once; see ``Loaded.run``."""
        return self._call(inputs, donated, self._next)

    def timed(
        self, inputs: Sequence[DeviceBuffer], donated: Collection[int] = ()
    ) -> tuple[list[DeviceBuffer], list[StepTime]]:
        """As ``run``, one step after another, with the times that the device measured."""
        queue = self.device.queue
        with self.device.lock:  # other threads would use the recording before it is read
            queue.wait(queue.submitted)  # so that the first step begins when it is submitted
            started = time.perf_counter()
            recording = self._measuring([])
            outputs = self._call(inputs, donated, self._measuring)
            queue.wait(recording.busy)
            return outputs, self._step_times(recording, started)

    def _measuring(self, _spans: list[Span]) -> Recording:
        """The recording with timestamps, made at the first profile; it never runs twice at once."""
        if self._timed is None:
            count = sum(map(len, self.parts))
            self._timed = self._new(Timestamps(self.device.logical, count))
        return self._timed

    def _step_times(self, recording: Recording, started: float) -> list[StepTime]:
        """From pieces to steps, and from the device's clock to the host's."""
        assert recording.times is not None
        pieces = [piece for part in self.parts for piece in part]
        measured = recording.times.read()
        first = measured[0][0] if measured else 0.0
        begins: dict[int, float] = {}
        spent: dict[int, float] = {}
        for piece, (begin, end) in zip(pieces, measured, strict=True):
            begins.setdefault(piece.position, begin - first + started)
            spent[piece.position] = spent.get(piece.position, 0.0) + end - begin
        return [StepTime(begins[i], spent[i]) for i in range(len(self.plan.steps))]

    def _call(
        self,
        inputs: Sequence[DeviceBuffer],
        donated: Collection[int],
        recording: Callable[[list[Span]], Recording],
    ) -> list[DeviceBuffer]:
        """The path of every call: a few microseconds beside those of the driver."""
        device = self.device
        given = [device.own(buffer) for buffer in inputs]
        if donated or self._taken or list(map(_NBYTES, given)) != self._needed:
            self._check(given, donated)
        with device.lock:
            device.reap()
            self._forecast.require_room()
            spans = [buffer.span for buffer in given]
            try:
                self._allocate(spans)
                value = recording(spans).submit(spans)
            except BaseException as error:
                for span in self._fresh(spans):
                    device.give(span)
                if isinstance(error, OutOfMemoryError):
                    raise self._forecast.failure(error) from None
                raise
            outputs: list[DeviceBuffer] = []
            for span, (size, source) in zip(spans[len(given) :], self._outputs, strict=False):
                if source is not None:
                    given[source].moved()
                outputs.append(VulkanBuffer(device, span, size, value))
            for place in self._arenas:
                device.give(spans[place])
            for position in donated:
                given[position].release()
        return outputs

    def _allocate(self, spans: list[Span]) -> None:
        """Appends the memory of outputs, arena and constants to that of the inputs."""
        take = self.device.memory.take
        for size, source in self._made:
            spans.append(take(size) if source is None else spans[source])
        spans += self._constant_spans

    def _fresh(self, spans: Sequence[Span]) -> list[Span]:
        """Of the spans that a call has so far, those that it allocated."""
        made = spans[self._inputs : self._inputs + len(self._made)]
        return [s for s, (_, source) in zip(made, self._made, strict=False) if source is None]

    def _check(self, given: Sequence[VulkanBuffer], donated: Collection[int]) -> None:
        """Refuses a wrong number of inputs, short inputs and incomplete donation."""
        if len(given) != self._inputs or not self._taken.issubset(donated):
            raise InternalError(
                f"{self.device.name}: {len(given)} inputs with {sorted(donated)} donated to "
                f"{self.plan.name}, expected {self._inputs} with {sorted(self._taken)}"
            )
        for buffer, needed in zip(given, self._needed, strict=True):
            if buffer.nbytes < needed:
                raise InternalError(
                    f"{self.device.name}: an input of {self.plan.name} has {buffer.nbytes} bytes, "
                    f"expected {needed}"
                )

    def _next(self, spans: list[Span]) -> Recording:
        """A recording that is not running: one that fits, a new one, or when full the oldest."""
        queue, ring = self.device.queue, self._ring
        for recording in ring:
            if not queue.is_finished(recording.busy):
                break
            if recording.fits(spans):
                ring.remove(recording)
                ring.append(recording)
                return recording
        if len(ring) < _RING:
            ring.append(self._new(None))
        else:
            queue.wait(ring[0].busy)
            ring.rotate(-1)
        return ring[-1]

    def _new(self, times: Timestamps | None) -> Recording:
        is_addressed = self.device.target.addressing is Addressing.DEVICE_ADDRESS
        return (AddressedRecording if is_addressed else DescribedRecording)(self, times)

    def close(self) -> None:
        """Waits for this plan and gives its recordings back."""
        self.device.retire(self._dropped())
        self.device.reap()

    def _dropped(self) -> list[Recording]:
        """All recordings, which belong to the plan no more."""
        dropped = [*self._ring, *([self._timed] if self._timed else [])]
        self._ring, self._timed = deque[Recording](), None
        return dropped
