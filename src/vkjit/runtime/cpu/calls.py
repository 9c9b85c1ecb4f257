"""Calls of Python functions from a running plan."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Generator, Sequence
from typing import Any, final

import numpy as np

from vkjit.lowering.artifact import HostCall, Plan, Step, While, blocks, leaves
from vkjit.runtime.device import HostArray

Run = Callable[[bytes], None]
"""Runs a plan, given the addresses that it reads."""

_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_GOES_ON, _ENDS = 1, 0


@final
class HostCalls:
    """The host calls of one plan, in the order of its leaves."""

    __slots__ = ("_calls",)

    def __init__(self, calls: Sequence[HostCall]) -> None:
        self._calls = tuple(calls)

    @staticmethod
    def of(plan: Plan) -> HostCalls | None:
        """Those of ``plan``; None where nothing in it calls the host or asks it to go on."""
        calls = [step for step in leaves(plan.steps) if isinstance(step, HostCall)]
        return HostCalls(calls) if calls or _has_while(plan.steps) else None

    def around(self, run: Run) -> Run:
        """``run`` with the address of a callback behind the others.

        What a function raises ends the run and is raised here.
        """

        def running(bases: bytes) -> None:
            outcome = _Outcome()
            server = self._serve(outcome)
            next(server)
            # A generator and not a function: a signal that arrived while the plan ran, such as
            # Ctrl-C, is raised where Python code is entered, and there it is inside the `try`.
            callback = _CALLBACK(server.send)
            address = ctypes.cast(callback, ctypes.c_void_p).value
            try:
                run(bases + struct.pack("Q", address))
                if outcome.error is not None:
                    raise outcome.error
            finally:
                outcome.error = None  # a traceback keeps this frame, which keeps the error
                next(server, None)

        return running

    def _serve(self, outcome: _Outcome) -> Generator[int, int | None, None]:
        """Takes the address of each call; gives whether the run goes on."""
        try:
            while frame := (yield _GOES_ON):
                self._call(frame)
        except BaseException as error:
            outcome.error = error
        if outcome.error is not None:
            yield _ENDS

    def _call(self, frame: int) -> None:
        """Calls the function of ``{ number, addresses }`` with copies of its arguments.

        The number -1 asks whether to go on: a signal would have been raised before this.
        """
        number, table = struct.unpack("qQ", ctypes.string_at(frame, 16))
        if number < 0:
            return
        call = self._calls[number]
        count = len(call.arguments)
        addresses = struct.unpack(f"{count}Q", ctypes.string_at(table, 8 * count))
        call.function(*map(_copied, addresses, call.types))


def _has_while(steps: Sequence[Step]) -> bool:
    return any(
        isinstance(step, While) or any(_has_while(block.steps) for block in blocks(step))
        for step in steps
    )


@final
class _Outcome:
    """What a function raised in one run."""

    __slots__ = ("error",)

    def __init__(self) -> None:
        self.error: BaseException | None = None


def _copied(address: int, of: tuple[np.dtype[Any], tuple[int, ...]]) -> HostArray:
    """A new array of the memory at an address."""
    dtype, shape = of
    data = bytearray(ctypes.string_at(address, math.prod(shape) * dtype.itemsize))
    return np.frombuffer(data, dtype).reshape(shape)
