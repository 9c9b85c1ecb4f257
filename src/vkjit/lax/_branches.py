"""Branches and loops that run what the values say: cond, switch, while_loop, fori_loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vkjit import dtypes, tree
from vkjit.control.branch import Cond
from vkjit.control.cells import Cell, contents_of, put_all, threaded
from vkjit.control.inner import parted, reads, sources, with_params, with_results
from vkjit.control.loop import While
from vkjit.control.stage import Staged, stage_together
from vkjit.errors import ArgumentError, DTypeError, ShapeError, TracerError
from vkjit.ir.avals import Aval
from vkjit.ir.primitive import Value
from vkjit.ir.program import Program
from vkjit.lax._control import scan
from vkjit.lax._functions import Flat, require_equal, require_functions, shown
from vkjit.numpy import add, asarray, astype
from vkjit.numpy._core import ArrayLike, cast, operand_aval
from vkjit.ops import compare
from vkjit.ops.cast import cast as cast_op
from vkjit.ops.extrema import clamp
from vkjit.ops.movement import iota
from vkjit.trace import Tracer, aval_of, bind_outs, user_source

Function = Callable[..., Any]
_NONE: Any = object()


def cond(
    pred: ArrayLike,
    true_fun: Function,
    false_fun: Function,
    *operands: Any,
    operand: Any = _NONE,
) -> Any:
    """``true_fun(*operands)`` where ``pred`` holds, else ``false_fun(*operands)``.

    Both are traced, also where ``pred`` is a Python value; one of them runs. Under ``vmap`` over
    ``pred`` both run and each example chooses.

    Args:
        pred: boolean of rank 0; a number counts as whether it differs from zero.
        true_fun: of pytrees of arrays to a pytree of arrays.
        false_fun: likewise, with results of the same structure, shapes and dtypes.
        operands: for either function, which may also close over arrays.
        operand: the only operand, by name.

    Raises:
        ShapeError, DTypeError: ``pred`` is not of rank 0, or results of the functions differ.
    """
    require_functions("cond", true_fun=true_fun, false_fun=false_fun)
    if operand is not _NONE:
        if operands:
            raise ArgumentError(
                f"cond: operand= beside {len(operands)} positional operands; expected either"
            )
        operands = (operand,)
    named = [("false_fun", false_fun), ("true_fun", true_fun)]
    return _choose("cond", _number_of(pred), named, operands)


def switch(index: ArrayLike, branches: Sequence[Function], *operands: Any) -> Any:
    """The result of ``branches[index]`` of the operands; ``index`` is clamped to their number.

    Args:
        index: integer of rank 0.
        branches: functions as ``cond`` takes them, with results of one structure and type.
        operands: pytrees of arrays.

    Raises:
        ArgumentError: there are no branches.
        ShapeError, DTypeError: ``index`` is no integer of rank 0, or results differ.
    """
    if not branches:
        raise ArgumentError("switch: no branches, expected at least one function")
    named = {f"branches[{i}]": fn for i, fn in enumerate(branches)}
    require_functions("switch", **named)
    of = operand_aval("switch", index)
    if of.shape or not dtypes.is_int(of.dtype):
        kind = ShapeError if of.shape else DTypeError
        raise kind(f"switch: index {of}, expected an integer of rank 0")
    if len(branches) == 1:
        return branches[0](*operands)
    number: Value = index
    if of.dtype != dtypes.int32:
        last = min(len(branches) - 1, np.iinfo(of.dtype).max)
        number = cast_op(clamp(of.dtype.type(0), index, of.dtype.type(last)), dtypes.int32)
    return _choose("switch", number, list(named.items()), operands)


def while_loop(cond_fun: Function, body_fun: Function, init_val: Any) -> Any:
    """``body_fun`` of its own result, from ``init_val`` on, as long as ``cond_fun`` of it holds.

    Forward-mode differentiable; for reverse mode the number of turns must be known while tracing:
    ``scan``, or ``fori_loop`` with static bounds. Under ``vmap`` with a condition that differs
    between examples, turns go on until all examples are done; those that are done keep their value.

    Args:
        cond_fun: of the carried value to a boolean of rank 0.
        body_fun: of the carried value to one of the same structure, shapes and dtypes.
        init_val: pytree of arrays. Python scalars take the dtype that the body gives them.

    Raises:
        ShapeError, DTypeError: the condition gives something else, or the body changes a type.
    """
    require_functions("while_loop", cond_fun=cond_fun, body_fun=body_fun)
    leaves, in_tree = tree.flatten((init_val,))
    flats = Flat("cond_fun", cond_fun, in_tree), Flat("body_fun", body_fun, in_tree)
    staged = _staged(flats, leaves)
    if flats[0].written:
        raise TracerError(f"while_loop: {flats[0]} writes a Ref; expected body_fun to write it")
    if flats[1].written:
        return _writing(cond_fun, body_fun, init_val, flats[1].written)
    while (promoted := _promoted(leaves, staged.programs[1].out_avals)) is not None:
        leaves = promoted
        staged = _staged(flats, leaves)
    condition, body = staged.programs
    _require_test(flats[0], condition.out_avals)
    left = "init_val has", tree.structure(init_val), [aval_of(v) for v in leaves]
    advice = "the carried value keeps its structure and types; cast what the body returns"
    require_equal("while_loop", left, (flats[1], body.out_avals), advice)
    results = _looped(condition, body, staged.captured, leaves)
    return tree.unflatten(flats[1].out_tree, results)


def _writing(cond_fun: Function, body_fun: Function, init_val: Any, cells: Sequence[Cell]) -> Any:
    """The loop of a body that writes Refs of outside: their contents are carried."""
    asks, turn = threaded(cond_fun, cells), threaded(body_fun, cells)

    @functools.wraps(cond_fun)
    def goes_on(carried: tuple[Any, Any]) -> Any:
        return asks(*carried)[1]

    @functools.wraps(body_fun)
    def turned(carried: tuple[Any, Any]) -> tuple[Any, Any]:
        return turn(*carried)

    contents, result = while_loop(goes_on, turned, (contents_of(cells), init_val))
    put_all(cells, contents)
    return result


def fori_loop(
    lower: ArrayLike,
    upper: ArrayLike,
    body_fun: Function,
    init_val: Any,
    *,
    unroll: int | bool | None = None,
) -> Any:
    """``body_fun(i, value)`` for i from ``lower`` on and below ``upper``, first of ``init_val``.

    With bounds that are known while tracing this is a ``scan``, differentiable in either mode; with
    traced bounds it is a ``while_loop``, which reverse mode refuses.

    Args:
        lower: integer of rank 0.
        upper: integer of rank 0; nothing happens where it is not above ``lower``.
        body_fun: of a counter and the carried value to a value of the same structure and types.
        init_val: pytree of arrays.
        unroll: turns per iteration of the loop, True for all; with static bounds only.

    Raises:
        ShapeError, DTypeError: bounds of different dtypes, or the body changes a type.
        ArgumentError: ``unroll`` with traced bounds.
    """
    require_functions("fori_loop", body_fun=body_fun)
    dtype = _bounds_dtype(lower, upper)
    if not isinstance(lower, Tracer) and not isinstance(upper, Tracer):
        first = aval_of(lower)
        weak = first.weak and first.dtype == dtype
        numbered = body_fun if weak else _counting_in(dtype, body_fun)
        return _static_loop(int(lower), int(upper), numbered, init_val, unroll=unroll or False)
    if unroll not in (None, False, 1):
        raise ArgumentError(
            f"fori_loop: unroll={unroll} with bounds {aval_of(lower)} and {aval_of(upper)} known "
            "at run time only; expected Python integers as bounds, or no unroll"
        )

    def going(carried: tuple[Value, Value, Any]) -> Value:
        return compare.lt(carried[0], carried[1])

    @functools.wraps(body_fun)
    def turn(carried: tuple[Value, Value, Any]) -> tuple[Value, Value, Any]:
        at, end, value = carried
        return add(at, 1), end, body_fun(at, value)

    bounds = [b if aval_of(b).dtype == dtype else astype(b, dtype) for b in (lower, upper)]
    return while_loop(going, turn, (*bounds, init_val))[2]


def _counting_in(dtype: dtypes.DType, body_fun: Function) -> Function:
    """The body with its counter in a dtype that is not weakly typed."""

    @functools.wraps(body_fun)
    def turn(at: Value, value: Any) -> Any:
        return body_fun(cast(at, dtype), value)

    return turn


_LISTED = 1 << 20
"""Turns up to which their numbers are written down before the loop: at most 4 MiB."""


def _static_loop(
    lower: int, upper: int, body_fun: Function, init_val: Any, *, unroll: int | bool
) -> Any:
    """The loop as a scan over the numbers of its turns, where they are few enough to list.

    A turn then reads its number where it lies. To count in a carry takes a step of each turn.
    """
    length = max(upper - lower, 0)

    @functools.wraps(body_fun)
    def numbered(value: Any, at: Value) -> tuple[Any, None]:
        return body_fun(at, value), None

    @functools.wraps(body_fun)
    def counting(carried: tuple[Value, Any], _: None) -> tuple[tuple[Value, Any], None]:
        at, value = carried
        return (add(at, 1), body_fun(at, value)), None

    if length <= _LISTED:
        numbers = add(iota(dtypes.int32, (length,), 0, weak=True), lower)
        return scan(numbered, init_val, numbers, unroll=unroll)[0]
    return scan(counting, (lower, init_val), None, length=length, unroll=unroll)[0][1]


def _bounds_dtype(lower: ArrayLike, upper: ArrayLike) -> dtypes.DType:
    """The counter's dtype: that of both bounds, or of the one that is not weakly typed."""
    avals = [operand_aval("fori_loop", bound) for bound in (lower, upper)]
    first, second = avals
    if first.shape or second.shape:
        raise ShapeError(f"fori_loop: bounds {first} and {second}, expected rank 0")
    if first.dtype == second.dtype:
        return first.dtype
    if all(dtypes.is_signed(of.dtype) and not dtypes.is_float(of.dtype) for of in avals):
        strong = [of.dtype for of in avals if not of.weak]
        if len(strong) == 1:
            return strong[0]
    raise DTypeError(
        f"fori_loop: bounds {first} and {second}, expected one dtype; cast with .astype(...)"
    )


def _number_of(pred: ArrayLike) -> Value:
    """The number of the branch: 1 where ``pred`` holds, else 0."""
    of = operand_aval("cond", pred)
    if of.shape:
        raise ShapeError(
            f"cond: pred {of}, expected a boolean of rank 0; use vkjit.numpy.where to choose for "
            "each element, or vmap"
        )
    test = pred if of.dtype == dtypes.bool_ else compare.ne(pred, of.dtype.type(0))
    return astype(test, dtypes.int32)


def _choose(
    what: str, number: Value, named: Sequence[tuple[str, Function]], operands: Sequence[Any]
) -> Any:
    """The results of the function of that number."""
    leaves, in_tree = tree.flatten(tuple(operands))
    flats = [Flat(role, fn, in_tree) for role, fn in named]
    staged = _staged(flats, leaves)
    cells = list(dict.fromkeys(cell for flat in flats for cell in flat.written))
    if cells:
        writing = [(role, threaded(fn, cells)) for role, fn in named]
        contents, result = _choose(what, number, writing, (contents_of(cells), *operands))
        put_all(cells, contents)
        return result
    first, *others = zip(flats, staged.programs, strict=True)
    for flat, program in others:
        left = f"{first[0]} returns", first[0].out_tree, first[1].out_avals
        advice = "make the functions agree, for example with .astype(...)"
        require_equal(what, left, (flat, program.out_avals), advice)
    results = _chosen(staged.programs, number, [*staged.captured, *leaves])
    return tree.unflatten(first[0].out_tree, results)


def _chosen(programs: Sequence[Program], number: Value, given: Sequence[Value]) -> list[Value]:
    """Binds the choice; what every branch passes through does not take part."""
    columns = zip(*[sources(p) for p in programs], strict=True)
    ahead = [column[0] if len(set(column)) == 1 else None for column in columns]
    kept = [source is None for source in ahead]
    branches = [with_results(p, parted(p.results, kept)[1]) for p in programs]
    acts = any(eqn.prim.acts() for branch in branches for eqn in branch.eqns)
    made = iter(bind_outs(Cond(tuple(branches)), number, *given) if any(kept) or acts else ())
    return [next(made) if source is None else asarray(given[source]) for source in ahead]


def _staged(flats: Sequence[Flat], leaves: Sequence[Value]) -> Staged:
    """The functions as programs that share what they close over."""
    avals = [aval_of(v) for v in leaves]
    return stage_together([(flat, avals, flat.role.partition("[")[0]) for flat in flats])


def _promoted(leaves: Sequence[Value], avals: Sequence[Aval]) -> list[Value] | None:
    """First values with weak ones in the dtypes that the body gives; None: they fit."""
    if len(avals) != len(leaves):
        return None
    found = [_joined(aval_of(v), of) for v, of in zip(leaves, avals, strict=True)]
    if not any(found):
        return None
    pairs = zip(leaves, found, strict=True)
    return [v if to is None else cast(v, to[0], weak=to[1]) for v, to in pairs]


def _joined(of: Aval, after: Aval) -> tuple[dtypes.DType, bool] | None:
    """The dtype and weakness of a weak first value that the body turns into another dtype."""
    if not of.weak or of.dtype == after.dtype:
        return None
    dtype, weak = dtypes.promote((of.dtype, True), (after.dtype, after.weak))
    return None if dtype == of.dtype else (dtype, weak)


def _require_test(flat: Flat, avals: Sequence[Aval]) -> None:
    if flat.out_tree != tree.structure(0):
        raise ShapeError(
            f"while_loop: {flat} returns the structure {shown(flat.out_tree)}, expected one "
            "boolean of rank 0"
        )
    (of,) = avals
    if of.shape or of.dtype != dtypes.bool_:
        kind = ShapeError if of.shape else DTypeError
        raise kind(
            f"while_loop: {flat} returns {of}, expected a boolean of rank 0; compare, or reduce "
            "with .any() or .all()"
        )


def _looped(
    condition: Program, body: Program, captured: Sequence[Value], leaves: Sequence[Value]
) -> list[Value]:
    """Binds the loop; what the body passes through is a constant of it, not a carry."""
    lead = len(captured)
    pairs = zip(body.results, body.params[lead:], strict=True)
    moving = [result is not param for result, param in pairs]
    flags = [*[False] * lead, *moving]
    fixed, carries = parted([*captured, *leaves], flags)
    turned = with_results(body, parted(body.results, moving)[1])
    asks, tests = _with_constants(condition, flags, fixed)
    turns, constants = _with_constants(turned, flags, fixed)
    loop = While(asks, turns, len(tests), len(constants), source=user_source())
    made = iter(bind_outs(loop, *tests, *constants, *carries) if carries else ())
    return [next(made) if m else asarray(v) for v, m in zip(leaves, moving, strict=True)]


def _with_constants(
    program: Program, carried: Sequence[bool], fixed: Sequence[Value]
) -> tuple[Program, list[Value]]:
    """The program without the constants that it does not read, and the values of the others."""
    params, carries = parted(program.params, carried)
    used, _ = parted(reads(program), carried)
    return with_params(program, [*parted(params, used)[1], *carries]), parted(fixed, used)[1]
