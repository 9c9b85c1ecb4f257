"""Recordings whose arguments lie in tables of addresses, which loops advance on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, final

import numpy as np

from vkjit.runtime.vulkan.ffi import ffi
from vkjit.runtime.vulkan.loop_kernels import (
    HEAD,
    INVOCATIONS,
    MOVE,
    advance_kernel,
    begin_kernel,
)
from vkjit.runtime.vulkan.memory import Span
from vkjit.runtime.vulkan.outline import Replay
from vkjit.runtime.vulkan.pipeline import COMPUTE, Pipeline
from vkjit.runtime.vulkan.progress import Counters
from vkjit.runtime.vulkan.queue import Commands
from vkjit.runtime.vulkan.recording import BIND, Recording
from vkjit.runtime.vulkan.split import Piece

if TYPE_CHECKING:
    from vkjit.lowering.kernel.nodes import Kernel
    from vkjit.runtime.device import HostArray
    from vkjit.runtime.vulkan.device import VulkanDevice
    from vkjit.runtime.vulkan.layout import Layout
    from vkjit.runtime.vulkan.stretch import Stretch

_ADDRESS: Callable[[Span], int] = attrgetter("address")
_ARGUMENTS = 8  # room for those of a kernel that begins or advances a loop


@final
@dataclass(frozen=True, slots=True)
class _State:
    """What a loop keeps on the device, as words of 8 bytes in the memory of its recording.

    ``count`` arguments, how they move, where they lie before the first turn, and two tables.
    ``calls`` are the arguments of the kernels that advance from even and from odd turns, and of
    those that begin the loop in even and in odd turns of the loop around it.
    """

    first: int
    count: int
    moves: int
    base: int
    tables: tuple[int, int]
    calls: tuple[int, int, int, int]
    end: int


def _state(first: int, count: int, at: int) -> _State:
    moves, base = at, at + MOVE * (count + 1)
    even = base + _even(count)
    odd = even + HEAD + _even(count)
    calls = odd + HEAD + _even(count)
    places = [calls + _ARGUMENTS * n for n in range(4)]
    return _State(
        first,
        count,
        moves,
        base,
        (even, odd),
        (places[0], places[1], places[2], places[3]),
        calls + 4 * _ARGUMENTS,
    )


def _even(count: int) -> int:
    """Words up to the next multiple of 16 bytes."""
    return count + count % 2


@final
class AddressedRecording(Recording):
    """Arguments through a table of addresses in memory that the host can write."""

    def __init__(self, device: VulkanDevice, stretch: Stretch, *, measures: bool) -> None:
        super().__init__(device, stretch, measures=measures)
        layout = stretch.layout
        count = len(layout.places)
        at = max(_even(count), 1)
        self._states: dict[Replay, _State] = {}
        for loop, (first, length) in layout.loops.items():
            self._states[loop] = _state(first, length, at)
            at = self._states[loop].end
        self._span = device.tables.take(8 * at)
        device.queue.wait(self._span.busy)
        start = ffi.cast("char *", self._span.mapped)
        self._memory = ffi.buffer(start, 8 * count)
        if self._states:
            words = np.frombuffer(ffi.buffer(start, 8 * at), np.int64)
            for loop in self._states:
                self._fill(words, loop, layout)

    def _fill(self, words: HostArray, loop: Replay, layout: Layout) -> None:
        """Writes what never changes: how arguments move, and what the loop's kernels work on."""
        state, parent = self._states[loop], self.stretch.parents[loop]
        part = slice(state.first, state.first + state.count)
        columns = layout.columns(loop.depth)
        rows = [columns.stride, columns.first, columns.step, columns.ring]
        words[state.moves] = state.count
        moves = words[state.moves + MOVE : state.moves + MOVE * (state.count + 1)]
        moves.reshape(-1, MOVE)[:] = np.stack([row[part] for row in rows], 1)
        even, odd = state.tables
        sources = [state.first, state.first]
        if parent is not None:
            around = self._states[parent]
            sources = [t + HEAD + state.first - around.first for t in around.tables]
        calls = [
            (state.moves, state.base, even, odd),
            (state.moves, state.base, odd, even),
            *((state.moves, source, state.base, even, odd) for source in sources),
        ]
        for place, arguments in zip(state.calls, calls, strict=True):
            words[place : place + len(arguments)] = [self._at(word) for word in arguments]

    def _at(self, word: int) -> int:
        """The device's address of a word of this recording's memory."""
        return self._span.address + 8 * word

    @property
    def reusable(self) -> bool:
        """Copies name their buffers; launches do not."""
        return not self.stretch.copies

    def point_at(self, spans: Sequence[Span], turns: Sequence[int]) -> None:
        """Writes the addresses of all arguments of all launches."""
        self._memory[:] = self.stretch.layout.table(list(map(_ADDRESS, spans)), turns)

    def bind_arguments(
        self,
        commands: Commands,
        piece: Piece,
        pipeline: Pipeline,
        turn: tuple[Replay, int] | None,
    ) -> None:
        """Pushes the address of the launch's part of a table."""
        word = self.stretch.layout.starts[piece.work]
        if turn is not None:
            loop, parity = turn
            state = self._states[loop]
            word += state.tables[parity] + HEAD - state.first
        self._push(commands, pipeline, word)

    def _push(self, commands: Commands, pipeline: Pipeline, word: int) -> None:
        pushed = ffi.new("uint64_t *", self._at(word))
        self.device.logical.functions.vkCmdPushConstants(
            commands.handle, pipeline.layout, COMPUTE, 0, 8, pushed
        )

    def begin_loop(self, commands: Commands, loop: Replay, parity: int | None) -> None:
        """Records the kernel that copies addresses from the table of what is around the loop."""
        kernel = begin_kernel(self.device.target)
        self._call(commands, kernel, loop, 2 + (parity or 0))

    def advance(self, commands: Commands, loop: Replay, parity: int) -> None:
        """Records the kernel that fills the other table."""
        self._call(commands, advance_kernel(self.device.target), loop, parity)

    def _call(self, commands: Commands, kernel: Kernel, loop: Replay, which: int) -> None:
        state, vk = self._states[loop], self.device.logical.functions
        pipeline = self.stretch.pipelines[kernel, False]
        vk.vkCmdBindPipeline(commands.handle, BIND, pipeline.handle)
        self._push(commands, pipeline, state.calls[which])
        vk.vkCmdDispatch(commands.handle, max(-(-state.count // INVOCATIONS), 1), 1, 1)

    def counters(self, loop: Replay) -> Counters:
        """The first words of both tables."""
        found: dict[int, tuple[int, int]] = {}
        around: Replay | None = loop
        while around is not None:
            even, odd = self._states[around].tables
            found[around.depth] = (self._span.mapped + 8 * even, self._span.mapped + 8 * odd)
            around = self.stretch.parents[around]
        return found

    def close(self) -> None:
        """Gives table and commands back."""
        super().close()
        self.device.tables.give(self._span, self.busy)
