"""Which drivers the loader is told of, and what is wrong with those that it cannot load.

The loader itself says so only on standard error, if at all. Paths follow the loader's document
"Driver interface": VK_DRIVER_FILES, or VK_ICD_FILENAMES, replaces the folders.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

_VARIABLES = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")
_FOLDER = Path("vulkan") / "icd.d"


def driver_faults() -> list[str]:
    """A line for each driver manifest that is missing, not readable, or names no library."""
    found: list[str] = []
    for path in _manifests():
        fault = _fault(path)
        if fault:
            found.append(f"driver manifest {path}: {fault}")
    return found


def where_drivers_come_from() -> str:
    """The variable in force, or the folders, for messages."""
    for name in _VARIABLES:
        if os.environ.get(name):
            return f"{name}={os.environ[name]}"
    return ", ".join(str(folder) for folder in _folders())


def _manifests() -> Iterator[Path]:
    for name in _VARIABLES:
        if os.environ.get(name):
            named = [Path(p) for p in os.environ[name].split(os.pathsep) if p]
            for path in named:
                yield from sorted(path.glob("*.json")) if path.is_dir() else [path]
            return
    for folder in _folders():
        if folder.is_dir():
            yield from sorted(folder.glob("*.json"))


def _folders() -> list[Path]:
    """Where the loader looks on Linux; other systems keep registries of their own."""
    if not sys.platform.startswith("linux"):
        return []
    home = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    shared = os.environ.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share"
    return [Path(p) / _FOLDER for p in (home, "/etc", *shared.split(":")) if p]


def _fault(path: Path) -> str | None:
    """What keeps the loader from using a manifest."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:
        return f"not JSON ({error})"
    library: object = None
    if isinstance(content, dict):
        icd = cast("dict[str, object]", content).get("ICD")
        if isinstance(icd, dict):
            library = cast("dict[str, object]", icd).get("library_path")
    if not isinstance(library, str):
        return "it names no library (ICD, library_path)"
    place = str(path.parent / library) if os.sep in library else library
    try:
        ctypes.CDLL(place)
    except OSError as error:
        if "wrong ELF class" in str(error):  # installed beside ours for programs of other width
            return None
        return f"its library cannot be loaded ({error})"
    return None
