"""Programs: single-assignment lists of equations over variables and literals.

    program(%0: f32[3], %1: f32[3]) {
      %2: f32[3] = mul %0, %1
      return %2
    }

Everything here is immutable once a trace has ended; passes make new programs.
"""

from __future__ import annotations

from functools import lru_cache
from types import CodeType
from typing import TYPE_CHECKING, Any, final

import numpy as np

from vkjit.ir.avals import Aval

if TYPE_CHECKING:
    from vkjit.ir.primitive import Primitive


@lru_cache(maxsize=4096)
def _line(code: CodeType, last: int) -> int:
    for start, end, line in code.co_lines():
        if start <= last < end and line is not None:
            return line
    return code.co_firstlineno


@final
class Source:
    """Where in the user's code an equation came from; the line is looked up when asked for.

    ``backward`` marks the cotangents of what that line computes. ``budget`` is that of the function
    around it, in bytes, if its values may be computed again for one.
    """

    __slots__ = ("backward", "budget", "code", "last")

    def __init__(
        self, code: CodeType, last: int, budget: int = 0, *, backward: bool = False
    ) -> None:
        self.code = code
        self.last = last
        self.budget = budget
        self.backward = backward

    @property
    def line(self) -> int:
        """Line number in ``code.co_filename``."""
        return _line(self.code, self.last)

    def __str__(self) -> str:
        return f"{self.code.co_filename}:{self.line}"


@final
class Var:
    """A variable; identity is its name."""

    __slots__ = ("aval",)

    def __init__(self, aval: Aval) -> None:
        self.aval = aval


@final
class Literal:
    """A scalar constant in an argument position."""

    __slots__ = ("aval", "value")

    def __init__(self, value: np.generic | np.ndarray[Any, Any], aval: Aval) -> None:
        self.value = value
        self.aval = aval


Atom = Var | Literal


@final
class Eqn:
    """``outs = prim(args)``, from ``source``.

    Equal equations of one ``region`` may be merged; a recomputation is a region of its own, because
    merging it with the original would keep the original alive.
    """

    __slots__ = ("args", "outs", "prim", "region", "source")

    def __init__(
        self,
        prim: Primitive,
        args: tuple[Atom, ...],
        outs: tuple[Var, ...],
        source: Source | None = None,
        region: int = 0,
    ) -> None:
        self.region = region
        self.prim = prim
        self.args = args
        self.outs = outs
        self.source = source


@final
class Program:
    """Parameters, equations in order, and results; every input is a parameter."""

    __slots__ = ("eqns", "name", "params", "results")

    def __init__(
        self,
        params: tuple[Var, ...],
        eqns: tuple[Eqn, ...],
        results: tuple[Atom, ...],
        name: str = "program",
    ) -> None:
        self.params = params
        self.eqns = eqns
        self.results = results
        self.name = name

    @property
    def in_avals(self) -> tuple[Aval, ...]:
        """Avals of the parameters."""
        return tuple(v.aval for v in self.params)

    @property
    def out_avals(self) -> tuple[Aval, ...]:
        """Avals of the results."""
        return tuple(v.aval for v in self.results)

    def __str__(self) -> str:
        from vkjit.ir.text import text  # noqa: PLC0415  text needs Program; printing is rare

        return text(self)
