"""remat: checkpoint, or a budget of memory for which values of a function are computed again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from vkjit.api.budget import parse_budget
from vkjit.api.checkpoint import checkpoint
from vkjit.api.flat import name_of
from vkjit.device_array import current_device
from vkjit.errors import ArgumentError
from vkjit.trace import recomputable

Function = Callable[..., Any]


def remat(fn: Function | None = None, *, budget: int | str | None = None, **options: Any) -> Any:
    """``fn``, whose inner values are computed again instead of being kept.

    Without a budget this is `checkpoint`. With one, no more is computed again than the budget asks
    for: of the values of ``fn`` and its derivatives those are kept that let the planned peak of the
    jitted function around it fit, in the least time. Outside ``jit`` a budget changes nothing.

    Args:
        fn: a function of pytrees of arrays; without it ``remat`` returns a decorator.
        budget: bytes of one call of the whole jitted function, arguments and results included, as
            an int or a string such as ``"4GiB"`` or ``"80%"`` of the current device's memory.
        options: of ``checkpoint``, without a budget.

    Returns:
        a function of the same arguments and results.

    Raises:
        ArgumentError: ``fn`` is not a function, or both budget and options are given.
        MemoryBudgetError: the budget cannot be met; raised by the jitted function's calls.
    """
    if budget is None:
        return checkpoint(fn, **options)
    if options:
        raise ArgumentError(
            f"remat: given a budget and {', '.join(options)}, expected one of both; a budget "
            "decides by itself what is saved"
        )
    allowed = parse_budget(budget, current_device().memory_stats().limit_bytes)
    if fn is None:
        return partial(remat, budget=allowed)
    if not callable(fn):
        raise ArgumentError(f"remat: given {type(fn).__name__}, expected a function")

    @wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with recomputable(allowed):
            return fn(*args, **kwargs)

    wrapped.__name__ = name_of(fn)
    return wrapped
