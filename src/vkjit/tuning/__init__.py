"""Tuning: which schedule serves a group best is measured once, checked, and kept.

``tune(f, *args)`` measures the products of a function on a GPU; later compilations of anything
with the same products, in any process, use what it found. ``with tune():`` and ``VKJIT_TUNE=1``
measure while compiling, and say so on standard error. Otherwise nothing is ever timed.

See ``docs/tuning.md``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, overload

from vkjit.device_array import current_device
from vkjit.errors import ArgumentError, ConfigError
from vkjit.runtime import get_device
from vkjit.tuning.choosing import at_compile, is_current, lookup, store, tuning_on, version
from vkjit.tuning.records import Receipt, Result, from_json
from vkjit.tuning.report import Progress, TunedGroup, TuneReport
from vkjit.tuning.store import write_json

__all__ = [
    "Progress",
    "Receipt",
    "Result",
    "TuneReport",
    "TunedGroup",
    "at_compile",
    "clear",
    "export",
    "is_current",
    "load",
    "lookup",
    "results",
    "tune",
    "version",
]


@overload
def tune(*, budget_s: float = 60.0) -> AbstractContextManager[None]: ...


@overload
def tune(
    fn: Callable[..., Any] | str,
    *args: Any,
    budget_s: float = 60.0,
    device: str | None = None,
    again: bool = False,
    progress: Progress | None = None,
) -> TuneReport: ...


def tune(
    fn: Callable[..., Any] | str | None = None,
    *args: Any,
    budget_s: float = 60.0,
    device: str | None = None,
    again: bool = False,
    progress: Progress | None = None,
) -> TuneReport | AbstractContextManager[None]:
    """Measures the products of ``fn`` for these arguments and keeps the fastest right schedules.

    Without a function: a context in which compiling tunes what has no result yet, for ``budget_s``
    seconds in all, with a line on standard error for each.

    Args:
        fn: a function, jitted or not, which is traced and never run; or the text of a program, as
            ``jit(f).lower(x).as_text()`` gives it.
        args: arrays, or anything with a shape and dtype such as ``ShapeDtypeStruct``.
        budget_s: seconds after which no further candidate is timed.
        device: name of the device; the default device if None.
        again: measures groups that have a result anew.
        progress: called with the group, the candidates timed and their number.

    Returns:
        default time, best time, schedule and gain of each group; print it. On devices without
        anything to tune (``cpu``) it has no groups.

    Raises:
        ArgumentError: no such device, or a budget that is not positive.
    """
    if budget_s <= 0:
        raise ArgumentError(f"tune: budget_s {budget_s}, expected seconds above 0")
    if fn is None:
        return tuning_on(budget_s)
    where = current_device() if device is None else get_device(device)
    from vkjit.tuning.rig import Rig  # noqa: PLC0415  the interpreter, which only tuning needs
    from vkjit.tuning.session import jobs_of, run  # noqa: PLC0415  likewise

    jobs = jobs_of(fn, args, where)
    return run(jobs, Rig(where), budget_s, progress, again=again)


def results() -> list[Result]:
    """Everything that was tuned, on any device, as far as this process and the cache know."""
    return store().all()


def export(path: str | Path) -> int:
    """Writes all results to one JSON file and returns their number.

    Raises:
        OSError: the file cannot be written.
    """
    found = results()
    write_json(Path(path), found)
    return len(found)


def load(path: str | Path) -> int:
    """Adds the results of a file that ``export`` wrote and returns their number.

    Results serve the device, driver and version of vkjit that they were measured with.

    Raises:
        ConfigError: the file cannot be read, or holds something else; nothing was added.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"tuning: {path} cannot be read ({error}), expected a file that `vkjit tune --export` "
            "wrote"
        ) from error
    found = from_json(document, str(path))
    store().put(found)
    return len(found)


def clear(device: str | None = None) -> None:
    """Forgets all results, or those of one device, on disk too."""
    store().clear(None if device is None else get_device(device).hardware)
