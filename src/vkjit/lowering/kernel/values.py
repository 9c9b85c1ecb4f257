"""What all nodes stand on: values, the arguments of regions, and regions."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from vkjit.lowering.kernel.types import Type

if TYPE_CHECKING:
    from vkjit.lowering.kernel.nodes import Node


class Value:
    """Something with a type that later nodes may use."""

    __slots__ = ("type",)
    type: Type


@final
class BlockArg(Value):
    """An argument of a region (a loop index, a carried value) or a result of a loop or branch."""

    __slots__ = ("hint",)

    def __init__(self, type_: Type, hint: str) -> None:
        self.type = type_
        self.hint = hint


@final
class Region:
    """Nodes in order, and the values handed to the enclosing loop, branch or map."""

    __slots__ = ("nodes", "yields")

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.yields: tuple[Value, ...] = ()
