"""Loops over leading axes: scan, map and associative_scan."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, SupportsIndex, final

from vkjit import tree
from vkjit.control.batched import spread_over
from vkjit.control.cells import Cell, body, contents_of, put_all, threaded
from vkjit.control.stage import Staged, stage
from vkjit.dtypes import promote
from vkjit.errors import ArgumentError, DTypeError, ShapeError, TracerError
from vkjit.ir.avals import Aval, aval
from vkjit.ir.primitive import Value
from vkjit.lax._shape import concatenate, reshape, rev, slice_in_dim
from vkjit.lax._turns import Turns
from vkjit.numpy._core import axis_of, cast, is_sequence, lift, operand_aval
from vkjit.numpy._shape import stack
from vkjit.passes.batch import batch
from vkjit.trace import Tracer, aval_of, maker

Body = Callable[[Any, Any], tuple[Any, Any]]


def scan(  # noqa: PLR0913  jax.lax's signature
    f: Body,
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,  # noqa: FBT001  jax.lax's signature
    unroll: int | bool = 1,  # noqa: FBT001  jax.lax's signature
    *,
    chunk: int | None = None,
) -> tuple[Any, Any]:
    """Runs ``f`` for each slice of ``xs``, handing the carry from turn to turn.

    The loop is one equation, whatever its length: it compiles once, and so does its derivative.
    A backward pass keeps, for each turn, what ``f`` needs of its carry and of what it computed;
    constants and ``xs`` themselves are kept once.

    Args:
        f: ``(carry, x) -> (carry, y)``; the carry keeps its structure, shapes and dtypes.
        init: the first carry, a pytree; Python scalars take the dtype that ``f`` gives them.
        xs: a pytree of arrays with one leading axis of equal size; None where there are none.
        length: of the loop; needed without ``xs``.
        reverse: whether the loop runs from the last slice to the first; ``ys`` are in the order
            of ``xs`` in both cases.
        unroll: how many times ``f`` stands in the body of the loop; True: no loop is left.

        chunk: turns of an inner loop that is a checkpoint: the backward pass keeps the carries
            before each chunk, and what the turns of one chunk need at a time. Its memory grows with
            length / chunk + chunk instead of length, for a second computation of each turn. Where
            it does not divide the length, the slices of whole chunks are copied.

    Returns:
        the last carry, and ``ys``, each leaf with a leading axis of the loop's length.

    Raises:
        ShapeError, DTypeError: ``f`` changes a shape or a dtype of the carry.
        ShapeError: leaves of ``xs`` differ in length, or in that of ``length``.
        ArgumentError: ``f`` changes the structure of the carry, or the length is unknown.
    """
    how: dict[str, Any] = {"length": length, "reverse": reverse, "unroll": unroll, "chunk": chunk}
    leaves, xs_tree = tree.flatten(xs)
    loop = _Loop(f, xs_tree, [_example("scan", leaf) for leaf in leaves])
    count = _length("scan", leaves, length)
    carry, staged = loop.stage(init)
    if loop.written:
        return _writing(f, init, xs, loop.written, partial(scan, **how))
    slices = [lift("scan", leaf) for leaf in leaves]
    turns = Turns(staged, len(carry), reverse=reverse)
    bodies = _unrolled(unroll, count)
    if chunk is None:
        last, ys = turns.run(carry, slices, count, bodies)
    elif chunk < 1:
        raise ArgumentError(f"scan: chunk={chunk}, expected a positive integer")
    else:
        last, ys = turns.chunked(carry, slices, count, (chunk, bodies))
    return tree.unflatten(loop.carry_tree, last), tree.unflatten(loop.ys_tree, ys)


def _writing(
    f: Body, init: Any, xs: Any, cells: Sequence[Cell], loop: Callable[..., tuple[Any, Any]]
) -> tuple[Any, Any]:
    """The loop of a body that writes Refs of outside: their contents are carries."""
    inner = threaded(f, cells)

    @wraps(f)
    def turn(carry: tuple[Any, Any], x: Any) -> tuple[tuple[Any, Any], Any]:
        contents, value = carry
        after, (value, y) = inner(contents, value, x)
        return (after, value), y

    (contents, last), ys = loop(turn, (contents_of(cells), init), xs)
    put_all(cells, contents)
    return last, ys


@final
class _Loop:
    """The body of a scan as a function of flat values; remembers the trees of carry and ys."""

    def __init__(self, f: Body, xs_tree: tree.TreeDef, xs: Sequence[Aval]) -> None:
        self.f = f
        self.name = getattr(f, "__name__", type(f).__name__).replace("<lambda>", "lambda_")
        self.xs_tree = xs_tree
        self.xs = xs
        self.carry_tree: tree.TreeDef
        self.ys_tree: tree.TreeDef
        self.paths: list[str] = []
        self.after: list[Value] = []
        self.written: list[Cell] = []

    def stage(self, init: Any) -> tuple[list[Value], Staged]:
        """The first carry, its weakly typed leaves as the body needs them, and the body."""
        pairs, self.carry_tree = tree.flatten_with_path(init)
        self.paths = [tree.keystr(path) for path, _ in pairs]
        carry = [lift("scan", leaf) for _, leaf in pairs]
        while True:
            avals = [aval_of(v) for v in carry]
            staged = stage(self._flat, [*avals, *self.xs], self.name)
            after = staged.programs[0].out_avals
            wider = [_wider(a, b) for a, b in zip(avals, after, strict=False)]
            if all(w is None for w in wider):
                self._check(avals, after)
                return carry, staged
            pairs = zip(carry, wider, strict=True)
            carry = [v if w is None else cast(v, w.dtype, weak=w.weak) for v, w in pairs]

    def _flat(self, *values: Value) -> list[Value]:
        count = self.carry_tree.num_leaves
        carry = tree.unflatten(self.carry_tree, values[:count])
        with body() as inner:
            result: object = self.f(carry, tree.unflatten(self.xs_tree, values[count:]))
        self.written = inner.written
        if not is_sequence(result) or len(result) != 2:
            raise ArgumentError(
                f"scan: {self.name} returned {type(result).__name__}, expected a pair (carry, y)"
            )
        after, y = result
        outs, after_tree = tree.flatten(after)
        if after_tree != self.carry_tree:
            raise ArgumentError(
                f"scan: the carry of {self.name} has structure {self.carry_tree} before a turn and "
                f"{after_tree} after it; expected one structure"
            )
        ys, self.ys_tree = tree.flatten(y)
        self.after = outs
        return [lift("scan", v) for v in (*outs, *ys)]

    def _check(self, before: Sequence[Aval], after: Sequence[Aval]) -> None:
        rows = zip(before, after, self.paths, self.after, strict=False)
        for given, got, path, value in rows:
            if (given.shape, given.dtype) == (got.shape, got.dtype):
                continue
            made = f", made at {maker(value)}" if isinstance(value, Tracer) else ""
            kind = ShapeError if given.shape != got.shape else DTypeError
            leaf = f"carry{path}" if path else "the carry"
            raise kind(
                f"scan: {leaf} of {self.name} is {given} before a turn and {got} after it{made}; "
                "expected one type; convert the first carry, or what the function returns"
            )


def _wider(given: Aval, after: Aval) -> Aval | None:
    """What a weakly typed carry becomes where the body gives another dtype; None: it stays."""
    if not given.weak or given.dtype == after.dtype:
        return None
    dtype, weak = promote((given.dtype, True), (after.dtype, after.weak))
    return None if dtype == given.dtype else aval(given.shape, dtype, weak)


def _example(what: str, leaf: Any) -> Aval:
    of = operand_aval(what, leaf)
    if of.ndim == 0:
        raise ShapeError(f"{what}: a leaf of xs is {of}, expected a leading axis to run along")
    return aval(of.shape[1:], of.dtype, of.weak)


def _length(what: str, leaves: Sequence[Any], given: int | None) -> int:
    sizes = {operand_aval(what, leaf).shape[0]: operand_aval(what, leaf) for leaf in leaves}
    if len(sizes) > 1:
        listed = ", ".join([str(of) for of in sizes.values()])
        raise ShapeError(f"{what}: leaves of xs are {listed}, expected leading axes of one size")
    found = next(iter(sizes), None)
    if found is not None and given is not None and found != int(given):
        raise ShapeError(f"{what}: length={given} for xs of length {found}; leave one out")
    count = found if given is None else int(given)
    if count is None or count < 0:
        raise ArgumentError(f"{what}: length={given} without xs; expected how often to run")
    return count


def _unrolled(unroll: int | bool, length: int) -> int:  # noqa: FBT001  as scan takes it
    if unroll is True:
        return max(length, 1)
    if int(unroll) < 0 or (unroll is not False and int(unroll) == 0):
        raise ArgumentError(f"scan: unroll={unroll}, expected a positive integer or a bool")
    return max(int(unroll), 1)


def map(f: Callable[[Any], Any], xs: Any, *, batch_size: int | None = None) -> Any:
    """``f`` of each slice of ``xs`` along its leading axis, one after the other.

    Args:
        f: of a pytree of slices.
        xs: a pytree of arrays with one leading axis of equal size.
        batch_size: how many slices to take at once, as ``vmap`` does; None: one.

    Returns:
        the results stacked along a leading axis.

    Raises:
        ShapeError: leaves of ``xs`` differ in length.
        ArgumentError: ``batch_size`` is not positive.
    """
    if batch_size is None:
        return scan(lambda _, x: ((), f(x)), (), xs)[1]
    if batch_size < 1:
        raise ArgumentError(f"map: batch_size={batch_size}, expected a positive integer")
    leaves, xs_tree = tree.flatten(xs)
    count = _length("map", leaves, None)
    loop = _Loop(lambda _, x: ((), f(x)), xs_tree, [_example("map", leaf) for leaf in leaves])
    _, staged = loop.stage(())
    if loop.written:
        raise TracerError(
            "map: the function writes a Ref made outside it, expected that of batch_size=None: "
            "examples of one batch cannot write it one after the other"
        )
    (program,), captured = staged.programs, staged.captured

    def together(*values: Value) -> list[Value]:
        flags = [*[False] * len(captured), *[True] * len(values)]
        outs, spread = batch(program, [*captured, *values], flags)
        size = aval_of(values[0]).shape[0]
        pairs = zip(outs, spread, strict=True)
        return [out if flag else spread_over(out, size) for out, flag in pairs]

    ys = _in_batches(together, [lift("map", leaf) for leaf in leaves], count, batch_size)
    return tree.unflatten(loop.ys_tree, ys)


def _in_batches(
    f: Callable[..., Sequence[Value]], xs: Sequence[Value], count: int, size: int
) -> list[Value]:
    """``f`` of ``size`` slices at once, then of those left over."""
    whole = count - count % size

    def one(_: Any, parts: list[Value]) -> tuple[Any, list[Value]]:
        return (), list(f(*parts))

    blocks = [
        reshape(slice_in_dim(x, 0, whole), (whole // size, size, *aval_of(x).shape[1:])) for x in xs
    ]
    ys = scan(one, (), blocks)[1]
    flat = [reshape(y, (whole, *aval_of(y).shape[2:])) for y in ys]
    if whole == count:
        return flat
    rest = f(*[slice_in_dim(x, whole, count) for x in xs])
    return [concatenate(pair, 0) for pair in zip(flat, rest, strict=True)]


def associative_scan(
    fn: Callable[[Any, Any], Any],
    elems: Any,
    reverse: bool = False,  # noqa: FBT001  jax.lax's signature
    axis: SupportsIndex = 0,
) -> Any:
    """All prefixes of ``elems`` along an axis, combined by ``fn`` in O(log n) steps.

    Args:
        fn: associative, of two pytrees like ``elems``, elementwise along ``axis``.
        elems: a pytree of arrays of one size along ``axis``.
        reverse: whether to combine from the end.
        axis: to run along.

    Returns:
        a pytree like ``elems``; entry i combines the entries up to i.

    Raises:
        ShapeError: leaves differ in size along ``axis``, or ``fn`` changes a shape.
    """
    found, structure = tree.flatten(elems)
    leaves = [lift("associative_scan", leaf) for leaf in found]
    axes = {axis_of("associative_scan", axis, aval_of(leaf).ndim) for leaf in leaves}
    if not leaves:
        return elems
    prefixes = _Prefixes(fn, structure, axes.pop())
    sizes = {prefixes.size(leaf) for leaf in leaves}
    if axes or len(sizes) > 1:
        listed = ", ".join(str(aval_of(leaf)) for leaf in leaves)
        raise ShapeError(f"associative_scan: {listed} along axis {axis}, expected one size")
    if reverse:
        leaves = [rev(leaf, (prefixes.axis,)) for leaf in leaves]
    outs = prefixes.of(leaves)
    if reverse:
        outs = [rev(out, (prefixes.axis,)) for out in outs]
    return tree.unflatten(structure, outs)


@final
class _Prefixes:
    """Prefixes by halves: neighbours are combined, then their prefixes give those between.

    Source: Blelloch, "Prefix sums and their applications" (1990); the recursion is JAX's.
    """

    def __init__(self, fn: Callable[[Any, Any], Any], structure: tree.TreeDef, axis: int) -> None:
        self.fn = fn
        self.structure = structure
        self.axis = axis

    def of(self, leaves: list[Value]) -> list[Value]:
        """All prefixes."""
        count = self.size(leaves[0])
        if count < 2:
            return leaves
        pairs = self._combined(self._part(leaves, 0, count - 1), self._part(leaves, 1, count))
        odd = self.of(pairs)
        before = odd if count % 2 else [self._cut(x, 0, self.size(x) - 1, 1) for x in odd]
        between = self._combined(before, self._part(leaves, 2, count))
        first = [self._cut(x, 0, 1, 1) for x in leaves]
        even = [concatenate(both, self.axis) for both in zip(first, between, strict=True)]
        return [self._woven(a, b) for a, b in zip(even, odd, strict=True)]

    def size(self, leaf: Value) -> int:
        """Size along the axis."""
        return aval_of(leaf).shape[self.axis]

    def _part(self, leaves: Sequence[Value], start: int, stop: int) -> list[Value]:
        return [self._cut(x, start, stop, 2) for x in leaves]

    def _cut(self, x: Value, start: int, stop: int, stride: int) -> Value:
        return slice_in_dim(x, start, builtins.max(start, stop), stride, self.axis)

    def _combined(self, left: Sequence[Value], right: Sequence[Value]) -> list[Value]:
        if self.size(left[0]) == 0:
            return list(left)
        made = self.fn(tree.unflatten(self.structure, left), tree.unflatten(self.structure, right))
        outs, structure = tree.flatten(made)
        shapes = [aval_of(v).shape for v in outs]
        if structure != self.structure or shapes != [aval_of(v).shape for v in left]:
            raise ShapeError(
                f"associative_scan: the function made {', '.join(_listed(outs))} of two times "
                f"{', '.join(_listed(left))}; expected the same structure and shapes"
            )
        return [lift("associative_scan", v) for v in outs]

    def _woven(self, even: Value, odd: Value) -> Value:
        """Entries of ``even`` and ``odd`` in turn; ``even`` may have one more."""
        count, shape = self.size(odd), aval_of(odd).shape
        both = stack([self._cut(even, 0, count, 1), odd], self.axis + 1)
        woven = reshape(both, (*shape[: self.axis], 2 * count, *shape[self.axis + 1 :]))
        if self.size(even) == count:
            return woven
        return concatenate([woven, self._cut(even, count, count + 1, 1)], self.axis)


def _listed(values: Sequence[Value]) -> list[str]:
    """Avals as text."""
    return [str(aval_of(v)) for v in values]
