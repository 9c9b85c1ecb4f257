"""Resident memory of this process, from /proc (Linux)."""

from __future__ import annotations

import ctypes
from pathlib import Path

STATUS = Path("/proc/self/status")


def resident() -> int:
    """Bytes resident now."""
    return _field("VmRSS")


def peak() -> int:
    """Most bytes resident since the start or the last `reset_peak`."""
    return _field("VmHWM")


def reset_peak() -> None:
    """Starts a new peak at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def trim() -> None:
    """Hands freed heap back to the system, so that `resident` is what is held."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def _field(name: str) -> int:
    for line in STATUS.read_text(encoding="ascii").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise OSError(f"{STATUS}: no field {name}")
