"""Reports on functions that nothing has compiled yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vkjit.api.jit import Jit, jit
from vkjit.api.memory import MemoryTimeline


def memory_report(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> MemoryTimeline:
    """What a call of ``fn``, jitted or to be jitted, holds in memory when; nothing runs.

    Print it for the peak, what is alive then by source line, and a table over time;
    ``save("memory.png")`` draws it. Arguments may be arrays or ``ShapeDtypeStruct``.

    Raises:
        MemoryBudgetError: ``fn`` has a budget that cannot be met.
    """
    jitted: Jit = fn if isinstance(fn, Jit) else jit(fn)
    return jitted.lower(*args, **kwargs).memory_report()
