"""Python functions called by programs: callback, print, grad_print and check."""

from __future__ import annotations

import string
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np

from vkjit import tree
from vkjit.control.callback import WatchGradient, call
from vkjit.control.callback import check as checked
from vkjit.dtypes import bool_, is_float
from vkjit.errors import ArgumentError, CheckError, DTypeError
from vkjit.ir.primitive import Value
from vkjit.trace import aval_of, bind, is_numpy, user_source

Array: TypeAlias = Any
ArrayLike: TypeAlias = Any


def callback(
    fn: Callable[..., object],
    *args: Any,
    ordered: bool = False,
    **kwargs: Any,
) -> None:
    """Calls ``fn`` with the values of its arguments, now or when the compiled program gets there.

    Calls run in the order of the program, once each time that it passes them: in each turn of a
    loop, in the branch that is taken. Under ``vmap`` there is one call for each example, in order.
    Derivatives call with the values of the function itself, once; so does ``checkpoint``, whose
    recomputation calls nothing. What ``fn`` raises ends the run and reaches the caller.

    Args:
        fn: its result is dropped.
        args: pytrees. Arrays and numbers reach ``fn`` as NumPy arrays of its own, other leaves as
            they are.
        ordered: accepted as in JAX; calls are always ordered.
        kwargs: likewise.
    """
    del ordered
    if not callable(fn):
        raise ArgumentError(f"debug.callback: given {type(fn).__name__}, expected a function")
    _bind(fn, args, kwargs, getattr(fn, "__name__", type(fn).__name__))


def print(fmt: str, *args: Any, ordered: bool = False, **kwargs: Any) -> None:
    """Writes ``fmt.format(*args, **kwargs)`` and a newline to standard output, as ``callback``.

    Args:
        fmt: a format string, such as ``"loss {:.4f} at {step}"``; not an f-string, which would show
            tracers.
        args: pytrees.
        ordered: accepted as in JAX; calls are always ordered.
        kwargs: pytrees by name.

    Raises:
        ArgumentError: an argument is missing in ``fmt``, or ``fmt`` does not use it.
    """
    del ordered
    _require_used(fmt, args, kwargs)
    _bind(_Printer(fmt), args, kwargs, "print")


def grad_print(x: ArrayLike, label: str = "gradient") -> Array:
    """``x``, whose gradient is printed: ``label cotangent: ...`` in reverse mode.

    In forward mode its tangent is printed, ``label tangent: ...``. Without derivatives nothing is.

    Args:
        x: a float array.
        label: begins each line.

    Raises:
        DTypeError: ``x`` is not a float.
    """
    of = aval_of(x)
    if not is_float(of.dtype):
        raise DTypeError(f"debug.grad_print: {of} has no gradient, expected a float")
    return bind(WatchGradient(_Line(f"{label} tangent"), _Line(f"{label} cotangent"), label), x)


def check(pred: ArrayLike, message: str, *args: Any, **kwargs: Any) -> None:
    """Raises where ``pred`` has an element that is false, also from inside a compiled function.

    The run ends there. Under ``vmap`` the error names the first example that fails. Derivatives
    check the values of the function itself.

    Args:
        pred: booleans of any shape.
        message: a format string for ``args`` and ``kwargs``; those that it does not use are listed.
        args: pytrees.
        kwargs: pytrees by name.

    Raises:
        CheckError: an element is false; with message, values and the line of this call.
        DTypeError: ``pred`` is not boolean.
    """
    of = aval_of(pred)
    if of.dtype != bool_:
        raise DTypeError(f"debug.check: {of}, expected booleans, such as x > 0")
    values, text = _dynamic(_Failure(message), args, kwargs)
    checked(_Checked(text, str(user_source())), "check", [pred, *values])


@final
@dataclass(frozen=True)
class _Printer:
    """Formats its arguments onto standard output."""

    fmt: str

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        sys.stdout.write(f"{self.fmt.format(*args, **kwargs)}\n")


@final
@dataclass(frozen=True)
class _Line:
    """Writes a label and a value to standard output."""

    label: str

    def __call__(self, value: np.ndarray[Any, Any]) -> None:
        sys.stdout.write(f"{self.label}: {value}\n")


@final
@dataclass(frozen=True)
class _Failure:
    """The text of a failed check, from its arguments."""

    message: str

    def __call__(self, where: str, *args: Any, **kwargs: Any) -> str:
        used = _Uses()
        text = used.vformat(self.message, args, kwargs) + where
        values = {**{f"argument {i}": v for i, v in enumerate(args)}, **kwargs}
        keys = {f"argument {k}" if isinstance(k, int) else k for k in used.seen}
        rest = [f"\n  {name} = {value}" for name, value in values.items() if name not in keys]
        return text + "".join(rest)


@final
@dataclass(frozen=True)
class _Checked:
    """Raises unless all elements of the first argument are true."""

    text: Callable[..., object]
    source: str

    def __call__(self, pred: np.ndarray[Any, Any], *values: Any) -> None:
        if pred.all():
            return
        where = ""
        if pred.ndim:
            first = np.unravel_index(int(np.argmin(pred)), pred.shape)
            index = ", ".join(str(int(i)) for i in first)
            count = pred.size - int(np.count_nonzero(pred))
            where = f" ({count} of {pred.size} elements are false, the first at [{index}])"
        raise CheckError(f"check: {self.text(where, *values)}\n  at {self.source}")


@final
class _Uses(string.Formatter):
    """Remembers which arguments a format string uses."""

    def __init__(self) -> None:
        self.seen: set[int | str] = set()

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Any) -> Any:
        """The argument itself."""
        self.seen.add(key)
        return super().get_value(key, args, kwargs)

    def check_unused_args(
        self, used_args: set[int | str], args: Sequence[Any], kwargs: Any
    ) -> None:
        """Nothing: who formats looks at ``seen``."""


@final
class _Blank:
    """Formats as nothing, whatever is asked of it."""

    def __format__(self, spec: str) -> str:
        return ""

    def __getattr__(self, name: str) -> _Blank:
        return self

    def __getitem__(self, key: object) -> _Blank:
        return self


def _require_used(fmt: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Refuses a format string that does not fit the arguments."""
    uses = _Uses()
    try:
        uses.vformat(fmt, [_Blank()] * len(args), dict.fromkeys(kwargs, _Blank()))
    except IndexError:
        raise ArgumentError(
            f"debug.print: {fmt!r} has more fields than the {len(args)} positional arguments; "
            "expected one for each"
        ) from None
    except KeyError as error:
        raise ArgumentError(
            f"debug.print: {fmt!r} asks for {error.args[0]}=, which is not given; expected an "
            "argument for each field"
        ) from None
    unused = [str(k) for k in (*range(len(args)), *kwargs) if k not in uses.seen]
    if unused:
        raise ArgumentError(
            f"debug.print: {fmt!r} does not use argument {', '.join(unused)}; expected a field "
            "for each (and no f-string, which would show tracers instead of values)"
        )


def _bind(
    fn: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any], label: str
) -> None:
    values, function = _dynamic(fn, args, kwargs)
    call(function, label, values)


def _dynamic(
    fn: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Value], Callable[..., object]]:
    """The leaves that have values, and ``fn`` as a function of these.

    What that function is given beyond them goes before the other arguments of ``fn``.
    """
    leaves, of = tree.flatten((args, kwargs))
    where = [i for i, leaf in enumerate(leaves) if _has_values(leaf)]

    def function(*arrays: Any) -> object:
        full, before = list(leaves), len(arrays) - len(where)
        for i, array in zip(where, arrays[before:], strict=True):
            full[i] = array
        given, named = tree.unflatten(of, full)
        return fn(*arrays[:before], *given, **named)

    values = [leaves[i] for i in where]
    for i in where:
        leaves[i] = None  # a tracer, or an array that the call need not keep
    return values, function


def _has_values(leaf: object) -> bool:
    return isinstance(leaf, bool | int | float) or is_numpy(leaf) or hasattr(leaf, "aval")
