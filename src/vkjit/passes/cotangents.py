"""Cotangents of variables while a program is transposed: sums, and parts that may be joined."""

from __future__ import annotations

from typing import final

from vkjit.ir.primitive import Linear, Primitive, Tangent, Value
from vkjit.ir.program import Var
from vkjit.ops.structural import add

_Part = tuple[Primitive, Value]


@final
class Cotangents:
    """What has reached each variable so far.

    Cotangents of primitives that can join them, such as slices, are kept apart until they are asked
    for: the halves of a rotary embedding become one concatenation, not a sum of padded arrays.
    """

    def __init__(self) -> None:
        self._sums: dict[Var, Value] = {}
        self._parts: dict[tuple[Var, type[Primitive]], list[_Part]] = {}
        self._kinds: dict[Var, list[type[Primitive]]] = {}

    def add(self, var: Var, ct: Value) -> None:
        """Adds a cotangent of the variable."""
        before = self._sums.get(var)
        self._sums[var] = ct if before is None else add(before, ct)

    def add_part(self, var: Var, prim: Primitive, ct: Value) -> None:
        """Adds the cotangent of what a primitive that joins cotangents made of the variable."""
        parts = self._parts.setdefault((var, type(prim)), [])
        if not parts:
            self._kinds.setdefault(var, []).append(type(prim))
        parts.append((prim, ct))

    def sum_of(self, var: Var) -> Tangent:
        """The sum for ``var`` without what may be joined yet; None is zero."""
        return self._sums.get(var)

    def parts_of(self, var: Var) -> list[_Part]:
        """What may be joined for ``var``, in an order that keeps that of first parts."""
        return [p for kind in self._kinds.get(var, []) for p in self._parts[var, kind]]

    def put(self, var: Var, ct: Value) -> None:
        """Makes ``ct`` the sum for ``var``."""
        self._sums[var] = ct

    def take(self, var: Var) -> Tangent:
        """The sum for ``var``, which is forgotten; None is zero."""
        for kind in self._kinds.pop(var, []):
            parts = self._parts.pop((var, kind))
            joined = kind.join_cotangents(var.aval, parts)
            if joined is not None:
                self.add(var, joined)
                continue
            for prim, ct in parts:
                (made,) = prim.transpose([ct], [Linear(var.aval)])
                if made is not None:
                    self.add(var, made)
        return self._sums.pop(var, None)
