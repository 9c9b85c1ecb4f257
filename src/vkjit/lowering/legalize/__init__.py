"""Rewrites a kernel into what a target can do: mathematics, narrow types, driver quirks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import final

from vkjit.errors import EmulationWarning, MissingRuleError
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Binary, Expr, Kernel, Unary, Value
from vkjit.lowering.kernel.types import (
    BF16,
    F16,
    F32,
    F64,
    I1,
    BinOp,
    ConvertOp,
    MatType,
    ScalarType,
    UnOp,
    lanes_of,
    scalar_of,
    with_elem,
)
from vkjit.lowering.kernel.walk import all_nodes
from vkjit.lowering.legalize import (
    exponential,
    integers,
    logarithm,
    power,
    sigmoidal,
    trigonometry,
    wide,
)
from vkjit.lowering.legalize.division import exact_division, exact_sqrt
from vkjit.lowering.legalize.fused import FUSED_FMA, fused_division, fused_sqrt
from vkjit.lowering.legalize.narrow import NARROW, Narrow
from vkjit.lowering.legalize.rewrite import Get, Rewriter
from vkjit.lowering.target import Target, TargetKind

__all__ = ["FUSED_FMA", "INEXACT_DIVISION", "legalize"]

INEXACT_DIVISION = "inexact-division"
"""Name of the quirk of drivers whose float division and root are corrected in integers."""

_UNARY: dict[UnOp, Callable[[Builder, Value], Value]] = {
    UnOp.RSQRT: sigmoidal.rsqrt,
    UnOp.EXP: exponential.exp,
    UnOp.EXP2: exponential.exp2,
    UnOp.EXPM1: exponential.expm1,
    UnOp.LOG: logarithm.log,
    UnOp.LOG1P: logarithm.log1p,
    UnOp.SIN: trigonometry.sin,
    UnOp.COS: trigonometry.cos,
    UnOp.TAN: trigonometry.tan,
    UnOp.ATAN: trigonometry.atan,
    UnOp.TANH: sigmoidal.tanh,
    UnOp.ERF: sigmoidal.erf,
    UnOp.ERF_INV: sigmoidal.erf_inv,
}
_BINARY: dict[BinOp, Callable[[Builder, Value, Value], Value]] = {
    BinOp.POW: power.pow_,
    BinOp.ATAN2: trigonometry.atan2,
}
_FLOAT = ConvertOp.FLOAT
_COUNTS: dict[UnOp, Callable[[Builder, Value], Value]] = {
    UnOp.POPCOUNT: integers.popcount,
    UnOp.CLZ: integers.count_leading_zeros,
}


def legalize(kernel: Kernel, target: Target) -> Kernel:
    """``kernel`` in operations and types that the emitter of ``target`` has; the old one stays.

    Functions of float32 become arithmetic, the same for every target. Types without arithmetic
    are computed in 32 bits; where ``bf16`` is among them it becomes ``i16``, in buffers too.
    On the CPU functions of float64 stay as they are, for the mathematical library of C.

    Raises:
        MissingRuleError: A type cannot be stored or computed with on the target, or a function of
            float64 is asked of a GPU.
    """
    _check_types(kernel, target)
    used = {scalar_of(n.type) for n in all_nodes(kernel.body) if isinstance(n, Value)}
    if used & NARROW:
        _tell_of_emulation(used, target)
        narrow = Narrow(target.arithmetic)
        kernel = Rewriter(kernel, narrow.rule, narrow.retyped).run()
    return Rewriter(kernel, _Functions(target).rule, {}).run()


_told: set[tuple[str, ScalarType]] = set()
"""Targets and types of which a warning has spoken."""


def _tell_of_emulation(used: Iterable[ScalarType], target: Target) -> None:
    """One warning for each type that a GPU could have and this one has not; none has bf16."""
    missing = (NARROW - {BF16} - target.arithmetic) & set(used)
    for elem in sorted(missing, key=str):
        if target.kind is TargetKind.GPU and (target.name, elem) not in _told:
            _told.add((target.name, elem))
            warnings.warn(
                f"{target.name}: arithmetic in {elem} is emulated in 32 bits, because the device "
                "has none; results are the same, kernels slower",
                EmulationWarning,
                stacklevel=2,
            )


def _check_types(kernel: Kernel, target: Target) -> None:
    for memory in (*kernel.buffers, *kernel.scratch):
        if memory.elem not in target.storage:
            raise MissingRuleError(
                f"legalize {kernel.name}: {memory.name} holds {memory.elem}, which {target.name} "
                f"cannot store; it stores {_names(target.storage)}"
            )
    for node in all_nodes(kernel.body):
        elem = scalar_of(node.type) if isinstance(node, Value) else I1
        if elem.bits == 64 and elem not in target.arithmetic:
            raise MissingRuleError(
                f"legalize {kernel.name}: a value of type {elem}, which {target.name} cannot "
                f"compute with; it computes with {_names(target.arithmetic)}"
            )


def _names(types: frozenset[ScalarType]) -> str:
    return ", ".join(sorted(t.name for t in types))


@final
class _Functions:
    """The rule that writes out functions."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._gpu = target.kind is TargetKind.GPU
        self._inexact = any(quirk.name == INEXACT_DIVISION for quirk in target.quirks)
        self._fused = FUSED_FMA in target.features

    def rule(self, b: Builder, node: Expr, get: Get) -> Value | None:
        if isinstance(node, Unary) and not isinstance(node.type, MatType):
            return self._unary(b, node, get)
        if isinstance(node, Binary) and node.op in _BINARY:
            return self._binary(b, node, get)
        if isinstance(node, Binary) and node.op is BinOp.DIV and self._divides(node):
            return self._quotient(b, get(node.a), get(node.b))
        return None

    def _divides(self, node: Value) -> bool:
        """Whether the driver's division and root are to be corrected for a value of this type."""
        scalar = not isinstance(node.type, MatType) and scalar_of(node.type) in (F16, F32)
        return self._inexact and scalar

    def _quotient(self, b: Builder, x: Value, y: Value) -> Value:
        return (fused_division if self._fused else exact_division)(b, x, y)

    def _root(self, b: Builder, x: Value) -> Value:
        return (fused_sqrt if self._fused else exact_sqrt)(b, x)

    def _unary(self, b: Builder, node: Unary, get: Get) -> Value | None:
        if node.op in _COUNTS and self._gpu:
            return _COUNTS[node.op](b, get(node.x))
        if node.op is UnOp.SQRT and self._divides(node):
            return self._root(b, get(node.x))
        if node.op is UnOp.RSQRT and self._divides(node):
            one = b.splat(b.const(scalar_of(node.type), 1.0), lanes_of(node.type))
            return self._quotient(b, one, self._root(b, get(node.x)))
        function = _UNARY.get(node.op)
        if function is None:
            return None
        elem = scalar_of(node.type)
        if elem is F64 and node.op is not UnOp.RSQRT:
            if self._gpu:
                raise self._missing(node.op, elem)
            return wide.erf_inv(b, get(node.x)) if node.op is UnOp.ERF_INV else None
        if elem is F32 or elem is F64:
            return function(b, get(node.x))
        x = b.convert(_FLOAT, get(node.x), with_elem(node.type, F32))
        return b.convert(_FLOAT, function(b, x), node.type)

    def _binary(self, b: Builder, node: Binary, get: Get) -> Value | None:
        elem = scalar_of(node.type)
        if elem is F64:
            if self._gpu:
                raise self._missing(node.op, elem)
            return None
        function = _BINARY[node.op]
        if elem is F32:
            return function(b, get(node.a), get(node.b))
        wide_type = with_elem(node.type, F32)
        a, c = (b.convert(_FLOAT, get(v), wide_type) for v in (node.a, node.b))
        return b.convert(_FLOAT, function(b, a, c), node.type)

    def _missing(self, op: UnOp | BinOp, elem: ScalarType) -> MissingRuleError:
        return MissingRuleError(
            f"legalize: {op.value} of {elem}, which {self._target.name} has no function for; "
            "expected float32, convert the operand"
        )
