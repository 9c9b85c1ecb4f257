"""What is switched on for the calls of a thread."""

from __future__ import annotations

import os
import threading
from enum import Enum
from typing import Any, final

from vkjit.errors import ArgumentError


class Watch(Enum):
    """Which values are errors."""

    NONE = "none"
    NAN = "nan"
    NONFINITE = "nan or infinity"


@final
class Modes(threading.local):
    """The modes of a thread; what is compiled depends on ``key``."""

    def __init__(self) -> None:
        self.watch = Watch.NAN if _asked("VKJIT_DEBUG_NANS") else Watch.NONE
        self.keys = _asked("VKJIT_DEBUG_KEY_REUSE")
        self.used: dict[bytes, Any] = {}
        """Values of the keys consumed so far, and by what."""
        self.key: object = None
        self.update()

    @property
    def watching(self) -> bool:
        """Whether any value is an error."""
        return self.watch is not Watch.NONE

    def __str__(self) -> str:
        keys = ", key reuse" if self.keys else ""
        return f"watching {self.watch.value}{keys}"

    def update(self) -> None:
        """Makes ``key`` anew; None where nothing is switched on."""
        switched = self.watching or self.keys
        self.key = (self.watch, self.keys) if switched else None


def _asked(variable: str) -> bool:
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise ArgumentError(f"{variable}: got {value!r}, expected 0 or 1")
    return value == "1"


modes = Modes()
