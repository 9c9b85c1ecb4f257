"""Grids: one position for each workgroup or invocation, within the limits of the target."""

from __future__ import annotations

from collections.abc import Generator
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


@final
class Grid:
    """Workgroups in two dimensions, at least one and enough for ``count``; the last may be idle."""

    __slots__ = ("count", "shape")

    def __init__(self, count: int, target: Target) -> None:
        width = max(1, min(count, target.max_grid[0]))
        height = max(1, -(-count // width))
        if height > target.max_grid[1]:
            raise MissingRuleError(
                f"grid: {count} workgroups, the device {target.name} takes at most "
                f"{target.max_grid[0]} x {target.max_grid[1]}"
            )
        self.count = count
        self.shape = (width, height, 1)

    def position(self, b: Builder) -> Value:
        """Number of this workgroup, which may be ``count`` or more."""
        if self.shape[1] == 1:
            return b.workgroup_id(0)
        return b.add(b.scaled(b.workgroup_id(1), self.shape[0]), b.workgroup_id(0))

    @contextmanager
    def each(self, b: Builder) -> Generator[Value]:
        """Runs the block in every workgroup that has work; uniform, so barriers may stand in it."""
        position = self.position(b)
        with within(b, position, self.count, self.shape[0] * self.shape[1]):
            yield position


@contextmanager
def within(b: Builder, position: Value, count: int, reach: int) -> Generator[None]:
    """Runs the block where ``position`` is below ``count``; no test when it cannot ``reach`` it."""
    if reach <= count:
        yield
        return
    inside = b.compare(CmpOp.LT_U, position, b.index(count))
    with b.branch(inside).then():
        yield
