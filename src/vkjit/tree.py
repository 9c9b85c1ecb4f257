"""Pytrees: nested tuples, lists, dictionaries, named tuples and registered classes.

Everything else is a leaf, except None, which is a tree without leaves. Dictionary keys are visited
in sorted order. Names and argument order follow ``jax.tree`` and ``jax.tree_util``.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, cast, final

import optree

from vkjit.errors import ArgumentError

__all__ = [
    "DictKey",
    "FlattenedIndexKey",
    "GetAttrKey",
    "KeyPath",
    "SequenceKey",
    "TreeDef",
    "all",
    "flatten",
    "flatten_up_to",
    "flatten_with_path",
    "keystr",
    "leaves",
    "leaves_with_path",
    "map",
    "map_with_path",
    "reduce",
    "register_dataclass",
    "register_pytree_node",
    "register_pytree_node_class",
    "structure",
    "transpose",
    "unflatten",
]

NAMESPACE = "vkjit"
TreeDef: TypeAlias = optree.PyTreeSpec
IsLeaf: TypeAlias = Callable[[Any], bool] | None
C = TypeVar("C", bound=type[Any])
# optree's own type of this function is partly unknown to pyright.
_register = cast("Any", optree.register_pytree_node)  # pyright: ignore[reportUnknownMemberType]


@final
@dataclass(frozen=True, slots=True)
class SequenceKey:
    """A step into a tuple or list."""

    idx: int

    def __str__(self) -> str:
        return f"[{self.idx}]"


@final
@dataclass(frozen=True, slots=True)
class DictKey:
    """A step into a dictionary."""

    key: Hashable

    def __str__(self) -> str:
        return f"[{self.key!r}]"


@final
@dataclass(frozen=True, slots=True)
class GetAttrKey:
    """A step into a named field of a named tuple or dataclass."""

    name: str

    def __str__(self) -> str:
        return f".{self.name}"


@final
@dataclass(frozen=True, slots=True)
class FlattenedIndexKey:
    """A step into a registered class: the position among its children."""

    key: int

    def __str__(self) -> str:
        return f"[<flat index {self.key}>]"


Key: TypeAlias = SequenceKey | DictKey | GetAttrKey | FlattenedIndexKey
KeyPath: TypeAlias = tuple[Key, ...]


def flatten(tree: Any, is_leaf: IsLeaf = None) -> tuple[list[Any], TreeDef]:
    """The leaves of ``tree`` in order, and its structure."""
    found, definition = optree.tree_flatten(tree, is_leaf, namespace=NAMESPACE)
    return found, definition


def flatten_up_to(treedef: TreeDef, tree: Any) -> list[Any]:
    """What ``tree`` has in the place of each leaf of ``treedef``.

    None stands for None in the place of every leaf below it.

    Raises:
        ValueError: the structures differ above those leaves.
    """
    if tree is None:
        return [None] * treedef.num_leaves
    level = treedef.one_level()
    if level is None:
        return [tree]
    pairs = zip(treedef.children(), level.flatten_up_to(tree), strict=True)
    return [leaf for child, part in pairs for leaf in flatten_up_to(child, part)]


def unflatten(treedef: TreeDef, leaves: Iterable[Any]) -> Any:
    """The tree of structure ``treedef`` with these leaves.

    Raises:
        ValueError: the number of leaves differs from that of the structure.
    """
    return optree.tree_unflatten(treedef, leaves)


def leaves(tree: Any, is_leaf: IsLeaf = None) -> list[Any]:
    """The leaves of ``tree`` in order."""
    return optree.tree_leaves(tree, is_leaf, namespace=NAMESPACE)


def structure(tree: Any, is_leaf: IsLeaf = None) -> TreeDef:
    """The structure of ``tree``: hashable, comparable, without its leaves."""
    return optree.tree_structure(tree, is_leaf, namespace=NAMESPACE)


def map(f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: IsLeaf = None) -> Any:
    """``f`` of each leaf of ``tree`` and what the other trees have in its place.

    Raises:
        ValueError: one of ``rest`` does not have the structure of ``tree`` as a prefix.
    """
    return optree.tree_map(f, tree, *rest, is_leaf=is_leaf, namespace=NAMESPACE)


_NO_START: Any = object()


def reduce(
    function: Callable[[Any, Any], Any],
    tree: Any,
    initializer: Any = _NO_START,
    is_leaf: IsLeaf = None,
) -> Any:
    """The leaves of ``tree`` combined from left to right, from ``initializer`` where given."""
    found = leaves(tree, is_leaf)
    if initializer is _NO_START:
        return functools.reduce(function, found)
    return functools.reduce(function, found, initializer)


def all(tree: Any, *, is_leaf: IsLeaf = None) -> bool:
    """Whether every leaf of ``tree`` is true; each must be concrete."""
    return builtins.all(leaves(tree, is_leaf))


def transpose(outer_treedef: TreeDef, inner_treedef: TreeDef | None, tree: Any) -> Any:
    """A tree of trees turned inside out: ``inner`` of ``outer`` from ``outer`` of ``inner``.

    Args:
        outer_treedef: structure at the top of ``tree``.
        inner_treedef: structure below each leaf of ``outer_treedef``; None: that of the first.
        tree: what is turned.

    Raises:
        ArgumentError: ``tree`` is not of these structures.
    """
    parts = outer_treedef.flatten_up_to(tree)
    if inner_treedef is None:
        if not parts:
            raise ArgumentError("tree.transpose: the outer structure has no leaves; give the inner")
        inner_treedef = structure(parts[0])
    for part in parts:
        if structure(part) != inner_treedef:
            raise ArgumentError(
                f"tree.transpose: structure {structure(part)} under a leaf of the outer structure; "
                f"expected {inner_treedef} everywhere"
            )
    columns = zip(*[leaves(part) for part in parts], strict=True)
    if not parts:
        columns = iter([()] * inner_treedef.num_leaves)
    return unflatten(inner_treedef, [unflatten(outer_treedef, column) for column in columns])


def flatten_with_path(
    tree: Any, is_leaf: IsLeaf = None
) -> tuple[list[tuple[KeyPath, Any]], TreeDef]:
    """``(path, leaf)`` pairs in order, and the structure; a path is a tuple of keys."""
    accessors, found, definition = optree.tree_flatten_with_accessor(
        tree, is_leaf, namespace=NAMESPACE
    )
    paths = [tuple([_key(entry) for entry in accessor]) for accessor in accessors]
    return list(zip(paths, found, strict=True)), definition


def leaves_with_path(tree: Any, is_leaf: IsLeaf = None) -> list[tuple[KeyPath, Any]]:
    """``(path, leaf)`` pairs in order."""
    return flatten_with_path(tree, is_leaf)[0]


def map_with_path(f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: IsLeaf = None) -> Any:
    """As ``map``, with the leaf's path as first argument of ``f``."""
    pairs, definition = flatten_with_path(tree, is_leaf)
    columns: list[Sequence[Any]] = [definition.flatten_up_to(other) for other in rest]
    out = [f(*pair, *others) for pair, *others in zip(pairs, *columns, strict=True)]
    return unflatten(definition, out)


def keystr(path: KeyPath, *, simple: bool = False, separator: str = "") -> str:
    """A path as text: ``['layers'][0].weight``; ``simple`` gives ``layers0weight``.

    Args:
        path: keys, from ``flatten_with_path``.
        simple: bare names and numbers.
        separator: between keys.
    """
    return separator.join(_bare(key) if simple else str(key) for key in path)


def register_pytree_node(
    nodetype: type[Any],
    flatten_func: Callable[[Any], tuple[Iterable[Any], Hashable]],
    unflatten_func: Callable[[Any, Any], Any],
) -> None:
    """Makes a class a tree: how to take it apart and build it.

    Args:
        nodetype: the class.
        flatten_func: object -> (children, data); the data is compared and hashed.
        unflatten_func: (data, children) -> object; children may be anything, so do not check them.
    """
    _register(
        nodetype,
        flatten_func,
        unflatten_func,
        path_entry_type=optree.FlattenedEntry,
        namespace=NAMESPACE,
    )


def register_pytree_node_class(cls: C) -> C:
    """Class decorator: uses the methods ``tree_flatten`` and (class method) ``tree_unflatten``."""
    found: Any = cls
    register_pytree_node(found, found.tree_flatten, found.tree_unflatten)
    return cls


def register_dataclass(
    nodetype: C,
    data_fields: Sequence[str] | None = None,
    meta_fields: Sequence[str] | None = None,
) -> C:
    """Makes a dataclass a tree; usable as a decorator.

    Args:
        nodetype: the dataclass.
        data_fields: fields that hold children; None: all except ``meta_fields``.
        meta_fields: fields that belong to the structure: hashable, static under ``jit``.

    Raises:
        ArgumentError: the fields named are not those of the class.
    """
    fields = tuple(cast("dict[str, Any]", getattr(nodetype, "__dataclass_fields__", {})))
    meta = tuple(meta_fields or ())
    data = tuple(f for f in fields if f not in meta) if data_fields is None else tuple(data_fields)
    if not fields or sorted(data + meta) != sorted(fields):
        raise ArgumentError(
            f"tree.register_dataclass: {nodetype.__name__} has the fields {fields}; given were "
            f"data {data} and meta {meta}; name each field of the dataclass once"
        )

    def take_apart(node: Any) -> tuple[list[Any], tuple[Any, ...], tuple[str, ...]]:
        static = tuple([getattr(node, name) for name in meta])
        return [getattr(node, name) for name in data], static, data

    def build(static: tuple[Any, ...], children: Iterable[Any]) -> Any:
        values = dict(zip(data, children, strict=True)) | dict(zip(meta, static, strict=True))
        return nodetype(**values)

    _register(nodetype, take_apart, build, path_entry_type=optree.GetAttrEntry, namespace=NAMESPACE)
    return nodetype


def _key(entry: Any) -> Key:
    match entry:
        case optree.NamedTupleEntry() | optree.StructSequenceEntry():
            return GetAttrKey(entry.field)
        case optree.GetAttrEntry() | optree.DataclassEntry():
            return GetAttrKey(str(entry.entry))
        case optree.SequenceEntry():
            return SequenceKey(entry.index)
        case optree.MappingEntry():
            return DictKey(cast("Any", entry).entry)
        case _:
            return FlattenedIndexKey(entry.entry)


def _bare(key: Key) -> str:
    match key:
        case SequenceKey():
            return str(key.idx)
        case GetAttrKey():
            return key.name
        case DictKey() | FlattenedIndexKey():
            return str(key.key)
