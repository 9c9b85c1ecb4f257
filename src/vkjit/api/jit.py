"""jit: a function compiled once for each combination of shapes, dtypes and static values.

A call flattens its arguments, looks the key up, and runs the loaded plan. The key holds the trees,
avals (weak types included) and static values of the arguments, the device and the 64-bit mode.
What was compiled before a tuning that changes its kernels is compiled anew.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any, final

from vkjit import tree, tuning
from vkjit.api.budget import parse_budget
from vkjit.api.call import Call
from vkjit.api.executable import Executable
from vkjit.api.flat import name_of, positions
from vkjit.api.misses import Miss, Misses
from vkjit.api.staged import Lowered, lower
from vkjit.api.stages import CompiledCall, TracedCall
from vkjit.debug.keys import KeyedLoaded
from vkjit.debug.modes import modes
from vkjit.device_array import DeviceArray, current_device, placed
from vkjit.dtypes import x64_enabled
from vkjit.errors import ArgumentError
from vkjit.ir.avals import Aval
from vkjit.ir.primitive import Value
from vkjit.ops.precision import matmul_precision
from vkjit.runtime.device import Device
from vkjit.trace import Traced, tracing

Function = Callable[..., Any]


@final
class Jit:
    """A jitted function; call it like the function itself.

    ``trace(*args)`` and ``lower(*args)`` are stages on the way, ``compile(*args)`` makes the next
    such call ready to run. ``cache_size()`` counts compiled versions, ``misses()`` says why each
    was made.
    """

    def __init__(
        self,
        fn: Function,
        static_argnums: tuple[int, ...],
        static_argnames: tuple[str, ...],
        donate_argnums: tuple[int, ...],
        memory_budget: int | str | None = None,
    ) -> None:
        self.fn = fn
        self.memory_budget = memory_budget
        self.static_argnums = static_argnums
        self.static_argnames = static_argnames
        self.donate_argnums = donate_argnums
        self._cache: dict[object, Executable] = {}
        # Calls with nothing but device arrays skip flattening: their avals and device are the key.
        self._quick: dict[object, Executable] = {}
        self._misses = Misses(name_of(fn))
        update_wrapper(self, fn, updated=())  # the attributes of another Jit are not ours

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Methods: the instance is a static argument, compared by identity or its own equality."""
        if instance is None:
            return self
        return _Bound(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result, computed by the version compiled for these arguments."""
        if tracing():
            return self.fn(*args, **kwargs)
        flat = None if kwargs else _flat_key(args)
        if flat is not None:
            quick = self._quick.get(flat)
            if quick is not None:
                return quick(args)
        call = self._call(args, kwargs)
        device = _device_of(call.leaves)
        found = self._executable(call, device)
        if flat is not None:
            self._quick[flat] = found
        return found([_on(v, device) for v in call.leaves], tuple(call.refs.values()))

    def compile(self, *args: Any, **kwargs: Any) -> Lowered:
        """Compiles for these arguments; nothing runs. The next such call finds it compiled.

        Returns:
            What `lower` returns: among others the memory that a call will need.
        """
        call = self._call(args, kwargs)
        return self._executable(call, _device_of(call.leaves)).lowered

    def trace(self, *args: Any, **kwargs: Any) -> TracedCall:
        """The function's program for these arguments: the first of the stages."""
        call = self._call(args, kwargs)
        traced, out_tree = call.trace(self.fn)

        def lowered(device: Device) -> Lowered:
            return self._lowered(call, traced, out_tree, device)

        trees = call.in_tree, out_tree
        return TracedCall(traced.program, trees, lowered, _device_of(call.leaves))

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The function's program, groups, kernels and plan for these arguments; nothing runs.

        ``compile()`` of the result is what can be called.
        """
        return self.trace(*args, **kwargs).lower()

    def _lowered(
        self, call: Call, traced: Traced, out_tree: tree.TreeDef, device: Device
    ) -> Lowered:
        """With the way on to what can be called."""
        taken = self._taken(call)
        budget = self._budget(device)
        made = lower(traced, device.target, taken, tuning.lookup(device), budget)

        def compiled() -> CompiledCall:
            return CompiledCall(Executable.load(made, device, out_tree), call.in_tree)

        made.compiler = compiled
        return made

    def _taken(self, call: Call) -> tuple[int, ...]:
        """Leaves whose memory results may take over."""
        # A call that fails is run again, for which its arguments must still be there.
        return () if modes.watching else call.donated(self.donate_argnums)

    def _budget(self, device: Device) -> int:
        """Bytes that a call may take; 0 for any number."""
        if self.memory_budget is None:
            return 0
        return parse_budget(self.memory_budget, device.memory_stats().limit_bytes)

    def cache_size(self) -> int:
        """Number of compiled versions."""
        return len(self._cache)

    def misses(self) -> tuple[Miss, ...]:
        """Every compilation so far, with its reason and time; print them to read them."""
        return tuple(self._misses.found)

    def clear_cache(self) -> None:
        """Forgets all compiled versions."""
        self._cache.clear()
        self._quick.clear()

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        static = [n for n in self.static_argnums if -len(args) <= n < len(args)]
        where = positions(static, len(args), f"jit of {name_of(self.fn)}") if static else ()
        return Call(self.fn, self.static_argnames, args, kwargs, where)

    def _executable(self, call: Call, device: Device) -> Executable:
        key = (call.key, device.name, x64_enabled(), matmul_precision(), modes.key)
        found = self._cache.get(key)
        if found is None or not found.is_current():
            self._quick.clear()  # it may hold what is replaced here
            facts = {
                **call.facts(_positional(self.fn)),
                "device": device.name,
                "64-bit mode": str(x64_enabled()),
                "matmul precision": str(matmul_precision()),
                "tuning": f"version {tuning.version()}",
                "debug modes": str(modes),
            }
            begin = time.perf_counter()
            found = self._cache[key] = self._compile(call, device)
            self._misses.add(facts, time.perf_counter() - begin)
        return found

    def _compile(self, call: Call, device: Device) -> Executable:
        traced, out_tree = call.trace(self.fn)
        choose = tuning.at_compile(device)
        taken = self._taken(call)
        lowered = lower(traced, device.target, taken, choose, self._budget(device))
        made = Executable.load(lowered, device, out_tree)
        made.donated = call.donated(self.donate_argnums)
        if modes.keys:
            made.loaded = KeyedLoaded(made.loaded, traced)
        return made


@final
class _Bound:
    """A jitted method with its instance."""

    def __init__(self, jitted: Jit, instance: object) -> None:
        shifted = tuple(n + 1 for n in jitted.donate_argnums)
        statics = (0, *(n + 1 for n in jitted.static_argnums))
        found = getattr(jitted, "_methods", None)
        if found is None:
            found = Jit(jitted.fn, statics, jitted.static_argnames, shifted, jitted.memory_budget)
            jitted._methods = found  # type: ignore[attr-defined]
        self._jitted: Jit = found
        self._instance = instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._jitted(self._instance, *args, **kwargs)


def jit(
    fn: Function | None = None,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    memory_budget: int | str | None = None,
) -> Any:
    """Compiles ``fn`` for the device of its arguments.

    Args:
        fn: a pure function of pytrees of arrays; without it ``jit`` returns a decorator.
        static_argnums: positional arguments that are hashable Python values, not arrays; each value
            compiles anew.
        static_argnames: keyword arguments likewise; names of positional parameters count too.
        donate_argnums: arguments whose memory the results may take over. They cannot be used
            after the call.
        memory_budget: bytes that one call may take, arguments and results included, as an int or a
            string such as ``"4GiB"`` or ``"80%"`` of the device's memory. Values are computed again
            instead of being kept until the planned peak fits; results stay the same.

    Returns:
        a function with the same arguments and results.

    Raises:
        MemoryBudgetError: the budget cannot be met; the message says what can. Raised by calls.
        StaticArgumentError: a static argument is not hashable.
        TracerError: the function needs a traced value as a Python value, or keeps one.
    """
    if fn is None:

        def decorate(inner: Function) -> Any:
            return jit(
                inner,
                static_argnums=static_argnums,
                static_argnames=static_argnames,
                donate_argnums=donate_argnums,
                memory_budget=memory_budget,
            )

        return decorate
    if not callable(fn):
        raise ArgumentError(f"jit: given {type(fn).__name__}, expected a function")
    names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    numbers = _tuple(static_argnums)
    parameters = _positional(fn)
    numbers = tuple(
        dict.fromkeys((*numbers, *(parameters.index(n) for n in names if n in parameters)))
    )
    names = tuple(
        dict.fromkeys((*names, *(parameters[n] for n in numbers if 0 <= n < len(parameters))))
    )
    if memory_budget is not None:
        parse_budget(memory_budget, limit=1 << 50)  # a fault is told here, not by the first call
    return Jit(fn, numbers, names, _tuple(donate_argnums), memory_budget)


def _tuple(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _positional(fn: Function) -> list[str]:
    """Names of the positional parameters, as far as they can be known."""
    try:
        found = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in found if p.kind in kinds]


def _device_of(leaves: Sequence[Value]) -> Device:
    for v in leaves:
        if type(v) is DeviceArray:
            return v.buffer.device
    return current_device()


def _on(value: Value, device: Device) -> DeviceArray:
    if type(value) is DeviceArray and value.buffer.device is device:
        return value
    return placed(value, device.name)


def _flat_key(args: tuple[Any, ...]) -> object:
    """The key of a call whose arguments are all arrays of one device; None for other calls."""
    if not args or type(args[0]) is not DeviceArray:
        return None
    device = args[0].buffer.device
    avals: list[Aval] = []
    for arg in args:
        if type(arg) is not DeviceArray or arg.buffer.device is not device:
            return None
        avals.append(arg.aval)
    return (device, x64_enabled(), matmul_precision(), tuning.version(), modes.key, *avals)
