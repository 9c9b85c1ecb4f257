"""One process at a time in a folder; the system releases the lock of a process that is killed."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from vkjit.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows has no such locks: two runs in one folder are not noticed there
    fcntl = None

NAME = ".lock"


@contextmanager
def sole_user(folder: Path) -> Generator[None]:
    """Holds ``folder``, which is made, until the block ends.

    Raises:
        ConfigError: Another process, or another block of this one, holds it.
        OSError: The folder cannot be made or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / NAME).open("a+", encoding="ascii") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                raise ConfigError(
                    f"train: process {file.read().strip() or '(unknown)'} is training in {folder}, "
                    "expected a folder that no other run uses; wait until it has ended, or set "
                    "another output.folder"
                ) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
