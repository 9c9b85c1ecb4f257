"""Operands and results of products as cooperative matrices in memory, whichever way they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import MatLayout, Tensor, Value
from vkjit.lowering.kernel.types import MatScope, MatType, Memory, ScalarType
from vkjit.lowering.kernel.views import View

ALIGNMENT = 16
"""Bytes that divide the address of a tensor, and the pitch of rows that a subgroup reads."""

Place = tuple[Value, Value]
"""Row and column of the first element of a matrix."""


@final
@dataclass(frozen=True, slots=True)
class Plane:
    """The last two axes of a view, of which one is contiguous in memory.

    ``pitch`` is the stride of the other one; ``turned`` planes have contiguous columns.
    """

    rows: int
    cols: int
    pitch: int
    turned: bool

    def tensor(self, *, clamped: bool) -> Tensor:
        """The plane as tensor loads and stores see it."""
        shape = (self.cols, self.rows) if self.turned else (self.rows, self.cols)
        return Tensor(shape, (self.pitch, 1), clamped, self.turned)

    @property
    def layout(self) -> MatLayout:
        """The plane as other loads and stores see it."""
        return MatLayout.COLUMN if self.turned else MatLayout.ROW


def plane_of(view: View) -> Plane | None:
    """The plane of a view, or None where neither axis is contiguous or one runs backwards."""
    rows, cols = view.shape[-2:]
    down, along = view.strides[-2:]
    if along == 1 and down >= 0:
        return Plane(rows, cols, down, turned=False)
    if down == 1 and along >= 0:
        return Plane(rows, cols, along, turned=True)
    return None


def is_aligned(view: View, elem: ScalarType) -> bool:
    """Whether the plane of every batch index starts at an aligned address."""
    return all(n * elem.bytes % ALIGNMENT == 0 for n in (view.offset, *view.strides[:-2]))


@final
@dataclass(frozen=True, slots=True)
class Located:
    """A plane in memory, whose first element is at ``base``."""

    memory: Memory
    plane: Plane
    base: Value

    def load(self, b: Builder, place: Place, type_: MatType, *, clamped: bool) -> Value:
        """The matrix of ``type_`` that begins at a row and column of the plane.

        ``clamped`` matrices of workgroup scope read zeros beyond its edges.
        """
        if type_.scope is MatScope.WORKGROUP:
            tensor = self.plane.tensor(clamped=clamped)
            return b.tensor_load(self.memory, self.base, tensor, self._at(place), type_)
        pitch, layout = b.index(self.plane.pitch), self.plane.layout
        return b.mat_load(self.memory, self._address(b, place), pitch, layout, type_)

    def store(self, b: Builder, place: Place, value: Value, *, clamped: bool) -> None:
        """Writes a matrix where ``load`` would read it."""
        assert isinstance(value.type, MatType)
        if value.type.scope is MatScope.WORKGROUP:
            tensor = self.plane.tensor(clamped=clamped)
            b.tensor_store(self.memory, self.base, tensor, self._at(place), value)
            return
        pitch, layout = b.index(self.plane.pitch), self.plane.layout
        b.mat_store(self.memory, self._address(b, place), pitch, layout, value)

    def _at(self, place: Place) -> Place:
        return (place[1], place[0]) if self.plane.turned else place

    def _address(self, b: Builder, place: Place) -> Value:
        across, along = self._at(place)
        return b.add(b.add(self.base, b.scaled(across, self.plane.pitch)), along)
