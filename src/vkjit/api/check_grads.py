"""check_grads: derivatives against differences of values, and devices against each other.

Along a direction v of signs, D(h) = (f(x + h v) - f(x - h v)) / 2h differs from the derivative by
O(h^2) and by the rounding of f over h; h is the cube root of the unit roundoff, which balances
both. Richardson's (4 D(h) - D(2h)) / 3 is what is compared, and |D(h) - D(2h)| / 3 what its error
is taken to be, on top of rounding: large where f bends or has a kink. One direction for each leaf
tells which derivative is wrong; bisection then tells in which element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast, final

import ml_dtypes
import numpy as np

from vkjit import dtypes, tree
from vkjit.api.autodiff import jvp
from vkjit.api.flat import flatten_call, name_of
from vkjit.api.jit import jit
from vkjit.api.pullback import vjp
from vkjit.device_array import default_device, host_values
from vkjit.dtypes import DType, is_float, x64_enabled
from vkjit.errors import ArgumentError, GradientError
from vkjit.ir.evaluate import Evaluator
from vkjit.ir.primitive import Value
from vkjit.ir.program import Program
from vkjit.trace import aval_of

Function = Callable[..., Any]
Array = np.ndarray[Any, Any]

GRADIENT_TOLERANCE = {"float64": 1e-5, "float32": 2e-3, "float16": 2e-2, "bfloat16": 1e-1}
"""Relative, of derivatives against differences; as in JAX, wider in 16 bits."""
DEVICE_TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "float16": 5e-3, "bfloat16": 4e-2}
"""Of one device against another, relative to the largest magnitude of a leaf."""
_ALL = 32
"""Leaves of at most so many elements are searched element by element for the worst."""


@final
@dataclass(frozen=True)
class _How:
    """What is checked and how closely."""

    name: str
    modes: tuple[str, ...]
    atol: float | None
    rtol: float | None
    eps: float | None
    devices: tuple[str | None, ...]


def check_grads(  # noqa: PLR0913  JAX's parameters, and devices
    f: Function,
    args: Sequence[Any],
    order: int = 1,
    modes: Sequence[str] = ("fwd", "rev"),
    atol: float | None = None,
    rtol: float | None = None,
    eps: float | None = None,
    *,
    devices: Sequence[str] | None = None,
) -> None:
    """Checks derivatives of ``f`` at ``args`` against central differences of its values.

    Differences are taken on the host, in float64 where 64-bit dtypes are enabled, else in float32.
    Integer arguments stay fixed.

    Args:
        f: of pytrees of arrays; smooth around ``args``.
        args: where to check.
        order: of the highest derivative checked.
        modes: ``"fwd"`` checks ``jvp``, ``"rev"`` checks ``vjp``; higher orders nest them.
        atol: absolute tolerance; by default what rounding alone may do.
        rtol: relative tolerance; by default 2e-3 in float32, 1e-5 in float64.
        eps: step of the differences; by default the cube root of the unit roundoff of the coarsest
            float dtype in ``f``.
        devices: names of devices on which ``f`` and its derivatives are compiled and run; all are
            checked, and compared with the first. By default the host evaluates them.

    Raises:
        GradientError: a derivative is wrong, or devices differ; names the worst leaf, the index in
            it, and both values.
        ArgumentError: ``modes`` or ``order`` is not one that exists.
    """
    unknown = set(modes) - {"fwd", "rev"}
    if unknown or order < 1 or not modes:
        raise ArgumentError(
            f"check_grads: order {order}, modes {tuple(modes)}; expected a positive order and some "
            "of 'fwd' and 'rev'"
        )
    where = (None,) if devices is None else tuple(devices)
    how = _How(name_of(f), tuple(modes), atol, rtol, eps, where)
    _check(f, tuple(args), order, how, "")


def _check(f: Function, args: tuple[Any, ...], order: int, how: _How, of: str) -> None:
    host = _Host(f, args, how)
    _compare_devices(how, f"value{of}", [_run(f, args, d) for d in how.devices])
    if "fwd" in how.modes:
        _check_forward(f, args, host, how, of)
        if order > 1:

            def pushed(primals: Any, tangents: Any) -> Any:
                return jvp(f, primals, tangents)

            _check(pushed, (args, args), order - 1, replace(how, modes=("fwd",)), f" of jvp{of}")
    if "rev" in how.modes:
        _check_reverse(f, args, host, how, of)
        if order > 1:

            def pulled(*primals: Any) -> Any:
                value, pullback = vjp(f, *primals)
                return pullback(value)

            _check(pulled, args, order - 1, how, f" of vjp{of}")


@final
@dataclass(frozen=True)
class _Slope:
    """A derivative from differences, and how far it may be off besides rounding."""

    value: Array
    error: Array


@final
class _Host:
    """A function on the host, in the widest dtype, and differences of its values."""

    def __init__(self, f: Function, args: tuple[Any, ...], how: _How) -> None:
        leaves = tree.leaves(args)
        wide = dtypes.float64 if x64_enabled() else dtypes.float32
        self.point = [
            np.asarray(host_values(v), wide) if _is_float(v) else host_values(v) for v in leaves
        ]
        flat, _ = flatten_call(f, args)
        traced = flat.trace(self.point)
        self._constants = [host_values(v) for v in traced.captured]
        self._run = Evaluator(traced.program).run
        self.unit = _coarsest(traced.program)
        self.eps = how.eps or float(np.cbrt(self.unit))
        self.floats = [i for i, v in enumerate(leaves) if _is_float(v)]
        self.values = self._outs(self.point)
        named = tree.leaves_with_path(flat.result(self.values[: flat.main]))
        self.paths = [tree.keystr(path) or "the value" for path, _ in named]
        self.rng = np.random.default_rng(len(leaves))

    def _outs(self, leaves: Sequence[Array]) -> list[Array]:
        return self._run([*self._constants, *leaves])

    def along(self, direction: dict[int, Array]) -> list[_Slope]:
        """The derivative of each result, from differences."""
        pairs = zip(self._central(direction, 1), self._central(direction, 2), strict=True)
        return [_Slope((4 * near - far) / 3, (near - far) / 3) for near, far in pairs]

    def _central(self, direction: dict[int, Array], steps: int) -> list[Array]:
        ends: list[list[Array]] = []
        for step in (steps * self.eps, -steps * self.eps):
            moved = list(self.point)
            for i, v in direction.items():
                moved[i] = (moved[i] + step * v).astype(moved[i].dtype)
            ends.append(self._outs(moved))
        return [
            (a.astype(np.float64) - b.astype(np.float64)) / (2 * steps * self.eps)
            for a, b in zip(*ends, strict=True)
        ]

    def signs(self, shape: tuple[int, ...]) -> Array:
        """A direction."""
        return self.rng.choice(np.array([-1.0, 1.0]), shape)

    def noise(self, values: Array) -> float:
        """What rounding of ``values`` may do to the difference of their sum."""
        norm = float(np.linalg.norm(values.astype(np.float64)))
        return 4 * self.unit * max(norm, 1.0) / self.eps


@final
@dataclass(frozen=True)
class _Fault:
    """A derivative that is off, by ``excess`` times what is allowed."""

    excess: float
    leaf: int
    given: float
    expected: float
    index: tuple[int, ...] = ()


def _check_forward(f: Function, args: tuple[Any, ...], host: _Host, how: _How, of: str) -> None:
    """Tangents of all results along one direction, element by element."""
    direction = {i: host.signs(host.point[i].shape) for i in host.floats}
    leaves, structure = tree.flatten(args)
    tangents = [
        np.asarray(direction[i], aval_of(v).dtype) if i in direction else host_values(v)
        for i, v in enumerate(leaves)
    ]

    def pushed(primals: Any, moved: Any) -> Any:
        return jvp(f, primals, moved)[1]

    given = (args, tree.unflatten(structure, tangents))
    runs = [_run(pushed, given, device) for device in how.devices]
    wanted = host.along(direction)
    for device, run in zip(how.devices, runs, strict=True):
        faults = [
            _worst(how, host, i, got, want)
            for i, (got, want) in enumerate(zip(run.leaves, wanted, strict=True))
            if is_float(got.dtype)
        ]
        _raise(faults, how, host, f"jvp{of}", device, [f"result {p}" for p in host.paths])
    _compare_devices(how, f"jvp{of}", runs)


def _worst(how: _How, host: _Host, leaf: int, given: Array, slope: _Slope) -> _Fault | None:
    """The element that is furthest off."""
    if given.size == 0:
        return None
    value, expected = given.astype(np.float64), slope.value
    rtol = _rtol(how, given.dtype)
    noise = 4 * host.unit * np.maximum(np.abs(host.values[leaf].astype(np.float64)), 1) / host.eps
    atol = noise + np.abs(slope.error) if how.atol is None else how.atol
    allowed = atol + rtol * np.maximum(np.abs(value), np.abs(expected))
    with np.errstate(all="ignore"):
        excess = _finite(np.abs(value - expected) / allowed, value, expected)
    worst = np.unravel_index(int(np.argmax(excess)), given.shape)
    index = tuple(int(i) for i in worst)
    return _Fault(float(excess[worst]), leaf, float(value[worst]), float(expected[worst]), index)


def _finite(excess: Array, given: Array, expected: Array) -> Array:
    """NaN and infinities count as right where both agree, else as wrong without bounds."""
    same = (given == expected) | (np.isnan(given) & np.isnan(expected))
    wrong = np.isnan(excess) | ~np.isfinite(given) | ~np.isfinite(expected)
    return np.where(same, 0.0, np.where(wrong, np.inf, excess))


def _check_reverse(f: Function, args: tuple[Any, ...], host: _Host, how: _How, of: str) -> None:
    """Cotangents of all arguments, leaf by leaf along one direction."""
    outs = host.values
    cts = [host.signs(v.shape) if is_float(v.dtype) else np.zeros(v.shape) for v in outs]

    def pulled(*given: Any) -> Any:
        value, pullback = vjp(f, *given)
        leaves, structure = tree.flatten(value)
        like = [np.asarray(ct, aval_of(v).dtype) for ct, v in zip(cts, leaves, strict=True)]
        return pullback(tree.unflatten(structure, like))

    runs = [_run(pulled, args, device) for device in how.devices]
    weighed = [(ct * v).ravel() for ct, v in zip(cts, outs, strict=True) if is_float(v.dtype)]
    noise = host.noise(np.concatenate([np.zeros(1), *weighed]))
    search = _Search(host, how, cts, noise)
    names = [f"argument {p}" for p in (tree.keystr(p) for p, _ in tree.leaves_with_path(args))]
    for device, run in zip(how.devices, runs, strict=True):
        faults = [search.leaf(i, run.leaves[i]) for i in host.floats if run.leaves[i].size]
        worst = max(faults, key=lambda fault: fault.excess, default=None)
        if worst is not None and worst.excess > 1:
            found = search.element(worst, run.leaves[worst.leaf])
            _raise([found], how, host, f"vjp{of}", device, names)
    _compare_devices(how, f"vjp{of}", runs)


@final
@dataclass(frozen=True)
class _Search:
    """Derivatives of the results weighed by ``cts``, along directions within one leaf."""

    host: _Host
    how: _How
    cts: list[Array]
    noise: float

    def leaf(self, leaf: int, given: Array) -> _Fault:
        """How far the cotangent of a leaf is off, along a direction."""
        return self._along(leaf, given, self.host.signs(given.shape))

    def _along(self, leaf: int, given: Array, direction: Array) -> _Fault:
        moved = self.host.along({leaf: direction})
        expected = sum(float(np.vdot(ct, d.value)) for ct, d in zip(self.cts, moved, strict=True))
        error = sum(float(np.vdot(ct, d.error)) for ct, d in zip(self.cts, moved, strict=True))
        parts = np.where(direction != 0, given.astype(np.float64) * direction, 0.0)
        value = float(parts.sum())
        rtol = _rtol(self.how, given.dtype)
        atol = self.noise + abs(error) if self.how.atol is None else self.how.atol
        allowed = atol + rtol * max(abs(value), abs(expected), float(np.linalg.norm(parts)))
        with np.errstate(all="ignore"):
            ratio = np.abs(np.float64(value) - expected) / np.float64(allowed)
        excess = _finite(ratio, np.asarray(value), np.asarray(expected))
        return _Fault(float(excess), leaf, value, expected)

    def element(self, fault: _Fault, given: Array) -> _Fault:
        """The element that is off, by halving a leaf that is."""
        low, high = 0, given.size
        while high - low > _ALL:
            middle = (low + high) // 2
            halves = [(low, middle), (middle, high)]
            found = [self._along(fault.leaf, given, self._signs(given, *h)) for h in halves]
            low, high = halves[int(found[1].excess > found[0].excess)]
        candidates: list[_Fault] = []
        for position in range(low, high):
            unit: Array = np.zeros(given.size)
            unit[position] = 1
            one = self._along(fault.leaf, given, unit.reshape(given.shape))
            index = tuple(int(i) for i in np.unravel_index(position, given.shape))
            candidates.append(replace(one, index=index))
        worst = max(candidates, key=lambda candidate: candidate.excess)
        return replace(worst, excess=max(worst.excess, fault.excess))

    def _signs(self, given: Array, low: int, high: int) -> Array:
        direction: Array = np.zeros(given.size)
        direction[low:high] = self.host.signs((high - low,))
        return direction.reshape(given.shape)


def _raise(  # noqa: PLR0913  what the message says
    faults: Sequence[_Fault | None],
    how: _How,
    host: _Host,
    what: str,
    device: str | None,
    names: Sequence[str],
) -> None:
    """Refuses the worst of ``faults``, if one exceeds what is allowed."""
    found = [fault for fault in faults if fault is not None]
    worst = max(found, key=lambda fault: fault.excess, default=None)
    if worst is None or worst.excess <= 1:
        return
    where = "" if device is None else f" on {device}"
    raise GradientError(
        f"check_grads {how.name}: {what}{where}: {names[worst.leaf]}, index {worst.index}: "
        f"{worst.given:.9g}, expected {worst.expected:.9g} by central differences with step "
        f"{host.eps:.2g}; off by {worst.excess:.3g} times what is allowed"
    )


@final
@dataclass(frozen=True)
class _Run:
    """What a function returned on a device."""

    leaves: list[Array]
    paths: list[str]


def _run(f: Function, args: tuple[Any, ...], device: str | None) -> _Run:
    """``f`` compiled for a device; without one, op by op on the host."""
    with nullcontext() if device is None else default_device(device):
        result = f(*args) if device is None else jit(f)(*tree.map(host_values, args))
    named = tree.leaves_with_path(result)
    return _Run([host_values(v) for _, v in named], [tree.keystr(p) for p, _ in named])


def _compare_devices(how: _How, what: str, runs: Sequence[_Run]) -> None:
    """All devices against the first."""
    worst: tuple[float, str] = (1.0, "")
    for device, run in zip(how.devices[1:], runs[1:], strict=True):
        for path, got, want in zip(run.paths, run.leaves, runs[0].leaves, strict=True):
            if got.size == 0:
                continue
            value, expected = got.astype(np.float64), want.astype(np.float64)
            largest = float(np.max(np.abs(expected), initial=0, where=np.isfinite(expected)))
            tolerance = DEVICE_TOLERANCE.get(got.dtype.name, 0.0)
            allowed = tolerance * max(largest, float(np.finfo(np.float32).tiny))
            with np.errstate(all="ignore"):
                off = _finite(np.abs(value - expected) / allowed, value, expected)
            at = np.unravel_index(int(np.argmax(off)), got.shape)
            if off[at] > worst[0]:
                message = (
                    f"check_grads {how.name}: {what}{path and ' ' + path}, index "
                    f"{tuple(int(i) for i in at)}: {value[at]:.9g} on {device}, "
                    f"{expected[at]:.9g} on {how.devices[0]}; off by {off[at]:.3g} times what is "
                    "allowed"
                )
                worst = (float(off[at]), message)
    if worst[1]:
        raise GradientError(worst[1])


def _is_float(value: Value) -> bool:
    return is_float(aval_of(value).dtype)


def _rtol(how: _How, dtype: DType) -> float:
    return GRADIENT_TOLERANCE[dtype.name] if how.rtol is None else how.rtol


def _coarsest(program: Program) -> float:
    """The largest unit roundoff of the float dtypes in a program."""
    outs = [v for eqn in program.eqns for v in eqn.outs]
    units = [_unit(v.aval.dtype) for v in (*program.params, *outs) if is_float(v.aval.dtype)]
    units += [u for eqn in program.eqns for inner in eqn.prim.programs() if (u := _coarsest(inner))]
    return max(units, default=0.0)


def _unit(dtype: DType) -> float:
    return float(cast("Any", ml_dtypes.finfo(dtype)).eps) / 2
