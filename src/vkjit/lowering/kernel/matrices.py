"""The part of the vocabulary that works on cooperative matrices.

All invocations of the scope run such a node together, with the same operands. Matrices of
workgroup scope, tensor loads and stores, and maps are those of VK_NV_cooperative_matrix2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import final

from vkjit.lowering.kernel.types import I32, MatType, Memory
from vkjit.lowering.kernel.values import BlockArg, Region, Value


class MatLayout(Enum):
    """Storage order of a cooperative matrix in memory."""

    ROW = "row"
    COLUMN = "column"


@final
class MatFill(Value):
    """A cooperative matrix with one scalar everywhere."""

    __slots__ = ("x",)

    def __init__(self, x: Value, type_: MatType) -> None:
        self.type = type_
        self.x = x


@final
class MatLoad(Value):
    """A cooperative matrix read from ``memory``; ``stride`` is in elements of it.

    Memory of ``i32`` holds matrices of any type as raw words; rows then start at whole words.
    """

    __slots__ = ("index", "layout", "memory", "stride")

    def __init__(
        self, memory: Memory, index: Value, stride: Value, layout: MatLayout, type_: MatType
    ) -> None:
        self.type = type_
        self.memory = memory
        self.index = index
        self.stride = stride
        self.layout = layout


@final
class MatMulAdd(Value):
    """``a @ b + c``, accumulated in the element type of ``c``."""

    __slots__ = ("a", "b", "c")

    def __init__(self, a: Value, b: Value, c: Value) -> None:
        self.type = c.type
        self.a = a
        self.b = b
        self.c = c


@final
class MatConvert(Value):
    """A cooperative matrix in another element type."""

    __slots__ = ("x",)

    def __init__(self, x: Value, type_: MatType) -> None:
        self.type = type_
        self.x = x


@final
class MatStore:
    """Writes a cooperative matrix to ``memory``, as ``MatLoad`` reads it."""

    __slots__ = ("index", "layout", "memory", "stride", "value")

    def __init__(
        self, memory: Memory, index: Value, stride: Value, layout: MatLayout, value: Value
    ) -> None:
        self.memory = memory
        self.index = index
        self.stride = stride
        self.layout = layout
        self.value = value


@final
@dataclass(frozen=True, slots=True)
class Tensor:
    """A two-dimensional array in memory: element (i, j) at ``i * strides[0] + j * strides[1]``.

    ``clamped`` reads zeros outside ``shape`` and drops what is written there; without it all
    elements must lie inside. ``turned`` shows matrices transposed: their rows run along axis 1.
    """

    shape: tuple[int, int]
    strides: tuple[int, int]
    clamped: bool = False
    turned: bool = False


@final
class TensorLoad(Value):
    """The matrix whose first element is that of ``tensor``, from ``index`` on, at position ``at``.

    ``at`` counts along the axes of the tensor in memory, whether it is turned or not.
    """

    __slots__ = ("at", "index", "memory", "tensor")

    def __init__(
        self, memory: Memory, index: Value, tensor: Tensor, at: tuple[Value, Value], type_: MatType
    ) -> None:
        self.type = type_
        self.memory = memory
        self.index = index
        self.tensor = tensor
        self.at = at


@final
class TensorStore:
    """Writes a matrix where ``TensorLoad`` would read it."""

    __slots__ = ("at", "index", "memory", "tensor", "value")

    def __init__(
        self, memory: Memory, index: Value, tensor: Tensor, at: tuple[Value, Value], value: Value
    ) -> None:
        self.memory = memory
        self.index = index
        self.tensor = tensor
        self.at = at
        self.value = value


@final
class MatMap(Value):
    """Element by element what ``body`` yields for the elements of ``sources`` at (row, column).

    ``body`` holds expressions on scalars and loads from buffers that the kernel only reads; it may
    run more than once for an element, and in any order. Sources and result are of one type.
    """

    __slots__ = ("body", "column", "elements", "row", "sources")

    def __init__(self, sources: Sequence[Value]) -> None:
        self.type = sources[0].type
        self.sources = tuple(sources)
        self.row = BlockArg(I32, "row")
        self.column = BlockArg(I32, "column")
        types = [s.type.elem if isinstance(s.type, MatType) else s.type for s in sources]
        self.elements = tuple([BlockArg(t, "x") for t in types])
        self.body = Region()
