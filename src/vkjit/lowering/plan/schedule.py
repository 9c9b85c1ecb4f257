"""Schedules: every number a template needs beside the group, as frozen data.

The tuner searches over these records; a default exists for every group and target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from vkjit.lowering.target import CoopShape


@final
@dataclass(frozen=True, slots=True)
class LoopSchedule:
    """How a ``LoopGroup`` runs.

    ``lanes`` is the vector width of one step, ``unroll`` the independent vectors per step,
    ``tasks`` the number of tasks (cpu) and ``workgroup`` the invocations per group (gpu).
    """

    lanes: int
    unroll: int = 1
    tasks: int = 1
    workgroup: int = 1


@final
@dataclass(frozen=True, slots=True)
class ContractSchedule:
    """How a ``ContractGroup`` runs.

    ``tile_m`` x ``tile_n`` outputs are kept in registers over ``tile_k`` steps of the sum;
    ``block_m``, ``block_n`` and ``block_k`` are the cache (cpu) or workgroup (gpu) blocks; ``pack``
    copies operands into panels; ``stages`` counts shared-memory buffers; ``split_k`` parts of the
    sum run apart; ``coop`` uses matrix units.
    """

    tile_m: int
    tile_n: int
    tile_k: int = 1
    block_m: int = 0
    block_n: int = 0
    block_k: int = 0
    pack_lhs: bool = False
    pack_rhs: bool = False
    workgroup: tuple[int, int, int] = (1, 1, 1)
    stages: int = 1
    split_k: int = 1
    coop: CoopShape | None = None


Schedule = LoopSchedule | ContractSchedule
