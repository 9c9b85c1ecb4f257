"""Structures of arguments and results as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from vkjit import tree
from vkjit.errors import ArgumentError, DataError

LEAF = "*"


def to_data(definition: tree.TreeDef) -> object:
    """Tuples, lists, dictionaries with string keys, None and leaves as JSON values.

    Raises:
        ArgumentError: the structure has another kind of node.
    """
    return _data(tree.unflatten(definition, [_Leaf()] * definition.num_leaves))


class _Leaf:
    """Stands for a leaf."""


def _data(value: Any) -> object:
    match value:
        case _Leaf():
            return LEAF
        case None:
            return None
        case dict():
            items = cast("dict[object, object]", value)
            if any(not isinstance(key, str) for key in items):
                raise ArgumentError(
                    f"export: a dictionary has keys {list(items)}, expected strings"
                )
            return {"dict": {str(key): _data(part) for key, part in items.items()}}
        case list():
            return {"list": [_data(part) for part in cast("list[object]", value)]}
        case tuple() if type(cast("object", value)) is tuple:
            return {"tuple": [_data(part) for part in cast("tuple[object, ...]", value)]}
        case _:
            raise ArgumentError(
                f"export: the structure has a {type(value).__name__}; expected tuples, lists, "
                "dictionaries and arrays: pass and return its parts in those"
            )


def from_data(data: object) -> tree.TreeDef:
    """The structure that ``to_data`` wrote.

    Raises:
        DataError: the data is something else.
    """
    return tree.structure(_tree(data, iter(range(1 << 62))))


def _tree(data: object, leaves: Iterator[int]) -> object:
    if data == LEAF:
        return next(leaves)
    if data is None:
        return None
    node = cast("dict[str, Any]", data) if isinstance(data, dict) else {}
    kind, parts = next(iter(node.items()), ("", None))
    if kind == "dict" and isinstance(parts, dict):
        return {key: _tree(part, leaves) for key, part in cast("dict[str, Any]", parts).items()}
    if kind in ("list", "tuple") and isinstance(parts, list):
        inside = [_tree(part, leaves) for part in cast("list[Any]", parts)]
        return inside if kind == "list" else tuple(inside)
    raise DataError(f"load: {data!r} is no structure of arrays; the file is damaged")
