"""Cells: what a Ref holds, and how a body of control flow writes one from outside.

A program has values, not memory. Where a body writes a cell that was made outside it, the cell's
contents become one more argument and result of that body: a carry of a loop, a result of a branch.
Which cells these are is known once the body has been traced; it is then traced again with them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, final

from vkjit.errors import TracerError
from vkjit.ir.primitive import Value
from vkjit.trace import Trace, aval_of, current_trace

Function = Callable[..., Any]


class Cell:
    """Contents that change, and the trace in which they were made."""

    __slots__ = ("_contents", "_owner")

    def __init__(self, contents: Value) -> None:
        self._contents = contents
        self._owner = current_trace()

    def take(self) -> Value:
        """The contents now."""
        return self._contents

    def put(self, contents: Value) -> None:
        """Other contents of the same aval.

        Raises:
            TracerError: the cell is not of the function that is being traced, and no loop or branch
                of control flow would carry what is written out of it.
        """
        if current_trace() is not self._owner:
            _body_of(self).lend(self)
        self._contents = contents

    def swap(self, contents: Value, owner: Trace | None) -> tuple[Value, Trace | None]:
        """Contents and owner replaced; those before."""
        before = self._contents, self._owner
        self._contents, self._owner = contents, owner
        return before


@final
class Body:
    """A body of control flow while it is traced.

    Attributes:
        written: cells of outside that it wrote, besides those that it was given.
    """

    def __init__(self, refusal: str) -> None:
        self.trace = current_trace()
        self.refusal = refusal
        self.written: list[Cell] = []
        self._before: list[tuple[Cell, tuple[Value, Trace | None]]] = []

    def lend(self, cell: Cell, contents: Value | None = None) -> None:
        """Makes a cell this body's own until it ends; without ``contents``, with those it has."""
        if contents is None:
            if self.refusal:
                raise TracerError(_message(cell, self.refusal))
            self.written.append(cell)
            contents = cell.take()
        self._before.append((cell, cell.swap(contents, self.trace)))

    def give_back(self) -> None:
        """Leaves every cell as it was."""
        for cell, before in reversed(self._before):
            cell.swap(*before)


@final
class _Open(threading.local):
    def __init__(self) -> None:
        self.bodies: list[Body] = []


_open = _Open()


@contextmanager
def body(
    cells: Sequence[Cell] = (), contents: Sequence[Value] = (), *, refusal: str = ""
) -> Generator[Body]:
    """What runs inside the block is a body of control flow; its writes do not reach outside.

    Args:
        cells: of outside, that get ``contents`` for the block.
        contents: a value for each.
        refusal: why it cannot write other cells of outside.
    """
    made = Body(refusal)
    _open.bodies.append(made)
    try:
        for cell, value in zip(cells, contents, strict=True):
            made.lend(cell, value)
        yield made
    finally:
        made.give_back()
        _open.bodies.pop()


class OuterWrites(Exception):
    """A body wrote cells of outside that it was not given."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        super().__init__()
        self.cells = tuple(cells)


def observed(fn: Function) -> Function:
    """``fn`` as a body; raises ``OuterWrites`` at its end where it wrote cells of outside."""

    @wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with body() as inner:
            result = fn(*args, **kwargs)
        if inner.written:
            raise OuterWrites(inner.written)
        return result

    return wrapped


def threaded(fn: Function, cells: Sequence[Cell]) -> Function:
    """``fn`` with the contents of ``cells`` as first argument, and as first of two results."""

    @wraps(fn)
    def wrapped(contents: Sequence[Value], *args: Any, **kwargs: Any) -> tuple[list[Value], Any]:
        with body(cells, contents) as inner:
            result = fn(*args, **kwargs)
            after = [cell.take() for cell in cells]
        outer = _open.bodies[-1] if _open.bodies else None
        if outer is not None and inner.written:
            outer.written.extend(inner.written)
        return after, result

    return wrapped


def contents_of(cells: Sequence[Cell]) -> list[Value]:
    """What the cells hold now."""
    return [cell.take() for cell in cells]


def put_all(cells: Sequence[Cell], contents: Sequence[Value]) -> None:
    """Puts a value into each cell."""
    for cell, value in zip(cells, contents, strict=True):
        cell.put(value)


def _body_of(cell: Cell) -> Body:
    current = current_trace()
    found = _open.bodies[-1] if _open.bodies else None
    if current is None:
        raise TracerError(
            f"ref: a Ref {aval_of(cell.take())} made inside a traced function was written after it "
            "had ended; return its contents, ref[...], instead"
        )
    if found is None or found.trace is not current:
        raise TracerError(
            _message(
                cell,
                "pass the Ref to the jitted function as an argument; inside grad, vmap or a custom "
                "rule make the Ref inside, or return what is to be written",
            )
        )
    return found


def _message(cell: Cell, advice: str) -> str:
    return (
        f"ref: a Ref {aval_of(cell.take())} made outside the traced function was written inside "
        f"it; {advice}"
    )
