"""Which tiles a product on the GPU may use, and how long each is expected to take.

The model counts clocks of a core that multiplies and adds 128 times in each, as those of NVIDIA and
(in pairs) of AMD do. Its constants were fitted to an H200; only the order of the schedules follows
from it, and the tuner measures what it lists.
"""

from __future__ import annotations

import math
from typing import final

from vkjit.lowering.gpu.gemm_join import MOST_PARTS
from vkjit.lowering.plan.groups import ContractGroup
from vkjit.lowering.plan.schedule import TiledSchedule
from vkjit.lowering.target import Target

LANES = 4
"""Consecutive elements in one vector: 16 bytes of float32."""
PADDING = 4
"""Elements after each row of a tile in shared memory: keeps vectors aligned and banks apart."""

_TILES = tuple(
    TiledSchedule(*numbers)
    for numbers in (
        (128, 128, 16, 8, 8, 1, 1, 1, 16),
        (128, 128, 16, 8, 8, 2),
        (128, 128, 16, 8, 8, 1),
        (128, 128, 16, 8, 8, 2, 1, 1, 16),
        (128, 128, 8, 8, 8, 2),
        (128, 64, 16, 8, 4, 2),
        (64, 128, 16, 4, 8, 2),
        (64, 64, 16, 8, 8, 2),
        (64, 64, 16, 4, 4, 2),
        (64, 64, 16, 4, 4, 1),
        (64, 64, 32, 4, 4, 1),
        (64, 32, 32, 4, 4, 1),
        (32, 64, 32, 4, 4, 1),
        (64, 32, 64, 4, 4, 1, 1, 2),
        (32, 64, 64, 4, 4, 1, 1, 2),
        (32, 32, 32, 4, 4, 2),
        (32, 32, 16, 4, 4, 1),
        (32, 32, 64, 4, 4, 1, 1, 4),
        (64, 16, 32, 4, 4, 2),
        (16, 64, 32, 4, 4, 2),
        (64, 16, 64, 4, 4, 1, 1, 4),
        (16, 64, 64, 4, 4, 1, 1, 4),
        (32, 16, 128, 4, 4, 1, 1, 8),
        (16, 32, 128, 4, 4, 1, 1, 8),
        (16, 16, 128, 4, 4, 1, 1, 16),
        (128, 16, 16, 4, 4, 2),
        (16, 128, 16, 4, 4, 2),
        (16, 16, 64, 1, 1, 1),
        (16, 16, 32, 1, 1, 2),
        (16, 16, 16, 1, 1, 1),
        (8, 8, 8, 1, 1, 1),
        (16, 8, 256, 4, 4, 1, 1, 32),
        (8, 16, 256, 4, 4, 1, 1, 32),
        (64, 32, 32, 8, 4, 1, 1, 4),
        (32, 64, 32, 4, 8, 1, 1, 4),
    )
)


def lanes_of(schedule: TiledSchedule) -> int:
    """Outputs of one vector of an invocation's sums."""
    return LANES if schedule.tile_m % LANES == schedule.tile_n % LANES == 0 else 1


def pitch(block: int) -> int:
    """Elements from one step of the sum to the next in shared memory."""
    return block + PADDING


def shared_elements(schedule: TiledSchedule) -> int:
    """Elements of shared memory that the tiles and the sums of slices take."""
    step = pitch(schedule.block_m) + pitch(schedule.block_n)
    sums = schedule.slices * schedule.block_m * schedule.block_n if schedule.slices > 1 else 0
    return schedule.stages * schedule.block_k * step + sums


def workgroups(group: ContractGroup, schedule: TiledSchedule) -> int:
    """Tiles of the product, over all batch indices and parts of the sum."""
    rows, columns = -(-group.m // schedule.block_m), -(-group.n // schedule.block_n)
    return math.prod(group.batch) * rows * columns * schedule.split_k


def fits(group: ContractGroup, schedule: TiledSchedule, target: Target) -> bool:
    """Whether the schedule is sound and keeps to the limits of the device."""
    if not is_sound(schedule):
        return False
    x, y, z = schedule.workgroup
    nbytes = shared_elements(schedule) * group.accumulate.bytes
    return (
        x * y * z <= target.max_invocations
        and z <= target.max_workgroup[2]
        and x <= target.max_workgroup[0]
        and y <= target.max_workgroup[1]
        and nbytes <= target.shared_bytes
    )


def is_sound(schedule: TiledSchedule) -> bool:
    """Whether the numbers go together: tiles, slices and turns of the loop divide each other.

    Only a text written by hand can have others.
    """
    s = schedule
    numbers = (s.block_m, s.block_n, s.block_k, s.tile_m, s.tile_n, s.split_k, s.slices, s.unroll)
    return (
        min(numbers) > 0
        and s.stages in (1, 2)
        and s.block_m % s.tile_m == s.block_n % s.tile_n == 0
        and s.block_k & (s.block_k - 1) == 0
        and s.block_k % s.slices == 0
        and s.block_k // s.slices % min(s.unroll, s.block_k // s.slices) == 0
    )


def costs(group: ContractGroup, target: Target) -> dict[TiledSchedule, float]:
    """The schedules that the target can run, with the clocks they should take."""
    clocks = _Model(group, target).clocks
    able = (s for tile in _TILES for s in _split(group, tile, target) if fits(group, s, target))
    return {s: clocks(s) for s in able}


def _split(group: ContractGroup, tile: TiledSchedule, target: Target) -> list[TiledSchedule]:
    """The schedule, and where it has few tiles also with its sum in parts."""
    tiles = max(1, workgroups(group, tile))
    most = min(MOST_PARTS, group.k // max(tile.block_k, 32))
    wanted = {1, *(times * cores(target) // tiles for times in (1, 2, 4))}
    numbers = {f: getattr(tile, f) for f in tile.__slots__}
    return [
        TiledSchedule(**{**numbers, "split_k": parts})
        for parts in sorted(wanted)
        if parts == 1 or 1 < parts <= most
    ]


def cores(target: Target) -> int:
    """Cores of the device: what it says, or as many as a middling one has."""
    return target.cores or 64


@final
class _Model:
    """Expected clocks of one product under different schedules."""

    _LAUNCH = 7000.0
    """From one kernel to the next."""
    _JOIN = 16000.0
    """Parts of sums written, a barrier, and parts read: most of two launches of small kernels (4
    us), and what the barrier costs a program, whose other kernels wait there (as much again)."""
    _START = 1100.0
    """A workgroup's first loads, and its stores."""
    _MEETING = 300.0
    """Slices that add up their sums."""
    _LATENCY = 150.0
    """Global memory and a barrier, where nothing else runs meanwhile."""
    _THREADS = 200
    """Invocations that keep a core busy."""
    _STAGING = 0.33
    """One element on its way to shared memory, in all invocations together."""
    _PEAK, _READ = 0.86, 0.1
    """Part of the peak that is reached at best, and what reads from shared memory take of it."""
    _MEMORY = 16.0
    """Bytes that a core's share of memory moves in a clock."""
    _CACHE = 13.0
    """Bytes that its share of the second-level cache moves."""

    def __init__(self, group: ContractGroup, target: Target) -> None:
        self.group = group
        self.cores = cores(target)
        self.batch = math.prod(group.batch)
        self.types = group.lhs.type.bytes, group.rhs.type.bytes

    def clocks(self, s: TiledSchedule) -> float:
        """From the start of the first kernel to the end of the last."""
        group = self.group
        count = max(1, workgroups(group, s))
        steps = max(1, -(-group.k // (s.block_k * s.split_k)))
        work = s.block_m * s.block_n * s.block_k / (128 * self._efficiency(s))
        work += self._STAGING * (s.block_m + s.block_n) * s.block_k
        # A core that is never idle, and workgroups that wait for their own steps one by one.
        fluid = -(-count // self.cores) * steps * work
        alone = work * max(1.0, self._THREADS / math.prod(s.workgroup))
        wait = self._LATENCY * (0.7 if s.stages > 1 else 1.0)
        chain = -(-count // (self.cores * self._beside(s))) * steps * (alone + wait)
        start = self._START + (self._MEETING if s.slices > 1 else 0.0)
        busy = start + max(fluid, chain, self._traffic(s, count * steps))
        return busy + self._LAUNCH + self._join(s)

    def _traffic(self, s: TiledSchedule, tiles: int) -> float:
        """Clocks for bytes: operands and outputs once from memory, tiles from the cache."""
        group, (lhs, rhs) = self.group, self.types
        once = group.m * group.k * lhs + group.n * group.k * rhs + 4 * group.m * group.n
        staged = tiles * s.block_k * (s.block_m * lhs + s.block_n * rhs)
        memory = self.batch * once / (self._MEMORY * self.cores)
        return max(memory, staged / (self._CACHE * self.cores))

    def _join(self, s: TiledSchedule) -> float:
        """Clocks of the second kernel, and for the parts that the first one writes."""
        if s.split_k == 1:
            return 0.0
        nbytes = 4 * (2 * s.split_k + 1) * self.batch * self.group.m * self.group.n
        return self._JOIN + nbytes / (self._CACHE * self.cores)

    def _beside(self, s: TiledSchedule) -> int:
        """Workgroups that one core runs at a time: registers, shared memory and threads allow."""
        threads = math.prod(s.workgroup)
        registers = s.tile_m * s.tile_n + 2 * (s.tile_m + s.tile_n) + 24
        shared = shared_elements(s) * self.group.accumulate.bytes
        return max(1, min(16, 65536 // (registers * threads), 98304 // shared, 2048 // threads))

    def _efficiency(self, s: TiledSchedule) -> float:
        """Part of the multiply-adds that loads from shared memory leave room for."""
        reads = 1 / s.tile_m + 1 / s.tile_n
        return self._PEAK / (1 + (self._READ if lanes_of(s) > 1 else 4.0) * reads)
