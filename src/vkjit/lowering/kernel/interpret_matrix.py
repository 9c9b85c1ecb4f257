"""Cooperative matrices in the interpreter: one matrix for each group of invocations that hold it.

A value is an array of groups by rows by columns, with one group where all agree. Groups that are
not active under a mask load zeros and store nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never, final

import numpy as np

from vkjit.errors import InternalError
from vkjit.lowering.kernel.interpret_memory import Bank, seen_index
from vkjit.lowering.kernel.interpret_ops import DTYPES, Array
from vkjit.lowering.kernel.nodes import (
    MatConvert,
    MatFill,
    MatLayout,
    MatLoad,
    MatMap,
    MatMulAdd,
    MatStore,
    TensorLoad,
    TensorStore,
    Value,
)
from vkjit.lowering.kernel.types import MatScope, MatType, Memory, Type
from vkjit.lowering.kernel.walk import operands

Mask = Array | None
Env = Mapping[Value, Array]
Banks = Mapping[Memory, Bank]
_Access = MatLoad | MatStore | TensorLoad | TensorStore


@final
class Groups:
    """The groups of a chunk. ``who`` numbers each invocation in its workgroup."""

    def __init__(self, who: Array, invocations: int, subgroup: int) -> None:
        self.who = who
        self._sizes = {MatScope.SUBGROUP: subgroup, MatScope.WORKGROUP: invocations}

    def owners(self, type_: MatType) -> Array:
        """The first invocation of each group."""
        return np.flatnonzero(self.who % self._sizes[type_.scope] == 0)

    def shared(self, x: Array, type_: MatType, mask: Mask) -> Array:
        """A value that all invocations of a group must share, once for each group."""
        if len(x) == 1:
            return x
        owners = self.owners(type_)
        picked = x[owners]
        starts = np.repeat(picked, np.diff(np.append(owners, len(self.who))))
        differs = starts != x
        if (differs if mask is None else differs & mask).any():
            raise InternalError(
                f"{type_}: the invocations of a {type_.scope.value} give different operands"
            )
        return picked

    # -- nodes ----------------------------------------------------------------------------------

    def evaluate(
        self,
        node: MatFill | MatLoad | MatMulAdd | MatConvert | TensorLoad,
        env: Env,
        banks: Banks,
        mask: Mask,
    ) -> Array:
        """The matrices that ``node`` makes."""
        type_ = mat_type(node.type)
        match node:
            case MatFill():
                x = self.shared(env[node.x], type_, mask)
                shape = (len(x), type_.rows, type_.cols)
                return np.broadcast_to(x[:, np.newaxis, np.newaxis], shape)
            case MatLoad() | TensorLoad():
                where, active, owners = self._places(node, type_, env, mask)
                bank = _of_groups(banks[node.memory].seen_as(type_.elem), owners)
                made = bank.load(where, active, self.who[owners])
                return made.reshape(len(where), type_.rows, type_.cols)
            case MatMulAdd():
                return _mul_add(env[node.a], env[node.b], env[node.c])
            case MatConvert():
                return env[node.x].astype(DTYPES[type_.elem])
            case _:
                assert_never(node)

    def store(self, node: MatStore | TensorStore, env: Env, banks: Banks, mask: Mask) -> None:
        """Writes the matrices of all active groups."""
        type_ = mat_type(node.value.type)
        where, active, owners = self._places(node, type_, env, mask)
        value = env[node.value].reshape(-1, where.shape[1])
        bank = _of_groups(banks[node.memory].seen_as(type_.elem), owners)
        bank.store(where, np.broadcast_to(value, where.shape), active, self.who[owners])

    def elements(self, node: MatMap, env: Env, mask: Mask) -> tuple[Env, Array]:
        """What the body of a map may read, with one invocation for each element, and their number.

        Also each element's invocation of the chunk. Only active groups take part.
        """
        type_ = mat_type(node.type)
        owners = self.owners(type_)
        kept = np.ones(len(owners), np.bool_) if mask is None else mask[owners]
        size = type_.rows * type_.cols
        inner: dict[Value, Array] = {}
        for value in (*(v for n in node.body.nodes for v in operands(n)), *node.body.yields):
            x = env.get(value)
            if x is not None and value not in inner:
                inner[value] = x if len(x) == 1 else np.repeat(x[owners[kept]], size)
        for argument, source in zip(node.elements, node.sources, strict=True):
            x = env[source]
            wide = np.broadcast_to(x, (len(owners), *x.shape[1:]))
            inner[argument] = wide[kept].reshape(-1)
        position = np.tile(np.arange(size, dtype=np.int32), int(kept.sum()))
        inner[node.row], inner[node.column] = position // type_.cols, position % type_.cols
        return inner, np.repeat(owners[kept], size)

    def scattered(self, x: Array, type_: MatType, mask: Mask) -> Array:
        """What a map gave for the elements of the active groups, as matrices of all groups."""
        owners = self.owners(type_)
        kept = np.ones(len(owners), np.bool_) if mask is None else mask[owners]
        made = np.zeros((len(owners), type_.rows * type_.cols), x.dtype)
        made[kept] = np.broadcast_to(x, (made[kept].size,)).reshape(made[kept].shape)
        return made.reshape(len(owners), type_.rows, type_.cols)

    # -- addresses ------------------------------------------------------------------------------

    def _places(
        self, node: _Access, type_: MatType, env: Env, mask: Mask
    ) -> tuple[Array, Mask, Array]:
        """Element numbers by group and element, which of them count, and the groups' owners."""
        owners = self.owners(type_)
        if isinstance(node, MatLoad | MatStore):
            where, inside = self._strided(node, type_, env, mask), None
        else:
            where, inside = self._tensor(node, type_, env, mask)
        where = np.broadcast_to(where, (len(owners), type_.rows, type_.cols))
        where = where.reshape(len(owners), -1)
        active = None if mask is None else mask[owners][:, np.newaxis]
        if inside is not None:
            inside = np.broadcast_to(inside, (len(owners), type_.rows, type_.cols))
            inside = inside.reshape(where.shape)
            active = inside if active is None else inside & active
            where = np.where(active, where, 0)
        return where, active, owners

    def _strided(self, node: MatLoad | MatStore, type_: MatType, env: Env, mask: Mask) -> Array:
        index, stride = (
            seen_index(self._wide(v, type_, env, mask), node.memory, type_.elem)
            for v in (node.index, node.stride)
        )
        row, column = np.arange(type_.rows)[:, np.newaxis], np.arange(type_.cols)
        if node.layout is MatLayout.COLUMN:
            row, column = column, row
        return index + (row * stride + column)

    def _tensor(
        self, node: TensorLoad | TensorStore, type_: MatType, env: Env, mask: Mask
    ) -> tuple[Array, Mask]:
        tensor = node.tensor
        steps = [np.arange(type_.rows)[:, np.newaxis], np.arange(type_.cols)]
        if tensor.turned:
            steps.reverse()
        starts = [self._wide(at, type_, env, mask) for at in node.at]
        i, j = (start + step for start, step in zip(starts, steps, strict=True))
        where = self._wide(node.index, type_, env, mask) + (
            i * tensor.strides[0] + j * tensor.strides[1]
        )
        inside = (i >= 0) & (i < tensor.shape[0]) & (j >= 0) & (j < tensor.shape[1])
        if tensor.clamped:
            return where, inside
        active = True if mask is None else mask[self.owners(type_)][:, np.newaxis, np.newaxis]
        if (~inside & active).any():
            raise InternalError(
                f"tensor: {type_} reaches beyond {tensor.shape} in {node.memory.name}, "
                "expected a clamped tensor"
            )
        return where, None

    def _wide(self, value: Value, type_: MatType, env: Env, mask: Mask) -> Array:
        return self.shared(env[value], type_, mask)[:, np.newaxis, np.newaxis].astype(np.int64)


def mat_type(type_: Type) -> MatType:
    """``type_``, which must be a matrix."""
    assert isinstance(type_, MatType)
    return type_


def _of_groups(bank: Bank, owners: Array) -> Bank:
    """The memory as the owners see it."""
    rows = None if bank.rows is None else bank.rows[owners]
    return Bank(bank.memory, bank.data, rows, bank.races)


def _mul_add(a: Array, b: Array, c: Array) -> Array:
    wide = np.float64 if a.dtype.itemsize == 8 and a.dtype.kind == "f" else np.float32
    kind = np.int32 if a.dtype.kind == "i" else wide
    return (np.matmul(a.astype(kind), b.astype(kind)) + c.astype(kind)).astype(c.dtype)
