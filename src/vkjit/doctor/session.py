"""What a stage is given: both devices, its time, and the one way to compare.

A stage is a function of a :class:`Session`. It runs programs on the device and on the host with the
same values, and every comparison goes through :meth:`Session.compare`, where a planted error
enters and where mismatches are collected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, final

import numpy as np

from vkjit import tree
from vkjit.api.flat import flatten_call
from vkjit.api.staged import Lowered, lower
from vkjit.device_array import host_values
from vkjit.doctor.comparing import Array, Mismatch, compared, with_error
from vkjit.doctor.tolerances import DType, Kind, SumBound, allowed, is_float
from vkjit.ir.avals import Aval
from vkjit.runtime.device import Device, DeviceBuffer

_KEPT = 8
"""Mismatches of one stage that are kept; the others are counted."""
OVERFLOW = "overflow"
"""The plant that makes gradients in float16 overflow."""

T = TypeVar("T")


@final
class Program:
    """A function compiled for one device, and called with host arrays or with buffers."""

    def __init__(
        self,
        device: Device,
        function: Callable[..., Any],
        args: Sequence[Any],
        donated: Collection[int] = (),
    ) -> None:
        flat, leaves = flatten_call(function, args)
        traced = flat.trace(leaves)
        self.device = device
        self.lowered: Lowered = lower(traced, device.target, tuple(donated))
        self._flat = flat
        constants = [self._upload(host_values(v)) for v in self.lowered.constants]
        setup = self.lowered.compiled.setup
        packed = [] if setup is None else device.load(setup).run(constants)
        self._loaded = device.load(self.lowered.plan, [*constants, *packed])
        self._donated = tuple(donated)

    @property
    def out_avals(self) -> tuple[Aval, ...]:
        """Shapes and dtypes of the results' leaves."""
        return tuple(self.lowered.program.out_avals)

    def put(self, args: Any) -> list[DeviceBuffer]:
        """The leaves of arguments in device memory."""
        return [self._upload(np.asarray(leaf)) for leaf in tree.leaves(args)]

    def run(self, buffers: Sequence[DeviceBuffer]) -> list[DeviceBuffer]:
        """One call; returns before it is done."""
        return self._loaded.run(buffers, self._donated)

    def get(self, buffers: Sequence[DeviceBuffer]) -> list[Array]:
        """The results' leaves in host memory."""
        pairs = zip(buffers, self.out_avals, strict=True)
        return [self.device.download(b, of.dtype, of.shape) for b, of in pairs]

    def structured(self, leaves: Sequence[Any]) -> Any:
        """The function's result from its leaves."""
        return self._flat.result(leaves)

    def __call__(self, *args: Any) -> Any:
        """The function's result as host arrays."""
        return self.structured(self.get(self.run(self.put(args))))

    def _upload(self, values: Array) -> DeviceBuffer:
        return self.device.upload(np.ascontiguousarray(values).reshape(values.shape))


@final
class Session:
    """One climb of the ladder; ``begin`` starts a stage.

    ``quick`` asks for small cases. ``plant`` names the stage whose results get an error of 1% each,
    or ``overflow``, or ``all``.
    """

    def __init__(
        self, device: Device, host: Device, *, quick: bool = False, plant: str | None = None
    ) -> None:
        self.device = device
        self.host = host
        self.quick = quick
        self.plant = plant
        self.stage = ""
        self.begin("", 0.0)

    def begin(self, stage: str, seconds: float) -> None:
        """Forgets the stage before and starts the clock."""
        self.stage = stage
        self._deadline = time.monotonic() + seconds
        self.rng = np.random.default_rng(0)
        self.checks = 0
        self.faults = 0
        self.worst = 0.0
        self.mismatches: list[Mismatch] = []
        self.done, self.all = 0, 0
        self.notes: list[str] = []
        self.figures: dict[str, Any] = {}

    # -- time -------------------------------------------------------------------------------------

    def left(self) -> float:
        """Seconds that the stage still has."""
        return self._deadline - time.monotonic()

    def cases(self, cases: Iterable[T]) -> Generator[T]:
        """The cases until the time is used up; the first one always."""
        listed = list(cases)
        self.all += len(listed)
        for number, case in enumerate(listed):
            if number and self.left() < 0:
                return
            yield case
            self.done += 1

    # -- comparing --------------------------------------------------------------------------------

    @property
    def planted(self) -> bool:
        """Whether results of this stage get an error."""
        return self.plant in (self.stage, "all")

    @property
    def overflow_planted(self) -> bool:
        """Whether gradients shall overflow."""
        return self.plant in (OVERFLOW, "all")

    def compare(
        self,
        what: str,
        got: Any,
        want: Any,
        limit: float = 0.0,
        scale: Array | float | None = None,
    ) -> None:
        """Checks one array; see ``compared``."""
        found, wanted = np.asarray(got), np.asarray(want)
        if self.planted:
            found = with_error(found)
        distance = compared(what, found, wanted, limit, scale)
        self.checks += 1
        self.worst = max(self.worst, distance.share)
        if distance.mismatch is not None:
            self.report(distance.mismatch)

    def compare_sums(self, what: str, got: Any, want: Array, of: tuple[Array, SumBound]) -> None:
        """Checks sums; ``of`` is the magnitudes of their terms, added up, and their bound."""
        terms, bound = of
        self.compare(what, got, want, bound.limit, bound.scale(want, terms))

    def report(self, mismatch: Mismatch) -> None:
        """Counts a fault and keeps it, unless there are many."""
        self.faults += 1
        if len(self.mismatches) < _KEPT:
            self.mismatches.append(mismatch)

    def require(self, what: str, *, holds: bool, got: str, wanted: str) -> None:
        """Checks a condition that is no comparison of arrays."""
        self.checks += 1
        if not holds:
            self.report(Mismatch(what, 1, 1, (), got, wanted, np.inf, 0.0))

    def both(self, what: str, function: Callable[..., Any], args: Sequence[Any], of: Judge) -> Any:
        """Runs a function on both devices, compares all leaves, returns the device's result."""
        got = Program(self.device, function, args)(*args)
        want = Program(self.host, function, args)(*args)
        self.trees(what, got, want, of)
        return got

    def trees(self, what: str, got: Any, want: Any, of: Judge) -> None:
        """Compares all leaves of two results."""
        leaves = list(zip(tree.leaves(got), tree.leaves(want), strict=True))
        for number, (left, right) in enumerate(leaves):
            name = f"{what}, result {number}" if len(leaves) > 1 else what
            wanted = np.asarray(right)
            self.compare(name, left, wanted, of.limit(wanted.dtype), of.scale(wanted))

    @contextmanager
    def missing_allowed(self, what: str, *kinds: type[Exception]) -> Generator[None]:
        """Notes what the device refuses by name (a type, a size) instead of failing."""
        try:
            yield
        except kinds as error:
            self.notes.append(f"{what}: refused: {str(error).splitlines()[0]}")


@final
class Judge:
    """How results of a kind and a length of sums are judged; see ``tolerances.allowed``.

    Errors are relative to the largest magnitude of the array, or of the same row ``by_row``.
    """

    def __init__(self, kind: Kind, length: int = 1, *, by_row: bool = False) -> None:
        self.kind = kind
        self.length = length
        self.by_row = by_row

    def limit(self, dtype: DType) -> float:
        """The largest relative error of a result of ``dtype``."""
        return allowed(self.kind, dtype, self.length)

    def scale(self, want: Array) -> Array | None:
        """What errors are relative to; None stands for the largest magnitude of all."""
        if not self.by_row or want.ndim == 0 or not is_float(want.dtype):
            return None
        finite = np.where(np.isfinite(want), np.abs(want.astype(np.float64)), 0.0)
        return np.max(finite, axis=-1, keepdims=True, initial=0.0)


EXACT = Judge(Kind.EXACT)
