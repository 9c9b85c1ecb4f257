"""Where candidates run: a device with a clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, final

import numpy as np

from vkjit.blocks import BlockType
from vkjit.lowering.kernel.elements import memory_type
from vkjit.lowering.kernel.interpret_ops import DTYPES
from vkjit.lowering.kernel.types import ScalarType
from vkjit.lowering.plan.schedule import GpuContract
from vkjit.runtime.device import Device, DeviceBuffer, Loaded
from vkjit.tuning.case import Case, Trial, trial
from vkjit.tuning.reference import Array, Arrays, random_blocks, random_values

Clock = Callable[[], float]
"""Seconds, from any start."""

SAMPLES = 4
"""Timings of which the shortest counts: what disturbs them only makes them longer."""
HOPELESS = 3.0
"""A candidate that takes so many times the best is not timed to the end."""
_SAMPLE_SECONDS = 1.5e-3  # one sample, by the time of a lone run, most of which may be the host's
_MOST_REPEATS = 64
_COLD_SECONDS = 5e-3  # after so long without work the clocks are looked at
_WARM_UP_SECONDS = (
    0.5  # what GPUs take to raise them (H200: 0.3 s, to five times those of idleness)
)
_AT_SPEED = 1.06  # the pacer, relative to its best time


@final
class _Pacer:
    """Work whose time is known: it tells whether the device runs at full speed."""

    def __init__(self, loaded: Loaded, given: Sequence[DeviceBuffer]) -> None:
        self.loaded = loaded
        self.given = given
        self.seconds = math.inf


@final
class Rig:
    """Runs and times trials on one device."""

    def __init__(self, device: Device, clock: Clock = time.perf_counter) -> None:
        self.device = device
        self.target = device.target
        self.clock = clock
        self._last = self._at_speed = 0.0
        self._pacer: _Pacer | None = None
        self._trials: dict[tuple[Case, GpuContract], Trial] = {}
        self._random: dict[tuple[ScalarType | BlockType, int], DeviceBuffer] = {}

    def upload(self, case: Case, arrays: Arrays) -> list[DeviceBuffer]:
        """The arrays that a case reads."""
        return [self.device.upload(_stored(arrays[a])) for a in case.reads]

    def filled(self, case: Case) -> list[DeviceBuffer]:
        """Random numbers for the arrays that a case reads, to be timed with, not to be changed.

        Cases share them: memory and time are those of the largest.
        """
        found: list[DeviceBuffer] = []
        in_blocks = case.blocks
        for place, array in enumerate(case.reads):
            info, blocks = case.infos[array], in_blocks.get(array)
            key = (blocks or info.elem, place)
            known = self._random.get(key)
            if known is None or known.nbytes < case.nbytes(array):
                rng = np.random.default_rng(place)
                values = random_blocks(rng, info, blocks) if blocks else random_values(rng, info)
                known = self._random[key] = self.device.upload(_stored(values))
            found.append(known)
        return found

    def trial(self, case: Case, schedule: GpuContract) -> Trial:
        """The kernels of a case under a schedule, lowered once.

        Raises:
            VkjitError: the template cannot serve the case.
        """
        found = self._trials.get((case, schedule))
        if found is None:
            found = self._trials[case, schedule] = trial(case, schedule, self.target)
        return found

    def forget(self) -> None:
        """Frees what trials took."""
        self._trials.clear()

    def prepare(self, case: Case, schedule: GpuContract) -> list[Future[Any]]:
        """Lowers a trial and begins to compile it; returns what goes on.

        Raises:
            VkjitError: it cannot be lowered.
        """
        return self.device.prepare(self.trial(case, schedule).plan())

    def is_compiled(self, tasks: Sequence[Future[Any]], seconds: float) -> bool:
        """Whether what ``prepare`` began ends within some seconds."""
        return not wait(tasks, timeout=seconds).not_done

    def results(
        self, case: Case, schedule: GpuContract, given: Sequence[DeviceBuffer]
    ) -> dict[int, Array]:
        """What a schedule writes; elements that it leaves alone have every bit set.

        Raises:
            VkjitError: it cannot be lowered, compiled or run.
        """
        plan = self.trial(case, schedule).plan(poisoned=True)
        poison = [
            self.device.upload(np.full(max(case.nbytes(a), 1), 0xFF, np.uint8)) for a in case.writes
        ]
        count = len(given)
        loaded = self.device.load(plan)
        outs = loaded.run([*given, *poison], range(count, count + len(poison)))
        return {
            a: self.device.download(
                out, DTYPES[memory_type(case.infos[a].elem)], (case.infos[a].length,)
            )
            for a, out in zip(case.writes, outs, strict=True)
        }

    def seconds(
        self, candidate: Trial, given: Sequence[DeviceBuffer], best: float | None = None
    ) -> float:
        """The device's time for one run: what each of many in a row adds to the time of one.

        A barrier stands between them, as between the kernels of a program. Of ``SAMPLES``
        timings the shortest counts; the cost of a submission is in none.

        Args:
            candidate: what to time.
            given: contents of the arrays it reads.
            best: of other candidates; one that is ``HOPELESS`` beside it is not timed to the end.

        Raises:
            VkjitError: it cannot be compiled or run.
        """
        once = self.device.load(candidate.plan())
        # Some drivers finish compiling at the first dispatch, which therefore never counts.
        self._timed(once, given)
        lone = self._timed(once, given)
        if best is not None and lone > HOPELESS * best and lone > _SAMPLE_SECONDS:
            return lone
        lone = min(lone, self._timed(once, given))
        repeats = max(1, min(_MOST_REPEATS, round(_SAMPLE_SECONDS / max(lone, 1e-9))))
        many = self.device.load(candidate.plan(1 + repeats)) if repeats > 1 else once
        self._timed(many, given)  # records the commands
        self._warm_up(many, given)
        took = self._timed(many, given)
        if best is None or took < HOPELESS * best * repeats:
            took = min(took, *(self._timed(many, given) for _ in range(SAMPLES - 1)))
        if repeats > 1:
            lone = min(self._timed(once, given) for _ in range(SAMPLES))
            took = max(took - lone, 0.0) / repeats or took / (1 + repeats)
        self._at_speed = self._last
        return took

    def _timed(self, loaded: Loaded, given: Sequence[DeviceBuffer]) -> float:
        """Seconds from handing a plan to the device until it is finished."""
        start = self.clock()
        outs = loaded.run(given)
        self.device.synchronize()
        self._last = self.clock()
        for out in outs:
            out.release()
        return self._last - start

    def _warm_up(self, loaded: Loaded, given: Sequence[DeviceBuffer]) -> None:
        """Brings the device to full speed after a pause, as the pacer tells.

        The first candidate becomes the pacer.
        """
        start = self.clock()
        if self._pacer is None:
            self._pacer = _Pacer(loaded, given)
        elif start - self._at_speed < _COLD_SECONDS:
            return
        pacer, best = self._pacer, math.inf
        while True:
            took = self._timed(pacer.loaded, pacer.given)
            best = min(best, took)
            if took <= _AT_SPEED * pacer.seconds < math.inf:
                pacer.seconds = min(pacer.seconds, took)
                return
            if self._last - start >= _WARM_UP_SECONDS:
                pacer.seconds = best  # what the device reaches now, which may be less than before
                return

    def rest(self) -> None:
        """Ends a series of timings: frees the pacer, and the arrays that it went with."""
        self._pacer = None
        self._random.clear()


def _stored(array: Array) -> Array:
    """Booleans as they lie in memory; arrays without elements take one byte."""
    return array.view(np.int8) if array.dtype == np.bool_ else array
