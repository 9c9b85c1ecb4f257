"""What a run was made with, and on what: enough to tell later whether two runs are comparable."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import vkjit as vj

MIB = 2**20
_STATUS = Path("/proc/self/status")
_PACKAGES = ("numpy", "llvmlite", "safetensors", "tokenizers", "gguf")


def receipt(device: str, data_sha256: str) -> dict[str, Any]:
    """Commit, versions, machine and device as JSON values.

    Args:
        device: Name of the device that computes.
        data_sha256: Digest of the training windows.
    """
    with vj.default_device(device) as opened:
        described = opened.describe().splitlines()
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": " ".join(sys.argv),
        "commit": commit(),
        "vkjit": vj.__version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "device": device,
        "driver": described,
        "data_sha256": data_sha256,
    }


def commit() -> str | None:
    """Hash of the checkout that this package runs from, with ``+`` if tracked files differ.

    None where it runs from no checkout, or git is not there.
    """
    folder = Path(__file__).resolve().parent
    try:
        found = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return found + ("+" if changed else "")


def process_peak() -> int:
    """Bytes of the largest resident size that this process has had."""
    if _STATUS.exists():  # what getrusage tells begins with that of the process which started it
        return 1024 * int(_STATUS.read_text().partition("VmHWM:")[2].split()[0])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB elsewhere


def device_peak(device: str) -> int:
    """Bytes of arrays that the device has held at most."""
    with vj.default_device(device) as opened:
        return opened.memory_stats().peak_bytes


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
