"""Results of rules on inner programs, remembered while a rule runs.

The rules of a loop run its body through passes until it is known what moves; a loop inside that
body would be derived anew each time, and one inside it four times. What is remembered is forgotten
when the outermost rule returns, so that nothing that a program refers to outlives it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast, final

P = ParamSpec("P")
R = TypeVar("R")


@final
class _State(threading.local):
    """What the rules that run in this thread have made."""

    def __init__(self) -> None:
        self.depth = 0
        self.made: dict[Hashable, Any] = {}


_state = _State()


def _always(_: object) -> bool:
    return True


def remembered(
    reusable: Callable[[Any], bool] = _always,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function of hashable arguments that makes a program from programs.

    Args:
        reusable: whether a result may be used again: one that closes over values of the trace in
            which it was made may not.
    """

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        @wraps(fn)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            key = (fn, args, tuple(kwargs.items()))
            if key in _state.made:
                return cast("R", _state.made[key])
            _state.depth += 1
            try:
                found = fn(*args, **kwargs)
                if reusable(found):
                    _state.made[key] = found
                return found
            finally:
                _state.depth -= 1
                if not _state.depth:
                    _state.made.clear()

        return wrapper

    return decorate
