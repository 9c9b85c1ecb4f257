"""What control flow asks of lowering: one closed union, matched where programs become plans.

A primitive that runs other programs knows its control form and never how a device runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from vkjit.ir.program import Program


@final
@dataclass(frozen=True, slots=True)
class Scan:
    """``length`` turns of ``body``: (constants, carries, slices) to (carries, slices).

    Arguments are the constants, the first carries and stacked arrays; results are the last carries
    and stacked arrays. Turn t takes and gives slices t of the leading axis of stacked arrays, or
    slices ``length - 1 - t`` when ``reverse``.
    """

    body: Program
    length: int
    constants: int
    carries: int
    reverse: bool = False


@final
@dataclass(frozen=True, slots=True)
class While:
    """``body`` as long as ``condition`` gives true.

    Arguments are the constants of the condition, those of the body, and the first carries; results
    are the last carries. ``condition``: (its constants, carries) to one bool of rank 0; ``body``:
    (its constants, carries) to carries.
    """

    condition: Program
    body: Program
    condition_constants: int
    body_constants: int


@final
@dataclass(frozen=True, slots=True)
class Branch:
    """The results of one of ``branches``.

    The first argument is its number, an ``i32`` of rank 0, clamped; the others are the operands of
    every branch.
    """

    branches: tuple[Program, ...]


@final
@dataclass(frozen=True, slots=True)
class Call:
    """``function`` of the arguments as NumPy arrays, on the host; no results.

    Calls run in the order of the program, once for each time that it passes them.
    """

    function: Callable[..., Any]


@final
@dataclass(frozen=True, slots=True)
class Inline:
    """``body`` of the arguments, in the place of the equation.

    ``apart`` makes it a region of its own: a recomputation, which nothing may join to the original.
    """

    body: Program
    apart: bool = False


@final
@dataclass(frozen=True, slots=True)
class Transfer:
    """The argument, in memory of the host (``away``) or back in that of the device."""

    away: bool


Control = Scan | While | Branch | Call | Inline | Transfer
