"""Pytrees: order of leaves, paths, registration."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from vkjit import tree
from vkjit.errors import ArgumentError


class Pair(NamedTuple):
    left: Any
    right: Any


@tree.register_dataclass
@dataclass(frozen=True)
class Layer:
    weight: Any
    bias: Any


@dataclass
class Scaled:
    value: Any
    name: str


tree.register_dataclass(Scaled, data_fields=["value"], meta_fields=["name"])


@tree.register_pytree_node_class
class Box:
    def __init__(self, content: Any) -> None:
        self.content = content

    def tree_flatten(self) -> tuple[list[Any], None]:
        return [self.content], None

    @classmethod
    def tree_unflatten(cls, data: None, children: Any) -> Box:
        return cls(*children)


NESTED = {"b": [1, (2, None)], "a": Pair(3, {"z": 4, "y": 5})}


def test_dictionary_keys_are_sorted_and_none_is_empty() -> None:
    assert tree.leaves(NESTED) == [3, 5, 4, 1, 2]
    assert tree.leaves(None) == []
    assert tree.leaves(OrderedDict([("z", 1), ("a", 2)])) == [1, 2]


def test_unflatten_inverts_flatten() -> None:
    leaves, definition = tree.flatten(NESTED)
    assert tree.unflatten(definition, leaves) == NESTED
    assert definition == tree.structure(tree.map(str, NESTED))
    assert hash(definition) == hash(tree.structure(NESTED))


def test_map_takes_several_trees() -> None:
    assert tree.map(lambda a, b: a + b, [1, (2,)], [10, (20,)]) == [11, (22,)]
    with pytest.raises(ValueError, match="tuple"):
        tree.map(lambda a, b: a + b, [1, (2,)], [10, [20]])


def test_is_leaf_stops_the_descent() -> None:
    assert tree.map(len, [(1, 2), (3,)], is_leaf=lambda x: isinstance(x, tuple)) == [2, 1]


def test_reduce_and_all() -> None:
    assert tree.reduce(lambda a, b: a + b, NESTED) == 15
    assert tree.reduce(lambda a, b: a + b, [], 7) == 7
    assert tree.all([True, {"a": 1}])
    assert not tree.all([True, {"a": 0}])


def test_paths_read_like_the_code_that_reaches_the_leaf() -> None:
    value = {"a": [Pair(1, 2)], "b": Layer(3, Box(4))}
    pairs, definition = tree.flatten_with_path(value)
    assert [tree.keystr(path) for path, _ in pairs] == [
        "['a'][0].left",
        "['a'][0].right",
        "['b'].weight",
        "['b'].bias[<flat index 0>]",
    ]
    assert [leaf for _, leaf in pairs] == [1, 2, 3, 4]
    assert definition == tree.structure(value)
    assert tree.keystr(pairs[2][0], simple=True, separator=".") == "b.weight"


def test_map_with_path() -> None:
    out = tree.map_with_path(lambda path, x, y: (tree.keystr(path), x + y), {"a": 1}, {"a": 2})
    assert out == {"a": ("['a']", 3)}


def test_metadata_belongs_to_the_structure() -> None:
    first, second = Scaled(1, "x"), Scaled(1, "y")
    assert tree.leaves(first) == [1]
    assert tree.structure(first) != tree.structure(second)
    assert tree.map(lambda v: v + 1, first) == Scaled(2, "x")


def test_registered_class_keeps_its_type() -> None:
    out = tree.map(lambda v: v * 2, Box(Layer(1, 2)))
    assert isinstance(out, Box)
    assert out.content == Layer(2, 4)


def test_transpose_turns_a_list_of_dictionaries_inside_out() -> None:
    outer = tree.structure([0, 0])
    assert tree.transpose(outer, None, [{"a": 1}, {"a": 2}]) == {"a": [1, 2]}
    with pytest.raises(ArgumentError, match=r"tree\.transpose: structure"):
        tree.transpose(outer, None, [{"a": 1}, {"b": 2}])


def test_register_dataclass_wants_every_field_once() -> None:
    with pytest.raises(ArgumentError, match="has the fields"):
        tree.register_dataclass(Pair, ["left"], ["middle"])
