"""The default schedule of a product on the CPU: an analytic rule, no timing.

How ``ContractSchedule`` is read here: the register tile is ``tile_m`` x ``tile_n``, ``tile_k``
steps of the sum stand in one iteration; a task computes ``block_m`` x ``block_n`` outputs, all of
them where 0; the sum runs in blocks of ``block_k``, or at once where 0. An operand to pack is
packed by the task when no other task of the batch item needs it, when the sum is blocked or when it
lies in quantized blocks, else once, by a kernel of its own.
"""

from __future__ import annotations

import math

from vkjit.errors import InternalError
from vkjit.lowering.cpu.gemm_operand import Layout, rhs_layout
from vkjit.lowering.plan.groups import ContractGroup
from vkjit.lowering.plan.schedule import ContractSchedule
from vkjit.lowering.target import Target

_TASK_FLOPS = 2_500_000
"""Work of a task that pays for handing it to another thread: 15 to 20 microseconds, against one
microsecond that the thread pool takes."""
_FLOPS_PER_BYTE = 6
"""Work that takes as long as moving a byte from the third-level cache."""
_TASKS_PER_THREAD = 8
"""More tasks than threads: a thread that the system interrupts does not hold up the others."""
_DOT_ROWS = 6
"""Up to this many rows an operand contiguous along k is read in place rather than turned."""
_MAX_ROWS = 14
_FEW_ROWS = 18
"""Rows of one or two tiles."""
_MOST_PADDING = 1.04
"""How much more a tile of 8 x 3 vectors may compute than one of 14 x 2, which is a little slower
where another thread shares the core."""
_RUN_ROWS = 2
"""Up to this many rows blocks along n are decoded run by run rather than turned."""
_UNROLL = 4
_NARROW = 16
"""Columns over which the conversion of an element of lhs, one by one, does not pay."""
_MAX_DEPTH = 2048
"""Longest sum in one block: a panel of rhs, and tiles of lhs, then stay in a 2 MiB cache."""
_BLOCK_DEPTH = 512
_SHORT_DEPTH = 32
"""Steps of the sum for which rows of rhs stay in the first cache, and in reach of the page
tables, wherever they lie."""
_BLOCK_BYTES = 1 << 22
"""Lhs that one task reads for each panel of rhs; beyond this its rows are split."""
RESIDENT_BYTES = 1 << 16
"""Rhs of at most this size is read again for each row of tiles, so that outputs are written in
the order of memory."""
_ALIAS_BYTES = 4096
"""Rows a multiple of this apart share one set of the first cache."""


def registers(target: Target) -> int:
    """Vector registers: 32 with 64-byte vectors (AVX-512), else 16."""
    return 32 if target.vector_bytes >= 64 else 16


def vector_lanes(group: ContractGroup, target: Target) -> int:
    """Lanes of a vector of the type that sums run in."""
    return max(1, target.vector_bytes // group.accumulate.bytes)


def reads_along_n(group: ContractGroup) -> bool:
    """Whether rhs, of numbers, can be read in vectors along n where it lies."""
    return group.n == 1 or group.rhs.view.strides[-1] == 1


def reads_along_k(group: ContractGroup) -> bool:
    """Whether both operands can be read in vectors along k where they lie."""
    return group.lhs.view.strides[-1] == 1 and group.rhs.view.strides[-2] == 1


def is_dot(group: ContractGroup, schedule: ContractSchedule) -> bool:
    """Whether the schedule means the dot form: nothing packed, vectors along k."""
    along_n = group.n > 1 and reads_along_n(group)
    blocks = group.lhs.blocks or group.rhs.blocks
    return not blocks and not schedule.pack_rhs and reads_along_k(group) and not along_n


def default_schedule(group: ContractGroup, target: Target) -> ContractSchedule:
    """A good schedule for a group whose stores run along n, and whose blocks are those of rhs."""
    if group.rhs.blocks or group.lhs.blocks:
        return _block_schedule(group, target)
    if reads_along_k(group) and group.m <= _DOT_ROWS and (group.n == 1 or not reads_along_n(group)):
        return _dot_schedule(group, target)
    lanes = vector_lanes(group, target)
    rows, vectors = _outer_tile(group, -(-group.n // lanes), registers(target))
    row_tiles, columns = -(-group.m // rows), vectors * lanes
    pack_rhs = not reads_along_n(group) or _far_rhs(group, row_tiles, columns)
    panels = -(-group.n // columns)
    pack_lhs = _far_lhs(group, row_tiles, panels)
    rhs_apart = not pack_rhs and panels > 1
    lhs_apart = not pack_lhs and group.lhs.view.strides[-1] != 1
    block_k = _block_k(group.k, lanes, in_place=rhs_apart or lhs_apart)
    block_m, block_n = _blocks(group, target, (rows, columns))
    return ContractSchedule(
        tile_m=rows,
        tile_n=columns,
        tile_k=_UNROLL,
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        pack_lhs=pack_lhs,
        pack_rhs=pack_rhs,
    )


def _block_schedule(group: ContractGroup, target: Target) -> ContractSchedule:
    """A schedule for operands of blocks.

    Few rows are summed while blocks are decoded; for more of them a task decodes a panel into
    scratch memory, where all its tiles read it. No other task needs it as long as rows are not
    divided.
    """
    lanes, count = vector_lanes(group, target), registers(target)
    layout = rhs_layout(group, lanes)
    rows, vectors = _outer_tile(group, -(-group.n // lanes), count)
    if layout is Layout.ALONG and group.m <= count // 2 - 2:
        rows, vectors = group.m, 1
    elif layout is Layout.ACROSS and vectors % 2 and vectors > 1 and group.m > _RUN_ROWS:
        vectors -= 1
        rows = _rows(group.m, vectors, count)
    row_tiles, panels = -(-group.m // rows), -(-group.n // (vectors * lanes))
    pack_rhs = row_tiles > 1 or layout is Layout.SCATTERED
    pack_rhs |= layout is Layout.ACROSS and group.m > _RUN_ROWS
    across = layout is Layout.ACROSS and not pack_rhs and panels > 1
    block_k = _block_k(group.k, lanes, in_place=across) if across or pack_rhs else 0
    block_m, block_n = _blocks(group, target, (rows, vectors * lanes))
    return ContractSchedule(
        tile_m=rows,
        tile_n=vectors * lanes,
        tile_k=_UNROLL,
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        pack_lhs=group.lhs.blocks is None and _far_lhs(group, row_tiles, panels),
        pack_rhs=pack_rhs,
    )


def _outer_tile(group: ContractGroup, vectors: int, count: int) -> tuple[int, int]:
    """Rows and vectors of the register tile: 8 x 3 or 14 x 2 in 32 registers, 6 x 2 in 16.

    Few rows take more vectors, so that enough sums are under way to hide latency. So do outputs of
    few columns, of which lhs is then read once, and short sums, whose cost is in writing long rows.
    """
    m = group.m
    if m <= _FEW_ROWS:
        wide = {1: 8, 2: 8, 3: 6, 4: 6, 5: 4, 6: 4}.get(m, 3)
    elif vectors > 4 and group.k <= 2 * _SHORT_DEPTH:
        wide = 6
    else:
        wide = 4 if vectors == 4 else 3
    most = min(wide, vectors, (count - 1) // (min(m, 4) + 1))
    tall, square = (_rows(m, v, count) for v in (min(most, 2), most))
    if m > _FEW_ROWS and most == 3 and vectors > 3:
        padded = [-(-m // r) * r * -(-vectors // v) * v for r, v in ((tall, 2), (square, 3))]
        if padded[1] > _MOST_PADDING * padded[0]:
            return tall, 2
    return square, most


def _rows(m: int, vectors: int, count: int) -> int:
    """Rows of a tile of ``vectors``: as many as registers allow, evened out over the tiles."""
    most = min(_MAX_ROWS, (count - vectors - 1) // vectors)
    if m % 8 == 0 and most == 9:
        return 8
    return -(-m // -(-m // most))


def _far_rhs(group: ContractGroup, row_tiles: int, columns: int) -> bool:
    """Whether rhs, contiguous along n, is read often enough from far apart to be packed."""
    near = group.n <= columns and group.rhs.view.strides[-2] <= 8 * columns
    converted = group.rhs.type is not group.accumulate
    return row_tiles > 2 and (converted or (not near and group.k > _SHORT_DEPTH))


def _far_lhs(group: ContractGroup, row_tiles: int, panels: int) -> bool:
    """Whether lhs needs conversion more than once, or lies badly.

    It does where its rows or its steps of the sum get in each other's way; but where it is read
    only once or twice, short blocks of the sum serve as well.
    """
    if group.lhs.type is not group.accumulate:
        return panels > 1 or group.n <= _NARROW
    if row_tiles <= 2 or panels <= 2 or group.k <= _SHORT_DEPTH:
        return False
    across, along = group.lhs.view.strides[-2:]
    return along != 1 or across * group.accumulate.bytes % _ALIAS_BYTES == 0


def _block_k(k: int, lanes: int, *, in_place: bool) -> int:
    """Steps of the sum in one block, whole vectors, the last block not shorter; 0 for all."""
    if in_place and k > 2 * _SHORT_DEPTH:
        most = _SHORT_DEPTH
    elif k > _MAX_DEPTH:
        most = _BLOCK_DEPTH
    else:
        return 0
    return next((s for s in range(most, 0, -lanes) if k % s == 0 or k % s >= lanes), 0)


def _blocks(group: ContractGroup, target: Target, tile: tuple[int, int]) -> tuple[int, int]:
    """``block_m`` and ``block_n``: tasks divide the columns, and rows where those are too few.

    A task then packs its part of rhs panel by panel, just before it reads it. Rows are divided
    first where rhs is small, and of a long sum, where packing lhs costs most and few tasks should
    do it.
    """
    row_tiles, panels = -(-group.m // tile[0]), -(-group.n // tile[1])
    items, threads = math.prod(group.batch), target.threads
    parts = -(-_tasks(group, target) // items)
    if group.k > _MAX_DEPTH:
        parts = min(parts, -(-2 * threads // items))
    if group.k > _MAX_DEPTH or group.k * group.n * group.accumulate.bytes <= RESIDENT_BYTES:
        row_parts = min(parts, row_tiles)
    else:
        size = group.m * group.k * group.accumulate.bytes
        row_parts = max(1, -(-size // _BLOCK_BYTES))
    columns = _share(panels, -(-parts // row_parts), items * row_parts, threads)
    column_parts = -(-panels // columns)
    if column_parts * row_parts < parts and not _even(items * row_parts * column_parts, threads):
        row_parts = -(-parts // column_parts)
    rows = _share(row_tiles, row_parts, items * column_parts, threads)
    return rows * tile[0] if rows < row_tiles else 0, columns * tile[1] if columns < panels else 0


def _share(count: int, parts: int, others: int, threads: int) -> int:
    """Tiles of a task when ``count`` are divided by about ``parts``, so that threads stay even."""
    most = -(-count // parts)
    shares = range(most, 0, -1) if parts > 1 else ()
    return next((s for s in shares if _even(others * -(-count // s), threads)), most)


def _even(tasks: int, threads: int) -> bool:
    """Whether ``tasks`` equal tasks keep all threads busy for nine tenths of the time."""
    return tasks >= 0.9 * threads * -(-tasks // threads)


def _tasks(group: ContractGroup, target: Target) -> int:
    """Tasks that pay."""
    items, k = math.prod(group.batch), group.k
    moved = items * group.accumulate.bytes * (group.m * k + k * group.n + group.m * group.n)
    cost = 2 * items * group.m * group.n * k + _FLOPS_PER_BYTE * moved
    return min(target.threads * _TASKS_PER_THREAD, max(1, cost // _TASK_FLOPS))


def _dot_schedule(group: ContractGroup, target: Target) -> ContractSchedule:
    wide = {1: 8, 2: 6, 3: 5, 4: 5, 5: 4}.get(group.m, 3)
    if registers(target) < 32:
        wide = {1: 6, 2: 4, 3: 3}.get(group.m, 1)
    columns = min(wide, group.n)
    block_n = _blocks(group, target, (group.m, columns))[1]
    return ContractSchedule(tile_m=group.m, tile_n=columns, block_n=block_n)


def _readable(group: ContractGroup, schedule: ContractSchedule, lanes: int) -> bool:
    """Whether the outer form can read rhs where it lies."""
    match rhs_layout(group, lanes):
        case Layout.PLAIN:
            return reads_along_n(group)
        case Layout.ALONG:
            return schedule.tile_n == lanes
        case Layout.ACROSS:
            return schedule.tile_n <= group.n
        case Layout.SCATTERED:
            return False


def validate(group: ContractGroup, schedule: ContractSchedule, target: Target) -> None:
    """Checks that the template can build ``schedule`` for ``group`` on ``target``.

    Raises:
        InternalError: with the field that does not fit.
    """
    lanes = vector_lanes(group, target)
    dot = is_dot(group, schedule)
    vectors = schedule.tile_n if dot else schedule.tile_n // lanes
    along = rhs_layout(group, lanes) is Layout.ALONG
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
        or _readable(group, schedule, lanes),
        "lhs of blocks is read where it lies": not (group.lhs.blocks and schedule.pack_lhs),
        "blocks of k must be whole blocks of rhs": not along
        or not group.rhs.blocks
        or schedule.block_k % group.rhs.blocks.size == 0,
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
    }
    for rule, holds in rules.items():
        if not holds:
            raise InternalError(
                f"gemm: {schedule} for m={group.m} n={group.n} k={group.k} on {target.name}: {rule}"
            )
