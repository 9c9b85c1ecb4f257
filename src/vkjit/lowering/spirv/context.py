"""What all parts of the emitter share: the module, the ids of values, kernel types as SPIR-V types.

Capabilities are declared where something needs them, so a module lists exactly those it uses. For
8 and 16 bit types there are two levels: loading, storing and converting to another width needs
only the storage capability of the buffer; anything else (``arithmetic=True``) needs the type's own.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import final

from vkjit.errors import InternalError
from vkjit.lowering.kernel.nodes import Const, Kernel, Value
from vkjit.lowering.kernel.types import (
    BF16,
    F16,
    F64,
    I1,
    I8,
    I16,
    I64,
    MatScope,
    MatType,
    MatUse,
    ScalarType,
    Type,
    VecType,
    scalar_of,
)
from vkjit.lowering.spirv.grammar import (
    Capability,
    CooperativeMatrixUse,
    FPEncoding,
    Op,
    Scope,
)
from vkjit.lowering.spirv.module import Module, float_bits
from vkjit.lowering.target import Target

_ALWAYS = {F64: Capability.Float64, I64: Capability.Int64}
_ARITHMETIC = {
    F16: Capability.Float16,
    I16: Capability.Int16,
    I8: Capability.Int8,
    # Outside matrices a bfloat16 is its 16 bits: there is no arithmetic on it to ask for.
    BF16: Capability.Int16,
}
STORAGE = {8: Capability.StorageBuffer8BitAccess, 16: Capability.StorageBuffer16BitAccess}
"""What buffers of narrow elements need, by width in bits."""
COOPERATIVE_MATRIX_2 = "SPV_NV_cooperative_matrix2"
_USES = {
    MatUse.A: CooperativeMatrixUse.MatrixAKHR,
    MatUse.B: CooperativeMatrixUse.MatrixBKHR,
    MatUse.ACC: CooperativeMatrixUse.MatrixAccumulatorKHR,
}
_MAT_SCOPES = {MatScope.SUBGROUP: Scope.Subgroup, MatScope.WORKGROUP: Scope.Workgroup}


@final
class Context:
    """One kernel being emitted. ``block`` is the label of the current block."""

    def __init__(self, kernel: Kernel, target: Target) -> None:
        self.kernel = kernel
        self.target = target
        self.module = Module()
        self.block = 0
        self._ids: dict[Value, int] = {}
        self._types: dict[Type, int] = {}

    # -- values -----------------------------------------------------------------------------------

    def bind(self, value: Value, id_: int) -> None:
        """Makes ``id_`` the result of ``value``."""
        self._ids[value] = id_

    def use(self, value: Value, *, arithmetic: bool = True) -> int:
        """The id of an operand; ``arithmetic`` unless it is only stored or converted in width."""
        if arithmetic:
            self.need_arithmetic(value.type)
        found = self._ids.get(value)
        if found is None and isinstance(value, Const):
            # Declared at first use: a constant that nothing reads needs no capability.
            found = self._ids[value] = self._constant(value)
        if found is None:
            raise InternalError(
                f"spirv: kernel {self.kernel.name} uses a {type(value).__name__} of type "
                f"{value.type} before it is defined"
            )
        return found

    @contextmanager
    def function(self) -> Generator[None]:
        """Inside, the body is that of another function, to be placed after the entry point."""
        module = self.module
        saved = (module.body, self._ids, self.block)
        module.body, self._ids = [], dict(self._ids)
        try:
            yield
        finally:
            module.functions.extend(module.body)
            module.body, self._ids, self.block = saved

    # -- types ------------------------------------------------------------------------------------

    @property
    def declared_types(self) -> frozenset[ScalarType]:
        """The scalar types that the module mentions so far."""
        return frozenset(scalar_of(type_) for type_ in self._types)

    def type(self, type_: Type, *, arithmetic: bool = True) -> int:
        """The SPIR-V type of ``type_``."""
        if arithmetic:
            self.need_arithmetic(type_)
        found = self._types.get(type_)
        if found is None:
            found = self._types[type_] = self._declare(type_)
        return found

    def need_arithmetic(self, type_: Type) -> None:
        """Declares the capability to compute with ``type_``."""
        if isinstance(type_, MatType) and type_.elem is BF16:
            return
        capability = _ARITHMETIC.get(scalar_of(type_))
        if capability is not None:
            self.module.require(capability)

    def settle_narrow_types(self) -> None:
        """Declares what allows narrow types that no buffer holds: between two conversions, say."""
        for elem in self.declared_types:
            capability = _ARITHMETIC.get(elem)
            if capability is not None and STORAGE[elem.bits] not in self.module.capabilities:
                self.module.require(capability)

    def _declare(self, type_: Type) -> int:
        match type_:
            case ScalarType():
                return self._declare_scalar(type_)
            case VecType(elem, lanes):
                if not 2 <= lanes <= 4:
                    raise InternalError(f"spirv: {type_} in kernel {self.kernel.name}, at most 4")
                return self.module.unique(Op.TypeVector, self.type(elem, arithmetic=False), lanes)
            case MatType():
                return self._declare_matrix(type_)

    def _declare_scalar(self, type_: ScalarType) -> int:
        module = self.module
        if type_ is I1:
            return module.unique(Op.TypeBool)
        if type_ in _ALWAYS:
            module.require(_ALWAYS[type_])
        if type_.kind == "int" or type_ is BF16:
            return module.unique(Op.TypeInt, type_.bits, 0)
        return module.unique(Op.TypeFloat, type_.bits)

    def _declare_matrix(self, type_: MatType) -> int:
        module = self.module
        module.require(Capability.CooperativeMatrixKHR, "SPV_KHR_cooperative_matrix")
        if type_.scope is MatScope.WORKGROUP:
            module.extensions.add(COOPERATIVE_MATRIX_2)
        return module.unique(
            Op.TypeCooperativeMatrixKHR,
            self.matrix_elem(type_.elem),
            module.uint(_MAT_SCOPES[type_.scope]),
            module.uint(type_.rows),
            module.uint(type_.cols),
            module.uint(_USES[type_.use]),
        )

    def matrix_elem(self, elem: ScalarType) -> int:
        """The component type of matrices of ``elem``; here bfloat16 is a type of its own."""
        if elem is not BF16:
            return self.type(elem)
        self.module.require(Capability.BFloat16TypeKHR, "SPV_KHR_bfloat16")
        self.module.require(Capability.BFloat16CooperativeMatrixKHR)
        return self.module.unique(Op.TypeFloat, 16, FPEncoding.BFloat16KHR)

    # -- constants --------------------------------------------------------------------------------

    def _constant(self, const: Const) -> int:
        """A constant of a scalar or vector type."""
        type_ = const.type
        if isinstance(type_, MatType):
            raise InternalError(f"spirv: constant of type {type_}; use MatFill")
        if isinstance(type_, ScalarType):
            assert not isinstance(const.value, tuple)
            return self.scalar_constant(type_, const.value)
        values = const.value if isinstance(const.value, tuple) else (const.value,) * type_.lanes
        lanes = [self.scalar_constant(type_.elem, v) for v in values]
        return self.module.constant(Op.ConstantComposite, self.type(type_), *lanes)

    def scalar_constant(self, type_: ScalarType, value: float) -> int:
        """A constant of a scalar type; integers wrap, floats round."""
        spirv_type = self.type(type_)
        if type_ is I1:
            op = Op.ConstantTrue if value else Op.ConstantFalse
            return self.module.constant(op, spirv_type)
        return self.module.constant(Op.Constant, spirv_type, *literal(type_, value))


def literal(type_: ScalarType, value: float) -> tuple[int, ...]:
    """The words of a number, least significant first; narrow types fill a word."""
    if type_ is BF16:
        bits = _bfloat16_bits(float(value))
    elif type_.kind == "float":
        bits = float_bits(float(value), type_.bits)
    else:
        bits = int(value) & ((1 << type_.bits) - 1)
    return (bits,) if type_.bits <= 32 else (bits & 0xFFFFFFFF, bits >> 32)


def _bfloat16_bits(value: float) -> int:
    """The upper half of the f32 pattern, rounded to nearest even; NaN keeps a mantissa bit."""
    bits = float_bits(value, 32)
    if value != value:
        return bits >> 16 | 0x40
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
