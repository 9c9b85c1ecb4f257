"""Exceptions of vkjit, in four classes: user fault, missing rule, internal fault, device fault.

Messages read ``op: what was given (types), what was expected; what to do`` and end, where it is
known, with the user's source line.
"""

from __future__ import annotations

import os
import sys
from typing import final

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class VkjitError(Exception):
    """Base of every error that vkjit raises on purpose."""


class UserError(VkjitError):
    """The call was wrong; the message says what was given and what was expected."""


class CallError(UserError):
    """A fault of one call; the message ends with the user's line, unless it names one already."""

    def __init__(self, message: str) -> None:
        where = None if "\n  at " in message else user_line()
        super().__init__(f"{message}\n  at {where}" if where else message)


def user_line() -> str | None:
    """The innermost line outside this package."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  inspect's is ten times slower
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None


@final
class ShapeError(CallError, ValueError):
    """Operand shapes do not fit the operation."""


@final
class DTypeError(CallError, TypeError):
    """Operand dtypes do not fit the operation."""


@final
class IndexingError(CallError, IndexError):
    """An index is out of range or of a kind that cannot index an array."""


@final
class ArgumentError(CallError, ValueError):
    """A parameter has a value outside its domain."""


@final
class StaticArgumentError(CallError, TypeError):
    """A static argument of ``jit`` is not hashable."""


@final
class TracerError(CallError, TypeError):
    """A traced value was used where a concrete one is needed, or outside its trace."""


@final
class DonatedBufferError(CallError, RuntimeError):
    """An array was read after its buffer had been donated to a jitted call."""


@final
class GradientError(UserError, AssertionError):
    """A derivative does not agree with differences of values, or with that of another device."""


@final
class MemoryBudgetError(CallError, RuntimeError):
    """No plan that was found fits a memory budget.

    ``smallest`` is the least budget, in bytes, that is known to be met: with it the call compiles.
    """

    def __init__(self, message: str, smallest: int) -> None:
        super().__init__(message)
        self.smallest = smallest


@final
class AxisNameError(CallError, NameError):
    """A collective names an axis over which no ``vmap`` around it maps."""


@final
class ConfigError(UserError, ValueError):
    """A configuration file has an unknown key or an invalid value."""


@final
class DataError(UserError, ValueError):
    """A data set or a model file is empty, truncated, foreign or unsupported."""


@final
class CheckError(UserError, AssertionError):
    """A ``debug.check`` failed.

    Attributes:
        reason: what failed where, with values.
        examples: the failing example in each batch of ``vmap``, outermost first.
    """

    def __init__(self, reason: str, examples: tuple[int, ...] = ()) -> None:
        self.reason = reason
        self.examples = examples
        which = ", ".join(map(str, examples))
        super().__init__(f"{reason}\n  in example {which} of vmap" if examples else reason)

    def of_example(self, number: int) -> CheckError:
        """The same failure, in one example of a batch."""
        return CheckError(self.reason, (number, *self.examples))


@final
class KeyReuseError(UserError, ValueError):
    """A random key was consumed twice, so that numbers meant to be independent are equal."""


@final
class NonFiniteError(UserError, FloatingPointError):
    """A value became NaN, or infinite where that was asked for, inside ``debug.nans``."""


@final
class MissingRuleError(VkjitError, NotImplementedError):
    """A primitive lacks the rule that a transformation or a target asked for."""


@final
class InternalError(VkjitError, AssertionError):
    """An invariant of the compiler is broken; the message shows the neighbouring equations."""


class DeviceError(VkjitError, RuntimeError):
    """A device or its driver failed."""


class RecompileWarning(UserWarning):
    """A function is compiled over and over; the message says what keeps changing."""


class EmulationWarning(UserWarning):
    """A device lacks arithmetic in a type; it is emulated, with the same results, but slower."""


@final
class OutOfMemoryError(DeviceError):
    """A device could not allocate a buffer; the message states size and limit."""
