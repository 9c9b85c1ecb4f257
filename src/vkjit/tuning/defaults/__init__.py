"""Results that come with vkjit: one JSON file for each device, as ``vkjit tune --export`` writes.

They serve devices of the same name with any driver, where nothing better was measured, and also
when the code that makes kernels has changed since: whether a schedule is still there is asked of
the templates, and releases measure anew.
"""

from __future__ import annotations

import functools
import json
import math
from importlib import resources
from operator import itemgetter

from vkjit.tuning.records import Result, from_json

_FACTOR = 1.5
"""Rows may be so many times more or fewer than those of a product whose schedule is borrowed."""


@functools.cache
def _all() -> tuple[Result, ...]:
    found: list[Result] = []
    for file in sorted(resources.files(__name__).iterdir(), key=lambda f: f.name):
        if file.name.endswith(".json"):
            found += from_json(json.loads(file.read_text(encoding="utf-8")), file.name)
    return tuple(found)


@functools.cache
def shipped(name: str) -> dict[str, Result]:
    """The results for devices called ``name``, by group."""
    return {result.group: result for result in _all() if result.hardware.name == name}


def near(name: str, group: str) -> Result | None:
    """The result for a product that has other rows only, a little more or fewer.

    Where that kept its default schedule, the one by calculation suits ``group`` as well.
    """
    rows, rest = _rows(group)
    found = [
        (abs(math.log(known / rows)), result)
        for known, result in _by_shape(name).get(rest, ())
        if rows / _FACTOR <= known <= rows * _FACTOR
    ]
    return min(found, key=itemgetter(0))[1] if found and rows else None


@functools.cache
def _by_shape(name: str) -> dict[str, list[tuple[int, Result]]]:
    """Results that replace a default, with their rows, by what else is in their keys."""
    found: dict[str, list[tuple[int, Result]]] = {}
    for group, result in shipped(name).items():
        if result.schedule != result.receipt.default:
            rows, rest = _rows(group)
            found.setdefault(rest, []).append((rows, result))
    return found


def _rows(group: str) -> tuple[int, str]:
    """The rows m of a key, and the key without them."""
    word, sizes, rest = group.split(" ", 2)
    *batch, m, n, k = sizes.split("x")
    return int(m), " ".join((word, "x".join((*batch, "m", n, k)), rest))
