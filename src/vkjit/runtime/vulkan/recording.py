"""Recordings: the command buffers of one stretch, with a way to point them at the arrays of a call.

With device addresses a recording holds only the addresses of its own argument tables, which the
host rewrites for each call. Recordings with descriptors, or with copies to and from arrays of the
caller, are made again when the arrays are others than last time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, assert_never

from vkjit.runtime.vulkan.estimate import ORIGIN
from vkjit.runtime.vulkan.ffi import constants
from vkjit.runtime.vulkan.memory import Span
from vkjit.runtime.vulkan.outline import Replay
from vkjit.runtime.vulkan.pipeline import Pipeline
from vkjit.runtime.vulkan.progress import Counters, Progress
from vkjit.runtime.vulkan.queue import Commands
from vkjit.runtime.vulkan.split import Begin, Part, Piece, Run, Segment
from vkjit.runtime.vulkan.timestamps import Timestamps

if TYPE_CHECKING:
    from vkjit.runtime.vulkan.device import VulkanDevice
    from vkjit.runtime.vulkan.stretch import Stretch

BIND: int = constants.VK_PIPELINE_BIND_POINT_COMPUTE


class Recording(ABC):
    """The submissions of one stretch; ``busy`` is the last of them.

    ``times`` are there where the recording is made to measure: then a barrier stands before every
    piece, so that each has its own time.
    """

    def __init__(self, device: VulkanDevice, stretch: Stretch, *, measures: bool) -> None:
        self.device = device
        self.stretch = stretch
        self.busy = 0
        self.times = Timestamps(device.logical, stretch.parts) if measures else None
        self.primaries = [device.queue.commands() for _ in stretch.parts.parts]
        self._segments = [device.queue.segment() for _ in stretch.parts.segments]
        self._bound: list[Span] | None = None
        self._turns: Sequence[int] = ()
        self._word = device.tables.take(4)
        device.queue.wait(self._word.busy)
        self.progress = Progress(stretch.plan, self._word)

    def submit(self, spans: list[Span], turns: Sequence[int] = ()) -> int:
        """Runs the stretch on these spans, which stand in the order of ``layout.order``.

        Args:
            spans: the memory of all buffers.
            turns: those of the loops around it that the host drives, outermost first.

        Returns:
            the number of the last submission.

        Raises:
            DeviceError: the device is lost.
        """
        self.prepare(spans, turns)
        queue, progress = self.device.queue, self.progress.describe
        try:
            for number, times in self.stretch.parts.order:
                for _ in range(times):
                    queue.submit(self.primaries[number], progress)
        finally:
            self.busy = queue.submitted  # also when a later part, or the validation layer, refuses
        return self.busy

    def prepare(self, spans: list[Span], turns: Sequence[int]) -> None:
        """Points tables or descriptors at the spans and records what does not hold for them."""
        if spans != self._bound or turns != self._turns:
            is_recorded = self._bound is not None and self.reusable
            # Until all of it is done: should this fail, the next call begins anew.
            self._bound = None
            self.point_at(spans, turns)
            if not is_recorded:
                self._record(spans, turns)
            self._bound, self._turns = spans, turns
        self.progress.reset(turns)

    def fits(self, spans: list[Span]) -> bool:
        """Whether the recorded commands can run on these spans."""
        return self._bound is not None and (self.reusable or spans == self._bound)

    # -- recording --------------------------------------------------------------------------------

    def _record(self, spans: Sequence[Span], turns: Sequence[int]) -> None:
        parts = self.stretch.parts
        often: Counter[int] = Counter()
        for number, times in parts.order:
            often[number] += times
        self.progress.forget()
        for number, segment in enumerate(parts.segments):
            commands = self._segments[number]
            commands.begin()
            if self.times is not None:
                self.times.reset_segment(commands, number)
            self._record_segment(commands, segment, number)
            commands.end()
        for number, part in enumerate(parts.parts):
            commands = self.primaries[number]
            commands.begin(again=often[number] > 1)
            if self.times is not None:
                self.times.reset_part(commands, number)
            self._record_part(commands, part, number, spans, turns)
            commands.end()

    def _record_segment(self, commands: Commands, segment: Segment, number: int) -> None:
        loop, bound = segment.loop, None
        counters = self.counters(loop)
        if segment.advances:
            commands.barrier()
            self.advance(commands, loop, segment.parity)
            for inner in segment.begins:
                self.begin_loop(commands, inner, segment.parity)
        query = self.times.of_segments[number] if self.times is not None else 0
        for index, piece in enumerate(segment.pieces):
            stands = index == 0 and segment.advances
            if (piece.barrier or (self.times is not None and index)) and not stands:
                commands.barrier()
            if piece.mark:
                self.progress.mark(commands, piece.work, counters)
            if self.times is not None:
                self.times.begin(commands, query + index)
            bound = self._dispatch(commands, piece, bound, (loop, segment.parity))
            if self.times is not None:
                self.times.end(commands, query + index)

    def _record_part(
        self,
        commands: Commands,
        part: Part,
        number: int,
        spans: Sequence[Span],
        turns: Sequence[int],
    ) -> None:
        bound: Pipeline | None = None
        query = self.times.of_parts[number] if self.times is not None else 0
        for index, item in enumerate(part):
            is_piece = isinstance(item, Piece)
            if (is_piece and item.barrier) or (self.times is not None and index):
                commands.barrier()
            if is_piece and item.mark:
                self.progress.mark(commands, item.work, {})
            if self.times is not None:
                self.times.begin(commands, query + index)
            match item:
                case Piece() if item.work not in self.stretch.kernels:
                    self._copy(commands, item, spans, turns)
                case Piece():
                    bound = self._dispatch(commands, item, bound, None)
                case _:
                    self._record_loops(commands, item)
                    bound = None  # what was bound is lost
            if self.times is not None:
                self.times.end(commands, query + index)

    def _record_loops(self, commands: Commands, item: Begin | Run) -> None:
        match item:
            case Begin(loops):
                for loop in loops:
                    self.begin_loop(commands, loop, None)
            case Run(segments):
                commands.execute([self._segments[segment] for segment in segments])
            case _:
                assert_never(item)

    def _dispatch(
        self,
        commands: Commands,
        piece: Piece,
        bound: Pipeline | None,
        turn: tuple[Replay, int] | None,
    ) -> Pipeline:
        """Records a launch or a slice of it; returns its pipeline, which stays bound."""
        vk = self.device.logical.functions
        pipeline = self.stretch.pipelines[self.stretch.kernels[piece.work], piece.is_slice]
        if pipeline is not bound:
            vk.vkCmdBindPipeline(commands.handle, BIND, pipeline.handle)
        self.bind_arguments(commands, piece, pipeline, turn)
        if piece.base == ORIGIN:
            vk.vkCmdDispatch(commands.handle, *piece.grid)
        else:
            vk.vkCmdDispatchBase(commands.handle, *piece.base, *piece.grid)
        return pipeline

    def _copy(
        self, commands: Commands, piece: Piece, spans: Sequence[Span], turns: Sequence[int]
    ) -> None:
        order = self.stretch.layout.order
        places = [place.at(turns) for place in piece.work.places]
        source, target = (
            (spans[order[r.buffer]].block.buffer, spans[order[r.buffer]].offset + r.offset)
            for r in places
        )
        commands.copy(source, target, places[0].size)

    # -- what differs between tables and descriptors ----------------------------------------------

    @property
    @abstractmethod
    def reusable(self) -> bool:
        """Whether the recorded commands hold for other spans, too."""

    @abstractmethod
    def point_at(self, spans: Sequence[Span], turns: Sequence[int]) -> None:
        """Writes table or descriptors."""

    @abstractmethod
    def bind_arguments(
        self,
        commands: Commands,
        piece: Piece,
        pipeline: Pipeline,
        turn: tuple[Replay, int] | None,
    ) -> None:
        """Records how a launch finds its arguments, in even (0) or odd turns of a loop, if any."""

    @abstractmethod
    def begin_loop(self, commands: Commands, loop: Replay, parity: int | None) -> None:
        """Records what computes a loop's first arguments, in such turns of the loop around it."""

    @abstractmethod
    def advance(self, commands: Commands, loop: Replay, parity: int) -> None:
        """Records what computes the arguments of the turns after those of ``parity``."""

    @abstractmethod
    def counters(self, loop: Replay) -> Counters:
        """Where the turns of a loop and of those around it are counted, by depth."""

    def close(self) -> None:
        """Gives everything back; the commands must not be running."""
        device = self.device
        self.progress.close()
        device.tables.give(self._word, self.busy)
        for commands in (*self.primaries, *self._segments):
            device.queue.give(commands, self.busy)
        if self.times is not None:
            self.times.close()
