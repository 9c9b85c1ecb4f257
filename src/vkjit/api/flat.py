"""Functions over pytrees as functions over flat lists of values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast, final

from vkjit import tree
from vkjit.errors import ArgumentError
from vkjit.ir.primitive import Value
from vkjit.trace import Traced, aval_of, trace


@final
class FlatFunction:
    """``fn`` on the leaves of its arguments; remembers the tree of its latest result.

    With ``has_aux`` the function returns a pair; the leaves of both parts come out, those of the
    first part first, and ``main`` counts them.
    """

    __slots__ = ("aux_tree", "fn", "has_aux", "in_tree", "main", "out_tree")

    def __init__(
        self, fn: Callable[..., Any], in_tree: tree.TreeDef, *, has_aux: bool = False
    ) -> None:
        self.fn = fn
        self.in_tree = in_tree
        self.has_aux = has_aux
        self.out_tree: tree.TreeDef | None = None
        self.aux_tree: tree.TreeDef | None = None
        self.main = 0

    def __call__(self, *leaves: Value) -> list[Value]:
        """The leaves of the result for those of the arguments."""
        args, kwargs = tree.unflatten(self.in_tree, leaves)
        result = self.fn(*args, **kwargs)
        aux: list[Value] = []
        if self.has_aux:
            result, extra = _pair(result)
            aux, self.aux_tree = tree.flatten(extra)
        out, self.out_tree = tree.flatten(result)
        self.main = len(out)
        return [*out, *aux]

    def trace(self, leaves: Sequence[Value]) -> Traced:
        """The function's program for arguments with the avals of ``leaves``."""
        return trace(self, [aval_of(v) for v in leaves], name_of(self.fn))

    def result(self, leaves: Sequence[Value]) -> Any:
        """The first part of the result from its leaves."""
        assert self.out_tree is not None
        return tree.unflatten(self.out_tree, list(leaves))

    def aux(self, leaves: Sequence[Value]) -> Any:
        """The auxiliary part from all leaves of the result."""
        assert self.aux_tree is not None
        return tree.unflatten(self.aux_tree, list(leaves[self.main :]))


def _pair(result: object) -> tuple[Any, Any]:
    """What a function with ``has_aux`` returned, as its two parts."""
    kind = type(result)
    parts = cast("tuple[Any, ...]", result) if isinstance(result, tuple) else ()
    if len(parts) != 2:
        raise ArgumentError(
            f"has_aux: the function returned {kind.__name__}, expected a pair "
            "(value, auxiliary data)"
        )
    return parts[0], parts[1]


def flatten_call(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    has_aux: bool = False,
) -> tuple[FlatFunction, list[Value]]:
    """The flat function and the leaves of one call."""
    leaves, in_tree = tree.flatten((tuple(args), kwargs or {}))
    return FlatFunction(fn, in_tree, has_aux=has_aux), leaves


def name_of(fn: Callable[..., Any]) -> str:
    """A name for messages and programs."""
    name = getattr(fn, "__name__", type(fn).__name__)
    return "lambda_" if name == "<lambda>" else str(name)


def positions(argnums: int | Sequence[int], count: int, what: str) -> tuple[int, ...]:
    """``argnums`` as non-negative positions among ``count`` arguments.

    Raises:
        ArgumentError: a number is out of range or occurs twice.
    """
    given = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    found = tuple(n + count if n < 0 else n for n in given)
    if any(not 0 <= n < count for n in found) or len(set(found)) != len(found):
        raise ArgumentError(
            f"{what}: argnums {argnums} for a call with {count} positional arguments; expected "
            "distinct positions in range"
        )
    return found
