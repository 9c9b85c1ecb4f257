"""What every reader of kernels asks of a node: its operands, its regions, what it defines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from vkjit.lowering.kernel.nodes import (
    AtomicAdd,
    Barrier,
    Binary,
    Bitcast,
    BlockArg,
    Compare,
    Const,
    Convert,
    Extract,
    Fma,
    For,
    If,
    Index,
    Insert,
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
from vkjit.lowering.kernel.types import Memory


def operands(node: Node) -> tuple[Value, ...]:
    """The values that the node itself reads; those of its regions are not among them."""
    match node:
        case Binary() | Compare() | Shuffle():
            return (node.a, node.b)
        case Fma() | MatMulAdd():
            return (node.a, node.b, node.c)
        case Select():
            return (node.cond, node.a, node.b)
        case Insert():
            return (node.x, node.scalar)
        case Const() | Index() | Barrier():
            return ()
        case For() | If():
            return _control_operands(node)
        case Load() | Store() | AtomicAdd():
            return _memory_operands(node)
        case MatLoad() | MatStore() | TensorLoad() | TensorStore() | MatFill() | MatMap():
            return _matrix_operands(node)
        case (
            Unary()
            | Convert()
            | Bitcast()
            | Splat()
            | Extract()
            | Reduce()
            | SubgroupReduce()
            | SubgroupShuffle()
            | MatConvert()
        ):
            return (node.x,)
        case _:
            assert_never(node)


def _memory_operands(node: Load | Store | AtomicAdd) -> tuple[Value, ...]:
    match node:
        case Load():
            return (node.index,) if node.mask is None else (node.index, node.mask)
        case Store():
            plain = (node.index, node.value)
            return plain if node.mask is None else (*plain, node.mask)
        case AtomicAdd():
            return (node.index, node.value)
        case _:
            assert_never(node)


def _control_operands(node: For | If) -> tuple[Value, ...]:
    if isinstance(node, If):
        return (node.cond,)
    return (node.lower, node.upper, node.step, *node.inits)


def _matrix_operands(
    node: MatLoad | MatStore | TensorLoad | TensorStore | MatFill | MatMap,
) -> tuple[Value, ...]:
    match node:
        case MatFill():
            return (node.x,)
        case MatMap():
            return node.sources
        case MatLoad():
            return (node.index, node.stride)
        case MatStore():
            return (node.index, node.stride, node.value)
        case TensorLoad():
            return (node.index, *node.at)
        case TensorStore():
            return (node.index, *node.at, node.value)
        case _:
            assert_never(node)


def regions(node: Node) -> tuple[Region, ...]:
    """The regions of a loop, branch or map; none for other nodes."""
    if isinstance(node, For | MatMap):
        return (node.body,)
    if isinstance(node, If):
        return (node.then, node.otherwise)
    return ()


def results(node: Node) -> tuple[Value, ...]:
    """The values that later nodes of the same region may read."""
    if isinstance(node, For | If):
        return node.results
    return (node,) if isinstance(node, Value) else ()


def arguments(node: Node) -> tuple[BlockArg, ...]:
    """The values that exist only inside the regions of the node."""
    if isinstance(node, MatMap):
        return (node.row, node.column, *node.elements)
    return (node.index, *node.carried) if isinstance(node, For) else ()


def memory_of(node: Node) -> Memory | None:
    """The memory that the node reads or writes."""
    if isinstance(node, Load | Store | AtomicAdd | MatLoad | MatStore | TensorLoad | TensorStore):
        return node.memory
    return None


def all_nodes(region: Region) -> Iterator[Node]:
    """Every node of the region and of the regions inside it, in order of the text."""
    for node in region.nodes:
        yield node
        for inner in regions(node):
            yield from all_nodes(inner)
