"""Which tiles a product on cooperative matrices of flexible dimensions may use, best first.

The order follows from speeds that were measured on an H200 and from how many tiles its cores work
through one after another; the tuner measures what is listed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from vkjit.lowering.gpu.gemm_join import MOST_PARTS
from vkjit.lowering.gpu.gemm_operand import is_packed
from vkjit.lowering.gpu.gemm_tensor_epilogue import casts_of, supports
from vkjit.lowering.gpu.gemm_tensor_memory import ALIGNMENT, is_aligned, plane_of
from vkjit.lowering.kernel.types import BF16, F16, F32, MatScope
from vkjit.lowering.plan.groups import ContractGroup, LoadStep
from vkjit.lowering.plan.schedule import TensorSchedule
from vkjit.lowering.target import Target, TensorShape

_MOST = 16
"""Schedules that are worth a measurement."""
_MOST_WORDS = 128
"""Words of sums that an invocation can hold: more of them spill, and take seconds to compile."""
_FEWEST_INVOCATIONS = 128
_CORES = 132
"""Where the device does not tell how many it has."""
_EDGE = 0.8
"""What clamped tiles take longer than others, relative to those."""
_LAUNCH, _JOINED = 5e6, 0.6
"""What the kernel that joins parts takes, and each number that it moves, in multiply-adds."""
_LEAST = 16
"""Rows, columns and steps of a product below which matrices are mostly padding."""
_SPLIT_FROM = 2048
"""Steps of a sum from which parts of it are worth a second kernel."""

_SHORT_SUM, _SMALL_TILE = 64, 64 * 64
"""Sums this short end before large tiles pay: three products of 1536 x 512 x 64 with epilogues took
21.9, 16.4 and 11.9 us in tiles of 128 x 256, and 12.4, 9.1 and 8.6 us in tiles of 64 x 64."""

_WORKGROUP = {
    # (block_m, block_n, block_k, invocations, unroll): sums per clock relative to the fourth
    (256, 256, 32, 256, 8): 1.09,
    (256, 256, 32, 256, 16): 1.05,
    (128, 256, 64, 256, 8): 0.95,
    (128, 256, 32, 256, 8): 1.0,
    (128, 256, 32, 256, 16): 0.97,
    (256, 128, 32, 256, 8): 0.9,
    (256, 128, 32, 256, 16): 0.88,
    (128, 128, 32, 128, 8): 0.9,
    (128, 128, 32, 128, 16): 0.89,
    (128, 128, 64, 256, 8): 0.8,
    (128, 64, 64, 128, 8): 0.74,
    (64, 128, 64, 128, 8): 0.7,
    (64, 64, 64, 128, 8): 0.6,
    (64, 64, 32, 128, 8): 0.5,
    (32, 64, 64, 128, 8): 0.4,
}
_SUBGROUP = ((64, 32, 16), (32, 32, 16), (16, 16, 16))


def candidates(group: ContractGroup, target: Target) -> list[TensorSchedule]:
    """Schedules of workgroup scope that the device can run for ``group``."""
    if not _fits(group, target) or "tensor_addressing" not in target.features:
        return []
    found = sorted(_whole_workgroups(group, target), key=lambda pair: pair[0])
    ordered = [schedule for _, schedule in found]
    if group.k <= _SHORT_SUM:
        ordered.sort(key=lambda s: s.block_m * s.block_n > _SMALL_TILE)
    return ordered[:_MOST]


def of_subgroups(group: ContractGroup, target: Target) -> list[TensorSchedule]:
    """Schedules of subgroup scope, which read operands without staging: others mostly win."""
    return list(_subgroups(group, target)) if _fits(group, target) else []


def serves(group: ContractGroup, schedule: TensorSchedule, target: Target) -> bool:
    """Whether the device can run ``schedule`` for ``group``, in any number of parts."""
    if not _fits(group, target):
        return False
    whole = replace(schedule, split_k=1)
    if not schedule.whole_workgroup:
        return whole in _subgroups(group, target)
    able = [one for _, one in _whole_workgroups(group, target)]
    return "tensor_addressing" in target.features and whole in able


def _fits(group: ContractGroup, target: Target) -> bool:
    """Whether types, strides and the body allow schedules of either scope."""
    sides = (group.lhs, group.rhs)
    fits = all(plane_of(s.view) is not None and is_aligned(s.view, s.type) for s in sides)
    fits = fits and all(is_aligned(s.view, group.body[s.value].type) for s in group.stores)
    large = min(group.m, group.n, group.k) >= _LEAST and 0 not in group.batch
    fits = fits and not is_packed(group)  # a tensor load reads numbers
    return fits and large and "tensor_maps" in target.features and supports(group)


def _shapes(group: ContractGroup, target: Target, scope: MatScope) -> list[TensorShape]:
    """The granularities for the types of ``group``."""
    types = (group.lhs.type, group.rhs.type, group.accumulate)
    if types[0] not in (F16, BF16) or types[2] not in (F16, F32):
        return []
    return [
        s for s in target.tensor_shapes if (s.a, s.b, s.accumulator, s.scope) == (*types, scope)
    ]


def _whole_workgroups(
    group: ContractGroup, target: Target
) -> Iterator[tuple[float, TensorSchedule]]:
    """Schedules of workgroup scope with the time that each is expected to take."""
    shapes = {s.invocations: s for s in _shapes(group, target, MatScope.WORKGROUP)}
    for numbers, speed in _WORKGROUP.items():
        m, n, k, invocations, unroll = numbers
        shape = shapes.get(invocations)
        words = m * n * group.accumulate.bytes // 4 // invocations
        if shape is None or words > _MOST_WORDS or invocations < _FEWEST_INVOCATIONS:
            continue
        if m % shape.m or n % shape.n or k % shape.k or max(m, n, k) > target.tensor_dimension:
            continue
        # Maps over clamped tiles failed the check against NumPy on an H200; joins have no maps.
        mapped = any(casts_of(group, step) is None for step in group.stores)
        unproven = mapped and (group.m % m or group.n % n)
        for parts in _parts(group, m * n, target):
            if unproven and parts == 1:
                continue
            schedule = TensorSchedule(m, n, k, invocations, unroll, parts)
            yield _time(group, schedule, speed, target), schedule


def _parts(group: ContractGroup, area: int, target: Target) -> list[int]:
    """Into how many parts the sum may be cut: 1, and what fills the cores."""
    tiles = max(1, math.prod(group.batch) * group.m * group.n // area)
    cores = target.cores or _CORES
    if group.k < _SPLIT_FROM or tiles * 2 > cores:
        return [1]
    full = min(cores // tiles, MOST_PARTS, group.k // 256)
    return sorted({1, max(2, full // 2), full})


def _time(group: ContractGroup, s: TensorSchedule, speed: float, target: Target) -> float:
    """Clocks of a core, up to a factor: rounds of tiles, and the kernel that joins the parts."""
    cores = target.cores or _CORES
    tiles = -(-group.m // s.block_m) * -(-group.n // s.block_n) * math.prod(group.batch)
    steps = -(-group.k // s.split_k) + 4 * s.block_k  # the start and the end of a tile count too
    rounds = -(-tiles * s.split_k // cores)
    inner = (group.m // s.block_m) * (group.n // s.block_n) * math.prod(group.batch)
    # The last round waits for the clamped tiles that it has.
    edges = 1.0 if inner < tiles and rounds == 1 else 1 - inner / tiles
    outputs = math.prod(group.batch) * group.m * group.n
    join = _LAUNCH + _JOINED * outputs * (s.split_k + 1) if s.split_k > 1 else 0
    return rounds * (1 + _EDGE * edges) * s.block_m * s.block_n * steps / speed + join


def _subgroups(group: ContractGroup, target: Target) -> Iterator[TensorSchedule]:
    """Schedules of subgroup scope: they have no edges, because their loads cannot clamp."""
    size = target.subgroup_sizes[0]
    sides: tuple[LoadStep, ...] = (group.lhs, group.rhs)
    planes = [(plane_of(s.view), s.type) for s in sides]
    planes += [(plane_of(s.view), group.body[s.value].type) for s in group.stores]
    if any(plane is None or plane.pitch * elem.bytes % ALIGNMENT for plane, elem in planes):
        return
    for m, n, k in _SUBGROUP:
        divides = group.m % m == group.n % n == group.k % k == 0
        for shape in _shapes(group, target, MatScope.SUBGROUP):
            if divides and m % shape.m == n % shape.n == k % shape.k == 0:
                yield TensorSchedule(m, n, k, size, 4, whole_workgroup=False)
