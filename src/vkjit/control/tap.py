"""Taps: identities whose derivative flows into a place of the caller's as well.

A tap has a second operand, a token that it ignores: zeros of its own shape, which no one computes.
The derivative treats it as if it were added, so that its cotangent is that of the tapped value:
summed over all turns of a loop and all examples of a batch, in the ways in which cotangents of
constants are. The transformation that finds the token among the values that its function closes
over hands that cotangent to the token's sink.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from vkjit.control.batched import spread_over
from vkjit.control.cells import Cell
from vkjit.ir.avals import Aval, aval
from vkjit.ir.primitive import Array, Kind, Op, Producer, Simpler, Tangent, Traits, Value
from vkjit.ir.program import Atom
from vkjit.lowering.kernel.specs import KernelSpec, ViewSpec
from vkjit.lowering.kernel.views import View
from vkjit.ops.cast import cast
from vkjit.ops.structural import add
from vkjit.trace import aval_of, bind


class Sink(ABC):
    """Where gradients go."""

    @abstractmethod
    def receive(self, ct: Value) -> None:
        """Adds a cotangent, now or when the program runs."""


@final
@dataclass(frozen=True, eq=False)
class CellSink(Sink):
    """A Ref's contents."""

    cell: Cell

    def receive(self, ct: Value) -> None:
        """Adds to the contents."""
        before = self.cell.take()
        self.cell.put(add(before, cast(ct, aval_of(before).dtype)))


@final
class Token:
    """The second operand of a tap."""

    __slots__ = ("aval", "sink")

    def __init__(self, of: Aval, sink: Sink) -> None:
        self.aval = of
        self.sink = sink

    def __array__(self, dtype: object = None, copy: bool | None = None) -> Array:  # noqa: FBT001  NumPy's protocol
        zero: Any = np.zeros((), self.aval.dtype)
        return np.broadcast_to(zero, self.aval.shape)


@final
@dataclass(frozen=True)
class Tap(Op):
    """The first of two operands of one aval."""

    traits: ClassVar[Traits] = Traits(Kind.VIEW)

    def infer(self, *avals: Aval) -> Aval:
        """That of the first."""
        return avals[0]

    def evaluate(self, *arrays: Array) -> Array:
        """The first."""
        return arrays[0]

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """The sum of both tangents; none of the operands is kept."""
        moving = [t for t in tangents if t is not None]
        return primals[0], add(*moving) if len(moving) == 2 else moving[0]

    def batch(self, args: Sequence[Value], batched: Sequence[bool]) -> Value:
        """Examples share a token, and their cotangents are added."""
        x, token = args
        size = aval_of(x if batched[0] else token).shape[0]
        pair = [v if flag else spread_over(v, size) for v, flag in zip(args, batched, strict=True)]
        return bind(self, *pair)

    def simplify(self, args: Sequence[Atom], producer: Producer) -> Simpler | None:
        """The operand: nothing differentiates it any more."""
        return args[0]

    def kernel_spec(self, avals: Sequence[Aval], out: Aval) -> KernelSpec:
        """The same view."""
        return ViewSpec(_same)


def _same(view: View) -> View:
    return view


def tap(x: Value, sink: Sink) -> Value:
    """``x``, a float, whose cotangents ``sink`` receives."""
    of = aval_of(x)
    return bind(Tap(), x, Token(aval(of.shape, of.dtype), sink))
