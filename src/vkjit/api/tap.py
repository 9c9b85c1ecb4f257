"""tap: the gradient of an inner value, added to an array of the caller's."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from vkjit.api.flat import name_of
from vkjit.api.ref import Ref
from vkjit.control.callback import call
from vkjit.control.tap import CellSink, Sink
from vkjit.control.tap import tap as bind_tap
from vkjit.dtypes import is_float
from vkjit.errors import DTypeError, ShapeError
from vkjit.ir.primitive import Array, Value
from vkjit.numpy import asarray
from vkjit.trace import aval_of, tracing


def tap(x: Any, acc: Ref | Array) -> Any:
    """``x``; when it is differentiated backward, dL/dx is added into ``acc``.

    The value ``x`` is not kept for that. Where ``tap`` runs more than once, in the turns of a loop
    or for the examples of a batch inside of what is differentiated, all gradients are added. The
    innermost ``grad`` or ``vjp`` around ``tap`` gives the gradient; without one, and in forward
    mode, nothing happens.

    Args:
        x: a float array.
        acc: of the shape of ``x``: a ``Ref``, passed to ``jit`` as an argument like any other that
            is written; or a NumPy array, which is written by a call of the host each time that the
            backward pass has run. Gradients are cast to its dtype and added in it.

    Raises:
        ShapeError: the shapes differ.
        DTypeError: ``x`` or ``acc`` is not a float, or ``acc`` is neither a Ref nor a NumPy array.
        TracerError: gradients cannot be written into the Ref from where they are computed, as
            under ``vmap`` of ``grad``.
    """
    of = aval_of(x)
    sink: Sink
    if isinstance(acc, Ref):
        sink, given = CellSink(acc), aval_of(acc.value)
    elif type(acc) is np.ndarray and acc.flags.writeable:
        sink, given = HostSink(acc), aval_of(acc)
    else:
        raise DTypeError(
            f"tap: acc is a {name_of(type(acc))}, expected a Ref or a writable NumPy array"
        )
    if given.shape != of.shape:
        raise ShapeError(f"tap: x is {of}, acc {given}; expected equal shapes")
    if not (is_float(of.dtype) and is_float(given.dtype)):
        raise DTypeError(f"tap: x is {of}, acc {given}; expected floats")
    value = asarray(x)
    return bind_tap(value, sink) if tracing() else value


@final
@dataclass(frozen=True, eq=False)
class HostSink(Sink):
    """A NumPy array, written one call at a time."""

    array: Array
    lock: threading.Lock = field(default_factory=threading.Lock)

    def receive(self, ct: Value) -> None:
        """Adds by a call of the host."""
        call(self.added, "tap", [ct])

    def added(self, ct: Array) -> None:
        """Adds now."""
        with self.lock:
            np.add(self.array, ct.astype(self.array.dtype), out=self.array)
