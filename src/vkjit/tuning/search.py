"""The search: compile candidates ahead, time them, then admit the fastest that is right.

Groups are searched together, a few candidates of each in turn, so that every group has its first
ones timed before any group its last ones. Who may gain most comes first.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib import metadata
from operator import attrgetter
from typing import Any, final

from vkjit.errors import VkjitError
from vkjit.lowering.compile import schedules
from vkjit.lowering.plan.schedule import GpuContract
from vkjit.tuning.admission import Admission, Check, RealSize, admitted
from vkjit.tuning.case import Case, Trial
from vkjit.tuning.records import Receipt, Result, group_key, kernels_version
from vkjit.tuning.reference import sum_bound
from vkjit.tuning.report import Progress
from vkjit.tuning.rig import Rig

LEAST_GAIN = 1.02
"""What is not faster than the default by this factor does not replace it."""
_TIMING_SHARE = 0.65
"""Part of the time for timing; the rest is for checks."""
_OUT_OF_REACH = 10.0
"""Where a kind of schedules is behind the best by this factor, later ones of it are not tried: they
are expected to be slower still."""
_AT_A_TIME = 4  # candidates of a group that are compiled and timed before it is another's turn
_COMPILE_SECONDS = 1.0  # who compiles longer is timed when the others are done
_AHEAD = 3  # groups whose checks are compiled at the same time
_BASES_AT_MOST = 6  # schedules that may fail before the group is given up
_CHECKS_AT_MOST = 4  # schedules that may fail their checks before the default is kept


@final
@dataclass(slots=True, eq=False)
class _Group:
    """What is known of one group: seconds of what was timed, and why others were not."""

    case: Case
    count: int
    options: Sequence[GpuContract]
    seconds: dict[GpuContract, float] = field(default_factory=dict[GpuContract, float])
    refused: dict[GpuContract, str] = field(default_factory=dict[GpuContract, str])
    out_of_reach: set[type[GpuContract]] = field(default_factory=set[type[GpuContract]])
    spent: float = 0.0

    @property
    def best(self) -> float | None:
        """The shortest time."""
        return min(self.seconds.values(), default=None)

    @property
    def weight(self) -> float:
        """Seconds of a call that the group takes; before it is timed, its work in its place."""
        best = self.best
        return self.count * (self.case.work * 1e-12 if best is None else best)

    @property
    def faster(self) -> list[GpuContract]:
        """What may replace the default, the fastest first."""
        limit = self.seconds.get(self.options[0], math.inf) / LEAST_GAIN
        ordered = sorted(self.seconds, key=self.seconds.__getitem__)
        return [s for s in ordered if self.seconds[s] <= limit][:_CHECKS_AT_MOST]

    @property
    def gain(self) -> float:
        """Seconds of a call that the fastest candidate saves."""
        faster, default = self.faster, self.seconds.get(self.options[0])
        if not faster or default is None:
            return math.inf if faster else 0.0
        return self.count * (default - self.seconds[faster[0]])


@final
@dataclass(frozen=True, slots=True)
class _Candidate:
    """A trial of a group that is being compiled."""

    group: _Group
    trial: Trial
    tasks: Sequence[Future[Any]]


@final
class Search:
    """Tunes groups on one device."""

    def __init__(self, rig: Rig, progress: Progress | None = None) -> None:
        self.rig = rig
        self.admission = Admission(rig)
        self._progress = progress

    def tune(self, case: Case, deadline: float) -> Result | None:
        """The result for one case; see ``all``."""
        return next((result for _, result in self.all([(case, 1)], deadline)), None)

    def all(
        self, cases: Sequence[tuple[Case, int]], deadline: float
    ) -> Iterator[tuple[Case, Result]]:
        """The results of cases that occur so many times each, as they are found.

        There is none where there is nothing to choose, nothing works, or the time was over before
        the default schedule was timed. ``deadline``, by the rig's clock, ends the timing with part
        of the time left for the checks. Where the default fails, the first schedule that works
        takes its part, and must show what the others must.
        """
        start = self.rig.clock()
        groups = [_Group(c, n, schedules(c.group, c.infos, self.rig.target)) for c, n in cases]
        groups = [group for group in groups if len(group.options) > 1]
        self._time(groups, start + (deadline - start) * _TIMING_SHARE)
        self.rig.rest()
        timed = sorted([g for g in groups if g.seconds], key=_gain, reverse=True)
        begun = 0
        for number, group in enumerate(timed):
            started = self.rig.clock()
            for other in timed[begun : number + _AHEAD]:
                # Drivers compile small variants for the next groups while this one is checked.
                for schedule in other.faster[:1] if started < deadline else ():
                    self.admission.prepare(other.case, schedule)
            begun = number + _AHEAD
            chosen, checks = self._admit(group, deadline)
            group.spent += self.rig.clock() - started
            if chosen in group.seconds:
                yield group.case, self._result(group, chosen, checks)
        self.rig.forget()

    # -- timing -----------------------------------------------------------------------------------

    def _time(self, groups: Sequence[_Group], end: float) -> None:
        """Times the first candidates of every group, then the next ones, until the time is over."""
        late: list[_Candidate] = []
        longest = max((len(g.options) for g in groups), default=0)
        ready = self._begun(groups, 0, end)
        for following in range(_AT_A_TIME, longest + _AT_A_TIME, _AT_A_TIME):
            # Drivers compile the next ones while these are timed.
            some, ready = ready, self._begun(groups, following, end)
            late += self._timed(some, end, _COMPILE_SECONDS)
        for one in self._timed(late, end, 0.0):
            one.group.refused[one.trial.schedule] = "not timed: still being compiled"

    def _begun(self, groups: Sequence[_Group], first: int, end: float) -> list[_Candidate]:
        """Begins to compile some candidates of each group."""
        found: list[_Candidate] = []
        for group in sorted(groups, key=_weight, reverse=True):
            for schedule in group.options[first : first + _AT_A_TIME]:
                if self.rig.clock() >= end and (found or first):
                    return found
                if type(schedule) in group.out_of_reach:
                    group.refused[schedule] = _FAR_BEHIND
                    continue
                try:
                    tasks = self.rig.prepare(group.case, schedule)
                    trial = self.rig.trial(group.case, schedule)
                    found.append(_Candidate(group, trial, tasks))
                except VkjitError as error:
                    group.refused[schedule] = _reason(error)
        return found

    def _timed(
        self, candidates: Sequence[_Candidate], end: float, seconds: float
    ) -> list[_Candidate]:
        """Times what compiles within some seconds, and returns what does not.

        The first of a group, its default, is waited for.
        """
        late: list[_Candidate] = []
        for number, one in enumerate(candidates):
            now = self.rig.clock()
            if now >= end and (number or one.group.seconds):
                return late
            patience = seconds if one.group.seconds else max(seconds, end - now)
            if not self.rig.is_compiled(one.tasks, patience):
                late.append(one)
                continue
            self._time_one(one.group, one.trial)
            one.group.spent += self.rig.clock() - now
            self._tell(one.group)
        return late

    def _time_one(self, group: _Group, one: Trial) -> None:
        """Times a candidate, unless those of its kind are out of reach."""
        kind, best = type(one.schedule), group.best
        if kind in group.out_of_reach:
            group.refused[one.schedule] = _FAR_BEHIND
            return
        try:
            seconds = self.rig.seconds(one, self.rig.filled(group.case), best)
        except VkjitError as error:
            group.refused[one.schedule] = _reason(error)
            return
        group.seconds[one.schedule] = seconds
        own = min(t for s, t in group.seconds.items() if type(s) is kind)
        if best is not None and own > _OUT_OF_REACH * best:
            group.out_of_reach.add(kind)

    def _tell(self, group: _Group) -> None:
        if self._progress is not None:
            done = len(group.seconds) + len(group.refused)
            self._progress(group_key(group.case), done, len(group.options))

    # -- admission --------------------------------------------------------------------------------

    def _admit(self, group: _Group, deadline: float) -> tuple[GpuContract, list[Check]]:
        """The fastest schedule that passes its checks, and these."""
        default, real = group.options[0], None
        for schedule in group.faster:
            if self.rig.clock() >= deadline:
                group.refused[schedule] = "not checked: the time was over"
                continue
            real = real or self._real_size(group)
            if real is None:
                break
            checks, reason = admitted(self.admission, real, group.case, schedule)
            if reason is None:
                return schedule, checks
            group.refused[schedule] = reason
        return default, []

    def _real_size(self, group: _Group) -> RealSize | None:
        """The group at its own size by the first of the first few schedules that work."""
        for schedule in group.options[:_BASES_AT_MOST]:
            if schedule in group.refused:
                continue
            try:
                return RealSize(self.rig, group.case, schedule)
            except VkjitError as error:
                group.refused[schedule] = _reason(error)
        return None

    def _result(self, group: _Group, chosen: GpuContract, checks: Sequence[Check]) -> Result:
        now = datetime.datetime.now(datetime.UTC)
        receipt = Receipt(
            date=now.isoformat(timespec="seconds"),
            version=_version(),
            default=group.options[0].text(),
            seconds={s.text(): t for s, t in group.seconds.items()},
            refused={s.text(): reason for s, reason in group.refused.items()},
            checks=tuple(map(str, checks)),
            error=max((c.share for c in checks), default=0.0),
            tolerance=_tolerance(group.case),
            spent=round(group.spent, 3),
        )
        hardware = self.rig.device.hardware
        return Result(hardware, kernels_version(), group_key(group.case), chosen.text(), receipt)


_FAR_BEHIND = "not timed: better ones of its kind were far behind"
_weight: Callable[[_Group], float] = attrgetter("weight")
_gain: Callable[[_Group], float] = attrgetter("gain")


def _version() -> str:
    """The package's version; a source tree without an installation has none."""
    try:
        return metadata.version("vkjit")
    except metadata.PackageNotFoundError:
        return "source"


def _reason(error: VkjitError) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def _tolerance(case: Case) -> str:
    group = case.group
    if group.accumulate.kind != "float":
        return "equal"
    return (
        f"{sum_bound(case):.3g} of the sum of magnitudes, then the rounding of results and epilogue"
    )
