"""Plans in several submissions, and long dispatches in slices of their grid.

Operating systems reset a GPU that is busy with one submission for too long: 2 s on Windows, 10 s or
so elsewhere. So a submission ends where the work in it is estimated to pass a limit, and a dispatch
longer than that is made in slices. The estimate is meant for slow GPUs: a fast one pays some ten
microseconds per submission for work that takes it milliseconds.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from vkjit.errors import ConfigError
from vkjit.lowering.artifact import Launch, Plan, Step
from vkjit.lowering.kernel.cost import flops
from vkjit.lowering.kernel.nodes import Kernel

Grid = tuple[int, int, int]

DEFAULT_SECONDS = 1.0
_FLOPS = 5e11  # per second, of a small integrated GPU
_BYTES = 2e10  # per second, likewise
ORIGIN: Grid = (0, 0, 0)
_MARK_EVERY = 16  # barriers between marks of progress; a mark costs 1.6 us on an H200


@final
@dataclass(frozen=True, slots=True)
class Piece:
    """``grid`` workgroups, from ``base`` on, of the step at ``position``; all zero for a copy.

    With ``barrier`` a barrier must stand before it; every submission begins with one. With ``mark``
    it is worth noting there that all steps before ``position`` are finished.
    """

    position: int
    base: Grid
    grid: Grid
    barrier: bool = False
    mark: bool = False


Part = tuple[Piece, ...]
"""The pieces of one submission."""


def submit_seconds(default: float) -> float:
    """Estimated seconds of work in a submission: VKJIT_SUBMIT_SECONDS, or ``default``.

    Raises:
        ConfigError: the variable is no positive number.
    """
    given = os.environ.get("VKJIT_SUBMIT_SECONDS")
    if given is None:
        return default
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise ConfigError(
            f"VKJIT_SUBMIT_SECONDS: got {given!r}, expected a positive number of seconds, or inf"
        )
    return seconds


def split(plan: Plan, seconds: float) -> tuple[Part, ...]:
    """The plan's steps in order, as submissions of at most about ``seconds`` of estimated work."""
    parts: list[list[Piece]] = [[]]
    spent, barriers = 0.0, 0
    known: dict[int, float] = {}
    for position, step in enumerate(plan.steps):
        estimate = _seconds(step, known) if math.isfinite(seconds) else 0.0
        boxes = _boxes(step, math.ceil(estimate / seconds))
        share = estimate / len(boxes)
        barrier = position in plan.barriers
        barriers += barrier
        mark = barrier and barriers % _MARK_EVERY == 0
        for base, grid in boxes:
            if parts[-1] and spent + share > seconds:
                parts.append([])
                spent, barrier, mark = 0.0, False, True
            parts[-1].append(Piece(position, base, grid, barrier, mark))
            spent += share
            barrier, mark = False, False
    return tuple(map(tuple, parts))


def slices(grid: Grid, count: int) -> list[tuple[Grid, Grid]]:
    """``grid`` as about ``count`` boxes (base, size): cut along its longest axis, then the next."""
    axis = max(range(3), key=grid.__getitem__)
    if count <= 1 or grid[axis] == 1:
        return [(ORIGIN, grid)]
    cuts = min(count, grid[axis])
    bounds = [grid[axis] * i // cuts for i in range(cuts + 1)]
    found: list[tuple[Grid, Grid]] = []
    for start, end in itertools.pairwise(bounds):
        box = _with(grid, axis, end - start)
        for base, size in slices(box, math.ceil(count / cuts)) if cuts < count else [(ORIGIN, box)]:
            found.append((_with(base, axis, base[axis] + start), size))
    return found


def _with(grid: Grid, axis: int, value: int) -> Grid:
    x, y, z = (value if i == axis else n for i, n in enumerate(grid))
    return x, y, z


def _boxes(step: Step, count: int) -> Sequence[tuple[Grid, Grid]]:
    return slices(step.kernel.grid, count) if isinstance(step, Launch) else [(ORIGIN, ORIGIN)]


def _seconds(step: Step, known: dict[int, float]) -> float:
    """What the step takes on a small GPU. ``known`` are the operations of kernels by identity."""
    if not isinstance(step, Launch):
        return 2 * step.source.size / _BYTES
    return _operations(step.kernel, known) / _FLOPS + touched_bytes(step) / _BYTES


def _operations(kernel: Kernel, known: dict[int, float]) -> float:
    found = known.get(id(kernel))
    if found is None:
        found = known[id(kernel)] = flops(kernel) or 0.0
    return found


def touched_bytes(step: Launch) -> int:
    """Bytes that a launch may read and write, each once."""
    return sum(place.size for place in step.arguments)
