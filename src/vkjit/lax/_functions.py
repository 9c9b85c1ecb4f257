"""Functions that control flow takes: over flat values, by name and line, with results compared."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, final

from vkjit import tree
from vkjit.control.cells import Cell, body
from vkjit.control.inner import same_type
from vkjit.errors import ArgumentError, DTypeError, ShapeError
from vkjit.ir.avals import Aval
from vkjit.ir.primitive import Value

Function = Callable[..., Any]


@final
class Flat:
    """A function of pytrees as one of their leaves, with the structure of its latest result.

    ``written`` are the Refs of outside that it wrote.

    Args:
        role: what the caller calls it: ``true_fun``.
        fn: the function.
        in_tree: structure of its arguments, a tuple.
    """

    def __init__(self, role: str, fn: Function, in_tree: tree.TreeDef) -> None:
        self.role = role
        self.fn = fn
        self.in_tree = in_tree
        self.out_tree: tree.TreeDef = tree.structure(None)
        self.written: list[Cell] = []

    def __call__(self, *leaves: Value) -> list[Value]:
        """The leaves of the result for those of the arguments."""
        with body() as inner:
            result = self.fn(*tree.unflatten(self.in_tree, leaves))
        self.written = inner.written
        out, self.out_tree = tree.flatten(result)
        return out

    def __str__(self) -> str:
        name = getattr(self.fn, "__name__", type(self.fn).__name__)
        code = getattr(inspect.unwrap(self.fn), "__code__", None)
        where = f" at {code.co_filename}:{code.co_firstlineno}" if code else ""
        return f"{self.role} ({name}{where})"

    def paths(self) -> list[str]:
        """Where each leaf of the result is in it, such as ``['a'][1]``."""
        positions = tree.unflatten(self.out_tree, range(self.out_tree.num_leaves))
        return [tree.keystr(path) for path, _ in tree.leaves_with_path(positions)]


def require_functions(what: str, **given: object) -> None:
    """Refuses what cannot be called.

    Raises:
        ArgumentError: one of ``given`` is no function.
    """
    for role, fn in given.items():
        if not callable(fn):
            raise ArgumentError(f"{what}: {role} is {type(fn).__name__}, expected a function")


def require_equal(
    what: str,
    left: tuple[str, tree.TreeDef, Sequence[Aval]],
    right: tuple[Flat, Sequence[Aval]],
    advice: str,
) -> None:
    """Refuses a function whose results differ from ``left`` in structure, shape or dtype.

    Args:
        what: name of the construct.
        left: what the results are compared with: a phrase for it, its structure and avals.
        right: the function and the avals of its results.
        advice: what to change.

    Raises:
        ShapeError, DTypeError: they differ; every leaf that does is named.
    """
    phrase, structure, expected = left
    flat, given = right
    if flat.out_tree != structure:
        raise ShapeError(
            f"{what}: {flat} returns the structure {shown(flat.out_tree)}, {phrase} "
            f"{shown(structure)}; expected one structure; {advice}"
        )
    leaves = zip(flat.paths(), expected, given, strict=True)
    pairs = [pair for pair in leaves if not same_type(pair[1], pair[2])]
    if pairs:
        _refuse(what, flat, phrase, pairs, advice)


def _refuse(
    what: str, flat: Flat, phrase: str, pairs: Sequence[tuple[str, Aval, Aval]], advice: str
) -> NoReturn:
    found = [
        f"{f'at {path} ' if path else ''}{given}, {phrase} {expected}"
        for path, expected, given in pairs
    ]
    kind = ShapeError if any(e.shape != g.shape for _, e, g in pairs) else DTypeError
    raise kind(
        f"{what}: {flat} returns {'; '.join(found)}; expected equal shapes and dtypes; {advice}"
    )


def shown(structure: tree.TreeDef) -> str:
    """A structure with ``*`` for its leaves."""
    text = str(structure)
    head, tail = "PyTreeSpec(", ", namespace="
    return text[len(head) :].split(tail)[0].removesuffix(")") if head in text else text
