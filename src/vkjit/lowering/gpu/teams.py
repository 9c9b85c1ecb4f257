"""Who walks the rows of a group with reductions.

- Of rows that lie side by side in memory, 32 share a workgroup, so that neighbours read
  neighbouring elements; several invocations walk each row.
- A contiguous row of up to a few hundred elements gets a run of invocations of one subgroup: they
  meet by shuffles alone.
- A longer row gets a workgroup, whose invocations walk it side by side, in vectors where rows are
  made of them.
- Where there are no shuffles a short row gets one invocation, as does one of very many that lie
  side by side.

Members keep the row in registers between passes where it fits: then it is read once.
"""

from __future__ import annotations

import math
from dataclasses import replace

from vkjit.lowering.gpu.grid import invocations, power_of_two
from vkjit.lowering.gpu.lanes import aligned, contiguous, vector_lanes
from vkjit.lowering.gpu.meeting import Stand, Team, can_shuffle, shuffles, state_types
from vkjit.lowering.plan.groups import LoopGroup, ReduceStep
from vkjit.lowering.target import Target
from vkjit.lowering.templates.body import arguments
from vkjit.lowering.templates.phases import full_values, phases
from vkjit.lowering.templates.space import lane_axis, views_of

_SHORT_ROW = 32
"""Rows of up to this many elements are walked by one invocation where there are no shuffles."""
_MANY_ROWS = 1 << 14
"""From this many on, rows that lie side by side in memory get one invocation each."""
_SIDE_BY_SIDE = 32
"""Rows in one workgroup: a subgroup of most GPUs, and 128 bytes of float32."""
_STEPS = 8
"""Most vectors of each member of a subgroup."""
_FEW_STEPS = 2
"""Vectors of each member of a workgroup, where it can be large enough."""
_FEW_INVOCATIONS = 1 << 16
"""With fewer in subgroups of their own, most of a large device would have nothing to do."""
_KEPT_STEPS = 16
"""Most vectors that members keep: more makes long kernels."""
_KEPT_WORK = 320
"""Most steps of a body that are written out, all vectors together."""
_WORKGROUPS = 512
"""Enough to fill a large device: smaller workgroups where there are fewer rows."""
_LARGE = 1024


def default_team(group: LoopGroup, target: Target) -> Team:
    """Who walks the rows of a compact group."""
    split = len(group.shape) - group.reduced
    count, length = math.prod(group.shape[:split]), math.prod(group.shape[split:])
    axis = row_axis(group)
    beside = side_by_side(group)
    clusters = meets_by_shuffles(group, target)
    alone = length <= _SHORT_ROW and (beside or not clusters)
    if alone or (beside and count >= _MANY_ROWS):
        return Team(1, 1, 1, axis)
    most = invocations(target)
    if beside and group.shape[axis] >= _SIDE_BY_SIDE and most >= 2 * _SIDE_BY_SIDE:
        return Team(_SIDE_BY_SIDE, most // _SIDE_BY_SIDE, 1, axis, Stand.BESIDE)
    last = len(group.shape) - 1
    lanes = vector_lanes(group, last)
    lanes = lanes if aligned(group, last, lanes) else 1
    width = target.subgroup_sizes[0]
    steps = -(-length // lanes)
    few = count * width < _FEW_INVOCATIONS and steps > width
    if clusters and steps <= width * _STEPS and not few:
        size = min(width, power_of_two(steps))
        return kept(
            group, Team(_rows(count, size, width, target), size, lanes, axis, Stand.CLUSTER)
        )
    size = invocations(target, max(width, 32, min(_LARGE, power_of_two(-(-steps // _FEW_STEPS)))))
    return kept(group, Team(1, size, lanes, axis))


def meets_by_shuffles(group: LoopGroup, target: Target) -> bool:
    """Whether all reductions can be merged across a subgroup."""
    rules = [s.rule for s in group.body if isinstance(s, ReduceStep)]
    return shuffles(target) and can_shuffle([t for rule in rules for t in state_types(rule)])


def row_axis(group: LoopGroup) -> int:
    """The row axis along which neighbouring rows lie."""
    split = len(group.shape) - group.reduced
    return lane_axis(views_of(group.body, group.stores), range(split), 4)


def side_by_side(group: LoopGroup) -> bool:
    """Whether neighbouring rows, not neighbouring elements of a row, lie beside each other.

    Only views along the reduced axes count: others are used once in a row.
    """
    split = len(group.shape) - group.reduced
    views = [v for v in views_of(group.body, group.stores) if any(v.strides[split:])]
    return contiguous(views, row_axis(group)) > contiguous(views, len(group.shape) - 1)


def _rows(count: int, size: int, width: int, target: Target) -> int:
    """Rows in a workgroup of whole subgroups."""
    members = max(width, invocations(target))
    while members > width and count * size < _WORKGROUPS * members:
        members //= 2
    return members // size


def kept(group: LoopGroup, who: Team, room: int | None = None) -> Team:
    """``who`` with the row in ``room`` registers where it fits, else walked vector by vector."""
    split = len(group.shape) - group.reduced
    steps = -(-math.prod(group.shape[split:]) // (who.size * who.lanes))
    values = steps * who.lanes * live_values(group)
    passes = max(phases(group).values(), default=0)
    writes = any(s.value in full_values(group) for s in group.stores)
    # A large workgroup leaves few registers to each; only a third pass over the row is worth more.
    few = who.size > _LARGE // 2 and passes + writes < 3
    fits = values <= (room or (32 if few else 64))
    if steps <= _KEPT_STEPS and steps * len(group.body) <= _KEPT_WORK and fits:
        return replace(who, keep=steps, unroll=1)
    return walked(who, _unroll(group, steps))


def walked(who: Team, unroll: int) -> Team:
    """``who`` without registers: every pass walks the row, ``unroll`` vectors a turn."""
    return replace(who, keep=0, unroll=unroll)


def _unroll(group: LoopGroup, steps: int) -> int:
    """Vectors of one turn: reads that wait for memory together."""
    most = max(1, 64 // len(group.body))
    return max(u for u in (1, 2, 4) if u <= most and u <= max(1, steps))


def live_values(group: LoopGroup) -> int:
    """Most full values that one pass hands to later ones."""
    body, full, phase = group.body, full_values(group), phases(group)
    last = max(phase.values(), default=0)
    made: set[int] = set()
    most = 0
    for number in range(1, last + 1):
        made |= _closure(group, [n for n, p in phase.items() if p == number]) & full
        later = [a for n, p in phase.items() if p > number for a in arguments(body[n])]
        wanted = _open([*later, *[s.value for s in group.stores]], group, made)
        most = max(most, len(wanted & full))
    return most


def _closure(group: LoopGroup, steps: list[int]) -> set[int]:
    """Everything that the arguments of reductions are computed from, and they themselves."""
    found: set[int] = set()
    waiting = [a for n in steps for a in arguments(group.body[n])]
    while waiting:
        number = waiting.pop()
        if number not in found:
            found.add(number)
            waiting += arguments(group.body[number])
    return found


def _open(wanted: list[int], group: LoopGroup, made: set[int]) -> set[int]:
    """The values among ``made`` from which ``wanted`` are computed directly."""
    found, seen = set[int](), set[int]()
    waiting = list(wanted)
    while waiting:
        number = waiting.pop()
        if number in seen:
            continue
        seen.add(number)
        if number in made:
            found.add(number)
        elif not isinstance(group.body[number], ReduceStep):
            waiting += arguments(group.body[number])
    return found
