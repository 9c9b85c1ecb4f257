"""Files that are either complete or absent: write aside, flush to the disk, rename into place.

A reader never sees half a file, whatever interrupts the writer: an exception, a full disk, SIGKILL.
POSIX guarantees that ``rename`` within a directory replaces the target in one step; the ``fsync``
before it keeps a power cut from leaving the new name on unwritten data.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_CHUNK = 1 << 20  # bytes per write: small enough that a full disk is noticed part way
_PREFIX, _SUFFIX = ".", ".partial"


def write_atomic(path: Path, data: bytes) -> None:
    """Replace ``path`` by a file holding ``data``, or leave it as it was.

    Raises:
        OSError: the data could not be written (``ENOSPC`` when the disk is full). The old file, if
            there was one, is intact and nothing is left beside it.
    """
    with replacing(path) as partial, partial.open("wb") as handle:
        write_all(handle, data)


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """A path to write to, which takes the place of ``path`` when the block ends without an error.

    The folder is made. What the block wrote is flushed to the disk before the renaming, and deleted
    where the block raised: ``path`` is then as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{_PREFIX}{path.name}.{os.getpid()}{_SUFFIX}")
    try:
        yield partial
        _sync(partial)
        os.replace(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            name_file(error, path)
        raise
    _sync(path.parent)


def name_file(error: OSError, path: Path) -> None:
    """Says which file ``error`` is about: a failed write does not, a failed open names it."""
    error.filename = str(path)


def write_all(handle: BinaryIO, data: bytes | memoryview) -> None:
    """Write ``data`` to ``handle`` in chunks of one MiB."""
    view = memoryview(data)
    for start in range(0, len(view), _CHUNK):
        handle.write(view[start : start + _CHUNK])


def remove_partial(directory: Path) -> None:
    """Delete what writers killed in the middle left in ``directory``; call with no writer alive."""
    for leftover in partial_files(directory):
        leftover.unlink(missing_ok=True)


def partial_files(directory: Path) -> Iterable[Path]:
    """Files of interrupted writes in ``directory``."""
    return list(directory.glob(f"{_PREFIX}*{_SUFFIX}"))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
