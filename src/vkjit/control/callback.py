"""Calls of Python functions from programs, and identities that call one with their gradient.

Calls run in the order of the program, once each time that it passes them, and are never repeated:
recomputation leaves them out. Derivatives leave them alone, with the values of the function itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np

from vkjit import dtypes
from vkjit.control.act import Act
from vkjit.control.batched import size_of, spread_over
from vkjit.control.branch import Cond
from vkjit.errors import CheckError
from vkjit.ir.avals import Aval
from vkjit.ir.control import Call, Control, Inline
from vkjit.ir.primitive import (
    Array,
    Kind,
    Linear,
    Op,
    Producer,
    Simpler,
    Tangent,
    Traits,
    Value,
)
from vkjit.ir.program import Atom, Program, Var
from vkjit.lowering.kernel.specs import KernelSpec, ViewSpec
from vkjit.lowering.kernel.views import View
from vkjit.ops.cast import cast
from vkjit.ops.logical import not_, or_
from vkjit.ops.reduce import reduce_and
from vkjit.ops.structural import broadcast
from vkjit.passes.batch import masks
from vkjit.trace import aval_of, bind, bind_outs, trace

Function = Callable[..., object]
Flags = tuple[bool, ...]


@final
@dataclass(frozen=True)
class PerExample:
    """Calls ``function`` once for each example of a batch, in order.

    ``batched`` says which arguments have the batch axis in front. The last ``masks`` arguments are
    not for the function, which is called for the examples for which all of them are true.
    """

    function: Function
    batched: Flags
    masks: int = 0

    def __call__(self, *arrays: Array) -> None:
        """One call for each example."""
        count = len(arrays) - self.masks
        pairs = list(zip(arrays[:count], self.batched, strict=True))
        for example in range(size_of(arrays, (*self.batched, *[True] * self.masks))):
            if not all(mask[example] for mask in arrays[count:]):
                continue
            try:
                self.function(*[a[example] if flag else a for a, flag in pairs])
            except CheckError as error:
                raise error.of_example(example) from None


def _each(function: Function, batched: Sequence[bool]) -> tuple[PerExample, tuple[Value, ...]]:
    """The function for a batch, and further arguments for it."""
    taken = masks()
    return PerExample(function, tuple(batched), len(taken)), taken


@final
@dataclass(frozen=True)
class Callback(Act):
    """Calls ``function`` with the arguments as NumPy arrays; there are no results."""

    function: Function
    label: str

    def evaluate_outs(self, *arrays: Array) -> tuple[Array, ...]:
        """Calls the function with copies."""
        self.function(*[np.array(a) for a in arrays])
        return ()

    def batch_outs(self, args: Sequence[Value], batched: Sequence[bool]) -> tuple[Value, ...]:
        """One call for each example, in order."""
        each, taken = _each(self.function, batched)
        return tuple(bind_outs(replace(self, function=each), *args, *taken))

    def control(self) -> Control:
        """A call."""
        return Call(self.function)

    def parameters(self) -> dict[str, object]:
        """The label: a function has no text."""
        return {"label": self.label}


def call(function: Function, label: str, values: Sequence[Value]) -> None:
    """Calls ``function`` with values as NumPy arrays, now or when the program runs."""
    bind_outs(Callback(function, label), *values)


@final
@dataclass(frozen=True)
class WatchGradient(Op):
    """The operand; ``tangent`` and ``cotangent`` are called with what flows through it."""

    tangent: Function
    cotangent: Function
    label: str

    traits: ClassVar[Traits] = Traits(Kind.VIEW, linear_in=(0,))

    def infer(self, *avals: Aval) -> Aval:
        """That of the operand."""
        return avals[0]

    def evaluate(self, *arrays: Array) -> Array:
        """The operand."""
        return np.asarray(arrays[0])

    def simplify(self, args: Sequence[Atom], producer: Producer) -> Simpler | None:
        """The operand: all derivatives have been taken by then."""
        return args[0]

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """The tangent is told, and watched in its turn, for when it is transposed."""
        (tangent,) = tangents
        call(self.tangent, self.label, (tangent,))
        return bind(self, *primals), bind(self, tangent)

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """The cotangent is told."""
        (cotangent,) = cotangents
        call(self.cotangent, self.label, (cotangent,))
        return (cotangent,)

    def batch(self, args: Sequence[Value], batched: Sequence[bool]) -> Value:
        """Told example by example."""
        tangent, cotangent = (PerExample(f, (True,)) for f in (self.tangent, self.cotangent))
        return bind(WatchGradient(tangent, cotangent, self.label), *args)

    def kernel_spec(self, avals: Sequence[Aval], out: Aval) -> KernelSpec:
        """The operand as it lies."""
        return ViewSpec(_as_it_is)

    def parameters(self) -> dict[str, object]:
        """The label: functions have no text."""
        return {"label": self.label}


def _as_it_is(view: View) -> View:
    return view


@final
@dataclass(frozen=True)
class Check(Act):
    """Calls ``function`` with the arguments unless all elements of the first are true.

    The function looks at them again, and raises.
    """

    function: Function
    avals: tuple[Aval, ...]
    label: str

    def evaluate_outs(self, *arrays: Array) -> tuple[Array, ...]:
        """Calls the function with copies."""
        if not np.all(arrays[0]):
            self.function(*[np.array(a) for a in arrays])
        return ()

    def batch_outs(self, args: Sequence[Value], batched: Sequence[bool]) -> tuple[Value, ...]:
        """One check of the whole batch, of those examples that come to it."""
        each, taken = _each(self.function, batched)
        okay, spread = args[0], batched[0]
        if taken and not spread:
            okay = spread_over(okay, aval_of(taken[0]).shape[0])
        shape = aval_of(okay).shape
        for mask in taken:
            okay = or_(okay, broadcast(not_(mask), shape, (0,)))
        each = replace(each, batched=(spread or bool(taken), *batched[1:]))
        values = [okay, *args[1:], *taken]
        return tuple(bind_outs(Check(each, tuple(map(aval_of, values)), self.label), *values))

    def control(self) -> Control:
        """A reduction, and a call in one of two branches."""

        def checked(*values: Value) -> list[Value]:
            okay = values[0]
            failed = not_(reduce_and(okay, tuple(range(aval_of(okay).ndim))))
            bind_outs(Cond((nothing, called)), cast(failed, dtypes.int32), *values)
            return []

        def told(*values: Value) -> list[Value]:
            call(self.function, self.label, values)
            return []

        nothing = Program(tuple(map(Var, self.avals)), (), (), "fine")
        called = trace(told, self.avals, "failed").program
        return Inline(trace(checked, self.avals, self.label).program)

    def parameters(self) -> dict[str, object]:
        """The label: a function has no text."""
        return {"label": self.label}


def check(function: Function, label: str, values: Sequence[Value]) -> None:
    """Calls ``function`` with values, unless all of the first are true."""
    bind_outs(Check(function, tuple(map(aval_of, values)), label), *values)
