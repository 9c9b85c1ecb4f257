"""Functions with derivatives of the user's own: ``custom_jvp`` and ``custom_vjp``.

Both keep the function as a program inside the program, with its rules beside it. Rules are traced
where the function is called, so they may read whatever it reads; a rule that applies the function
itself leaves the rules of that inner application for later, since they may never be needed.
"""

from __future__ import annotations

import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any, cast, final

from vkjit import tree
from vkjit.api.flat import name_of, positions
from vkjit.control.custom_jvp import CustomJvpCall, DeferredJvp, TracedJvp
from vkjit.control.custom_vjp import CustomVjpCall, DeferredVjp, TracedVjp
from vkjit.control.stage import together
from vkjit.dtypes import is_float
from vkjit.errors import ArgumentError, DTypeError, ShapeError, UserError
from vkjit.ir.avals import Aval, aval
from vkjit.ir.primitive import Value
from vkjit.numpy import add, asarray, zeros_like
from vkjit.trace import Traced, aval_of, bind_outs, trace, tracing

Function = Callable[..., Any]


@final
class _Open(threading.local):
    """Functions whose rules are being traced in this thread."""

    def __init__(self) -> None:
        self.functions: list[object] = []


_open = _Open()


@final
class _Call:
    """One call: its leaves, the trees around them, and what is not differentiated."""

    def __init__(self, custom: Custom, args: Sequence[Any], fixed: Sequence[int]) -> None:
        self.custom = custom
        self.args = tuple(args)
        self.fixed = tuple(args[i] for i in fixed)
        self.moving = tuple(i for i in range(len(args)) if i not in fixed)
        diff = tuple(args[i] for i in self.moving)
        leaves, self.in_tree = tree.flatten(diff)
        self.leaves: list[Value] = leaves
        self.avals = [self._aval(path, leaf) for path, leaf in tree.leaves_with_path(diff)]
        self.out_tree: tree.TreeDef = self.in_tree
        self.outs: tuple[Aval, ...] = ()

    def _aval(self, path: tree.KeyPath, leaf: object) -> Aval:
        try:
            return aval_of(leaf)
        except UserError as error:
            first = path[0]
            number = self.moving[first.idx] if isinstance(first, tree.SequenceKey) else 0
            raise DTypeError(
                f"{self.custom.what}: argument {number}{tree.keystr(path[1:])} is a "
                f"{type(leaf).__name__}, expected an array; name its position in nondiff_argnums"
            ) from error

    def whole(self, leaves: Sequence[Value]) -> list[Any]:
        """All arguments, with ``leaves`` in the place of those that are differentiated."""
        full = list(self.args)
        parts = tree.unflatten(self.in_tree, leaves)
        for i, part in zip(self.moving, parts, strict=True):
            full[i] = part
        return full

    def body(self) -> Traced:
        """The function itself; notes what it returns."""

        def flat(*leaves: Value) -> list[Value]:
            outs, self.out_tree = tree.flatten(self.custom.fn(*self.whole(leaves)))
            return outs

        traced = trace(flat, self.avals, name_of(self.custom.fn))
        self.outs = traced.program.out_avals
        return traced

    def fitting(self, value: Any, role: str) -> list[Value]:
        """The leaves of what a rule returned in the place of the function's result.

        Raises:
            ShapeError, DTypeError: it is not like the function's result.
        """
        found = tree.structure(value)
        what = f"{self.custom.what}: {role}"
        if found != self.out_tree:
            raise ShapeError(f"{what} has structure {found}, expected {self.out_tree}")
        wanted = zip(tree.leaves_with_path(value), self.outs, strict=True)
        return [_like(leaf, of, what + tree.keystr(path)) for (path, leaf), of in wanted]


class Custom(ABC):
    """A function with a rule; call it like the function itself."""

    def __init__(self, fn: Function, nondiff_argnums: tuple[int, ...]) -> None:
        self.fn = fn
        self.nondiff_argnums = nondiff_argnums
        update_wrapper(self, fn, updated=())  # attributes of a decorated function are its own

    @property
    @abstractmethod
    def what(self) -> str:
        """The transformation and the function, for messages."""

    @abstractmethod
    def _record(self, call: _Call) -> Sequence[Value]:
        """Binds the call; returns the leaves of its result."""

    @abstractmethod
    def _ready(self) -> bool:
        """Whether there is a rule."""

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Methods: the instance is the first argument."""
        if instance is None:
            return self

        def bound(*args: Any, **kwargs: Any) -> Any:
            return self(instance, *args, **kwargs)

        return bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result."""
        if not self._ready():
            raise ArgumentError(
                f"{self.what}: it has no rule, expected one before the first call; give it with "
                f"{self._definer}(...)"
            )
        given = self._positional(args, kwargs)
        if not tracing():
            return tree.map(asarray, self.fn(*given))
        fixed = positions(self.nondiff_argnums, len(given), f"{self.what}: nondiff_argnums")
        call = _Call(self, given, sorted(fixed))
        outs = self._record(call)
        return tree.unflatten(call.out_tree, list(outs))

    _definer = "defjvp"

    def _positional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """All arguments by position, defaults included."""
        try:
            bound = inspect.signature(self.fn).bind(*args, **kwargs)
        except ValueError:  # a function without a signature
            return args
        bound.apply_defaults()
        if bound.kwargs:
            raise ArgumentError(
                f"{self.what}: keyword-only arguments {sorted(bound.kwargs)}, expected arguments "
                "that can be given by position; rules take them so"
            )
        return bound.args

    def _deferred(self) -> bool:
        return self in _open.functions

    @contextmanager
    def _tracing_rules(self) -> Generator[None]:
        _open.functions.append(self)
        try:
            yield
        finally:
            _open.functions.pop()


@final
class CustomJvp(Custom):
    """A function with a forward derivative; see ``custom_jvp``."""

    def __init__(self, fn: Function, nondiff_argnums: tuple[int, ...]) -> None:
        super().__init__(fn, nondiff_argnums)
        self.rule: Function | None = None

    @property
    def what(self) -> str:
        """The transformation and the function, for messages."""
        return f"custom_jvp {name_of(self.fn)}"

    def _ready(self) -> bool:
        return self.rule is not None

    def defjvp(self, rule: Function) -> Function:
        """Sets the derivative.

        Args:
            rule: takes the arguments of ``nondiff_argnums``, then a tuple of the others and a tuple
                of their tangents; returns the result and its tangent, which must be linear in the
                tangents. Tangents of arguments that are not floats are zeros of their own dtype.

        Returns:
            ``rule``.
        """
        self.rule = rule
        return rule

    def defjvps(self, *rules: Function | None) -> None:
        """Sets the derivative with respect to each argument by itself; the tangents are added.

        Args:
            rules: for each argument, ``rule(tangent, result, *arguments)``, the tangent of the
                result, or None for zero.

        Raises:
            ArgumentError: the function has ``nondiff_argnums``.
        """
        if self.nondiff_argnums:
            raise ArgumentError(
                f"{self.what}: defjvps with nondiff_argnums {self.nondiff_argnums}, expected none; "
                "use defjvp"
            )

        def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
            out = self(*primals)
            total = tree.map(zeros_like, out)
            for tangent, each in zip(tangents, rules, strict=True):
                if each is not None:
                    total = tree.map(add, total, each(tangent, out, *primals))
            return out, total

        self.defjvp(rule)

    def _record(self, call: _Call) -> Sequence[Value]:
        body = call.body()
        if self._deferred():
            staged = together([body])

            def later(avals: Sequence[Aval]) -> TracedJvp:
                del avals  # those of the call
                found = together([self._traced(call)])
                return TracedJvp(found.programs[0], found.captured, 0)

            rule: TracedJvp | DeferredJvp = DeferredJvp(later, len(staged.captured))
        else:
            staged = together([body, self._traced(call)])
            rule = TracedJvp(staged.programs[1], (), len(staged.captured))
        prim = CustomJvpCall(staged.programs[0], rule, len(staged.captured), name_of(self.fn))
        return bind_outs(prim, *staged.captured, *call.leaves)

    def _traced(self, call: _Call) -> Traced:
        count = len(call.avals)
        floats = [i for i, a in enumerate(call.avals) if is_float(a.dtype)]
        assert self.rule is not None
        user = self.rule

        def flat(*values: Value) -> list[Value]:
            moving = [zeros_like(v) for v in values[:count]]
            for i, t in zip(floats, values[count:], strict=True):
                moving[i] = t
            primals = tree.unflatten(call.in_tree, values[:count])
            tangents = tree.unflatten(call.in_tree, moving)
            found = user(*call.fixed, primals, tangents)
            out, dout = _pair(found, f"{self.what}: the rule", "(result, tangent of the result)")
            outs = call.fitting(out, "the result of the rule")
            douts = call.fitting(dout, "the tangent from the rule")
            return [*outs, *[d for d, of in zip(douts, call.outs, strict=True) if _moves(of)]]

        avals = [*call.avals, *[_strong(call.avals[i]) for i in floats]]
        with self._tracing_rules():
            return trace(flat, avals, f"{name_of(self.fn)}.jvp")


@final
class CustomVjp(Custom):
    """A function with a backward derivative; see ``custom_vjp``."""

    _definer = "defvjp"

    def __init__(self, fn: Function, nondiff_argnums: tuple[int, ...]) -> None:
        super().__init__(fn, nondiff_argnums)
        self.rules: tuple[Function, Function] | None = None

    @property
    def what(self) -> str:
        """The transformation and the function, for messages."""
        return f"custom_vjp {name_of(self.fn)}"

    def _ready(self) -> bool:
        return self.rules is not None

    def defvjp(self, fwd: Function, bwd: Function) -> None:
        """Sets the derivative.

        Args:
            fwd: takes the function's arguments; returns ``(result, residuals)``, residuals being a
                pytree of arrays.
            bwd: takes the arguments of ``nondiff_argnums``, the residuals and a cotangent like the
                result; returns a tuple with a cotangent for each other argument. None stands for
                zero, and is the cotangent of whatever is not a float.
        """
        self.rules = (fwd, bwd)

    def _record(self, call: _Call) -> Sequence[Value]:
        body = call.body()
        if self._deferred():
            staged = together([body])

            def later(avals: Sequence[Aval]) -> TracedVjp:
                del avals  # those of the call
                forward, backward, arguments = self._traced(call)
                found = together([forward, backward])
                fwd, bwd = found.programs
                return TracedVjp(fwd, bwd, arguments, found.captured, 0, len(call.outs))

            rule: TracedVjp | DeferredVjp = DeferredVjp(later, len(staged.captured))
        else:
            forward, backward, arguments = self._traced(call)
            staged = together([body, forward, backward])
            _, fwd, bwd = staged.programs
            shared = len(staged.captured)
            where = tuple(shared + i for i in arguments)
            rule = TracedVjp(fwd, bwd, where, (), shared, len(call.outs))
        prim = CustomVjpCall(staged.programs[0], rule, len(staged.captured), name_of(self.fn))
        return bind_outs(prim, *staged.captured, *call.leaves)

    def _traced(self, call: _Call) -> tuple[Traced, Traced, tuple[int, ...]]:
        """Both rules, and the leaves to which the results of the second belong."""
        assert self.rules is not None
        fwd, bwd = self.rules
        trees: list[tree.TreeDef] = []
        where: list[int] = []

        def forward(*leaves: Value) -> list[Value]:
            found = fwd(*call.whole(leaves))
            out, residuals = _pair(found, f"{self.what}: fwd", "(result, residuals)")
            saved, structure = tree.flatten(residuals)
            trees.append(structure)
            return [*call.fitting(out, "the result of fwd"), *saved]

        def backward(*values: Value) -> list[Value]:
            count = trees[0].num_leaves
            residuals = tree.unflatten(trees[0], values[:count])
            ct = tree.unflatten(call.out_tree, values[count:])
            found = self._cotangents(call, bwd(*call.fixed, residuals, ct))
            where[:] = found
            return list(found.values())

        with self._tracing_rules():
            name = name_of(self.fn)
            first = trace(forward, call.avals, f"{name}.fwd")
            saved = first.program.out_avals[len(call.outs) :]
            second = trace(backward, [*saved, *map(_strong, call.outs)], f"{name}.bwd")
        return first, second, tuple(where)

    def _cotangents(self, call: _Call, found: Any) -> dict[int, Value]:
        """The cotangent of each float leaf that has one, by position."""
        what = f"{self.what}: bwd"
        count = len(call.moving)
        parts = _sequence(found)
        if parts is None or len(parts) != count:
            given = _kind(found) if parts is None else f"{len(parts)} values"
            raise ShapeError(
                f"{what} returned {given}, expected a tuple with a cotangent for each of the "
                f"{count} arguments that are differentiated"
            )
        leaves: list[Value | None] = []
        for number, part, of in zip(call.moving, parts, call.in_tree.children(), strict=True):
            try:
                leaves.extend(tree.flatten_up_to(of, part))
            except ValueError as error:
                raise ShapeError(
                    f"{what} returned a cotangent of structure {tree.structure(part)} for "
                    f"argument {number}, expected {of}"
                ) from error
        named = tree.leaves_with_path(tree.unflatten(call.in_tree, range(len(leaves))))
        return {
            i: _like(ct, _strong(of), f"{what}: the cotangent of argument {tree.keystr(path)}")
            for (path, i), ct, of in zip(named, leaves, call.avals, strict=True)
            if ct is not None and is_float(of.dtype)
        }


def custom_jvp(
    fun: Function,
    nondiff_argnums: int | Sequence[int] = (),
    nondiff_argnames: str | Sequence[str] = (),
) -> CustomJvp:
    """``fun`` with a forward derivative of your own; reverse mode transposes it.

    Set it with ``defjvp`` or ``defjvps``. Names and order of arguments are JAX's::

        @vj.custom_jvp
        def log1pexp(x):
            return jnp.log(1.0 + jnp.exp(x))

        @log1pexp.defjvp
        def rule(primals, tangents):
            (x,), (t,) = primals, tangents
            return log1pexp(x), (1 - 1 / (1 + jnp.exp(x))) * t

    Args:
        fun: of pytrees of arrays, given by position or by name.
        nondiff_argnums: positions of arguments that the rule takes first and that have no
            tangents: functions, numbers, or arrays that do not move.
        nondiff_argnames: names of further ones.

    Raises:
        TracerError: where it is differentiated with respect to a value that it closes over.
    """
    return CustomJvp(fun, _fixed("custom_jvp", fun, nondiff_argnums, nondiff_argnames))


def custom_vjp(
    fun: Function,
    nondiff_argnums: int | Sequence[int] = (),
    nondiff_argnames: str | Sequence[str] = (),
) -> CustomVjp:
    """``fun`` with a backward derivative of your own; set it with ``defvjp(fwd, bwd)``.

    Names and order of arguments are JAX's::

        @vj.custom_vjp
        def clipped(x):
            return x

        clipped.defvjp(lambda x: (x, ()), lambda saved, g: (jnp.clip(g, -1, 1),))

    Args:
        fun: of pytrees of arrays, given by position or by name.
        nondiff_argnums: positions of arguments that ``bwd`` takes first and that have no
            cotangents: functions, numbers, or arrays that do not move.
        nondiff_argnames: names of further ones.

    Raises:
        TracerError: where it is differentiated with respect to a value that it closes over.
        MissingRuleError: where it is differentiated in forward mode.
    """
    return CustomVjp(fun, _fixed("custom_vjp", fun, nondiff_argnums, nondiff_argnames))


def _fixed(
    what: str, fn: Function, numbers: int | Sequence[int], names: str | Sequence[str]
) -> tuple[int, ...]:
    """Positions of the arguments that are not differentiated, those given by name included.

    Raises:
        ArgumentError: ``fn`` has no argument of that name.
    """
    found = [numbers] if isinstance(numbers, int) else list(numbers)
    wanted = [names] if isinstance(names, str) else list(names)
    known = list(inspect.signature(fn).parameters) if wanted else []
    for name in wanted:
        if name not in known:
            raise ArgumentError(
                f"{what} {name_of(fn)}: nondiff_argnames {name!r}, expected one of {known}"
            )
        found.append(known.index(name))
    return tuple(dict.fromkeys(found))


def _moves(of: Aval) -> bool:
    return is_float(of.dtype)


def _strong(of: Aval) -> Aval:
    return aval(of.shape, of.dtype)


def _pair(found: object, what: str, parts: str) -> tuple[Any, Any]:
    values = _sequence(found)
    if values is None or len(values) != 2:
        raise ArgumentError(f"{what} returned {_kind(found)}, expected a pair {parts}")
    return values[0], values[1]


def _sequence(found: object) -> Sequence[Any] | None:
    return cast("Sequence[Any]", found) if isinstance(found, tuple | list) else None


def _kind(found: object) -> str:
    return type(found).__name__


def _like(value: Value, of: Aval, what: str) -> Value:
    """``value``, which has the shape and dtype of ``of``."""
    given = aval_of(value)
    if given.shape != of.shape:
        raise ShapeError(f"{what} is {given}, expected {of}")
    if given.dtype != of.dtype and not given.weak:
        raise DTypeError(f"{what} is {given}, expected {of}; cast it with .astype(...)")
    return asarray(value, of.dtype)
