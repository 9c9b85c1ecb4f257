"""Tracing: running a Python function on stand-ins and recording what it does.

``bind`` is the one entry of every operation. Inside a trace it records an equation, whatever the
arguments are; outside it hands the operation to the eager evaluator. A value of an enclosing trace,
or an array that the function closes over, becomes a captured parameter of the program.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol, TypeGuard, final

import numpy as np
import optree

from vkjit.dtypes import canonical, default_float, default_int, of_array
from vkjit.errors import DTypeError, TracerError
from vkjit.ir.avals import Aval, aval
from vkjit.ir.primitive import Primitive, Value
from vkjit.ir.program import Atom, Eqn, Literal, Program, Source, Var

_NOT_THE_USER = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep for file in (__file__, optree.__file__)
)
"""Folders whose frames stand between an operation and the line that asked for it."""


class HasAval(Protocol):
    """Device arrays and tracers: values that know their aval."""

    @property
    def aval(self) -> Aval:
        """Shape and dtype."""
        ...


class Tracer:
    """Stand-in for an array while a function is traced."""

    __slots__ = ("__weakref__", "aval", "owner", "variable")
    # NumPy leaves `ndarray op tracer` to the tracer.
    __array_priority__: ClassVar[int] = 1000

    def __init__(self, trace: Trace, var: Var) -> None:
        self.owner = trace
        self.variable = var
        self.aval = var.aval


@final
class _State(threading.local):
    """The traces that are open in this thread, innermost last.

    ``source`` is that of the equation for which operations run now, outside any trace.
    """

    def __init__(self) -> None:
        self.stack: list[Trace] = []
        self.current: Trace | None = None
        self.budget = 0
        self.source: Source | None = None


_state = _State()


@final
class Trace:
    """Equations recorded so far, and the values captured from outside."""

    __slots__ = (
        "box",
        "captured",
        "captured_vars",
        "eqns",
        "lifted",
        "region",
        "regions",
        "source",
    )

    def __init__(self, box: type[Tracer]) -> None:
        self.box = box
        self.eqns: list[Eqn] = []
        self.captured: list[Value] = []
        self.captured_vars: list[Var] = []
        self.lifted: dict[int, Var] = {}
        self.source: Source | None = None
        self.region = 0
        self.regions = 0

    def new_input(self, of: Aval) -> Tracer:
        """A tracer for a fresh parameter."""
        return self.box(self, Var(of))

    def atom(self, value: Value) -> Atom:
        """The variable or literal that stands for ``value`` in this trace."""
        if isinstance(value, Tracer):
            if value.owner is self:
                return value.variable
            if value.owner not in _state.stack:
                raise TracerError(_leak_message(value))
        elif isinstance(value, (bool, int, float)) or (is_numpy(value) and value.ndim == 0):
            return literal(value)
        read = plain(value)
        if read is not value:
            return self.atom(read)
        found = self.lifted.get(id(value))
        if found is None:
            found = self.lifted[id(value)] = Var(aval_of(value))
            self.captured.append(value)
            self.captured_vars.append(found)
        return found

    def record(self, prim: Primitive, values: Sequence[Value]) -> list[Tracer]:
        """Appends one equation and returns tracers of its results."""
        box = self.box
        atoms = tuple(
            [v.variable if type(v) is box and v.owner is self else self.atom(v) for v in values]
        )
        source = self.source or user_source()
        avals = prim.applied([a.aval for a in atoms])
        outs = tuple([Var(a) for a in avals])
        self.eqns.append(Eqn(prim, atoms, outs, source, self.region))
        return [box(self, v) for v in outs]


def is_numpy(value: object) -> TypeGuard[np.ndarray[Any, Any]]:
    """Whether ``value`` is a NumPy array or scalar (which has the same attributes)."""
    return isinstance(value, (np.ndarray, np.generic))


def is_scalar(value: object) -> TypeGuard[np.generic[Any]]:
    """Whether ``value`` is a NumPy scalar."""
    return isinstance(value, np.generic)


def plain(value: Value) -> Value:
    """The array that an object stands for, by its method ``__jax_array__``; others as they are."""
    read = getattr(value, "__jax_array__", None)
    return value if read is None else read()


def literal(value: object) -> Literal:
    """A Python or NumPy scalar as a literal; Python scalars are weakly typed."""
    of = aval_of(value)
    if is_scalar(value) and value.dtype is of.dtype:
        return Literal(value, of)
    return Literal(np.asarray(value, of.dtype)[()], of)


def aval_of(value: Value) -> Aval:
    """The aval of a tracer, array, NumPy value or Python scalar.

    Raises:
        DTypeError: the value is none of these.
    """
    found = getattr(value, "aval", None)
    if found is not None and isinstance(found, Aval):
        return found
    kind: type[object] = value.__class__
    if kind is float:
        return aval((), default_float(), True)
    if kind is int:
        return aval((), default_int(), True)
    if kind is bool:
        return aval((), canonical(np.bool_), False)
    if is_numpy(value):
        return aval(value.shape, of_array(value.dtype), False)
    hint = getattr(kind, "array_hint", "expected an Array, a NumPy array or a Python scalar")
    raise DTypeError(
        f"array: {kind.__module__}.{kind.__qualname__} is not an array or scalar; {hint}"
    )


Eager = Callable[[Primitive, Sequence[Value], Sequence[Aval]], Sequence[Value]]
"""Runs a primitive on values now; the avals are those of its results."""


def _evaluate(prim: Primitive, values: Sequence[Value], outs: Sequence[Aval]) -> Sequence[Value]:
    """Outside any trace, before a device layer is there: plain NumPy."""
    del outs
    return prim.evaluate_outs(*[np.asarray(v, aval_of(v).dtype) for v in values])


def _unnoticed(name: str, key: Value) -> None:
    """Takes no notice of a random key that is consumed."""
    del name, key


def _identity(value: np.ndarray[Any, Any]) -> Value:
    return value


@final
class Hooks:
    """What the layers above provide: running an operation now, arrays from NumPy, tracers.

    ``key_used`` is told the name of each random function and its key.
    """

    eager: ClassVar[Eager] = staticmethod(_evaluate)
    constant: ClassVar[Callable[[np.ndarray[Any, Any]], Value]] = staticmethod(_identity)
    box: ClassVar[type[Tracer]] = Tracer
    key_used: ClassVar[Callable[[str, Value], None]] = staticmethod(_unnoticed)


def bind(prim: Primitive, *values: Value) -> Value:
    """Applies a single-result primitive, recording it when a trace is open."""
    current = _state.current
    if current is not None:
        return current.record(prim, values)[0]
    return _run(prim, values)[0]


def bind_outs(prim: Primitive, *values: Value) -> Sequence[Value]:
    """Applies a primitive with any number of results."""
    current = _state.current
    if current is not None:
        return current.record(prim, values)
    return _run(prim, values)


def _run(prim: Primitive, values: Sequence[Value]) -> Sequence[Value]:
    for value in values:
        if isinstance(value, Tracer):
            raise TracerError(_leak_message(value))
    values = [plain(v) for v in values]
    outs = prim.applied([aval_of(v) for v in values])
    return Hooks.eager(prim, values, outs)


@contextmanager
def open_trace() -> Generator[Trace]:
    """Records operations until the block ends; closed even when the function raises.

    The garbage collector rests meanwhile: a trace allocates many small objects that all stay.
    """
    trace = Trace(Hooks.box)
    collecting = gc.isenabled()
    gc.disable()
    _state.stack.append(trace)
    outer, _state.current = _state.current, trace
    try:
        yield trace
    finally:
        _state.stack.pop()
        _state.current = outer
        if collecting:
            gc.enable()


@final
class Traced:
    """A program and the values to pass for its first ``len(captured)`` parameters."""

    __slots__ = ("captured", "program")

    def __init__(self, program: Program, captured: tuple[Value, ...]) -> None:
        self.program = program
        self.captured = captured


def trace(
    fn: Callable[..., Sequence[Value]], avals: Sequence[Aval], name: str = "program"
) -> Traced:
    """Runs ``fn`` on tracers of ``avals`` and returns what it did.

    Args:
        fn: takes one value for each aval and returns a flat sequence of values.
        avals: of the explicit parameters.
        name: of the program.

    Returns:
        the program, whose parameters are the captured values followed by the explicit ones.
    """
    with open_trace() as current:
        inputs = [current.new_input(a) for a in avals]
        results = tuple([current.atom(r) for r in fn(*inputs)])
        params = (*current.captured_vars, *(t.variable for t in inputs))
        program = Program(params, tuple(current.eqns), results, name)
    return Traced(program, tuple(current.captured))


def current_trace() -> Trace | None:
    """The innermost open trace of this thread."""
    return _state.current


def tracing() -> bool:
    """Whether a trace is open in this thread."""
    return _state.current is not None


def apply_program(program: Program, values: Sequence[Value]) -> list[Value]:
    """Binds every equation of ``program`` on ``values``, keeping source lines."""
    env: dict[Var, Value] = dict(zip(program.params, values, strict=True))
    current, holder = _state.current, _state.current or _state
    regions: dict[int, int] = {0: current.region if current is not None else 0}
    outer, before = regions[0], holder.source
    try:
        for eqn in program.eqns:
            holder.source = eqn.source
            if current is not None:
                if eqn.region not in regions:
                    regions[eqn.region] = new_region()
                current.region = regions[eqn.region]
            args = [env[a] if isinstance(a, Var) else a.value for a in eqn.args]
            env.update(zip(eqn.outs, bind_outs(eqn.prim, *args), strict=True))
    finally:
        holder.source = before
        if current is not None:
            current.region = outer
    return [env[r] if isinstance(r, Var) else r.value for r in program.results]


def new_region() -> int:
    """A number for the next recomputation in the open trace; 0 without one."""
    current = _state.current
    if current is None:
        return 0
    current.regions += 1
    return current.regions


@contextmanager
def in_region(region: int) -> Generator[None]:
    """Operations inside the block are recorded as belonging to ``region``."""
    current = _state.current
    if current is None:
        yield
        return
    before, current.region = current.region, region
    try:
        yield
    finally:
        current.region = before


@contextmanager
def source_of(eqn: Eqn, *, backward: bool = False) -> Generator[None]:
    """Operations inside the block are recorded as coming from ``eqn``'s line.

    ``backward`` says that they compute its cotangents.
    """
    holder = _state.current or _state
    source = eqn.source
    if backward and source is not None and not source.backward:
        source = Source(source.code, source.last, source.budget, backward=True)
    before, holder.source = holder.source, source
    try:
        yield
    finally:
        holder.source = before


def present_source() -> Source | None:
    """Where an operation that runs now comes from."""
    return (_state.current or _state).source or user_source()


@contextmanager
def recomputable(budget: int) -> Generator[None]:
    """Operations inside the block, and what derives from them, may be computed again.

    Args:
        budget: bytes that the whole jitted function may take; the least of several nested ones.
    """
    before = _state.budget
    _state.budget = min(before, budget) if before else budget
    try:
        yield
    finally:
        _state.budget = before


def user_source() -> Source | None:
    """The innermost frame outside this package and the one that maps over trees."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  inspect's is ten times slower
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_NOT_THE_USER):
            return Source(code, frame.f_lasti, _state.budget)
        frame = frame.f_back
    return None


def maker(value: Tracer) -> str:
    """The line that made a traced value, for messages."""
    eqns = value.owner.eqns
    return next((str(e.source) for e in eqns if value.variable in e.outs), "a parameter")


def _leak_message(value: Tracer) -> str:
    made = maker(value)
    return (
        f"tracer: a value {value.aval} of a finished trace was used (made at {made}); "
        "a traced function must return what it computes, not keep it in outer variables"
    )
