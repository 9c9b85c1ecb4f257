"""Primitives that act: run for what they do, without results."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import ClassVar

from vkjit.ir.avals import Aval
from vkjit.ir.primitive import Kind, Linear, Primitive, Remat, Tangent, Traits, Value
from vkjit.trace import bind_outs


class Act(Primitive, ABC):
    """Acts once each time that the program passes it; derivatives act as the function does."""

    traits: ClassVar[Traits] = Traits(Kind.CONTROL, Remat.ONCE, differentiable=False)

    def infer_outs(self, avals: Sequence[Aval]) -> tuple[Aval, ...]:
        """None."""
        return ()

    def jvp_outs(
        self, primals: Sequence[Value], tangents: Sequence[Tangent]
    ) -> tuple[tuple[Value, ...], tuple[Tangent, ...]]:
        """The same act."""
        return tuple(bind_outs(self, *primals)), ()

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """Nothing flows back."""
        return (None,) * len(args)

    def acts(self) -> bool:
        """It does nothing else."""
        return True
