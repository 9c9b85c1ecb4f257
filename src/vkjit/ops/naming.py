"""Names of values, for policies that say what a checkpoint saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from vkjit import dtypes
from vkjit.ir.avals import Aval, aval
from vkjit.ir.primitive import (
    Array,
    Kind,
    Linear,
    Op,
    Producer,
    Sample,
    Simpler,
    Tangent,
    Traits,
    Value,
)
from vkjit.ir.program import Atom
from vkjit.lowering.kernel.specs import KernelSpec, ViewSpec
from vkjit.lowering.kernel.views import View
from vkjit.trace import bind


@final
@dataclass(frozen=True)
class Name(Op):
    """The operand, under a name; compiled programs have none."""

    label: str

    traits: ClassVar[Traits] = Traits(Kind.VIEW, linear_in=(0,))

    def infer(self, *avals: Aval) -> Aval:
        """That of the operand."""
        return avals[0]

    def evaluate(self, *arrays: Array) -> Array:
        """The operand."""
        return np.asarray(arrays[0])

    def simplify(self, args: Sequence[Atom], producer: Producer) -> Simpler | None:
        """The operand: what is saved has been decided by then."""
        return args[0]

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """The tangent has no name."""
        return bind(self, *primals), tangents[0]

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """The cotangent."""
        return (cotangents[0],)

    def batch(self, args: Sequence[Value], batched: Sequence[bool]) -> Value:
        """The batch has the name."""
        return bind(self, *args)

    def kernel_spec(self, avals: Sequence[Aval], out: Aval) -> KernelSpec:
        """The operand as it lies."""
        return ViewSpec(_as_it_is)

    @classmethod
    def samples(cls) -> list[Sample]:
        """Some shapes and dtypes."""
        return [
            Sample(cls("x"), (aval((2, 3), dtypes.float32),)),
            Sample(cls("x"), (aval((), dtypes.bfloat16),)),
        ]


def _as_it_is(view: View) -> View:
    return view


def name(x: Value, label: str) -> Value:
    """``x`` under a name that policies of checkpoints know."""
    return bind(Name(label), x)
