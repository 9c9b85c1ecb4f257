"""Plans on the Vulkan device: command buffers recorded once and replayed.

A call needs a recording that is not running: there is a small ring of them per plan. Its outputs
are promises: the submission that writes them may not have begun when the call returns. Plans in
which the host decides what comes next have a driver for each call instead, and wait.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, final

from vkjit.errors import InternalError, OutOfMemoryError
from vkjit.lowering.artifact import Copy, Launch, Plan, Role
from vkjit.lowering.target import Addressing
from vkjit.runtime.device import DeviceBuffer, Loaded, StepTime, indices, taken_over
from vkjit.runtime.vulkan.buffer import VulkanBuffer
from vkjit.runtime.vulkan.drive import Driver
from vkjit.runtime.vulkan.estimate import DEFAULT_SECONDS, submit_seconds
from vkjit.runtime.vulkan.forecast import Forecast
from vkjit.runtime.vulkan.layout import check_ranges, span_order
from vkjit.runtime.vulkan.loop_kernels import can_advance
from vkjit.runtime.vulkan.measure import LeafTimes
from vkjit.runtime.vulkan.memory import Span
from vkjit.runtime.vulkan.outline import Play, leaf_count, outline
from vkjit.runtime.vulkan.recording import Recording
from vkjit.runtime.vulkan.stretch import Stretch, compile_all, kernels_of, plays

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
        "_drivers",
        "_forecast",
        "_inputs",
        "_made",
        "_needed",
        "_only",
        "_outputs",
        "_ring",
        "_taken",
        "_timed",
        "device",
        "order",
        "plan",
        "script",
        "stretches",
    )

    def __init__(self, device: VulkanDevice, plan: Plan, constants: Sequence[VulkanBuffer]) -> None:
        self.device = device
        self.plan = plan
        self._ring: deque[Recording] = deque()
        self._drivers: list[Driver] = []
        self._timed: list[Driver] = []
        self._constants = list(constants)  # keeps the memory
        self._constant_spans = [constant.span for constant in constants]
        self._inputs = len(indices(plan, Role.INPUT))
        outputs = [plan.buffers[i] for i in indices(plan, Role.OUTPUT)]
        arenas = [plan.buffers[i] for i in indices(plan, Role.ARENA)]
        self._outputs = [(b.size, b.donated) for b in outputs]
        heaps = [device.away if b.host else device.memory for b in (*outputs, *arenas)]
        self._made = [
            (b.size, b.donated, heap) for b, heap in zip((*outputs, *arenas), heaps, strict=True)
        ]
        first = self._inputs + len(outputs)
        self._arenas = range(first, first + len(arenas))
        self._needed = [plan.buffers[i].size for i in indices(plan, Role.INPUT)]
        self._taken = taken_over(plan)
        if len(self._constants) != len(indices(plan, Role.CONSTANT)):
            raise InternalError(f"{device.name}: {plan.name} was given {len(constants)} constants")
        self._forecast = Forecast(device.name, device.memory, plan)
        self._forecast.require_possible()
        check_ranges(device, plan)
        self.order = span_order(plan)
        self._outline()

    def _outline(self) -> None:
        """Cuts the plan into stretches that run without the host, and compiles their kernels."""
        device, plan = self.device, self.plan
        target = device.target
        addressed = target.addressing is Addressing.DEVICE_ADDRESS
        self.script = outline(plan, replays=addressed and can_advance(target))
        is_flat = all(isinstance(step, Launch | Copy) for step in plan.steps)
        kernels = kernels_of(self.script, target if addressed and not is_flat else None)
        watched = not device.capabilities.is_software
        seconds = submit_seconds(DEFAULT_SECONDS if watched else math.inf)
        self.stretches = {
            play: Stretch(plan, play.items, kernels, seconds) for play in plays(self.script)
        }
        compile_all(self.stretches.values(), device.pipelines, target)
        self._only: Stretch | None = None
        if len(self.script) == 1 and isinstance(self.script[0], Play):
            self._only = self.stretches[self.script[0]]

    def __del__(self) -> None:
        # Collection of garbage may come at any point and in any thread: no lock can be taken.
        self.device.retire(self._dropped())

    @property
    def submissions(self) -> int | None:
        """How many submissions a call makes; None where the host decides in between."""
        return self._only.parts.submissions if self._only else None

    def run(
        self, inputs: Sequence[DeviceBuffer], donated: Collection[int] = ()
    ) -> list[DeviceBuffer]:
        """Runs the plan once; see ``Loaded.run``. Waits where the host must decide."""
        if self._only is None:
            return self._drive(inputs, donated, None)
        return self._call(inputs, donated)

    def timed(
        self, inputs: Sequence[DeviceBuffer], donated: Collection[int] = ()
    ) -> tuple[list[DeviceBuffer], list[StepTime]]:
        """As ``run``, one step after another, with the times that the device measured."""
        started = time.perf_counter()
        times = LeafTimes(leaf_count(self.plan))
        outputs = self._drive(inputs, donated, times)
        return outputs, times.listed(started)

    def _call(self, inputs: Sequence[DeviceBuffer], donated: Collection[int]) -> list[DeviceBuffer]:
        """The path of calls without the host: a few microseconds beside those of the driver."""
        device = self.device
        given = self._given(inputs, donated)
        with device.lock:
            device.reap()
            self._forecast.require_room()
            spans = [buffer.span for buffer in given]
            try:
                self._allocate(spans)
                value = self._next(spans).submit(spans)
            except BaseException as error:
                self._undo(spans, error)
                raise
            return self._outputs_of(spans, given, donated, value)

    def _drive(
        self,
        inputs: Sequence[DeviceBuffer],
        donated: Collection[int],
        times: LeafTimes | None,
    ) -> list[DeviceBuffer]:
        """The path of calls in which the host decides, or measures.

        The device is not locked while functions of the host run: they may wait for other threads.
        """
        device = self.device
        given = self._given(inputs, donated)
        with device.lock:
            device.reap()
            self._forecast.require_room()
            spans = [buffer.span for buffer in given]
            try:
                self._allocate(spans)
            except BaseException as error:
                self._undo(spans, error)
                raise
            kept = self._drivers if times is None else self._timed
            driver = kept.pop() if kept else Driver(self, measures=times is not None)
        driver.times = times
        try:
            value = driver.run(spans, given)
        except BaseException as error:
            try:
                device.queue.settle(device.queue.submitted)
            finally:
                for position in self._taken:
                    given[position].release()
                self._undo(spans, error)
            raise
        finally:
            kept.append(driver)
        with device.lock:
            return self._outputs_of(spans, given, donated, value)

    def _given(
        self, inputs: Sequence[DeviceBuffer], donated: Collection[int]
    ) -> list[VulkanBuffer]:
        """The inputs, which fit the plan."""
        given = [self.device.own(buffer) for buffer in inputs]
        if donated or self._taken or list(map(_NBYTES, given)) != self._needed:
            self._check(given, donated)
        return given

    def _undo(self, spans: Sequence[Span], error: BaseException) -> None:
        """Gives back what a call has allocated; tells more of it if memory was short."""
        for span in self._fresh(spans):
            self.device.give(span)
        if isinstance(error, OutOfMemoryError):
            raise self._forecast.failure(error) from None

    def _outputs_of(
        self,
        spans: Sequence[Span],
        given: Sequence[VulkanBuffer],
        donated: Collection[int],
        value: int,
    ) -> list[DeviceBuffer]:
        """The outputs that submission ``value`` writes; the arena and what was donated go back."""
        device = self.device
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
        for size, source, heap in self._made:
            spans.append(heap.take(size) if source is None else spans[source])
        spans += self._constant_spans

    def _fresh(self, spans: Sequence[Span]) -> list[Span]:
        """Of the spans that a call has so far, those that it allocated."""
        made = spans[self._inputs : self._inputs + len(self._made)]
        return [s for s, (_, source, _) in zip(made, self._made, strict=False) if source is None]

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
            assert self._only is not None
            ring.append(self.device.recording(self._only, measures=False))
        else:
            queue.wait(ring[0].busy)
            ring.rotate(-1)
        return ring[-1]

    def close(self) -> None:
        """Waits for this plan and gives its recordings back."""
        self.device.retire(self._dropped())
        self.device.reap()

    def _dropped(self) -> list[Recording | Driver]:
        """All recordings, which belong to the plan no more."""
        dropped = [*self._ring, *self._drivers, *self._timed]
        for held in (self._ring, self._drivers, self._timed):
            held.clear()  # names no global: at the interpreter's end they are gone
        return dropped
