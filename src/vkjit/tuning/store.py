"""Where results are kept: a JSON file for each device and driver in the cache folder.

Writers take a lock, merge, and rename a whole file into place; readers need no lock. A file that is
damaged or foreign is left aside with one warning and written anew by the next result. Where the
folder cannot be written, results last as long as the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import final

from vkjit.errors import ConfigError
from vkjit.runtime.cache import cache_key, open_cache
from vkjit.runtime.device import Hardware
from vkjit.tuning.records import SCHEMA, Result, from_json, kernels_version, to_json

_LOCK_SECONDS = 10.0

Stamp = tuple[int, int, int]


@final
class Store:
    """Results by hardware and group; those of other kernel templates are kept but not found.

    ``version`` grows with every change. ``folder`` None keeps everything in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.version = 0
        self._results: dict[Hardware, dict[tuple[str, str], Result]] = {}
        self._read: dict[Path, Stamp | None] = {}
        self._warned: set[str] = set()
        self._lock = threading.RLock()

    def get(self, hardware: Hardware, group: str) -> Result | None:
        """The result of these kernels for a group."""
        with self._lock:
            self._refresh(hardware)
            return self._results.get(hardware, {}).get((kernels_version(), group))

    def put(self, results: Iterable[Result]) -> None:
        """Keeps results; they replace earlier ones of the same key."""
        by_hardware: dict[Hardware, list[Result]] = {}
        for result in results:
            by_hardware.setdefault(result.hardware, []).append(result)
        with self._lock:
            for hardware, found in by_hardware.items():
                self._write(hardware, found)
                self.version += 1

    def all(self) -> list[Result]:
        """Every result in the folder and in memory."""
        with self._lock:
            if self.folder is not None:
                for path in sorted(self.folder.glob("*.json")):
                    self._load(path)
            return [r for known in self._results.values() for r in known.values()]

    def clear(self, hardware: Hardware | None = None) -> None:
        """Forgets the results of some hardware, or all, on disk too."""
        with self._lock:
            paths: list[Path] = []
            if self.folder is not None:
                paths = list(self.folder.glob("*.json")) if hardware is None else []
            if hardware is None:
                self._results.clear()
            else:
                self._results.pop(hardware, None)
                paths = [path] if (path := self._path(hardware)) else []
            for path in paths:
                with contextlib.suppress(OSError):
                    path.unlink()
                self._read.pop(path, None)
            self.version += 1

    # -- files ------------------------------------------------------------------------------------

    def _path(self, hardware: Hardware) -> Path | None:
        if self.folder is None:
            return None
        parts = (str(SCHEMA), hardware.name, hardware.uuid, hardware.driver)
        slug = "".join(c if c.isalnum() else "-" for c in hardware.name.lower())[:40]
        return self.folder / f"{slug}-{cache_key(parts)[:16]}.json"

    def _refresh(self, hardware: Hardware) -> None:
        """Reads the file of some hardware if it changed since the last time."""
        path = self._path(hardware)
        if path is not None:
            self._load(path)

    def _load(self, path: Path) -> None:
        stamp = _stamp(path)
        if stamp == self._read.get(path):
            return
        self._read[path] = stamp
        if stamp is not None and self._merge(self._parsed(path)):
            self.version += 1

    def _merge(self, results: Iterable[Result]) -> bool:
        changed = False
        for result in results:
            known = self._results.setdefault(result.hardware, {})
            key = (result.kernels, result.group)
            changed = changed or known.get(key) != result
            known[key] = result
        return changed

    def _parsed(self, path: Path) -> list[Result]:
        """The results of a file; none, and a warning, if it is damaged or foreign."""
        try:
            return from_json(json.loads(path.read_text(encoding="utf-8")), str(path))
        except OSError:
            return []
        except (ValueError, RecursionError) as error:
            text = str(error) if isinstance(error, ConfigError) else f"tuning: {path}: {error}"
            self._warn(str(path), f"{text.splitlines()[0]}; its results are not used")
            return []

    def _write(self, hardware: Hardware, found: list[Result]) -> None:
        """Adds results to those in the file, under its lock."""
        path = self._path(hardware)
        if path is None:
            self._merge(found)
            return
        import filelock  # noqa: PLC0415  half of what importing this package would take

        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(path.with_suffix(".lock"), timeout=_LOCK_SECONDS):
                self._read.pop(path, None)
                self._load(path)
                self._merge(found)
                _replace(path, to_json(self._results[hardware].values()))
                self._read[path] = _stamp(path)
        except (OSError, filelock.Timeout) as error:
            self._merge(found)
            self._warn(
                str(path.parent),
                f"tuning: results cannot be kept in {path.parent} ({error}); they last until the "
                "process ends; set VKJIT_CACHE_DIR to a folder that can be written",
            )

    def _warn(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(message, RuntimeWarning, stacklevel=2)


def open_store() -> Store:
    """The store that the environment names; see ``vkjit.runtime.cache``."""
    cache = open_cache("tuning")
    return Store(None if cache is None else cache.folder)


def write_json(path: Path, results: Iterable[Result]) -> None:
    """Writes a document of results, whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    _replace(path, to_json(results))


def _stamp(path: Path) -> Stamp | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _replace(path: Path, document: object) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1, sort_keys=True)
            file.write("\n")
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
