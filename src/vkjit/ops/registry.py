"""Every primitive there is; for tests and documentation, never for passes."""

from __future__ import annotations

import inspect
from types import ModuleType

from vkjit.ir.primitive import Op
from vkjit.ops import (
    arithmetic,
    cast,
    compare,
    contract,
    extrema,
    indexing,
    logical,
    math,
    movement,
    naming,
    power,
    quant,
    reduce,
    reshaping,
    rng,
    scan,
    sort,
    special,
    structural,
    trigonometry,
    write,
)

FAMILIES: tuple[ModuleType, ...] = (
    structural,
    arithmetic,
    extrema,
    power,
    quant,
    compare,
    logical,
    math,
    trigonometry,
    special,
    cast,
    reshaping,
    movement,
    reduce,
    scan,
    sort,
    contract,
    indexing,
    naming,
    rng,
    write,
)


def _defined_in(family: ModuleType) -> list[type[Op]]:
    """Concrete classes of a file; a leading underscore marks a base."""
    return [
        c
        for name, c in vars(family).items()
        if inspect.isclass(c)
        and issubclass(c, Op)
        and c.__module__ == family.__name__
        and not name.startswith("_")
        and not inspect.isabstract(c)
    ]


PRIMITIVES: tuple[type[Op], ...] = tuple(c for family in FAMILIES for c in _defined_in(family))
"""All concrete primitives, family by family."""
