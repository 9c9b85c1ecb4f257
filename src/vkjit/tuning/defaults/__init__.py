"""Results that come with vkjit: one JSON file for each device, as ``vkjit tune --export`` writes.

They serve devices of the same name with any driver, where nothing better was measured.
"""

from __future__ import annotations

import functools
import json
from importlib import resources

from vkjit.tuning.records import Result, from_json


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
