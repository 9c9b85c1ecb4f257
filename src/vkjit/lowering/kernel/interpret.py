"""The definition of a kernel: runs it in NumPy, all invocations at once.

Every value is an array with an axis of invocations, of length 1 where all agree, and an axis of
lanes for vectors; a cooperative matrix has an axis of the groups that hold it. Divergent control
flow runs under a mask, and a barrier is where nothing has to happen, because each node is done for
all invocations before the next one begins. Workgroups run in chunks to bound memory.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, assert_never, final

import numpy as np

from vkjit.errors import InternalError
from vkjit.lowering.kernel import interpret_ops as ops
from vkjit.lowering.kernel.interpret_matrix import Groups, mat_type
from vkjit.lowering.kernel.interpret_memory import Bank, flat, scratch_bank, seen_index
from vkjit.lowering.kernel.interpret_ops import DTYPES, Array
from vkjit.lowering.kernel.nodes import (
    AtomicAdd,
    Barrier,
    BarrierScope,
    Binary,
    Bitcast,
    Compare,
    Const,
    Convert,
    Expr,
    Extract,
    Fma,
    For,
    If,
    Index,
    Insert,
    Kernel,
    Load,
    MatConvert,
    MatFill,
    MatLoad,
    MatMap,
    MatMulAdd,
    MatStore,
    Node,
    Reduce,
    Region,
    Select,
    Shuffle,
    Splat,
    Store,
    SubgroupReduce,
    SubgroupShuffle,
    TensorLoad,
    TensorStore,
    Unary,
    Value,
)
from vkjit.lowering.kernel.types import (
    IndexKind,
    MatType,
    Memory,
    Type,
    VecType,
    lanes_of,
    scalar_of,
)
from vkjit.lowering.kernel.walk import all_nodes, arguments, operands, regions, results

_CHUNK_VALUES = 1 << 16  # lanes of one value in a chunk: arrays stay in the cache
_CHUNK_SCRATCH = 1 << 26  # bytes of scratch memory in a chunk
_DEFAULT_SUBGROUP = 32

Mask = Array | None


def run(
    kernel: Kernel, arrays: Sequence[np.ndarray[Any, Any]], subgroup: int | None = None
) -> None:
    """Runs ``kernel`` on contiguous ``arrays``, one for each of its buffers, in place.

    Integer arrays may have either sign, ``i8`` buffers take bool arrays. ``subgroup`` is the
    size of a subgroup where the kernel does not require one.

    Raises:
        InternalError: An index is out of bounds, two invocations race on shared memory between
            barriers, a buffer is used against its access, or an array does not fit its buffer.
    """
    if len(arrays) != len(kernel.buffers):
        raise InternalError(
            f"run {kernel.name}: {len(arrays)} arrays given, expected {len(kernel.buffers)}"
        )
    storage = [flat(buffer, array) for buffer, array in zip(kernel.buffers, arrays, strict=True)]
    invocations = int(np.prod(kernel.workgroup))
    size = min(kernel.subgroup or subgroup or _DEFAULT_SUBGROUP, invocations)
    total = int(np.prod(kernel.grid))
    chunk = _chunk(kernel, invocations)
    drops = _drops(kernel.body)
    with np.errstate(all="ignore"):
        for first in range(0, total, chunk):
            count = min(chunk, total - first)
            _Chunk(kernel, storage, (first, count, invocations, size), drops).run()


def _chunk(kernel: Kernel, invocations: int) -> int:
    """Workgroups to run at once."""
    widest = max(
        (lanes_of(n.type) for n in all_nodes(kernel.body) if isinstance(n, Value)), default=1
    )
    mats = max(
        (
            n.type.rows * n.type.cols
            for n in all_nodes(kernel.body)
            if isinstance(n, Value) and isinstance(n.type, MatType)
        ),
        default=1,
    )
    scratch = sum(
        s.length * s.elem.bytes * (invocations if s.space.value == "local" else 1)
        for s in kernel.scratch
    )
    by_values = _CHUNK_VALUES // max(invocations * widest, mats)
    return max(1, min(by_values, _CHUNK_SCRATCH // max(scratch, 1)))


Drops = dict[Region, list[tuple[Value, ...]]]


def _drops(body: Region) -> Drops:
    """For each node, the values of its region that nobody reads later: their memory is freed."""
    found: Drops = {}

    def visit(region: Region) -> set[Value]:
        read: set[Value] = set(region.yields)
        dead: list[tuple[Value, ...]] = []
        own = {value for node in region.nodes for value in results(node)}
        for node in reversed(region.nodes):
            used = set(operands(node))
            for inner in regions(node):
                used |= visit(inner) - set(arguments(node))
            unread = [v for v in results(node) if v not in read]
            dead.append((*[v for v in used - read if v in own], *unread))
            read |= used
        found[region] = dead[::-1]
        return read - own

    visit(body)
    return found


@final
class _Chunk:
    """Some consecutive workgroups in flight."""

    def __init__(
        self,
        kernel: Kernel,
        storage: Sequence[Array],
        extent: tuple[int, int, int, int],
        drops: Drops,
    ) -> None:
        self._kernel = kernel
        self._first, self._workgroups, self._invocations, self._subgroup = extent
        self._total = self._workgroups * self._invocations
        self._who = np.tile(np.arange(self._invocations, dtype=np.int32), self._workgroups)
        self._groups = Groups(self._who, self._invocations, self._subgroup)
        self._drops = drops
        self._env: dict[Value, Array] = {}
        self._banks: dict[Memory, Bank] = {
            buffer: Bank(buffer, data, None, None)
            for buffer, data in zip(kernel.buffers, storage, strict=True)
        }
        for scratch in kernel.scratch:
            self._banks[scratch] = scratch_bank(
                scratch, self._workgroups, self._invocations, self._subgroup
            )

    def run(self) -> None:
        self._region(self._kernel.body, None)

    # -- control --------------------------------------------------------------------------------

    def _region(self, region: Region, mask: Mask) -> tuple[Array, ...]:
        env = self._env
        for node, dead in zip(region.nodes, self._drops[region], strict=True):
            self._node(node, mask)
            for value in dead:
                env.pop(value, None)
        return tuple(env[value] for value in region.yields)

    def _node(self, node: Node, mask: Mask) -> None:
        match node:
            case For():
                self._for(node, mask)
            case If():
                self._if(node, mask)
            case Store():
                active = self._active(mask, node.mask, node.value.type)
                index = self._addresses(node.memory, node.index, node.value.type)
                bank = self._bank(node.memory, node.value.type)
                bank.store(index, self._env[node.value], active, self._who)
            case AtomicAdd():
                self._banks[node.memory].atomic_add(
                    self._env[node.index], self._env[node.value], mask, self._total
                )
            case MatStore() | TensorStore():
                self._groups.store(node, self._env, self._banks, mask)
            case Barrier():
                self._barrier(node, mask)
            case _:
                self._env[node] = self._expr(node, mask)

    def _barrier(self, node: Barrier, mask: Mask) -> None:
        groups: Array = np.ones(self._workgroups, np.bool_)
        if mask is not None:
            arrived = mask.reshape(self._workgroups, self._invocations)
            groups = np.logical_and.reduce(arrived, axis=1)
            if (np.logical_or.reduce(arrived, axis=1) & ~groups).any():
                raise InternalError("barrier: some invocations of the workgroup do not reach it")
        for bank in self._banks.values():
            if bank.races is not None:
                bank.races.barrier(groups, workgroup=node.scope is BarrierScope.WORKGROUP)

    def _for(self, node: For, mask: Mask) -> None:
        env = self._env
        index, upper, step = (self._uniform(v, mask) for v in (node.lower, node.upper, node.step))
        values = tuple(env[v] for v in node.inits)
        while True:
            going = index < upper
            if mask is not None:
                going = going & mask
            if not going.any():
                break
            # A loop whose bounds all invocations share needs no mask of its own.
            inner = mask if len(going) == 1 or going.all() else going
            env[node.index] = index
            env.update(zip(node.carried, values, strict=True))
            fresh = self._region(node.body, inner)
            if inner is not None and inner is not mask:
                merged = zip(fresh, values, node.results, strict=True)
                fresh = tuple(self._merged(inner, a, b, v.type) for a, b, v in merged)
            values = fresh
            index = index + step
        for done in arguments(node):
            env.pop(done, None)
        env.update(zip(node.results, values, strict=True))

    def _uniform(self, value: Value, mask: Mask) -> Array:
        """The value, on an axis of length 1 when all active invocations agree."""
        found = self._env[value]
        seen = found if mask is None or len(found) == 1 else found[mask]
        return seen[:1] if seen.size and (seen == seen[0]).all() else found

    def _if(self, node: If, mask: Mask) -> None:
        env = self._env
        cond = self._uniform(node.cond, mask)
        if len(cond) == 1:
            taken = node.then if cond[0] else node.otherwise
            env.update(zip(node.results, self._region(taken, mask), strict=True))
            return
        sides: list[tuple[Array, ...]] = []
        for region, chosen in ((node.then, cond), (node.otherwise, ~cond)):
            sides.append(self._region(region, chosen if mask is None else chosen & mask))
        for result, a, b in zip(node.results, *sides, strict=True):
            env[result] = self._merged(cond, a, b, result.type)

    def _merged(self, cond: Array, a: Array, b: Array, type_: Type) -> Array:
        if isinstance(type_, MatType):
            per_group = cond[self._groups.owners(type_)] if len(cond) > 1 else cond
            return np.where(per_group[:, np.newaxis, np.newaxis], a, b)
        return np.where(_like(cond, type_), a, b)

    # -- expressions ----------------------------------------------------------------------------

    def _expr(self, node: Expr, mask: Mask) -> Array:  # noqa: C901, PLR0912  one flat case each
        env = self._env
        match node:
            case Binary():
                return ops.binary(node.op, env[node.a], env[node.b])
            case Fma():
                return ops.fma(env[node.a], env[node.b], env[node.c])
            case Unary():
                return ops.unary(node.op, env[node.x])
            case Load():
                active = self._active(mask, node.mask, node.type)
                index = self._addresses(node.memory, node.index, node.type)
                return self._bank(node.memory, node.type).load(index, active, self._who)
            case Const():
                return _constant(node)
            case Select():
                cond = env[node.cond]
                if not isinstance(node.cond.type, VecType):
                    cond = _like(cond, node.type)
                return np.where(cond, env[node.a], env[node.b])
            case Compare():
                return ops.compare(node.op, env[node.a], env[node.b])
            case Convert():
                return ops.convert(node.op, env[node.x], scalar_of(node.type))
            case Bitcast():
                return ops.bitcast(env[node.x], scalar_of(node.type), lanes_of(node.type))
            case Index():
                return self._index(node)
            case Splat() | Extract() | Insert() | Shuffle() | Reduce():
                return self._vector(node)
            case SubgroupReduce() | SubgroupShuffle():
                return self._across(node, mask)
            case MatFill() | MatLoad() | MatMulAdd() | MatConvert() | TensorLoad():
                return self._groups.evaluate(node, env, self._banks, mask)
            case MatMap():
                return self._map(node, mask)
            case _:
                assert_never(node)

    def _index(self, node: Index) -> Array:
        dtype = DTYPES[scalar_of(node.type)]
        if node.kind is IndexKind.WORKGROUP:
            x, y, _ = self._kernel.grid
            linear = np.arange(self._first, self._first + self._workgroups)
            place = (linear % x, linear // x % y, linear // (x * y))[node.axis]
            return np.repeat(place, self._invocations).astype(dtype)
        if node.kind is IndexKind.LOCAL:
            x, y, _ = self._kernel.workgroup
            place = (self._who % x, self._who // x % y, self._who // (x * y))[node.axis]
        elif node.kind is IndexKind.LANE:
            place = self._who % self._subgroup
        else:
            place = self._who // self._subgroup
        return place.astype(dtype)

    def _vector(self, node: Splat | Extract | Insert | Shuffle | Reduce) -> Array:
        env = self._env
        match node:
            case Splat():
                x = env[node.x]
                return np.broadcast_to(x[:, np.newaxis], (len(x), lanes_of(node.type)))
            case Extract():
                return env[node.x][:, node.lane]
            case Insert():
                x, scalar = env[node.x], env[node.scalar]
                made = np.broadcast_to(x, (max(len(x), len(scalar)), x.shape[1])).copy()
                made[:, node.lane] = scalar
                return made
            case Shuffle():
                a, b = env[node.a], env[node.b]
                rows = max(len(a), len(b))
                both = [np.broadcast_to(v, (rows, v.shape[1])) for v in (a, b)]
                return np.concatenate(both, axis=1)[:, list(node.lanes)]
            case Reduce():
                return ops.reduce_last(node.op, env[node.x])
            case _:
                assert_never(node)

    def _across(self, node: SubgroupReduce | SubgroupShuffle, mask: Mask) -> Array:
        """Subgroup operations; invocations that are not active take no part."""
        x = self._env[node.x]
        x = np.broadcast_to(x, (self._total, *x.shape[1:]))
        if isinstance(node, SubgroupShuffle):
            source = self._who ^ node.mask
            base = np.arange(self._total) - self._who
            inside = (source < self._invocations) & (
                source // self._subgroup == self._who // self._subgroup
            )
            return x[np.where(inside, base + source, np.arange(self._total))]
        neutral = ops.identity(node.op, scalar_of(node.type))
        if mask is not None:
            x = np.where(_like(mask, node.type), x, neutral)
        size = self._subgroup
        count = -(-self._invocations // size)
        rest = x.shape[1:]
        padded = np.full((self._workgroups, count * size, *rest), neutral, x.dtype)
        padded[:, : self._invocations] = x.reshape(self._workgroups, self._invocations, *rest)
        groups = np.moveaxis(padded.reshape(self._workgroups, count, size, *rest), 2, -1)
        made = np.repeat(ops.reduce_last(node.op, groups), size, axis=1)
        return made[:, : self._invocations].reshape(self._total, *rest)

    # -- memory ---------------------------------------------------------------------------------

    def _bank(self, memory: Memory, type_: Type) -> Bank:
        return self._banks[memory].seen_as(scalar_of(type_))

    def _addresses(self, memory: Memory, index: Value, type_: Type) -> Array:
        found = seen_index(self._env[index], memory, scalar_of(type_))
        if isinstance(type_, VecType) and not isinstance(index.type, VecType):
            return found[:, np.newaxis] + np.arange(type_.lanes, dtype=found.dtype)
        return found

    def _active(self, mask: Mask, own: Value | None, type_: Type) -> Mask:
        outer = None if mask is None else _like(mask, type_)
        if own is None:
            return outer
        inner = self._env[own]
        if not isinstance(own.type, VecType):
            inner = _like(inner, type_)
        return inner if outer is None else inner & outer

    # -- cooperative matrices -------------------------------------------------------------------

    def _map(self, node: MatMap, mask: Mask) -> Array:
        """The body of a map, run by as many invocations as there are elements."""
        type_ = mat_type(node.type)
        inner = copy.copy(self)  # the same memory, but other values and invocations
        env, who = self._groups.elements(node, self._env, mask)
        inner._env, inner._who, inner._total = dict(env), self._who[who], len(who)
        if not len(who):
            return np.zeros((1, type_.rows, type_.cols), DTYPES[type_.elem])
        (made,) = inner._region(node.body, None)
        return self._groups.scattered(made, type_, mask)


def _like(mask: Array, type_: Type) -> Array:
    """A mask of invocations shaped to meet a value of ``type_``."""
    if isinstance(type_, MatType):
        return mask[:, np.newaxis, np.newaxis]
    return mask[:, np.newaxis] if isinstance(type_, VecType) else mask


def _constant(node: Const) -> Array:
    elem = scalar_of(node.type)
    if elem.kind == "int":
        whole = node.value if isinstance(node.value, tuple) else (node.value,)
        low = [int(v) & ((1 << elem.bits) - 1) for v in whole]
        made = np.array(low, f"u{elem.bytes}").view(DTYPES[elem])
    else:
        made = np.atleast_1d(np.asarray(node.value, dtype=np.float64)).astype(DTYPES[elem])
    if isinstance(node.type, VecType):
        return np.broadcast_to(made, (1, node.type.lanes))
    return made
