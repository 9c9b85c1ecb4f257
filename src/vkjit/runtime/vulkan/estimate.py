"""What works take on a slow GPU, and long dispatches in slices of their grid."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping
from typing import final

from vkjit.errors import ConfigError
from vkjit.lowering.kernel.cost import flops
from vkjit.lowering.kernel.nodes import Kernel
from vkjit.runtime.vulkan.outline import Work

Grid = tuple[int, int, int]

DEFAULT_SECONDS = 1.0
_FLOPS = 5e11  # per second, of a small integrated GPU
_BYTES = 2e10  # per second, likewise
ORIGIN: Grid = (0, 0, 0)


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


@final
class Estimate:
    """Seconds of works and their boxes, none of them longer than ``seconds`` if that can be.

    Args:
        kernels: of the works that are launches.
        seconds: the limit; with inf nothing is estimated.
    """

    def __init__(self, kernels: Mapping[Work, Kernel], seconds: float) -> None:
        self._kernels = kernels
        self._seconds = seconds
        self._operations: dict[Kernel, float] = {}

    def boxes(self, work: Work) -> tuple[list[tuple[Grid, Grid]], float]:
        """Slices (base, size) of the grid of a work, and seconds of each."""
        kernel = self._kernels.get(work)
        spent = self._spent(work, kernel) if math.isfinite(self._seconds) else 0.0
        if kernel is None:
            return [(ORIGIN, ORIGIN)], spent
        boxes = slices(kernel.grid, math.ceil(spent / self._seconds))
        return boxes, spent / len(boxes)

    def _spent(self, work: Work, kernel: Kernel | None) -> float:
        touched = sum(place.size for place in work.places)
        if kernel is None:
            return touched / _BYTES
        operations = self._operations.get(kernel)
        if operations is None:
            operations = self._operations[kernel] = flops(kernel) or 0.0
        return operations / _FLOPS + touched / _BYTES


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
