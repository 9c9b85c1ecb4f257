"""How wide vectors are, and which of their lanes count."""

from __future__ import annotations

from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import CmpOp
from vkjit.lowering.plan.groups import LoopGroup
from vkjit.lowering.target import Target


def vector_lanes(group: LoopGroup, target: Target) -> int:
    """Lanes of a vector of 32-bit elements; half as many when the group has 64-bit ones."""
    widest = max((s.type.bits for s in group.body), default=32)
    return max(1, target.vector_bytes * 8 // max(32, widest))


def lane_mask(b: Builder, position: Value, limit: Value, lanes: int) -> Value:
    """Which of ``lanes`` positions from ``position`` lie below ``limit``."""
    where = b.add(b.splat(position, lanes), b.iota(lanes)) if lanes > 1 else position
    return b.compare(CmpOp.LT, where, b.splat(limit, lanes))
