"""Grids: one position for each workgroup or invocation, within the limits of the target."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import final

from vkjit.errors import MissingRuleError
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import CmpOp
from vkjit.lowering.target import Target


def invocations(target: Target, wanted: int = 256) -> int:
    """The largest power of two of invocations along x, at most ``wanted``."""
    limit = min(wanted, target.max_invocations, target.max_workgroup[0])
    return 1 << (limit.bit_length() - 1)


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << max(0, number - 1).bit_length()


@final
class Grid:
    """Workgroups in up to three dimensions, enough for ``count``; the last ones may be idle."""

    __slots__ = ("count", "shape")

    def __init__(self, count: int, target: Target) -> None:
        width = max(1, min(count, target.max_grid[0]))
        height = max(1, min(-(-count // width), target.max_grid[1]))
        depth = max(1, -(-count // (width * height)))
        if depth > target.max_grid[2]:
            raise MissingRuleError(
                f"grid: {count} workgroups, the device {target.name} takes at most "
                f"{' x '.join(map(str, target.max_grid))}; split the array or run on cpu"
            )
        self.count = count
        self.shape = (width, height, depth)

    @property
    def reach(self) -> int:
        """Workgroups in the grid."""
        return self.shape[0] * self.shape[1] * self.shape[2]

    def position(self, b: Builder) -> Value:
        """Number of this workgroup, which may be ``count`` or more."""
        width, height, depth = self.shape
        number = b.workgroup_id(0)
        if height > 1:
            number = b.add(b.scaled(b.workgroup_id(1), width), number)
        if depth > 1:
            number = b.add(b.scaled(b.workgroup_id(2), width * height), number)
        return number

    @contextmanager
    def each(self, b: Builder) -> Generator[Value]:
        """Runs the block in every workgroup that has work; uniform, so barriers may stand in it."""
        position = self.position(b)
        with within(b, position, self.count, self.reach):
            yield position


def each_item(
    b: Builder, count: int, target: Target, visit: Callable[[Value], None], unroll: int = 1
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Visits every number below ``count`` in one invocation; returns grid and workgroup.

    Each invocation visits ``unroll`` numbers, one workgroup apart: neighbours stay neighbours.
    """
    size = min(invocations(target), power_of_two(count))
    grid = Grid(-(-count // (size * unroll)), target)
    reach = grid.reach * size * unroll
    first = b.add(b.scaled(grid.position(b), size * unroll), b.local_id())
    for turn in range(unroll):
        item = b.offset(first, turn * size)
        with within(b, item, count, reach):
            visit(item)
    return grid.shape, (size, 1, 1)


@contextmanager
def within(b: Builder, position: Value, count: int, reach: int) -> Generator[None]:
    """Runs the block where ``position`` is below ``count``; no test when it cannot ``reach`` it."""
    if reach <= count:
        yield
        return
    inside = b.compare(CmpOp.LT_U, position, b.index(count))
    with b.branch(inside).then():
        yield
