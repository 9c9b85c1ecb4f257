"""Exceptions of vkjit, in four classes: user fault, missing rule, internal fault, device fault.

Messages read ``op: what was given (types), what was expected; what to do`` and end, where it is
known, with the user's source line.
"""

from __future__ import annotations

from typing import final


class VkjitError(Exception):
    """Base of every error that vkjit raises on purpose."""


class UserError(VkjitError):
    """The call was wrong; the message says what was given and what was expected."""


@final
class ShapeError(UserError, ValueError):
    """Operand shapes do not fit the operation."""


@final
class DTypeError(UserError, TypeError):
    """Operand dtypes do not fit the operation."""


@final
class IndexingError(UserError, IndexError):
    """An index is out of range or of a kind that cannot index an array."""


@final
class ArgumentError(UserError, ValueError):
    """A parameter has a value outside its domain."""


@final
class StaticArgumentError(UserError, TypeError):
    """A static argument of ``jit`` is not hashable."""


@final
class TracerError(UserError, TypeError):
    """A traced value was used where a concrete one is needed, or outside its trace."""


@final
class DonatedBufferError(UserError, RuntimeError):
    """An array was read after its buffer had been donated to a jitted call."""


@final
class ConfigError(UserError, ValueError):
    """A configuration file has an unknown key or an invalid value."""


@final
class DataError(UserError, ValueError):
    """A data set or a model file is empty, truncated, foreign or unsupported."""


@final
class MissingRuleError(VkjitError, NotImplementedError):
    """A primitive lacks the rule that a transformation or a target asked for."""


@final
class InternalError(VkjitError, AssertionError):
    """An invariant of the compiler is broken; the message shows the neighbouring equations."""


class DeviceError(VkjitError, RuntimeError):
    """A device or its driver failed."""


@final
class OutOfMemoryError(DeviceError):
    """A device could not allocate a buffer; the message states size and limit."""
