"""Which values differ between invocations that wait for each other, and barriers that they skip."""

from __future__ import annotations

from typing import final

from vkjit.lowering.kernel.nodes import (
    Barrier,
    BarrierScope,
    For,
    If,
    Index,
    Kernel,
    Load,
    Node,
    Region,
    SubgroupReduce,
    Value,
)
from vkjit.lowering.kernel.types import Access, Buffer, IndexKind
from vkjit.lowering.kernel.walk import all_nodes, operands


def divergent_barrier(kernel: Kernel) -> Barrier | None:
    """A barrier that some invocations of its scope may not reach, or None.

    A value is uniform when it derives from constants, workgroup indices and loads at uniform
    indices from read-only buffers; whatever else is loaded counts as different everywhere.
    """
    x, y, z = kernel.workgroup
    if x * y * z == 1:
        return None
    scopes = {node.scope for node in all_nodes(kernel.body) if isinstance(node, Barrier)}
    for scope in scopes:
        found = _Analysis(kernel, scope)
        found.region(kernel.body, divergent=False)
        if found.fault is not None:
            return found.fault
    return None


@final
class _Analysis:
    def __init__(self, kernel: Kernel, scope: BarrierScope) -> None:
        self._kernel = kernel
        self._scope = scope
        self._varying: set[Value] = set()
        self.fault: Barrier | None = None

    def region(self, region: Region, *, divergent: bool) -> None:
        for node in region.nodes:
            if isinstance(node, For):
                self._for(node, divergent=divergent)
            elif isinstance(node, If):
                self._if(node, divergent=divergent)
            elif isinstance(node, Barrier):
                if divergent and node.scope is self._scope:
                    self.fault = node
            elif isinstance(node, Value) and self._varies(node):
                self._varying.add(node)

    def _any(self, values: tuple[Value, ...]) -> bool:
        return any(value in self._varying for value in values)

    def _varies(self, node: Node) -> bool:
        whole_subgroup = self._scope is BarrierScope.SUBGROUP
        if isinstance(node, Index):
            if node.kind is IndexKind.LOCAL:
                return self._kernel.workgroup[node.axis] > 1
            return node.kind is IndexKind.LANE or (
                node.kind is IndexKind.SUBGROUP and not whole_subgroup
            )
        if isinstance(node, SubgroupReduce) and whole_subgroup:
            return False
        if isinstance(node, Load):
            memory = node.memory
            fixed = isinstance(memory, Buffer) and memory.access is Access.READ
            return not fixed or self._any(operands(node))
        return self._any(operands(node))

    def _for(self, node: For, *, divergent: bool) -> None:
        bounds = self._any((node.lower, node.upper, node.step))
        if self._any((node.lower, node.step)):
            self._varying.add(node.index)
        fresh = [c for c, init in zip(node.carried, node.inits, strict=True) if self._any((init,))]
        # What one iteration makes different, the next one carries in: repeat until nothing is new.
        while True:
            self._varying.update(fresh)
            self.region(node.body, divergent=divergent or bounds)
            pairs = zip(node.carried, node.body.yields, strict=True)
            fresh = [c for c, y in pairs if self._any((y,)) and c not in self._varying]
            if not fresh:
                break
        pairs = zip(node.results, node.carried, strict=True)
        self._varying.update(r for r, c in pairs if bounds or c in self._varying)

    def _if(self, node: If, *, divergent: bool) -> None:
        cond = self._any((node.cond,))
        for side in (node.then, node.otherwise):
            self.region(side, divergent=divergent or cond)
        yields = zip(node.results, node.then.yields, node.otherwise.yields, strict=True)
        self._varying.update(r for r, a, b in yields if cond or self._any((a, b)))
