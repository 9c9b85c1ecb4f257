"""Plans that need the host in between: loops until a flag falls, branches, calls of functions.

The host submits what comes before a decision, waits for it, and reads the flag that it left in
memory which the host sees. One call has its driver to itself, so that functions of the host may run
plans on the device, this one included.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, assert_never, final

import numpy as np

from vkjit.errors import ArgumentError
from vkjit.lowering.artifact import Range
from vkjit.runtime.vulkan.ffi import ffi
from vkjit.runtime.vulkan.measure import LeafTimes, measure
from vkjit.runtime.vulkan.memory import Span
from vkjit.runtime.vulkan.outline import (
    FLAG_BYTES,
    Call,
    Choice,
    Play,
    Repeat,
    Script,
    Until,
)

if TYPE_CHECKING:
    from vkjit.runtime.device import HostArray
    from vkjit.runtime.vulkan.buffer import VulkanBuffer
    from vkjit.runtime.vulkan.loaded import VulkanLoaded
    from vkjit.runtime.vulkan.recording import Recording


@final
class Driver:
    """Runs the script of a plan, one call at a time; ``busy`` is its last submission.

    With ``times`` everything is measured.
    """

    def __init__(self, loaded: VulkanLoaded, *, measures: bool) -> None:
        self.device = loaded.device
        self.busy = 0
        self.times: LeafTimes | None = None
        self._measures = measures
        self._script = loaded.script
        self._stretches = loaded.stretches
        self._order = loaded.order
        self._recordings: dict[Play, Recording] = {}
        self._spans: list[Span] = []
        self._inputs: Sequence[VulkanBuffer] = ()
        self._flag = self.device.tables.take(FLAG_BYTES)
        self._value: Any = ffi.cast("char *", self._flag.mapped)

    def run(self, spans: Sequence[Span], inputs: Sequence[VulkanBuffer]) -> int:
        """One call; returns the number of the last submission.

        Args:
            spans: the memory of all buffers.
            inputs: those of the call, which functions of the host must not give up meanwhile.

        Raises:
            ArgumentError: a function of the host did.
            DeviceError: the device is lost.
            Exception: what a function of the host raised.
        """
        self.busy = self.device.queue.submitted
        self._spans, self._inputs = [*spans, self._flag], inputs
        try:
            self._run(self._script, ())
        finally:
            self._inputs = ()
        return self.busy

    def _run(self, script: Script, turns: tuple[int, ...]) -> None:
        for node in script:
            match node:
                case Play():
                    self._play(node, turns)
                case Repeat(body, length):
                    for turn in range(length):
                        self._run(body, (*turns, turn))
                case Until(first, body, size):
                    self._run(first, turns)
                    while any(self._flag_bytes(size)):
                        self._run(body, turns)
                case Choice(scripts):
                    number = int.from_bytes(self._flag_bytes(4), "little", signed=True)
                    self._run(scripts[min(max(number, 0), len(scripts) - 1)], turns)
                case Call():
                    self._call(node, turns)
                case _:
                    assert_never(node)

    def _play(self, node: Play, turns: tuple[int, ...]) -> None:
        """Submits a stretch; it is not running, or is waited for."""
        queue = self.device.queue
        recording = self._recordings.get(node)
        if recording is None:
            recording = self._recordings[node] = self.device.recording(
                self._stretches[node], measures=self._measures
            )
        queue.wait(recording.busy)
        with self.device.lock:
            if self.times is None:
                recording.submit(self._spans, turns)
            else:
                measure(recording, self._spans, turns, self.times)
            self.busy = recording.busy

    def _flag_bytes(self, size: int) -> bytes:
        """What the last submission left for the host to decide by."""
        self.device.queue.wait(self.busy)
        return bytes(ffi.buffer(self._value, size))

    def _call(self, node: Call, turns: tuple[int, ...]) -> None:
        self.device.queue.wait(self.busy)
        begin = time.perf_counter()
        places = [place.at(turns) for place in node.places]
        pairs = zip(places, node.step.types, strict=True)
        arrays = [self._array(place, *kind) for place, kind in pairs]
        try:
            node.step.function(*arrays)
        finally:
            if self.times is not None:
                self.times.add(node.leaf, begin, time.perf_counter() - begin, 1)
        if any(buffer.released for buffer in self._inputs):
            raise ArgumentError(
                f"{self.device.name}: a function that a compiled call runs on the host donated an "
                "array that this call still reads; donate it after the call"
            )

    def _array(self, place: Range, dtype: np.dtype[Any], shape: tuple[int, ...]) -> HostArray:
        """A copy of a range."""
        span = self._spans[self._order[place.buffer]]
        part = Span(span.block, span.offset + place.offset, place.size)
        found = np.empty(shape, dtype)
        if found.nbytes:
            self.device.read(part, found)
        return found

    def close(self) -> None:
        """Gives everything back; nothing of it may be running."""
        for recording in self._recordings.values():
            recording.close()
        self._recordings.clear()
        self.device.tables.give(self._flag, self.busy)
