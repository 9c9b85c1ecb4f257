"""Groups up to the names of their arrays: layers of a model repeat, their kernels are made once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import assert_never

from vkjit.lowering.plan.groups import (
    IOTA,
    BodyStep,
    ContractGroup,
    GatherStep,
    Group,
    InverseGroup,
    LoadStep,
    LoopGroup,
    ScanGroup,
    ScatterAddGroup,
    SetRowsGroup,
    SortGroup,
    StoreStep,
)

Rename = Callable[[int], int]


def canonical(group: Group) -> tuple[Group, tuple[int, ...]]:
    """``group`` with its arrays numbered in order of appearance and no origin.

    Returns:
        the renamed group, and the array behind each new number.
    """
    found: dict[int, int] = {}

    def rename(array: int) -> int:
        return IOTA if array == IOTA else found.setdefault(array, len(found))

    return _renamed(group, rename), tuple(found)


def _renamed(group: Group, rename: Rename) -> Group:
    match group:
        case LoopGroup():
            return replace(
                group,
                body=_body(group.body, rename),
                stores=_stores(group.stores, rename),
                origin=(),
            )
        case ContractGroup():
            return replace(
                group,
                lhs=_load(group.lhs, rename),
                rhs=_load(group.rhs, rename),
                body=_body(group.body, rename),
                stores=_stores(group.stores, rename),
                origin=(),
            )
        case ScatterAddGroup() | SetRowsGroup():
            return replace(
                group,
                target=rename(group.target),
                indices=_load(group.indices, rename),
                updates=_load(group.updates, rename),
                origin=(),
            )
        case InverseGroup():
            return replace(
                group, order=_load(group.order, rename), target=rename(group.target), origin=()
            )
        case ScanGroup() | SortGroup():
            return replace(
                group, source=_load(group.source, rename), target=rename(group.target), origin=()
            )
        case _:
            assert_never(group)


def _load(step: LoadStep, rename: Rename) -> LoadStep:
    return replace(step, array=rename(step.array))


def _body(body: tuple[BodyStep, ...], rename: Rename) -> tuple[BodyStep, ...]:
    return tuple(
        replace(s, array=rename(s.array)) if isinstance(s, (LoadStep, GatherStep)) else s
        for s in body
    )


def _stores(stores: tuple[StoreStep, ...], rename: Rename) -> tuple[StoreStep, ...]:
    return tuple(replace(s, array=rename(s.array)) for s in stores)
