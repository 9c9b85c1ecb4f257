"""Profiles for people: a table, and a trace for ui.perfetto.dev."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vkjit.runtime.profiling import CallCost, Row, StepCost

_ROWS = 40
_ORIGINS = 3  # operations named in a row of the table
_HEAD = f"{'ms':>10} {'share':>6} {'runs':>6} {'us each':>9} {'GB/s':>8} {'GFLOP/s':>9}  kernel"
_HOST, _KERNELS = 0, 1  # the two tracks of a device in a trace


def table(rows: Sequence[Row], calls: Sequence[CallCost]) -> str:
    """The most expensive rows with their rates, and how many were left out."""
    total = sum(row.seconds for row in rows)
    devices = ", ".join(dict.fromkeys(call.device for call in calls)) or "no device"
    launches = sum(step.runs for call in calls for step in call.steps)
    barriers = sum(call.barriers for call in calls)
    lines = [
        f"profile: {len(calls)} calls on {devices}, {launches} launches, {barriers} barriers, "
        f"{total * 1e3:.3f} ms in kernels",
        _HEAD,
        *(_line(row, total) for row in rows[:_ROWS]),
    ]
    if len(rows) > _ROWS:
        rest = sum(row.seconds for row in rows[_ROWS:])
        lines.append(f"{rest * 1e3:10.3f} in {len(rows) - _ROWS} other rows")
    return "\n".join(lines)


def _line(row: Row, total: float) -> str:
    share = row.seconds / total if total else 0.0
    rate = row.flop_rate
    flops = f"{rate * 1e-9:9.1f}" if rate is not None else f"{'-':>9}"
    each = row.seconds / max(row.runs, 1) * 1e6  # a branch may not have been taken
    return (
        f"{row.seconds * 1e3:10.3f} {share:6.1%} {row.runs:6} {each:9.1f} "
        f"{row.byte_rate * 1e-9:8.1f} {flops}  {row.kernel} {list(row.grid)}  {_origin(row.origin)}"
    )


def _origin(origin: Sequence[str]) -> str:
    """Operations with their lines; of paths only the file."""
    origin = [text for text in origin if text != "result"] or list(origin)
    shown = [_short(text) for text in origin[:_ORIGINS]]
    more = f" and {len(origin) - _ORIGINS} more" if len(origin) > _ORIGINS else ""
    return "; ".join(shown) + more


def _short(text: str) -> str:
    name, at, place = text.partition(" at ")
    return f"{name}{at}{Path(place).name}" if at else text


def save_trace(calls: Sequence[CallCost], path: str | PathLike[str]) -> None:
    """Writes the trace beside ``path`` and moves it there."""
    target = Path(path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": trace_events(calls), "displayTimeUnit": "ms"}, file)
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def trace_events(calls: Sequence[CallCost]) -> list[dict[str, Any]]:
    """Complete events ("X") in microseconds from the first call on; a process for each device."""
    devices = list(dict.fromkeys(call.device for call in calls))
    events: list[dict[str, Any]] = []
    for number, device in enumerate(devices):
        events.append(_named("process_name", number, _HOST, device))
        events.append(_named("thread_name", number, _HOST, "calls"))
        events.append(_named("thread_name", number, _KERNELS, "kernels"))
    start = min((call.begin for call in calls), default=0.0)
    for call in calls:
        number = devices.index(call.device)
        events.append(
            {
                "name": call.plan, "cat": "call", "ph": "X", "pid": number, "tid": _HOST,
                "ts": (call.begin - start) * 1e6, "dur": call.seconds * 1e6,
                "args": {"steps": len(call.steps), "barriers": call.barriers},
            }
        )  # fmt: skip
        events += [_step_event(step, call.plan, number, start) for step in call.steps]
    return events


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _step_event(step: StepCost, plan: str, process: int, start: float) -> dict[str, Any]:
    details: dict[str, Any] = {
        "plan": plan,
        "operations": list(step.origin),
        "grid": list(step.grid),
        "runs": step.runs,
        "bytes": step.nbytes,
    }
    if step.seconds:
        details["GB/s"] = step.nbytes / step.seconds * 1e-9
    if step.flops is not None:
        details["flops"] = step.flops
        details["GFLOP/s"] = step.flops / step.seconds * 1e-9 if step.seconds else 0.0
    return {
        "name": step.kernel, "cat": "kernel", "ph": "X", "pid": process, "tid": _KERNELS,
        "ts": (step.begin - start) * 1e6, "dur": step.seconds * 1e6, "args": details,
    }  # fmt: skip
