"""The search for one group: time the candidates, then admit the fastest that is right."""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import final

from vkjit.errors import VkjitError
from vkjit.lowering.compile import schedules
from vkjit.lowering.plan.schedule import GpuContract
from vkjit.tuning.admission import Admission, Check, RealSize, admitted
from vkjit.tuning.case import Case, Trial, trial
from vkjit.tuning.records import Receipt, Result, group_key, kernels_version
from vkjit.tuning.reference import sum_bound
from vkjit.tuning.report import Progress
from vkjit.tuning.rig import Rig

LEAST_GAIN = 1.02
"""What is not faster than the default by this factor does not replace it."""
_TIMING_SHARE = 0.7
"""Part of a group's time for timing; the rest is for checks."""
_OUT_OF_REACH = 10.0
"""Where a kind of schedules is behind the best by this factor, later ones of it are not tried: they
are expected to be slower still."""
_BATCH = 8  # candidates compiled between two looks at the clock
_BASES_AT_MOST = 6  # schedules that may fail before the group is given up
_CHECKS_AT_MOST = 4  # schedules that may fail their checks before the default is kept


@final
@dataclass(slots=True)
class _Timings:
    """Seconds of what was timed and why others were not; when to stop, by the rig's clock."""

    seconds: dict[GpuContract, float] = field(default_factory=dict[GpuContract, float])
    refused: dict[GpuContract, str] = field(default_factory=dict[GpuContract, str])
    out_of_reach: set[type[GpuContract]] = field(default_factory=set[type[GpuContract]])

    last_batch: float = 0.0
    end: float = 0.0

    @property
    def best(self) -> float | None:
        """The shortest time."""
        return min(self.seconds.values(), default=None)


@final
class Search:
    """Tunes one group after another on one device."""

    def __init__(self, rig: Rig, progress: Progress | None = None) -> None:
        self.rig = rig
        self.admission = Admission(rig)
        self._progress = progress

    def tune(self, case: Case, deadline: float) -> Result | None:
        """The result for a case, or None where there is nothing to choose or nothing works.

        The default schedule is always timed; ``deadline``, by the rig's clock, ends the timing of
        others with part of the time left for the checks. Where the default itself fails, the first
        schedule that works takes its part, and must show what the others must.
        """
        rig, start = self.rig, self.rig.clock()
        options = schedules(case.group, case.infos, rig.target)
        if len(options) < 2:
            return None
        timings = _Timings()
        real = self._real_size(case, options, timings)
        if real is None:
            return None
        left = [s for s in options if s not in timings.refused]
        timings.last_batch = start + (deadline - start) * _TIMING_SHARE
        timings.end = deadline
        self._time(case, left, real, timings)
        chosen, checks = self._admit(case, options[0], real, timings)
        if chosen not in timings.seconds:
            return None
        return self._result(case, chosen, options[0], timings, checks, rig.clock() - start)

    def _real_size(
        self, case: Case, options: Sequence[GpuContract], timings: _Timings
    ) -> RealSize | None:
        """The group at its own size by the first of the first few schedules that work."""
        for schedule in options[:_BASES_AT_MOST]:
            try:
                return RealSize(self.rig, case, schedule)
            except VkjitError as error:
                timings.refused[schedule] = _reason(error)
        return None

    def _time(
        self,
        case: Case,
        options: Sequence[GpuContract],
        real: RealSize,
        timings: _Timings,
    ) -> None:
        """Times the default, then the others in their order until the time is over."""
        done = 0
        for some in _batches(options):
            if done and self.rig.clock() >= timings.last_batch:
                return
            ready: list[Trial] = []
            for schedule in some:
                try:
                    ready.append(trial(case, schedule, self.rig.target))
                except VkjitError as error:
                    timings.refused[schedule] = _reason(error)
            self.rig.prepare(ready)
            for one in ready:
                # What is compiled already is timed, as long as there is any time.
                if done and self.rig.clock() >= timings.end:
                    return
                self._time_one(one, real, timings)
                done += 1
                if self._progress is not None:
                    self._progress(group_key(case), done, len(options))

    def _time_one(self, one: Trial, real: RealSize, timings: _Timings) -> None:
        """Times a candidate, unless those of its kind are out of reach."""
        kind, best = type(one.schedule), timings.best
        if kind in timings.out_of_reach:
            timings.refused[one.schedule] = "not timed: better ones of its kind were far behind"
            return
        try:
            seconds = self.rig.seconds(one, real.given, best)
        except VkjitError as error:
            timings.refused[one.schedule] = _reason(error)
            return
        timings.seconds[one.schedule] = seconds
        own = min(t for s, t in timings.seconds.items() if type(s) is kind)
        if best is not None and own > _OUT_OF_REACH * best:
            timings.out_of_reach.add(kind)

    def _admit(
        self, case: Case, default: GpuContract, real: RealSize, timings: _Timings
    ) -> tuple[GpuContract, list[Check]]:
        """The fastest schedule that passes its checks, and these."""
        limit = timings.seconds.get(default, math.inf) / LEAST_GAIN
        ordered = sorted(timings.seconds, key=timings.seconds.__getitem__)
        faster = [s for s in ordered if timings.seconds[s] <= limit]
        for schedule in faster[:_CHECKS_AT_MOST]:
            checks, reason = admitted(self.admission, real, case, schedule)
            if reason is None:
                return schedule, checks
            timings.refused[schedule] = reason
        return default, []

    def _result(  # noqa: PLR0913  the parts of a receipt
        self,
        case: Case,
        chosen: GpuContract,
        default: GpuContract,
        timings: _Timings,
        checks: Sequence[Check],
        spent: float,
    ) -> Result:
        now = datetime.datetime.now(datetime.UTC)
        receipt = Receipt(
            date=now.isoformat(timespec="seconds"),
            version=_version(),
            default=default.text(),
            seconds={s.text(): t for s, t in timings.seconds.items()},
            refused={s.text(): reason for s, reason in timings.refused.items()},
            checks=tuple(map(str, checks)),
            error=max((c.share for c in checks), default=0.0),
            tolerance=_tolerance(case),
            spent=round(spent, 3),
        )
        hardware = self.rig.device.hardware
        return Result(hardware, kernels_version(), group_key(case), chosen.text(), receipt)


def _version() -> str:
    """The package's version; a source tree without an installation has none."""
    try:
        return metadata.version("vkjit")
    except metadata.PackageNotFoundError:
        return "source"


def _batches(options: Sequence[GpuContract]) -> Iterator[Sequence[GpuContract]]:
    """The default alone, which must not wait, then as many as compile at the same time."""
    yield options[:1]
    size = min(max(os.cpu_count() or 1, 2), _BATCH)
    for start in range(1, len(options), size):
        yield options[start : start + size]


def _reason(error: VkjitError) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def _tolerance(case: Case) -> str:
    group = case.group
    if group.accumulate.kind != "float":
        return "equal"
    return (
        f"{sum_bound(case):.3g} of the sum of magnitudes, then the rounding of results and epilogue"
    )
