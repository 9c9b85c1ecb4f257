"""Profiles: what each kernel of jitted calls costs, by operation and source line.

Only plans are measured, that is, calls of jitted functions; operations outside ``jit`` run on the
host, one by one, and are not part of a profile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import assert_never, final

from vkjit.errors import ArgumentError
from vkjit.lowering.artifact import Copy, HostCall, Launch, Leaf, Plan, leaves
from vkjit.lowering.kernel.cost import flops
from vkjit.runtime.device import DeviceBuffer, Loaded, StepTime
from vkjit.runtime.profile_text import save_trace, table


@final
@dataclass(frozen=True, slots=True)
class StepCost:
    """All ``runs`` of one step in one call; a step in a loop runs once in each turn.

    ``begin`` is by ``time.perf_counter``, in seconds; ``nbytes`` the size of the arguments, each
    read or written at least in part; ``flops`` the floating-point operations that were executed, if
    they can be counted; all are summed over the runs. ``kernel`` is "copy" for copies, "host" for
    calls of functions on the host.
    """

    kernel: str
    origin: tuple[str, ...]
    grid: tuple[int, ...]
    begin: float
    seconds: float
    nbytes: int
    flops: float | None
    runs: int = 1


@final
@dataclass(frozen=True, slots=True)
class CallCost:
    """One call of a plan: when the host began and finished it, and what the device did."""

    plan: str
    device: str
    begin: float
    seconds: float
    barriers: int
    steps: tuple[StepCost, ...]


@final
@dataclass(frozen=True, slots=True)
class Row:
    """All runs of one kernel for one origin, summed; rates are per second."""

    kernel: str
    origin: tuple[str, ...]
    grid: tuple[int, ...]
    runs: int
    seconds: float
    nbytes: int
    flops: float | None

    @property
    def byte_rate(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.seconds if self.seconds else 0.0

    @property
    def flop_rate(self) -> float | None:
        """Floating-point operations per second, if they can be counted."""
        return None if self.flops is None or not self.seconds else self.flops / self.seconds


@final
class Profile:
    """What calls inside ``with profile() as p:`` cost; print it, or :meth:`save` it as a trace."""

    def __init__(self) -> None:
        self.calls: list[CallCost] = []
        self._operations: dict[int, tuple[Plan, list[float | None]]] = {}

    @property
    def seconds(self) -> float:
        """Time of all steps."""
        return sum(step.seconds for call in self.calls for step in call.steps)

    def rows(self) -> list[Row]:
        """One row for each kernel and origin, the most expensive first."""
        found: dict[object, list[StepCost]] = {}
        for call in self.calls:
            for step in call.steps:
                found.setdefault((step.kernel, step.origin, step.grid), []).append(step)
        rows = [_row(steps) for steps in found.values()]
        return sorted(rows, key=_seconds, reverse=True)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes a trace in Chrome's JSON format, which ui.perfetto.dev opens.

        The file appears whole or not at all.
        """
        save_trace(self.calls, path)

    def __str__(self) -> str:
        return table(self.rows(), self.calls)

    def run(
        self,
        loaded: Loaded,
        plan: Plan,
        inputs: Sequence[DeviceBuffer],
        donated: Collection[int],
    ) -> list[DeviceBuffer]:
        """Runs a plan once and keeps what it cost; waits for it."""
        begin = time.perf_counter()
        outputs, times = loaded.timed(inputs, donated)
        seconds = time.perf_counter() - begin
        found = tuple(leaves(plan.steps))
        operations = self._operations_of(plan, found)
        steps = tuple(map(_cost, found, operations, times))
        device = outputs[0].device.name if outputs else ""
        barriers = len(plan.barriers)
        self.calls.append(CallCost(plan.name, device, begin, seconds, barriers, steps))
        return outputs

    def _operations_of(self, plan: Plan, steps: Sequence[Leaf]) -> list[float | None]:
        """Floating-point operations of one run of each step; counted once per plan and kernel."""
        known = self._operations.get(id(plan))
        if known is None:
            kernels = {id(step.kernel): step.kernel for step in steps if isinstance(step, Launch)}
            counted = {key: flops(kernel) for key, kernel in kernels.items()}
            found = [counted[id(s.kernel)] if isinstance(s, Launch) else None for s in steps]
            known = self._operations[id(plan)] = (plan, found)  # the plan is kept: ids stay its own
        return known[1]


def _cost(step: Leaf, operations: float | None, when: StepTime) -> StepCost:
    match step:
        case Launch(kernel, arguments, origin):
            name, grid, nbytes = kernel.name, kernel.grid, sum(place.size for place in arguments)
        case Copy(source):
            name, origin, grid, nbytes = "copy", (), (), 2 * source.size
        case HostCall(_, arguments, _, origin):
            name, grid, nbytes = "host", (), sum(place.size for place in arguments)
        case _:
            assert_never(step)
    runs = when.runs
    total = None if operations is None else operations * runs
    return StepCost(name, origin, grid, when.begin, when.seconds, nbytes * runs, total, runs)


def _row(steps: Sequence[StepCost]) -> Row:
    first = steps[0]
    operations = None if first.flops is None else sum(step.flops or 0.0 for step in steps)
    seconds = sum(step.seconds for step in steps)
    nbytes = sum(step.nbytes for step in steps)
    runs = sum(step.runs for step in steps)
    return Row(first.kernel, first.origin, first.grid, runs, seconds, nbytes, operations)


def _seconds(row: Row) -> float:
    return row.seconds


@final
class _Active:
    """The profile that jitted calls of all threads go to."""

    def __init__(self) -> None:
        self.profile: Profile | None = None
        self.lock = threading.Lock()


active = _Active()


@contextmanager
def profile() -> Generator[Profile]:
    """Measures every kernel that jitted calls run inside the block, on any device and thread.

    A measured call waits for its result, and its kernels run one after another, so that each has
    its own time: the sum is what the kernels cost, more than a call takes in which they overlap. On
    Vulkan the device's own clock measures, on ``cpu`` the host's.

    Example::

        with vj.profile() as measured:
            step(params, batch)
        print(measured)                # a table, the most expensive kernels first
        measured.save("trace.json")    # open it in ui.perfetto.dev

    Raises:
        ArgumentError: another profile is being taken.
        MissingRuleError: a device cannot measure its kernels (when it is called).
    """
    made = Profile()
    with active.lock:
        if active.profile is not None:
            raise ArgumentError("profile: another profile is being taken; leave its block first")
        active.profile = made
    try:
        yield made
    finally:
        active.profile = None
