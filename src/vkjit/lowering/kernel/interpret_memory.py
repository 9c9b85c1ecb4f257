"""Memory of the interpreter: bounds, access rights, and races between two barriers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from vkjit.errors import InternalError
from vkjit.lowering.kernel.interpret_ops import DTYPES, Array
from vkjit.lowering.kernel.types import Access, Buffer, Memory, ScalarType, Scratch, Space

_NOBODY = np.iinfo(np.int32).max


@final
class Races:
    """Who touched each element of one shared array since the last barrier.

    ``writer`` holds an invocation or -1. ``first`` and ``last`` bound the readers. ``synced``
    marks what a subgroup barrier has made safe for the invocations of the same subgroup.
    """

    def __init__(self, name: str, workgroups: int, length: int, subgroup: int) -> None:
        self.name = name
        self._subgroup = subgroup
        shape = (workgroups, length)
        self._writer = np.full(shape, -1, np.int32)
        self._first = np.full(shape, _NOBODY, np.int32)
        self._last = np.full(shape, -1, np.int32)
        self._synced = np.zeros(shape, np.bool_)

    def barrier(self, groups: Array, *, workgroup: bool) -> None:
        """Forgets everything that the workgroups marked in ``groups`` did, or inside subgroups."""
        if not workgroup:
            self._synced[groups] = True
            return
        self._writer[groups] = -1
        self._first[groups] = _NOBODY
        self._last[groups] = -1
        self._synced[groups] = False

    def read(self, rows: Array, index: Array, who: Array) -> None:
        """Records reads; raises when somebody else wrote an element."""
        writer = self._writer[rows, index]
        bad = (writer >= 0) & (writer != who) & ~self._ordered(rows, index, writer, who)
        self._raise("written by {0} and read by {1}", bad, index, writer, who)
        np.minimum.at(self._first, (rows, index), who)
        np.maximum.at(self._last, (rows, index), who)

    def write(self, rows: Array, index: Array, who: Array) -> None:
        """Records writes; raises when somebody else read or wrote an element."""
        for other, touched in (
            (self._writer[rows, index], "written"),
            (self._first[rows, index], "read"),
            (self._last[rows, index], "read"),
        ):
            real = (other >= 0) & (other != _NOBODY) & (other != who)
            bad = real & ~self._ordered(rows, index, other, who)
            self._raise(touched + " by {0} and written by {1}", bad, index, other, who)
        self._writer[rows, index] = who
        kept = self._writer[rows, index]
        self._raise("written by {0} and written by {1}", kept != who, index, kept, who)
        self._first[rows, index] = _NOBODY
        self._last[rows, index] = -1
        self._synced[rows, index] = False

    def _ordered(self, rows: Array, index: Array, other: Array, who: Array) -> Array:
        same = other // self._subgroup == who // self._subgroup
        return self._synced[rows, index] & same

    def _raise(self, text: str, bad: Array, index: Array, other: Array, who: Array) -> None:
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            parties = text.format(f"invocation {other[at]}", f"invocation {who[at]}")
            raise InternalError(
                f"race on shared {self.name}[{index[at]}]: {parties} without a barrier between"
            )


@final
class Bank:
    """One global, shared or local array as the invocations of a chunk see it.

    ``rows`` maps an invocation to its row of scratch memory; global memory has one row.
    """

    def __init__(
        self, memory: Memory, data: Array, rows: Array | None, races: Races | None
    ) -> None:
        self.memory = memory
        self.data = data
        self.rows = rows
        self.races = races
        self._per = max(1, memory.elem.bytes // data.dtype.itemsize)

    def seen_as(self, elem: ScalarType) -> Bank:
        """The same memory as elements of another type, as far as it holds whole ones."""
        own = self.memory.elem
        if elem is own:
            return self
        whole = self.data.shape[-1] * own.bytes // elem.bytes * elem.bytes // own.bytes
        return Bank(self.memory, self.data[..., :whole].view(DTYPES[elem]), self.rows, self.races)

    def load(self, index: Array, active: Array | None, who: Array) -> Array:
        """Elements at ``index`` (invocations, or invocations by lanes); 0 where not active."""
        if isinstance(self.memory, Buffer) and self.memory.access is Access.WRITE:
            raise InternalError(f"load: buffer {self.memory.name} is write only")
        safe = self._checked("load", index, active)
        if self.rows is None:
            made: Array = self.data.take(safe)
        else:
            rows, safe = self._with_rows(safe)
            if self.races is not None:
                touched = (rows, safe // self._per, _beside(who, safe))
                self.races.read(*_picked(touched, active, safe.shape))
            made = self.data[rows, safe]
        if active is None:
            return made
        return np.where(active, made, np.zeros((), made.dtype))

    def store(self, index: Array, value: Array, active: Array | None, who: Array) -> None:
        """Writes ``value`` where active."""
        self._check_writable("store")
        safe = self._checked("store", index, active)
        if self.rows is not None:
            rows, safe = self._with_rows(safe)
            parts = _picked((rows, safe, _beside(who, safe), value), active, safe.shape)
            if self.races is not None:
                self.races.write(parts[0], parts[1] // self._per, parts[2])
            self.data[parts[0], parts[1]] = parts[3]
            return
        shape = np.broadcast_shapes(safe.shape, value.shape)
        if active is None:
            self.data[np.broadcast_to(safe, shape)] = value
        else:
            where, what = _picked((safe, value), active, np.broadcast_shapes(shape, active.shape))
            self.data[where] = what

    def atomic_add(self, index: Array, value: Array, active: Array | None, total: int) -> None:
        """Adds once for each active invocation."""
        self._check_writable("atomic_add")
        safe = self._checked("atomic_add", index, active)
        if self.rows is None:
            where, what = _picked((safe, value), active, (total,))
            np.add.at(self.data, where, what)
        else:
            rows, safe = self._with_rows(safe)
            row, where, what = _picked((rows, safe, value), active, (total,))
            np.add.at(self.data, (row, where), what)

    def _check_writable(self, what: str) -> None:
        if isinstance(self.memory, Buffer) and self.memory.access is Access.READ:
            raise InternalError(f"{what}: buffer {self.memory.name} is read only")

    def _checked(self, what: str, index: Array, active: Array | None) -> Array:
        length = self.data.shape[-1]
        if index.size == 0 or (index.min() >= 0 and index.max() < length):
            return index
        outside = (index < 0) | (index >= length)
        wrong = outside if active is None else outside & active
        if wrong.any():
            first = np.broadcast_to(index, wrong.shape)[wrong][0]
            raise InternalError(
                f"{what}: index {first} is outside {self.memory.name}, which has {length} elements"
            )
        return np.where(outside, 0, index)

    def _with_rows(self, index: Array) -> tuple[Array, Array]:
        assert self.rows is not None
        rows = _beside(self.rows, index)
        shape = np.broadcast_shapes(rows.shape, index.shape)
        return np.broadcast_to(rows, shape), np.broadcast_to(index, shape)


def seen_index(index: Array, memory: Memory, elem: ScalarType) -> Array:
    """An index that counts elements of ``memory``, in elements of type ``elem``."""
    own = memory.elem.bytes
    if own == elem.bytes:
        return index
    if (index * own % elem.bytes).any():
        raise InternalError(f"{memory.name} as {elem}: an index is not a whole number of them")
    return index * own // elem.bytes


def _beside(per_invocation: Array, index: Array) -> Array:
    """One number for each invocation, with a lane axis when ``index`` has one."""
    return per_invocation[:, np.newaxis] if index.ndim == 2 else per_invocation


def _picked(
    parts: Sequence[Array], active: Array | None, shape: tuple[int, ...]
) -> tuple[Array, ...]:
    """The parts as flat arrays, only where active."""
    wide = tuple(np.broadcast_to(part, shape) for part in parts)
    if active is None:
        return tuple(part.ravel() for part in wide)
    keep = np.broadcast_to(active, shape)
    return tuple(part[keep] for part in wide)


def flat(memory: Buffer, array: np.ndarray[Any, Any]) -> Array:
    """The caller's array as the flat storage of ``memory``; shares its memory."""
    kind = memory.elem.kind
    if memory.elem.bits == 8 and array.dtype == np.bool_:
        array = array.view(np.int8)
    want = DTYPES[memory.elem]
    fits = (
        array.dtype == want
        if kind == "float"
        else array.dtype.kind in "iu" and array.dtype.itemsize == want.itemsize
    )
    if not fits or array.size != memory.length or not array.flags.c_contiguous:
        raise InternalError(
            f"run: {memory.name} was given {array.dtype}[{array.size}], "
            f"expected contiguous {memory.elem}[{memory.length}]"
        )
    return array.reshape(-1).view(want)


def scratch_bank(memory: Scratch, workgroups: int, invocations: int, subgroup: int) -> Bank:
    """Fresh scratch memory for a chunk: floats are NaN, integers a pattern, until written."""
    everyone = np.arange(workgroups * invocations)
    if memory.space is Space.LOCAL:
        return Bank(memory, _junk(memory.elem, len(everyone), memory.length), everyone, None)
    races = None
    if invocations > 1:
        races = Races(memory.name, workgroups, memory.length, subgroup)
    data = _junk(memory.elem, workgroups, memory.length)
    return Bank(memory, data, everyone // invocations, races)


def _junk(elem: ScalarType, rows: int, length: int) -> Array:
    value = np.nan if elem.kind == "float" else 0x5A
    return np.full((rows, length), value, DTYPES[elem])
