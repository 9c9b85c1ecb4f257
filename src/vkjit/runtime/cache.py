"""Files of compiled code, kept between processes.

``VKJIT_CACHE_DIR`` names the folder (default: the user's cache folder), ``VKJIT_CACHE=0`` switches
the cache off, ``VKJIT_CACHE_BYTES`` bounds it. Entries appear by an atomic rename, so readers see
whole files; each carries a checksum, so a damaged one counts as missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import final

from vkjit.errors import ArgumentError

_MAGIC = b"vkjit-1\n"
_DIGEST = 32
_DEFAULT_LIMIT = 512 << 20
_PRUNE_EVERY = 64  # writes between looks at the folder's size
_KEEP = 0.75  # share of the limit that pruning leaves
_warned: set[Path] = set()


def cache_key(parts: Iterable[str]) -> str:
    """A file name that is equal only for equal ``parts``."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def open_cache(kind: str) -> DiskCache | None:
    """The cache for one kind of code as the environment sets it, or None where it is off."""
    if os.environ.get("VKJIT_CACHE") == "0":
        return None
    limit = os.environ.get("VKJIT_CACHE_BYTES", str(_DEFAULT_LIMIT))
    if not limit.isdecimal():
        raise ArgumentError(f"VKJIT_CACHE_BYTES: got {limit!r}, expected a number of bytes")
    folder = os.environ.get("VKJIT_CACHE_DIR")
    if not folder:
        import platformdirs  # noqa: PLC0415  only where the environment names no folder

        folder = platformdirs.user_cache_dir("vkjit", appauthor=False)
    return DiskCache(Path(folder) / kind, int(limit))


@final
class DiskCache:
    """A folder of at most ``limit`` bytes; the entries used longest ago go first.

    Several processes may share it. Every failure of the file system counts as a miss: a cache
    must never stop a program. The first that keeps an entry from being written is told.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self.hits = 0
        self.misses = 0
        self._writes = 0

    def get(self, key: str) -> bytes | None:
        """The entry of ``key``, or None."""
        path = self.folder / key
        try:
            data = path.read_bytes()
        except OSError:
            data = b""
        head = len(_MAGIC) + _DIGEST
        body = data[head:]
        if data[:head] != _MAGIC + hashlib.sha256(body).digest():
            self.misses += 1
            return None
        self.hits += 1
        with contextlib.suppress(OSError):
            os.utime(path)  # the order of pruning
        return body

    def put(self, key: str, body: bytes) -> None:
        """Keeps ``body`` under ``key``."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder, prefix=".new-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_MAGIC + hashlib.sha256(body).digest() + body)
                os.replace(name, self.folder / key)
            except BaseException:
                os.unlink(name)
                raise
            if self._writes % _PRUNE_EVERY == 0:
                self.prune()
            self._writes += 1
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        """Says once per process that nothing is kept: it costs time at every start."""
        root = self.folder.parent
        if root not in _warned:
            _warned.add(root)
            warnings.warn(
                f"cache: {root} cannot be written ({error.strerror or error}); compiled code is "
                "not kept for the next process; set VKJIT_CACHE_DIR to a folder that can be "
                "written, or VKJIT_CACHE=0",
                RuntimeWarning,
                stacklevel=3,
            )

    def prune(self) -> None:
        """Removes the entries used longest ago until the folder is well under its limit."""
        entries: list[tuple[float, int, Path]] = []
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):  # another process may have removed it
                status = path.stat()
                entries.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in entries)
        if total <= self.limit:
            return
        for _, size, path in sorted(entries):
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size
            if total <= self.limit * _KEEP:
                return
