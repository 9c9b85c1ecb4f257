"""How many threads run jobs, and the pool that runs them."""

from __future__ import annotations

import atexit
import ctypes
import os
from collections.abc import Callable, Mapping
from typing import Protocol, final

from vkjit.errors import ArgumentError
from vkjit.runtime.cpu.native import can_run_threads


class NativeLibrary(Protocol):
    """Linked code; keeps its memory while referenced."""

    def address(self, symbol: str) -> int:
        """Where an exported symbol stands."""
        ...


def thread_count() -> int:
    """``VKJIT_NUM_THREADS``, else the number of cores this process may use; the caller counts.

    Raises:
        ArgumentError: ``VKJIT_NUM_THREADS`` is not a positive number.
    """
    if not can_run_threads():
        return 1
    asked = os.environ.get("VKJIT_NUM_THREADS")
    if asked is None or asked == "":
        return len(os.sched_getaffinity(0))
    if not asked.isdecimal() or int(asked) < 1:
        raise ArgumentError(
            f"VKJIT_NUM_THREADS: got {asked!r}, expected a whole number of at least 1"
        )
    return int(asked)


@final
class ThreadPool:
    """The linked native runtime of this process; there must be only one."""

    def __init__(self, library: NativeLibrary, threads: int) -> None:
        self.threads = threads
        self._library = library
        init = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)(library.address("vkjit_init"))
        self._reset: Callable[[], None] = ctypes.CFUNCTYPE(None)(library.address("vkjit_reset"))
        self._stop: Callable[[], None] = ctypes.CFUNCTYPE(None)(library.address("vkjit_stop"))
        self.par_for: Callable[[int, int, int], None] = ctypes.CFUNCTYPE(
            None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64
        )(library.address("vkjit_par_for"))
        if init(threads) != 0:
            raise MemoryError("pthread_key_create failed")
        os.register_at_fork(after_in_child=self._reset)
        # A worker must not be inside the code when the interpreter lets go of it.
        atexit.register(self.stop)

    def symbols(self) -> Mapping[str, int]:
        """Addresses of the functions that generated modules call."""
        return {name: self._library.address(name) for name in ("vkjit_execute", "vkjit_scratch")}

    def stop(self) -> None:
        """Ends the worker threads; the next job starts new ones."""
        if can_run_threads():
            self._stop()
