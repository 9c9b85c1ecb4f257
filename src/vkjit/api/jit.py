"""jit: a function compiled once for each combination of shapes, dtypes and static values.

A call flattens its arguments, looks the key up, and runs the loaded plan. The key holds the trees,
avals (weak types included) and static values of the arguments, the device and the 64-bit mode.
What was compiled before a tuning that changes its kernels is compiled anew.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import update_wrapper
from typing import Any, final

from vkjit import tree, tuning
from vkjit.api.flat import name_of, positions
from vkjit.api.ref import Ref
from vkjit.api.staged import Lowered, lower
from vkjit.device_array import DeviceArray, current_device, device_put
from vkjit.dtypes import x64_enabled
from vkjit.errors import ArgumentError, DonatedBufferError, InternalError, StaticArgumentError
from vkjit.ir.avals import Aval
from vkjit.ir.primitive import Value
from vkjit.ops.precision import matmul_precision
from vkjit.runtime.device import Device, Loaded
from vkjit.runtime.profiling import active
from vkjit.trace import Traced, aval_of, trace, tracing

Function = Callable[..., Any]


@final
class Executable:
    """A loaded plan, and what is needed to make arrays of its outputs."""

    __slots__ = (
        "device",
        "donated",
        "loaded",
        "lowered",
        "out_avals",
        "out_tree",
        "single",
        "tuned_at",
    )

    def __init__(
        self, lowered: Lowered, loaded: Loaded, device: Device, out_tree: tree.TreeDef
    ) -> None:
        self.lowered = lowered
        self.loaded = loaded
        self.device = device
        self.out_tree = out_tree
        self.out_avals = lowered.program.out_avals
        self.donated = lowered.donated
        self.single = out_tree == tree.structure(0)
        self.tuned_at = tuning.version()

    def __call__(self, leaves: Sequence[DeviceArray], refs: Sequence[Ref] = ()) -> Any:
        """Runs the plan on the leaves of the arguments; the last outputs go to ``refs``."""
        buffers = [v.buffer for v in leaves]
        if self.donated:
            _check_donation(leaves, self.donated)
        try:
            measured = active.profile
            if measured is None:
                outs = self.loaded.run(buffers, self.donated)
            else:
                outs = measured.run(self.loaded, self.lowered.plan, buffers, self.donated)
        except InternalError:
            _require_alive(leaves)
            raise
        arrays = [DeviceArray(of, b) for of, b in zip(self.out_avals, outs, strict=True)]
        for ref in reversed(refs):
            ref.replace(arrays.pop())
        return arrays[0] if self.single else tree.unflatten(self.out_tree, arrays)

    def is_current(self) -> bool:
        """Whether the kernels are those that compiling again would choose."""
        now = tuning.version()
        choices = self.lowered.compiled.choices
        if self.tuned_at != now and tuning.is_current(self.device, choices):
            self.tuned_at = now
        return self.tuned_at == now


@final
class Jit:
    """A jitted function; call it like the function itself.

    ``lower(*args)`` shows what would run, ``compile(*args)`` makes it ready to run.
    ``cache_size()`` counts compiled versions.
    """

    def __init__(
        self,
        fn: Function,
        static_argnums: tuple[int, ...],
        static_argnames: tuple[str, ...],
        donate_argnums: tuple[int, ...],
    ) -> None:
        self.fn = fn
        self.static_argnums = static_argnums
        self.static_argnames = static_argnames
        self.donate_argnums = donate_argnums
        self._cache: dict[object, Executable] = {}
        # Calls with nothing but device arrays skip flattening: their avals and device are the key.
        self._quick: dict[object, Executable] = {}
        update_wrapper(self, fn)

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

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The function's program, groups, kernels and plan for these arguments; nothing runs."""
        call = self._call(args, kwargs)
        traced, _ = call.trace(self.fn)
        device = _device_of(call.leaves)
        choose = tuning.lookup(device)
        return lower(traced, device.target, call.donated(self.donate_argnums), choose)

    def cache_size(self) -> int:
        """Number of compiled versions."""
        return len(self._cache)

    def clear_cache(self) -> None:
        """Forgets all compiled versions."""
        self._cache.clear()
        self._quick.clear()

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        static = [n for n in self.static_argnums if -len(args) <= n < len(args)]
        where = positions(static, len(args), f"jit of {name_of(self.fn)}") if static else ()
        return _Call(self, args, kwargs, where)

    def _executable(self, call: _Call, device: Device) -> Executable:
        key = (call.key, device.name, x64_enabled(), matmul_precision())
        found = self._cache.get(key)
        if found is None or not found.is_current():
            self._quick.clear()  # it may hold what is replaced here
            found = self._cache[key] = self._compile(call, device)
        return found

    def _compile(self, call: _Call, device: Device) -> Executable:
        traced, out_tree = call.trace(self.fn)
        choose = tuning.at_compile(device)
        lowered = lower(traced, device.target, call.donated(self.donate_argnums), choose)
        constants = [device_put(v, device.name).buffer for v in lowered.constants]
        setup = lowered.compiled.setup
        packed = [] if setup is None else device.load(setup).run(constants)
        loaded = device.load(lowered.plan, [*constants, *packed])
        return Executable(lowered, loaded, device, out_tree)


@final
class _Bound:
    """A jitted method with its instance."""

    def __init__(self, jitted: Jit, instance: object) -> None:
        shifted = tuple(n + 1 for n in jitted.donate_argnums)
        statics = (0, *(n + 1 for n in jitted.static_argnums))
        found = getattr(jitted, "_methods", None)
        if found is None:
            found = Jit(jitted.fn, statics, jitted.static_argnames, shifted)
            jitted._methods = found  # type: ignore[attr-defined]
        self._jitted: Jit = found
        self._instance = instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._jitted(self._instance, *args, **kwargs)


@final
class _Call:
    """One call taken apart: dynamic leaves, static values, and the key."""

    __slots__ = ("_args", "_kwargs", "_static", "in_tree", "key", "leaves", "refs")

    def __init__(
        self, jitted: Jit, args: tuple[Any, ...], kwargs: dict[str, Any], static: tuple[int, ...]
    ) -> None:
        self._args = args
        self._static = static
        names = jitted.static_argnames
        fixed: object = ()
        dynamic: tuple[Any, ...] = args
        self._kwargs = kwargs
        if static or (names and kwargs):
            dynamic = tuple(a for i, a in enumerate(args) if i not in static)
            statics = tuple((i, args[i]) for i in static)
            named = tuple((n, kwargs[n]) for n in names if n in kwargs)
            kwargs = {k: v for k, v in kwargs.items() if k not in names}
            fixed = (statics, named)
            _require_hashable(jitted.fn, (*statics, *named))
        leaves, self.in_tree = tree.flatten((dynamic, kwargs))
        self.refs = {i: v for i, v in enumerate(leaves) if type(v) is Ref}
        self.leaves = [v.value if type(v) is Ref else v for v in leaves] if self.refs else leaves
        avals = tuple([_aval(v) for v in self.leaves])
        self.key = (self.in_tree, avals, _typed(fixed), tuple(self.refs))

    def trace(self, fn: Function) -> tuple[Traced, tree.TreeDef]:
        """The program of the call, and the structure of its result.

        The contents of the Refs among the arguments are the last results.
        """
        out_trees: list[tree.TreeDef] = []

        def flat(*given: Value) -> list[Value]:
            leaves = [Ref(v) if i in self.refs else v for i, v in enumerate(given)]
            dynamic, kwargs = tree.unflatten(self.in_tree, leaves)
            rest = iter(dynamic)
            args = [a if i in self._static else next(rest) for i, a in enumerate(self._args)]
            static = {k: v for k, v in self._kwargs.items() if k not in kwargs}
            out, out_tree = tree.flatten(fn(*args, **static, **kwargs))
            out_trees.append(out_tree)
            return [*out, *[leaves[i].value for i in self.refs]]

        return trace(flat, [_aval(v) for v in self.leaves], name_of(fn)), out_trees[0]

    def donated(self, argnums: Iterable[int]) -> tuple[int, ...]:
        """Positions of the leaves of donated arguments."""
        chosen = {n % len(self._args) for n in argnums if -len(self._args) <= n < len(self._args)}
        found: list[int] = []
        start = 0
        for i, arg in enumerate(self._args):
            if i in self._static:
                continue
            count = len(tree.leaves(arg))
            if i in chosen:
                found.extend(range(start, start + count))
            start += count
        return tuple(dict.fromkeys((*found, *self.refs)))


def jit(
    fn: Function | None = None,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
) -> Any:
    """Compiles ``fn`` for the device of its arguments.

    Args:
        fn: a pure function of pytrees of arrays; without it ``jit`` returns a decorator.
        static_argnums: positional arguments that are hashable Python values, not arrays; each value
            compiles anew.
        static_argnames: keyword arguments likewise; names of positional parameters count too.
        donate_argnums: arguments whose memory the results may take over. They cannot be used
            after the call.

    Returns:
        a function with the same arguments and results.

    Raises:
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
    return Jit(fn, numbers, names, _tuple(donate_argnums))


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


def _aval(value: Value) -> Aval:
    return value.aval if type(value) is DeviceArray else aval_of(value)


def _typed(fixed: object) -> object:
    """Static values with their types: 1, 1.0 and True are equal but not the same value."""
    if isinstance(fixed, tuple):
        return tuple(_typed(v) for v in fixed)  # type: ignore[misc]
    return (type(fixed), fixed)


def _require_hashable(fn: Function, statics: Iterable[tuple[int | str, Any]]) -> None:
    for name, value in statics:
        try:
            hash(value)
        except TypeError as error:
            raise StaticArgumentError(
                f"jit of {name_of(fn)}: static argument {name!r} is a {type(value).__name__}, "
                "which is not hashable; pass a tuple, a frozen dataclass or another hashable value"
            ) from error


def _device_of(leaves: Sequence[Value]) -> Device:
    for v in leaves:
        if type(v) is DeviceArray:
            return v.buffer.device
    return current_device()


def _on(value: Value, device: Device) -> DeviceArray:
    if type(value) is DeviceArray and value.buffer.device is device:
        return value
    return device_put(value, device.name)


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
    return (device, x64_enabled(), matmul_precision(), tuning.version(), *avals)


def _require_alive(leaves: Sequence[DeviceArray]) -> None:
    """Says which argument was donated before, if one was."""
    for position, leaf in enumerate(leaves):
        if leaf.buffer.released:
            raise DonatedBufferError(
                f"jit: array {position} of the call, {leaf.aval}, was donated to an earlier call; "
                "use that call's result, or do not donate it (donate_argnums)"
            )


def _check_donation(leaves: Sequence[DeviceArray], donated: Sequence[int]) -> None:
    """A donated buffer must not be passed anywhere else in the same call."""
    seen: dict[int, int] = {}
    for position, leaf in enumerate(leaves):
        key = id(leaf.buffer)
        if key in seen and (position in donated or seen[key] in donated):
            raise DonatedBufferError(
                f"jit: one array {leaf.aval} is passed twice, once donated; pass a copy, or do "
                "not donate it"
            )
        seen[key] = position
