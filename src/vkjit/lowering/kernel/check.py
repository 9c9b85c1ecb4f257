"""Verifies a kernel and gathers the facts that emitters and devices need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from vkjit.errors import InternalError
from vkjit.lowering.kernel.check_types import access_fault, expression_fault, map_fault
from vkjit.lowering.kernel.nodes import (
    AtomicAdd,
    Barrier,
    For,
    If,
    Index,
    Kernel,
    Load,
    MatLoad,
    MatMap,
    MatStore,
    Node,
    Region,
    Store,
    SubgroupReduce,
    SubgroupShuffle,
    TensorLoad,
    TensorStore,
    Value,
)
from vkjit.lowering.kernel.text import node_text
from vkjit.lowering.kernel.types import (
    I1,
    Access,
    Buffer,
    IndexKind,
    MatType,
    ScalarType,
    Scratch,
    Space,
    Type,
    VecType,
    scalar_of,
)
from vkjit.lowering.kernel.uniform import divergent_barrier
from vkjit.lowering.kernel.walk import arguments, memory_of, operands, regions, results

_SHOWN = 4  # nodes before a fault that its message shows
_SHOWN_LINES = 12
_READERS = (Load, MatLoad, TensorLoad, AtomicAdd)
_WRITERS = (Store, MatStore, TensorStore, AtomicAdd)
_ACCESSES = frozenset((*_READERS, *_WRITERS))


@final
@dataclass(frozen=True, slots=True)
class KernelFacts:
    """What a verified kernel uses.

    ``types`` are the scalar types of its values, ``storage`` those of its memory. ``reads`` and
    ``writes`` have one entry for each buffer. ``shared_bytes`` count per workgroup, ``local_bytes``
    per invocation. ``lanes`` is the widest vector.
    """

    types: frozenset[ScalarType]
    storage: frozenset[ScalarType]
    reads: tuple[bool, ...]
    writes: tuple[bool, ...]
    shared_bytes: int
    local_bytes: int
    lanes: int
    subgroup: bool
    coop: bool
    atomics: bool
    barriers: bool


def verify(kernel: Kernel, max_lanes: int | None = None) -> KernelFacts:
    """Checks that ``kernel`` is well formed; at most ``max_lanes`` lanes in a vector, if given.

    Raises:
        InternalError: A value is used before its definition or outside its scope, operand types
            do not fit, yields do not match, memory is unknown or used against its access, or a
            barrier is not reached by all; the message shows the neighbouring nodes.
    """
    checker = _Checker(kernel, max_lanes)
    checker.region(kernel.body)
    if kernel.body.yields:
        raise InternalError(f"kernel {kernel.name}: its body yields values, expected none")
    barrier = divergent_barrier(kernel)
    if barrier is not None:
        raise InternalError(
            f"kernel {kernel.name}: barrier {barrier.scope.value} inside a loop or branch that "
            "differs between its invocations"
        )
    return checker.facts()


@final
class _Checker:
    def __init__(self, kernel: Kernel, max_lanes: int | None) -> None:
        self._kernel = kernel
        self._max_lanes = max_lanes
        self._visible: set[Value] = set()
        self._memory = frozenset((*kernel.buffers, *kernel.scratch))
        self._read: set[Buffer | Scratch] = set()
        self._written: set[Buffer | Scratch] = set()
        self._types: dict[int, Type] = {}
        self._kinds: set[type] = set()
        self._by_subgroup = kernel.subgroup is not None

    def facts(self) -> KernelFacts:
        kernel, kinds, types = self._kernel, self._kinds, self._types.values()
        sizes = {
            space: sum(s.length * s.elem.bytes for s in kernel.scratch if s.space is space)
            for space in Space
        }
        return KernelFacts(
            types=frozenset(map(scalar_of, types)),
            storage=frozenset(memory.elem for memory in self._memory),
            reads=tuple(buffer in self._read for buffer in kernel.buffers),
            writes=tuple(buffer in self._written for buffer in kernel.buffers),
            shared_bytes=sizes[Space.SHARED],
            local_bytes=sizes[Space.LOCAL],
            lanes=max((t.lanes for t in types if isinstance(t, VecType)), default=1),
            subgroup=self._by_subgroup or bool(kinds & {SubgroupReduce, SubgroupShuffle}),
            coop=any(isinstance(t, MatType) for t in types),
            atomics=AtomicAdd in kinds,
            barriers=Barrier in kinds,
        )

    def region(self, region: Region) -> None:
        defined: list[Value] = []
        for at, node in enumerate(region.nodes):
            fault = self._fault(node)
            if fault is None and isinstance(node, For | If | MatMap):
                fault = self._inside(node)
            if fault is not None:
                raise self._error(fault, region.nodes, at)
            self._record(node)
            if isinstance(node, Value):
                self._visible.add(node)
                defined.append(node)
            else:
                self._visible.update(results(node))
                defined += results(node)
        hidden = [value for value in region.yields if value not in self._visible]
        if hidden:
            raise self._error(
                f"yields {type(hidden[0]).__name__} that is not in scope",
                region.nodes,
                len(region.nodes) - 1,
            )
        self._visible.difference_update(defined)

    def _inside(self, node: For | If | MatMap) -> str | None:
        """Checks the regions of a node, then that their yields match its results."""
        self._visible.update(arguments(node))
        for inner in regions(node):
            self.region(inner)
        self._visible.difference_update(arguments(node))
        return map_fault(node) if isinstance(node, MatMap) else _yield_fault(node)

    def _record(self, node: Node) -> None:
        kind = type(node)
        self._kinds.add(kind)
        if isinstance(node, Value):
            # By identity: thousands of nodes share a few type objects, and hashing those is slow.
            self._types[id(node.type)] = node.type
        if kind in _ACCESSES:
            memory = memory_of(node)
            assert memory is not None
            if isinstance(node, _READERS):
                self._read.add(memory)
            if isinstance(node, _WRITERS):
                self._written.add(memory)
        elif isinstance(node, Index):
            self._by_subgroup |= node.kind in (IndexKind.LANE, IndexKind.SUBGROUP)

    def _fault(self, node: Node) -> str | None:
        for value in operands(node):
            if value not in self._visible:
                return f"uses {type(value).__name__} ({value.type}) before or outside its scope"
        if isinstance(node, Value) and node in self._visible:
            return "stands twice in the kernel"
        if type(node) in _ACCESSES:
            found = self._memory_fault(node)
            if found is not None:
                return found
        match node:
            case Store() | AtomicAdd() | MatStore() | TensorStore():
                return access_fault(node, self._kernel.index_type)
            case Barrier():
                return None
            case For():
                return _for_fault(node)
            case If():
                wrong = node.cond.type is not I1
                return f"condition of type {node.cond.type}, expected i1" if wrong else None
            case _:
                found = self._lanes_fault(node.type)
                return found or expression_fault(node, self._kernel.index_type)

    def _lanes_fault(self, type_: Type) -> str | None:
        if not isinstance(type_, VecType):
            return None
        if type_.lanes < 2:
            return f"{type_}, expected at least two lanes"
        if self._max_lanes is not None and type_.lanes > self._max_lanes:
            return f"{type_}, expected at most {self._max_lanes} lanes"
        return None

    def _memory_fault(self, node: Node) -> str | None:
        memory = memory_of(node)
        if memory is None:
            return None
        if memory not in self._memory:
            return f"{memory.name} is not among the buffers and scratch of the kernel"
        if isinstance(memory, Scratch):
            return None
        if isinstance(node, _READERS) and memory.access is Access.WRITE:
            return f"reads buffer {memory.name}, which is write only"
        if isinstance(node, _WRITERS) and memory.access is Access.READ:
            return f"writes buffer {memory.name}, which is read only"
        return None

    def _error(self, fault: str, nodes: Sequence[Node], at: int) -> InternalError:
        near = [n for n in nodes[max(0, at - _SHOWN) : at] if not isinstance(n, For | If | MatMap)]
        lines = node_text([*near, *nodes[at : at + 1]]).split("\n")
        what = type(nodes[at]).__name__ if nodes else "region"
        return InternalError(
            f"kernel {self._kernel.name}: {what}: {fault}; near\n" + "\n".join(lines[:_SHOWN_LINES])
        )


def _for_fault(node: For) -> str | None:
    bounds = {str(v.type) for v in (node.lower, node.upper, node.step, node.index)}
    whole = isinstance(node.lower.type, ScalarType) and node.lower.type.kind == "int"
    if len(bounds) != 1 or not whole:
        return f"bounds of types {', '.join(sorted(bounds))}, expected one integer type"
    for init, carried, result in zip(node.inits, node.carried, node.results, strict=True):
        if not init.type == carried.type == result.type:
            return f"carries {init.type} as {carried.type} into {result.type}"
    return None


def _yield_fault(node: Node) -> str | None:
    """Yields that do not match what the loop or branch promised."""
    want = [value.type for value in results(node)]
    for region in regions(node):
        got = [value.type for value in region.yields]
        if got != want:
            return f"yields {got}, expected {want}"
    return None
