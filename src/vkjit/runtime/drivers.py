"""Why no Vulkan driver answers: the loader, its manifests, and the libraries that they name.

Looked at only where no Vulkan device can be used; nothing here needs the loader.
"""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path
from typing import Any

_LOADER = "libvulkan.so.1"
_REPLACING = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")


def loader_fault() -> str | None:
    """Why the Vulkan loader cannot be used, or None."""
    return _load_fault(_LOADER) and (
        f"no Vulkan loader ({_LOADER}); install it (Debian: libvulkan1, Fedora: vulkan-loader, "
        "Arch: vulkan-icd-loader) and a driver"
    )


def driver_faults() -> list[str]:
    """What is wrong with each driver that the loader is told of."""
    manifests, where = _manifests()
    if not manifests:
        return [
            f"no driver: {where} names none; install one (Debian: mesa-vulkan-drivers, or the "
            "maker's package)"
        ]
    return [_fault(path) for path in manifests]


def _manifests() -> tuple[list[Path], str]:
    """Files that describe drivers, in the order of the loader, and where they were looked for.

    Source: LoaderDriverInterface.md of Khronos' Vulkan-Loader.
    """
    for variable in _REPLACING:
        named = os.environ.get(variable)
        if named:
            return _listed(named), variable
    added = os.environ.get("VK_ADD_DRIVER_FILES", "")
    home = Path.home()
    folders = [
        os.environ.get("XDG_CONFIG_HOME") or str(home / ".config"),
        *(os.environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":"),
        "/etc",
        os.environ.get("XDG_DATA_HOME") or str(home / ".local" / "share"),
        *(os.environ.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share").split(":"),
    ]
    places = [Path(folder) / "vulkan" / "icd.d" for folder in folders]
    found = _listed(added)
    for place in places:
        found += sorted(place.glob("*.json"))
    return found, " and ".join(map(str, (places[2], places[-1])))


def _listed(paths: str) -> list[Path]:
    """Files of a list with colons; a folder stands for the manifests in it."""
    found: list[Path] = []
    for name in filter(None, paths.split(":")):
        path = Path(name)
        found += sorted(path.glob("*.json")) if path.is_dir() else [path]
    return found


def _fault(manifest: Path) -> str:
    """What is wrong with one driver."""
    try:
        plain: Any = json.loads(manifest.read_text(encoding="utf-8"))
        library = str(plain["ICD"]["library_path"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{manifest}: not a manifest of a driver ({type(error).__name__}: {error})"
    path = str(manifest.parent / library) if "/" in library else library
    fault = _load_fault(path)
    if fault:
        return f"{manifest}: its driver cannot be loaded ({fault}); reinstall it or remove the file"
    return f"{manifest}: the driver loads, but offers no device that can be used"


def _load_fault(library: str) -> str | None:
    """Why a shared library cannot be loaded, or None."""
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return str(error)
    return None
