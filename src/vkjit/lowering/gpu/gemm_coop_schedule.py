"""Which tiles a product on subgroup-wide matrix units uses, and which products those serve."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import final

from vkjit.lowering.gpu.gemm_operand import is_packed, run_of
from vkjit.lowering.kernel.specs import Precision
from vkjit.lowering.kernel.types import BF16, F16, F32, MatScope, ScalarType
from vkjit.lowering.plan.groups import ContractGroup
from vkjit.lowering.plan.schedule import CoopSchedule
from vkjit.lowering.target import CoopShape, Target

UNIT = 8
"""Elements of 16 bits in the 16 bytes that an invocation moves at once."""
UNIT_WORDS = 4
PATCH_PADDING = 4
"""Words after each row of a fragment that lies in shared memory: keeps banks apart."""
_MOST_WORDS = 128
"""Accumulators of one invocation: with more, registers spill."""
_FEWEST = 8
"""Rows and columns below which a tile is mostly empty: there every element is read for little."""
_CORES = 128
"""Workgroups that keep a large device busy."""
_LONG = 2048
"""Steps of the sum from which its parts are worth a second kernel."""
_MOST_PARTS = 8
_SPLIT_DEPTH = 32
_TOO_LONG = 0.6
"""Speed of operands in two parts with more steps than that at once (H200: 41 instead of 58 TF)."""
_DECODED = {32: 87, 16: 122}
"""Products in the time that a number out of blocks takes on its way to a tile, by the numbers that
an invocation decodes at once (H200, Q4_K and Q4_1, bfloat16)."""
_DECODED_HALVES = 150
"""The same out of units of 16 bits (Q8_0 and Q6_K)."""
_BAND = 8
_MOST = 16
"""Schedules that are worth a measurement."""


@final
@dataclass(frozen=True, slots=True)
class Scheme:
    """What matrix units multiply for one product.

    Every operand is staged as ``parts`` tiles of ``elem``: itself, or its high and its low part.
    ``low_scale`` is the factor of the products with a low part.
    """

    elem: ScalarType
    parts: int = 1
    low_scale: float = 1.0


_SPLITS = {
    Precision.BFLOAT16: Scheme(BF16),
    Precision.HIGH: Scheme(BF16, 2),
    Precision.F16X3: Scheme(F16, 2, 2.0**-11),
}


def scheme_of(group: ContractGroup) -> Scheme | None:
    """How matrix units of 16-bit operands serve the group, or None where they do not."""
    types = {group.lhs.type, group.rhs.type}
    if types in ({F16}, {BF16}):
        return Scheme(group.lhs.type) if group.accumulate in (F16, F32) else None
    if types == {F32} and group.accumulate is F32:
        return _SPLITS.get(group.precision)
    return None


def shapes_of(group: ContractGroup, scheme: Scheme, target: Target) -> list[CoopShape]:
    """Fragments that the target multiplies in these types, the largest of them.

    One that is smaller along every axis than another is no faster (H200: up to 6 % slower). Tiles
    are laid out in whole units, so fragments must be, too.
    """
    wanted = (scheme.elem, scheme.elem, group.accumulate, MatScope.SUBGROUP)
    found = [
        s
        for s in target.coop_shapes
        if (s.a, s.b, s.accumulator, s.scope) == wanted
        and all(size % UNIT == 0 for size in (s.m, s.n, s.k))
    ]
    return [s for s in found if not any(_is_within(s, other) for other in found if other != s)]


def _is_within(shape: CoopShape, other: CoopShape) -> bool:
    return shape.m <= other.m and shape.n <= other.n and shape.k <= other.k


def pitch(columns: int) -> int:
    """Words from one row of a tile of 16-bit elements to the next: a unit more than the row.

    Eight rows of one unit each, which is what a fragment reads at once, then lie in all banks.
    """
    return (columns // UNIT + 1) * UNIT_WORDS


def patch_words(schedule: CoopSchedule) -> int:
    """Words of shared memory for one fragment of each subgroup, whichever way it lies there."""
    m, n = schedule.fragment_m, schedule.fragment_n
    words = max(m * (n + PATCH_PADDING), n * (m + PATCH_PADDING))
    return schedule.subgroups_m * schedule.subgroups_n * words


def shared_bytes(group: ContractGroup, scheme: Scheme, schedule: CoopSchedule) -> int:
    """Shared memory of one workgroup."""
    words = patch_words(schedule)
    for view, free, block in (
        (group.lhs.view, len(group.batch), schedule.block_m),
        (group.rhs.view, len(group.batch) + 1, schedule.block_n),
    ):
        total = 2 * len(group.batch) + 1 - free
        rows, columns = block, schedule.block_k
        if not along_sum(view.strides[free], view.strides[total]):
            rows, columns = columns, rows
        words += scheme.parts * rows * pitch(columns)
    return 4 * words


def along_sum(free: int, total: int) -> bool:
    """Whether an operand with these strides of m (or n) and of k lies in rows along k."""
    return total == 1 or free != 1


def fits(group: ContractGroup, scheme: Scheme, schedule: CoopSchedule, target: Target) -> bool:
    """Whether the schedule keeps to the limits of the device and of its registers."""
    s, count = schedule, schedule.invocations
    rows, columns = s.subgroups_m * s.fragment_m, s.subgroups_n * s.fragment_n
    whole = s.block_m % rows == 0 and s.block_n % columns == 0 and s.block_k % s.fragment_k == 0
    words = s.block_m * s.block_n * group.accumulate.bytes // 4 * scheme.parts // count
    return (
        whole
        and count <= min(target.max_invocations, target.max_workgroup[0])
        and words <= _MOST_WORDS
        and shared_bytes(group, scheme, s) <= target.shared_bytes
    )


# Rows, columns and steps of a workgroup's tile, subgroups along rows and columns, and the part of
# the large tile's speed that each reaches when all cores have work (H200, float16).
_TILES = (
    (128, 128, 64, 2, 4, 1.0),
    (128, 128, 64, 2, 2, 0.95),
    (128, 256, 32, 2, 4, 0.99),
    (256, 128, 32, 4, 2, 0.95),
    (128, 128, 32, 2, 2, 0.99),
    (128, 128, 32, 2, 4, 0.85),
    # Subgroups of 128 x 64 outputs: for sums of 16 bits only.
    (256, 256, 32, 2, 4, 1.4),
    (128, 256, 32, 1, 4, 1.0),
    (256, 128, 32, 2, 2, 1.0),
    (128, 128, 64, 1, 2, 1.0),
    (64, 128, 64, 2, 4, 0.75),
    (128, 64, 64, 4, 2, 0.75),
    (64, 128, 64, 1, 2, 0.8),
    (64, 64, 64, 2, 2, 0.7),
    (64, 64, 32, 2, 2, 0.6),
    (32, 64, 64, 1, 4, 0.4),
    (32, 32, 32, 2, 2, 0.3),
    (32, 32, 16, 2, 2, 0.25),
    (16, 32, 32, 1, 2, 0.2),
    (16, 16, 16, 1, 1, 0.1),
)


def candidates(group: ContractGroup, target: Target) -> list[CoopSchedule]:
    """Schedules that the device can run for the group, those expected to be fastest first.

    Empty where matrix units do not serve the group's types, or where it is too thin for them.
    """
    scheme = scheme_of(group)
    sizes = (group.m, group.n, *group.batch)
    if scheme is None or 0 in sizes or min(group.m, group.n) < _FEWEST:
        return []
    found: dict[CoopSchedule, float] = {}
    for shape in shapes_of(group, scheme, target):
        for tile in _TILES:
            made = _schedule(tile, shape, target)
            if fits(group, scheme, made, target):
                for parts in _splits(group, made):
                    schedule = replace(made, split_k=parts)
                    long = scheme.parts == 2 and schedule.block_k > _SPLIT_DEPTH
                    speed = tile[5] * (_TOO_LONG if long else 1.0)
                    found[schedule] = _cost(group, schedule, speed, target)
    return sorted(found, key=lambda schedule: found[schedule])[:_MOST]


# Tiles for products with one short side, of which a workgroup has all, and many rows and steps.
_NARROW = (
    (64, 16, 64, 4, 1, 1.0),
    (128, 16, 64, 8, 1, 1.0),
    (64, 16, 128, 4, 1, 1.0),
    (32, 16, 128, 2, 1, 1.0),
)
_NARROW_SIDE, _NARROW_STEPS = 16, 512


def narrow(group: ContractGroup, target: Target) -> list[CoopSchedule]:
    """Schedules for a product of 16-bit operands of which one has at most 16 rows or columns.

    Such a product, as of an adapter's small matrix, takes the time in which the other operand is
    read. Many workgroups keep memory busy: the sum is cut into eight parts where it has the steps.
    On an H200 products of 4096 x 16 x 8960 took 30 us so, and 59 us in two parts; of 8960 x 16 x
    4096 33 us, and 45 us in three parts, whose last one is shorter; plain ones 74 and 91 us.
    """
    scheme = scheme_of(group)
    sides = sorted((group.m, group.n))
    worth = 0 < sides[0] <= _NARROW_SIDE and min(sides[1], group.k) >= _NARROW_STEPS
    if scheme is None or scheme.parts > 1 or not worth or 0 in group.batch or is_packed(group):
        return []
    found: list[CoopSchedule] = []
    for shape in shapes_of(group, scheme, target):
        for m, n, k, rows, columns, speed in _NARROW:
            tile = (m, n, k, rows, columns, speed)
            if group.m < group.n:
                tile = (n, m, k, columns, rows, speed)
            made = _schedule(tile, shape, target)
            if fits(group, scheme, made, target):
                parts = [p for p in (2, 4, _MOST_PARTS) if p * 2 * k <= group.k]
                found.append(replace(made, split_k=max(parts, default=1)))
    return found


def _schedule(
    tile: tuple[int, int, int, int, int, float], shape: CoopShape, target: Target
) -> CoopSchedule:
    """The tile in fragments of ``shape``, in subgroups of the size that suits matrix units.

    Matrix units of AMD's are at their best with 64 invocations, those of Intel's have as many as
    their smallest subgroup; others leave no choice.
    """
    sizes = target.subgroup_sizes
    subgroup = 64 if 64 in sizes else min(sizes)
    block_m, block_n, block_k, subgroups_m, subgroups_n, _ = tile
    return CoopSchedule(
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        subgroups_m=subgroups_m,
        subgroups_n=subgroups_n,
        fragment_m=shape.m,
        fragment_n=shape.n,
        fragment_k=shape.k,
        subgroup=subgroup,
        band=_BAND,
    )


def workgroups(group: ContractGroup, schedule: CoopSchedule) -> int:
    """Tiles of the product, over all batch indices."""
    rows, columns = -(-group.m // schedule.block_m), -(-group.n // schedule.block_n)
    return math.prod(group.batch) * rows * columns


def _splits(group: ContractGroup, schedule: CoopSchedule) -> list[int]:
    """In how many parts the sum may run: more than one where tiles leave most cores idle."""
    tiles = workgroups(group, schedule)
    if group.k < _LONG or 2 * tiles > _CORES:
        return [1]
    most = min(_MOST_PARTS, _CORES // tiles, group.k // 256)
    return [1, *(parts for parts in (2, 4, 8) if parts <= most)]


def _decoding(group: ContractGroup, schedule: CoopSchedule) -> float:
    """What decoding adds to a step of the sum, in products."""
    total = 0.0
    for operand, block in ((group.lhs, schedule.block_m), (group.rhs, schedule.block_n)):
        if operand.blocks is not None:
            run = 32 if block * schedule.block_k >= 32 * schedule.invocations else 16
            halves = run_of(operand.blocks) < max(_DECODED)
            total += block * (_DECODED_HALVES if halves else _DECODED[run])
    return total


def _cost(group: ContractGroup, schedule: CoopSchedule, speed: float, target: Target) -> float:
    """Expected time in arbitrary units: rounds of workgroups over the cores, by size of tile."""
    tiles = workgroups(group, schedule) * schedule.split_k
    rounds = max(tiles / _CORES, 1.0) if tiles < 4 * _CORES else -(-tiles // _CORES)
    area = schedule.block_m * schedule.block_n / speed
    if is_packed(group):
        rounds = -(-tiles // (target.cores or _CORES))  # the last one takes as long as the others
        area += _decoding(group, schedule)
    steps = -(-group.k // schedule.split_k) + 64  # the start and the end of a tile count too
    join = group.m * group.n * math.prod(group.batch) * (schedule.split_k - 1) / _CORES
    return rounds * area * steps + join
