"""What loops ask of the ranges inside them: turns hand over what they should, and nothing else.

A full barrier stands between two turns, so nothing that they share needs more order. But what one
turn writes must not be what another still needs: slices of stacks lie apart, and only the two
places of a carry change roles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn

from vkjit.errors import InternalError
from vkjit.lowering.artifact import Loop, Move, Plan, Range, Step, blocks
from vkjit.lowering.plan.hazards import Footprint, footprint

_PLACES = 2
"""Places of a carry that moves."""


def check_turns(plan: Plan) -> None:
    """Checks that ranges stay inside their buffers, and that turns of a loop do not collide.

    Raises:
        InternalError: one does not, or they do; the message names range and step.
    """
    for number, depth, step in _all(plan.steps, "", 0):
        for place in _ranges(footprint(step, depth)):
            reach = place.cover()
            if reach.offset < 0 or reach.offset + reach.size > plan.buffers[place.buffer].size:
                _refuse(plan, number, f"{place} is not inside its buffer")
        if isinstance(step, Loop):
            for problem in _collisions(step, depth):
                _refuse(plan, number, problem)


def _all(steps: Sequence[Step], at: str, depth: int) -> Iterator[tuple[str, int, Step]]:
    """Each step with its number, and how many loops are around it."""
    for position, step in enumerate(steps):
        yield f"{at}{position}", depth, step
        for block in blocks(step):
            yield from _all(block.steps, f"{at}{position}.", depth + isinstance(step, Loop))


def _ranges(touched: Footprint) -> Iterator[Range]:
    yield from touched.reads
    yield from touched.writes


def _collisions(loop: Loop, depth: int) -> Iterator[str]:
    """Pairs of ranges, at least one of them written, of which turns share what they should not."""
    written: dict[int, set[Range]] = {}
    moving: dict[Range, Move] = {}
    everything: dict[int, set[Range]] = {}
    for step in loop.body.steps:
        touched = footprint(step, depth + 1)
        for place in touched.writes:
            written.setdefault(place.buffer, set()).add(place)
        for place in _ranges(touched):
            everything.setdefault(place.buffer, set()).add(place)
            move = _at(place, depth)
            if move is not None:
                moving[place] = move
    for place, move in moving.items():
        writes = written.get(place.buffer, set())
        others = everything[place.buffer] if place in writes else writes
        for other in others:
            meet = place.cover(depth).overlaps(other.cover(depth))
            if meet and not _go_together(place, move, other, _at(other, depth)):
                yield f"turns of {place} and {other} collide"


def _go_together(place: Range, move: Move, other: Range, its: Move | None) -> bool:
    """Whether two ranges move alike, and apart from themselves in other turns."""
    if its is None or max(place.size, other.size) > move.stride:
        return False
    alike = (move.stride, move.ring, move.step) == (its.stride, its.ring, its.step)
    return alike and (move.first == its.first or move.ring == _PLACES)


def _at(place: Range, depth: int) -> Move | None:
    return next((m for m in place.moves if m.depth == depth), None)


def _refuse(plan: Plan, number: str, problem: str) -> NoReturn:
    raise InternalError(f"plan {plan.name}: step {number}: {problem}")
