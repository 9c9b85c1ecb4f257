"""Devices: found without opening them, opened on first use, one object per name.

A device family is a module with ``discover() -> list[DeviceInfo]`` and ``open_device(name) ->
Device``. Vulkan's is imported only when asked for, and a machine without it still has the others.
"""

from __future__ import annotations

import importlib
import os
import threading
from typing import Protocol, cast

from vkjit.errors import ArgumentError, DeviceError
from vkjit.runtime.device import Device, DeviceClass, DeviceInfo

__all__ = [
    "available_devices",
    "close_devices",
    "default_device_name",
    "discovered_devices",
    "explain_devices",
    "get_device",
    "open_device",
]


class _Family(Protocol):
    """What the module of a device family offers."""

    def discover(self) -> list[DeviceInfo]:
        """Every device of the family on this machine, usable or not."""
        ...

    def open_device(self, name: str) -> Device:
        """Opens a device that ``discover`` listed."""
        ...


# Prefix of the device names, and the module that serves them, by rank among equals.
_FAMILIES = {
    "cpu": "vkjit.runtime.cpu.device",
    "reference": "vkjit.runtime.reference",
    "vulkan": "vkjit.runtime.vulkan",
}
_GPUS = (DeviceClass.DISCRETE_GPU, DeviceClass.INTEGRATED_GPU, DeviceClass.VIRTUAL_GPU)

_lock = threading.RLock()
_open: dict[str, Device] = {}
_found: list[DeviceInfo] = []


def discovered_devices() -> list[DeviceInfo]:
    """Every device of this machine, usable or refused; looked up once per process."""
    with _lock:
        if not _found:
            families = [_discover(prefix, module) for prefix, module in _FAMILIES.items()]
            _found.extend(info for family in families for info in family)
        return list(_found)


def available_devices() -> list[str]:
    """Names of the usable devices, ``cpu`` first."""
    return [info.name for info in discovered_devices() if info.refused is None]


def default_device_name() -> str:
    """``VKJIT_DEVICE``, else the first real GPU, else ``cpu``.

    Raises:
        ArgumentError: ``VKJIT_DEVICE`` names no usable device.
    """
    asked = os.environ.get("VKJIT_DEVICE")
    if asked:
        if asked not in ("cpu", "reference"):  # always there: no need to load a driver to know
            _require(asked)
        return asked
    usable = [info for info in discovered_devices() if info.refused is None]
    for device_class in _GPUS:
        for info in usable:
            if info.device_class is device_class:
                return info.name
    return "cpu"


def get_device(name: str) -> Device:
    """The device called ``name``, opened on first use.

    Raises:
        ArgumentError: no such device, or one that cannot be used; the message says why.
        DeviceError: the driver failed to open it.
    """
    device = _open.get(name)
    if device is not None:
        return device
    with _lock:
        device = _open.get(name)
        if device is None:
            if name.partition(":")[0] not in ("cpu", "reference"):
                _require(name)
            device = _open[name] = _family(name).open_device(name)
        return device


def open_device(name: str) -> Device:
    """A device of the caller's own, which it must close; ``get_device`` shares one by name.

    Raises:
        ArgumentError: no such device.
        DeviceError: the driver failed to open it.
    """
    return _family(name).open_device(name)


def close_devices() -> None:
    """Closes every open device; the next ``get_device`` opens it anew."""
    with _lock:
        while _open:
            _open.popitem()[1].close()


def explain_devices() -> str:
    """What devices exist, which one is used by default, and why others are refused."""
    chosen = _default_or_reason()
    lines: list[str] = []
    for info in discovered_devices():
        mark = "*" if info.name == chosen else " "
        state = "" if info.refused is None else f"  (not usable: {info.refused})"
        lines.append(
            f"{mark} {info.name:<12} {info.device_class.value:<15} {info.description}{state}"
        )
    if all(info.name != chosen for info in discovered_devices()):
        lines.append(chosen)
    return "\n".join(lines)


def _default_or_reason() -> str:
    try:
        return default_device_name()
    except ArgumentError as error:
        return str(error)


def _require(name: str) -> None:
    """Refuses a name that is no usable device."""
    for info in discovered_devices():
        if info.name == name:
            if info.refused is None:
                return
            raise ArgumentError(f"device: {name!r} cannot be used: {info.refused}")
    family = name.partition(":")[0]
    reasons = [i.refused for i in discovered_devices() if i.name == family and i.refused]
    raise ArgumentError(
        f"device: {name!r} does not exist, expected one of {', '.join(available_devices())}"
        + "".join(f"; {reason}" for reason in reasons)
        + "; `vkjit info` lists all devices"
    )


def _family(name: str) -> _Family:
    prefix = name.partition(":")[0]
    module = _FAMILIES.get(prefix)
    if module is None:
        raise ArgumentError(
            f"device: unknown kind {prefix!r}, expected one of {', '.join(_FAMILIES)}"
        )
    return _imported(module)


def _imported(module: str) -> _Family:
    """The module of a family; a folder without its code, as of a broken install, is none."""
    found = importlib.import_module(module)
    if not hasattr(found, "discover"):
        raise ImportError(f"{module} is incomplete; reinstall vkjit")
    return cast(_Family, found)


def _discover(prefix: str, module: str) -> list[DeviceInfo]:
    """The devices of one family; a family that cannot be asked is one refused device."""
    try:
        return _imported(module).discover()
    except (ImportError, OSError, DeviceError) as error:
        return [DeviceInfo(prefix, DeviceClass.SOFTWARE, module, refused=str(error))]
