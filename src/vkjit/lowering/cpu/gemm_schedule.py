"""The default schedule of a product on the CPU: an analytic rule, no timing.

How ``ContractSchedule`` is read here: the register tile is ``tile_m`` x ``tile_n``, ``tile_k``
steps of the sum stand in one iteration; a task computes ``block_m`` x ``block_n`` outputs, all of
them where 0; the sum runs in blocks of ``block_k``, or at once where 0. An operand to pack is
packed by the task when no other task of the batch item needs it or when the sum is blocked, else
once, by a kernel of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from vkjit.errors import InternalError
from vkjit.lowering.plan.groups import ContractGroup
from vkjit.lowering.plan.schedule import ContractSchedule
from vkjit.lowering.target import Target

_TASK_FLOPS = 4_500_000
"""Work of a task that pays for handing it to another thread: about 30 microseconds."""
_TASKS_PER_THREAD = 8
"""More tasks than threads: a thread that the system interrupts does not hold up the others."""
_DOT_ROWS = 6
"""Up to this many rows an operand contiguous along k is read in place rather than turned."""
_MAX_DEPTH = 2048
"""Longest sum in one block: a panel of rhs and the tiles of lhs then stay in a 2 MiB cache."""
_MAX_ROWS = 14
_DIRECT_DEPTH = 32
"""Sums so short that rows of rhs stay in the first cache wherever they lie."""
_BLOCK_BYTES = 1 << 20
"""Packed lhs of one task, half of a 2 MiB second-level cache."""
_ALIAS_BYTES = 1024
"""Rows a multiple of this apart share few sets of the first cache."""


def registers(target: Target) -> int:
    """Vector registers: 32 with 64-byte vectors (AVX-512), else 16."""
    return 32 if target.vector_bytes >= 64 else 16


def vector_lanes(group: ContractGroup, target: Target) -> int:
    """Lanes of a vector of the type that sums run in."""
    return max(1, target.vector_bytes // group.accumulate.bytes)


def reads_along_n(group: ContractGroup) -> bool:
    """Whether rhs can be read in vectors along n where it lies."""
    return group.n == 1 or group.rhs.view.strides[-1] == 1


def reads_along_k(group: ContractGroup) -> bool:
    """Whether both operands can be read in vectors along k where they lie."""
    return group.lhs.view.strides[-1] == 1 and group.rhs.view.strides[-2] == 1


def is_dot(group: ContractGroup, schedule: ContractSchedule) -> bool:
    """Whether the schedule means the dot form: nothing packed, vectors along k."""
    along_n = group.n > 1 and reads_along_n(group)
    return not schedule.pack_rhs and reads_along_k(group) and not along_n


def default_schedule(group: ContractGroup, target: Target) -> ContractSchedule:
    """A good schedule for a group whose stores run along n."""
    if reads_along_k(group) and group.m <= _DOT_ROWS and (group.n == 1 or not reads_along_n(group)):
        return _dot_schedule(group, target)
    lanes = vector_lanes(group, target)
    rows, vectors = _outer_tile(group.m, -(-group.n // lanes), registers(target))
    columns = vectors * lanes
    panels = -(-group.n // columns)
    pack_rhs = not reads_along_n(group) or _reused_rhs(group, -(-group.m // rows), columns)
    pack_lhs = _reused_lhs(group, panels)
    work = _Work(group, target, rows, columns)
    block_k = _block_k(group.k, lanes)
    block_m, block_n = work.blocks(pack_lhs=pack_lhs and not block_k)
    return ContractSchedule(
        tile_m=rows,
        tile_n=columns,
        tile_k=max(1, 8 // (rows * vectors)),
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        pack_lhs=pack_lhs,
        pack_rhs=pack_rhs,
    )


def _outer_tile(m: int, vectors: int, count: int) -> tuple[int, int]:
    """Rows and vectors of the register tile: 14 x 2 in 32 registers, 6 x 2 in 16.

    Few rows take more vectors, so that enough sums are under way to hide latency; rows are evened
    out over the tiles.
    """
    wide = {1: 8, 2: 8, 3: 6, 4: 6, 5: 4, 6: 4, 7: 3, 8: 3, 9: 3}.get(m, 2)
    if m > 9 and vectors % 2 and vectors <= 3:
        wide = vectors
    wide = min(wide, vectors)
    while wide > 1 and min(m, 4) * wide + wide + 1 > count:
        wide -= 1
    most = min(_MAX_ROWS, (count - wide - 1) // wide)
    return -(-m // -(-m // most)), wide


def _reused_rhs(group: ContractGroup, row_tiles: int, columns: int) -> bool:
    """Whether rhs, contiguous along n, is read often enough from far apart to be packed."""
    near = group.n <= columns and group.rhs.view.strides[-2] <= 2 * columns
    return row_tiles > 2 and not near and group.k > _DIRECT_DEPTH


def _reused_lhs(group: ContractGroup, panels: int) -> bool:
    """Whether lhs is read often enough, and lies badly enough, to be packed."""
    across, along = group.lhs.view.strides[-2:]
    near = along == 1 and across * group.accumulate.bytes % _ALIAS_BYTES != 0
    return panels > 3 and not near and group.k > _DIRECT_DEPTH


def _block_k(k: int, lanes: int) -> int:
    """Even blocks of the sum, whole vectors each; 0 for one block."""
    if k <= _MAX_DEPTH:
        return 0
    size = -(-k // -(-k // (_MAX_DEPTH // 2)))
    return size + -size % lanes


@final
@dataclass(frozen=True, slots=True)
class _Work:
    """Splits a product into tasks of whole tiles."""

    group: ContractGroup
    target: Target
    rows: int
    columns: int

    def blocks(self, *, pack_lhs: bool) -> tuple[int, int]:
        """``block_m`` and ``block_n``."""
        group = self.group
        row_tiles, panels = -(-group.m // self.rows), -(-group.n // self.columns)
        parts = -(-self._tasks() // math.prod(group.batch))
        if parts > row_tiles or panels > 4 * row_tiles:
            return 0, -(-panels // min(parts, panels)) * self.columns
        if pack_lhs:
            size = group.m * group.k * group.accumulate.bytes
            parts = max(parts, -(-size // _BLOCK_BYTES))
        return -(-row_tiles // min(parts, row_tiles)) * self.rows, 0

    def _tasks(self) -> int:
        """Tasks that pay; as many for each thread, where there are at least as many."""
        group, threads = self.group, self.target.threads
        if threads == 1:
            return 1
        flops = 2 * math.prod(group.batch) * group.m * group.n * group.k
        tasks = min(threads * _TASKS_PER_THREAD, max(1, flops // _TASK_FLOPS))
        return tasks - tasks % threads if tasks >= threads else tasks


def _dot_schedule(group: ContractGroup, target: Target) -> ContractSchedule:
    wide = {1: 8, 2: 6, 3: 5, 4: 5, 5: 4}.get(group.m, 3)
    if registers(target) < 32:
        wide = {1: 6, 2: 4, 3: 3}.get(group.m, 1)
    columns = min(wide, group.n)
    block_n = _Work(group, target, group.m, columns).blocks(pack_lhs=False)[1]
    return ContractSchedule(tile_m=group.m, tile_n=columns, block_n=block_n)


def validate(group: ContractGroup, schedule: ContractSchedule, target: Target) -> None:
    """Checks that the template can build ``schedule`` for ``group`` on ``target``.

    Raises:
        InternalError: with the field that does not fit.
    """
    lanes = vector_lanes(group, target)
    dot = is_dot(group, schedule)
    vectors = schedule.tile_n if dot else schedule.tile_n // lanes
    rules = {
        "tile_m, tile_n and tile_k must be at least 1": min(
            schedule.tile_m, schedule.tile_n, schedule.tile_k
        )
        >= 1,
        f"tile_n must be a multiple of {lanes} lanes": dot or schedule.tile_n % lanes == 0,
        "tile_m must not exceed m unless lhs is packed": schedule.pack_lhs
        or schedule.tile_m <= group.m,
        "tile_n must not exceed n in the dot form": not dot or schedule.tile_n <= group.n,
        "rhs must be packed: it lies neither along n nor, with lhs, along k": schedule.pack_rhs
        or dot
        or reads_along_n(group),
        "blocks must be whole tiles": schedule.block_m % schedule.tile_m == 0
        and schedule.block_n % schedule.tile_n == 0,
        "the dot form takes no blocks of k and no packing": not dot
        or not (schedule.block_k or schedule.pack_lhs),
        f"each block of k must have at least {lanes} steps": schedule.block_k == 0
        or min(schedule.block_k, group.k % schedule.block_k or schedule.block_k) >= lanes,
        f"the tile must fit {registers(target)} vector registers": schedule.tile_m * vectors
        + vectors
        + 1
        <= registers(target),
        "split_k and coop are for other targets": schedule.split_k == 1 and schedule.coop is None,
    }
    for rule, holds in rules.items():
        if not holds:
            raise InternalError(
                f"gemm: {schedule} for m={group.m} n={group.n} k={group.k} on {target.name}: {rule}"
            )
