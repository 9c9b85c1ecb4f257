"""Where candidates run: a device with a clock."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from vkjit.errors import VkjitError
from vkjit.lowering.kernel.interpret_ops import DTYPES
from vkjit.lowering.plan.schedule import GpuContract
from vkjit.lowering.templates.context import memory_type
from vkjit.runtime.device import Device, DeviceBuffer, Loaded
from vkjit.tuning.case import Case, Trial, together, trial
from vkjit.tuning.reference import Array, Arrays

Clock = Callable[[], float]
"""Seconds, from any start."""

SAMPLES = 3
"""Timings of which the median counts."""
HOPELESS = 3.0
"""A candidate that takes so many times the best is not timed to the end."""
_SAMPLE_SECONDS = 4e-3  # one sample: far over the cost of a submission
_MOST_REPEATS = 256
_COLD_SECONDS = 0.2  # without work for so long, GPUs lower their clocks
_WARM_UP_SECONDS = 0.05


@final
class Rig:
    """Runs and times trials on one device."""

    def __init__(self, device: Device, clock: Clock = time.perf_counter) -> None:
        self.device = device
        self.target = device.target
        self.clock = clock
        self._last = 0.0
        self._warm = False

    def upload(self, case: Case, arrays: Arrays) -> list[DeviceBuffer]:
        """The arrays that a case reads."""
        return [self.device.upload(_stored(arrays[a])) for a in case.reads]

    def prepare(self, trials: Sequence[Trial]) -> None:
        """Compiles several trials at the same time; what fails fails again on its own."""
        if len(trials) > 1:
            with contextlib.suppress(VkjitError):
                self.device.load(together([one.plan() for one in trials]))

    def results(
        self, case: Case, schedule: GpuContract, given: Sequence[DeviceBuffer]
    ) -> dict[int, Array]:
        """What a schedule writes; elements that it leaves alone have every bit set.

        Raises:
            VkjitError: it cannot be lowered, compiled or run.
        """
        plan = trial(case, schedule, self.target).plan(poisoned=True)
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
        """The time of one run, queued many times in a row: the median of ``SAMPLES``.

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
        single = self._timed(once, given)
        if best is not None and single > HOPELESS * best and single > _SAMPLE_SECONDS:
            return single
        single = min(single, self._timed(once, given))
        repeats = max(1, min(_MOST_REPEATS, round(_SAMPLE_SECONDS / max(single, 1e-9))))
        many = self.device.load(candidate.plan(repeats)) if repeats > 1 else once
        self._warm_up(many, given)
        first = self._timed(many, given) / repeats
        if best is not None and first > HOPELESS * best:
            return first
        samples = [self._timed(many, given) / repeats for _ in range(SAMPLES)]
        return statistics.median(samples)

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
        """Work that is not timed, if there was none for a while."""
        start = self.clock()
        if start - self._last < _COLD_SECONDS and self._warm:
            return
        self._warm = True
        for _ in range(_MOST_REPEATS):
            self._timed(loaded, given)
            if self._last - start >= _WARM_UP_SECONDS:
                return


def _stored(array: Array) -> Array:
    """Booleans as they lie in memory; arrays without elements take one byte."""
    return array.view(np.int8) if array.dtype == np.bool_ else array
