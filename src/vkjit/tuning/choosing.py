"""How compiling finds tuned schedules, and tunes on the way where it was asked to."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

from vkjit.errors import ArgumentError, ConfigError
from vkjit.lowering.compile import Choice, Choose, serves
from vkjit.lowering.plan.groups import ArrayInfo, Group
from vkjit.lowering.plan.schedule import GpuContract
from vkjit.lowering.target import Target, TargetKind
from vkjit.runtime.device import Device
from vkjit.tuning.case import Case, case_of
from vkjit.tuning.defaults import near, shipped
from vkjit.tuning.records import Result, group_key
from vkjit.tuning.store import Store, open_store

if TYPE_CHECKING:
    from vkjit.tuning.search import Search

GROUP_SECONDS = 5.0
"""The most that tuning one group while compiling may take."""


@final
class _State:
    """The results of this process, opened on first use."""

    def __init__(self) -> None:
        self.store: Store | None = None
        self.lock = threading.RLock()


@final
class _Asked(threading.local):
    """Whether this thread is inside ``tune()``, and the seconds left."""

    def __init__(self) -> None:
        self.budgets: list[float] = []


_state = _State()
_asked = _Asked()


def store() -> Store:
    """The results that this process knows."""
    with _state.lock:
        if _state.store is None:
            _state.store = open_store()
        return _state.store


def version() -> int:
    """A number that grows when results change."""
    found = _state.store
    return 0 if found is None else found.version


def lookup(device: Device) -> Choose | None:
    """What was tuned for ``device``, for ``compile_program``; None where nothing is tuned.

    Results are those of this process and the cache folder, then those that come with vkjit for
    devices of that name. Never tunes.
    """
    if device.target.kind is not TargetKind.GPU:
        return None

    def choose(group: Group, infos: Sequence[ArrayInfo], target: Target) -> GpuContract | None:
        case = case_of(group, infos)
        return None if case is None else usable(find(device, case), case, target)

    return choose


def at_compile(device: Device) -> Choose | None:
    """As ``lookup``; where ``VKJIT_TUNE=1`` or ``with tune():`` asks for it, tunes what is new."""
    found = lookup(device)
    if found is None or not is_on():
        return found
    from vkjit.tuning.rig import Rig  # noqa: PLC0415  the interpreter, which only tuning needs
    from vkjit.tuning.search import Search  # noqa: PLC0415  likewise

    search = Search(Rig(device))

    def choose(group: Group, infos: Sequence[ArrayInfo], target: Target) -> GpuContract | None:
        case = case_of(group, infos)
        if case is None:
            return None
        result = stored(device, case) or _tuned(device, case, search) or find(device, case)
        return usable(result, case, target)

    return choose


def stored(device: Device, case: Case) -> Result | None:
    """What was measured on this very device and driver."""
    return store().get(device.hardware, group_key(case))


def find(device: Device, case: Case) -> Result | None:
    """What was measured on this device, or on another of its name before vkjit was released.

    Of the latter a product with other rows may serve, too.
    """
    name, key = device.hardware.name, group_key(case)
    return stored(device, case) or shipped(name).get(key) or near(name, key)


def usable(result: Result | None, case: Case, target: Target) -> GpuContract | None:
    """The schedule of a result if it still serves the case."""
    if result is None:
        return None
    try:
        schedule = result.parsed()
    except ConfigError:  # of another version of vkjit
        return None
    return schedule if serves(case.group, case.infos, schedule, target) else None


def is_current(device: Device, choices: Iterable[Choice]) -> bool:
    """Whether compiling again would choose the same schedules."""
    choose = lookup(device)
    if choose is None:
        return True
    return all(choose(c.group, c.infos, device.target) == c.schedule for c in choices)


def is_on() -> bool:
    """Whether compiling tunes.

    Raises:
        ArgumentError: ``VKJIT_TUNE`` is neither 0 nor 1.
    """
    asked = os.environ.get("VKJIT_TUNE") or "0"
    if asked not in ("0", "1"):
        raise ArgumentError(f"VKJIT_TUNE: got {asked!r}, expected 0 or 1")
    return asked == "1" or bool(_asked.budgets)


@contextmanager
def tuning_on(budget_s: float) -> Generator[None]:
    """Compiling in this thread tunes, for at most ``budget_s`` seconds in all."""
    _asked.budgets.append(budget_s)
    try:
        yield
    finally:
        _asked.budgets.pop()


def _tuned(device: Device, case: Case, search: Search) -> Result | None:
    """Tunes one group, and says so on standard error."""
    seconds = GROUP_SECONDS
    if _asked.budgets:
        seconds = min(seconds, _asked.budgets[-1])
        if seconds <= 0:
            return None
    key, clock = group_key(case), search.rig.clock
    sys.stderr.write(f"vkjit: tuning {key} on {device.name}, at most {seconds:.0f} s\n")
    start = clock()
    result = search.tune(case, start + seconds)
    spent = clock() - start
    if _asked.budgets:
        _asked.budgets[-1] -= spent
    if result is None:
        sys.stderr.write(f"vkjit: tuned nothing in {spent:.1f} s: the default stays\n")
        return None
    store().put([result])
    sys.stderr.write(
        f"vkjit: tuned in {spent:.1f} s: {len(result.receipt.seconds)} schedules, "
        f"{result.seconds * 1e3:.3f} ms with {result.schedule}, "
        f"{result.default_seconds * 1e3:.3f} ms by default\n"
    )
    return result
