"""``key_reuse``: random keys that are consumed twice are errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from typing import final

from vkjit.debug.key_flow import consumed
from vkjit.debug.key_uses import Consume, Use, note
from vkjit.debug.modes import modes
from vkjit.device_array import host_values
from vkjit.ir.avals import Aval
from vkjit.ir.primitive import Array, Value
from vkjit.runtime.device import DeviceBuffer, Loaded
from vkjit.trace import Hooks, Traced, aval_of, bind_outs, present_source

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@contextmanager
def key_reuse() -> Generator[None]:
    """Raises where a random key is consumed twice, inside the block and in this thread.

    ``split`` and every function that draws numbers consume their key; ``fold_in`` does not. Keys
    are followed through programs when they are traced, into loops too: a key that is the same in
    each turn and consumed there is consumed twice. Outside ``jit``, and between calls, equal values
    are one key: what a jitted call consumes of its arguments is known when the next one begins.
    ``VKJIT_DEBUG_KEY_REUSE=1`` switches it on for the whole process.

    Parts of an array of keys that are picked at run time are not told apart by a compiled function.

    Raises:
        KeyReuseError: with the functions and lines of both uses.
    """
    before, modes.keys = modes.keys, True
    kept, modes.used = modes.used, {}
    modes.update()
    try:
        yield
    finally:
        modes.keys, modes.used = before, kept
        modes.update()


def _used(name: str, key: Value) -> None:
    """Notes that the function ``name`` consumes a key."""
    if not modes.keys or name == "fold_in":
        return
    bind_outs(Consume(Use(_called(name), present_source()), aval_of(key)), key)


def _called(name: str) -> str:
    """The function of this package that the user called."""
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]  as in vkjit.trace
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        name = frame.f_code.co_name
        frame = frame.f_back
    return name


@final
class KeyedLoaded(Loaded):
    """A plan that notes in each run which of its arguments are keys that it consumes."""

    __slots__ = ("_captured", "_found", "_inside", "_program")

    def __init__(self, inside: Loaded, traced: Traced) -> None:
        self._inside = inside
        self._program = traced.program
        self._captured = traced.captured
        self._found = consumed(traced.program)

    def run(
        self, inputs: Sequence[DeviceBuffer], donated: Collection[int] = ()
    ) -> list[DeviceBuffer]:
        """Notes the keys and runs the plan.

        Raises:
            KeyReuseError: an argument was consumed before.
        """
        count = len(self._captured)
        for position, use in self._found.params:
            if position < count:
                keys = host_values(self._captured[position])
            else:
                keys = _values(inputs[position - count], self._program.params[position].aval)
            note(keys, use)
        outputs = self._inside.run(inputs, donated)
        for position, use in self._found.results:
            for row in _values(outputs[position], self._program.results[position].aval):
                modes.used.setdefault(row.tobytes(), use)
        return outputs


def _values(buffer: DeviceBuffer, of: Aval) -> Array:
    return buffer.device.download(buffer, of.dtype, of.shape).reshape(-1, 2)


Hooks.key_used = staticmethod(_used)
