"""Why a jitted function was compiled again: what differs from the versions there are.

Set ``VKJIT_EXPLAIN_MISSES=1``, or call inside ``explain_misses()``, to have every compilation
reported on the logger ``vkjit.jit`` as it happens. A function that is compiled over and over warns
once.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import final

from vkjit.errors import ArgumentError, RecompileWarning, user_line

_LOG = logging.getLogger("vkjit.jit")
_MANY = 32
"""Versions of one function before a warning, unless VKJIT_MANY_MISSES says otherwise."""
_explained: ContextVar[bool] = ContextVar("explained", default=False)

Facts = Mapping[str, str]
"""What a version was compiled for: values by what they are called, such as ``argument x``."""


@final
@dataclass(frozen=True, slots=True)
class Miss:
    """One compilation of a jitted function.

    ``changed`` has what differs from the most similar version there was, as (before, now) by name;
    it is empty for the first version. ``seconds`` is what tracing and compiling took; ``line`` is
    where the call stands.
    """

    function: str
    number: int
    changed: Mapping[str, tuple[str, str]]
    seconds: float
    line: str | None

    def __str__(self) -> str:
        where = f" at {self.line}" if self.line else ""
        head = f"jit of {self.function}: compiled version {self.number} in {self.seconds:.3f} s"
        if not self.changed:
            return f"{head}{where}: first call"
        changes = "; ".join(f"{k}: {a} -> {b}" for k, (a, b) in self.changed.items())
        return f"{head}{where}: {changes}"


@final
class Misses:
    """The compilations of one jitted function."""

    __slots__ = ("_function", "_known", "_warned", "found")

    def __init__(self, function: str) -> None:
        self.found: list[Miss] = []
        self._function = function
        self._known: list[Facts] = []
        self._warned = False

    def add(self, facts: Facts, seconds: float) -> None:
        """Notes a compilation, reports it if asked to, and warns when there are many."""
        changed = _changes(self._known, facts)
        miss = Miss(self._function, len(self.found) + 1, changed, seconds, user_line())
        self.found.append(miss)
        self._known.append(facts)
        if _explained.get() or os.environ.get("VKJIT_EXPLAIN_MISSES", "") not in ("", "0"):
            _LOG.warning("%s", miss)
        if not self._warned and len(self.found) >= _many():
            self._warned = True
            where, line = (user_line() or "<unknown>:0").rsplit(":", 1)
            warnings.warn_explicit(self._complaint(), RecompileWarning, where, int(line))

    def _complaint(self) -> str:
        """What keeps changing, and what all of it cost."""
        names = Counter(name for miss in self.found for name in miss.changed)
        often = ", ".join(f"{name} ({count} times)" for name, count in names.most_common(3))
        spent = sum(miss.seconds for miss in self.found)
        return (
            f"jit of {self._function}: compiled {len(self.found)} versions, which took "
            f"{spent:.1f} s; what keeps changing: {often}; last: {self.found[-1]}; pad arrays to a "
            "few sizes, or pass what varies as an array. misses() of the function lists all"
        )


@contextmanager
def explain_misses() -> Generator[None]:
    """Inside the block, every compilation of a jitted function is reported with its reason.

    The logger is ``vkjit.jit``; Python shows its reports on stderr unless logging is set up.
    """
    token = _explained.set(True)
    try:
        yield
    finally:
        _explained.reset(token)


def _changes(known: Sequence[Facts], facts: Facts) -> dict[str, tuple[str, str]]:
    """How ``facts`` differ from the most similar ones known; a later one where several are."""
    found: dict[str, tuple[str, str]] | None = None
    for other in reversed(known):
        names = [*facts, *(name for name in other if name not in facts)]
        pairs = {name: (other.get(name, "absent"), facts.get(name, "absent")) for name in names}
        changed = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        if found is None or len(changed) < len(found):
            found = changed
    return found or {}


def _many() -> int:
    given = os.environ.get("VKJIT_MANY_MISSES", str(_MANY))
    if not given.isdecimal():
        raise ArgumentError(f"VKJIT_MANY_MISSES: {given!r} is not a number, such as {_MANY}")
    return int(given)
