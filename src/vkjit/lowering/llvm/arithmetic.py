"""The expressions of a kernel that touch no memory, as LLVM instructions."""

from __future__ import annotations

from typing import assert_never

from vkjit.errors import InternalError
from vkjit.lowering.kernel.nodes import (
    Binary,
    Bitcast,
    Compare,
    Const,
    Convert,
    Extract,
    Fma,
    Insert,
    Reduce,
    Select,
    Shuffle,
    Splat,
    Unary,
    Value,
)
from vkjit.lowering.kernel.types import (
    BF16,
    F32,
    F64,
    I1,
    BinOp,
    ScalarType,
    Type,
    UnOp,
    VecType,
    scalar_of,
    with_elem,
)
from vkjit.lowering.llvm import spelling
from vkjit.lowering.llvm.spelling import mangled, type_text
from vkjit.lowering.llvm.writer import Writer

_DIVISIONS = (BinOp.DIV_S, BinOp.DIV_U, BinOp.REM_S, BinOp.REM_U)


def expression(  # noqa: C901, PLR0912  one case per expression of a closed union
    w: Writer,
    node: Unary
    | Binary
    | Compare
    | Select
    | Fma
    | Convert
    | Bitcast
    | Splat
    | Extract
    | Insert
    | Shuffle
    | Reduce,
) -> str:
    """The operand that holds the result of ``node``."""
    text = type_text(node.type)
    match node:
        case Unary():
            return _unary(w, node)
        case Binary():
            return _binary(w, node)
        case Compare():
            opcode = spelling.compare_opcode(node.op, scalar_of(node.a.type))
            return w.value(f"{opcode} {w.typed(node.a)}, {w.use(node.b)}")
        case Select():
            return w.value(f"select {w.typed(node.cond)}, {w.typed(node.a)}, {w.typed(node.b)}")
        case Fma():
            return w.call("llvm.fma", node.type, (node.a, node.b, node.c))
        case Convert():
            return _convert(w, node)
        case Bitcast():
            return w.value(f"bitcast {w.typed(node.x)} to {text}")
        case Splat():
            assert isinstance(node.type, VecType)
            return w.splat(w.use(node.x), node.type)
        case Extract():
            return w.value(f"extractelement {w.typed(node.x)}, i64 {node.lane}")
        case Insert():
            return w.value(
                f"insertelement {w.typed(node.x)}, {w.typed(node.scalar)}, i64 {node.lane}"
            )
        case Shuffle():
            lanes = ", ".join(f"i32 {lane}" for lane in node.lanes)
            return w.value(
                f"shufflevector {w.typed(node.a)}, {w.typed(node.b)}, "
                f"<{len(node.lanes)} x i32> <{lanes}>"
            )
        case Reduce():
            return _reduce(w, node)
        case _:
            assert_never(node)


def _unary(w: Writer, node: Unary) -> str:
    elem = scalar_of(node.type)
    text = type_text(node.type)
    intrinsic = spelling.UNARY_INTRINSICS.get(node.op)
    if intrinsic is not None:
        return w.call(f"llvm.{intrinsic}", node.type, (node.x,))
    if node.op is UnOp.NOT:
        ones = spelling.constant(node.type, -1 if elem is not I1 else True)
        return w.value(f"xor {w.typed(node.x)}, {ones}")
    if node.op is UnOp.NEG:
        if elem.kind == "float":
            return w.value(f"fneg {w.typed(node.x)}")
        return w.value(f"sub {text} zeroinitializer, {w.use(node.x)}")
    if node.op is UnOp.CLZ:
        name = f"llvm.ctlz.{mangled(node.type)}"
        w.declarations.need(name, text, f"{text}, i1")
        return w.value(f"call {text} @{name}({w.typed(node.x)}, i1 false)")
    if node.op is UnOp.RSQRT:
        root = w.call("llvm.sqrt", node.type, (node.x,))
        return w.value(f"fdiv {text} {spelling.constant(node.type, 1.0)}, {root}")
    return _library(w, spelling.LIBM_UNARY.get(node.op), node.op.value, (node.x,))


def _binary(w: Writer, node: Binary) -> str:
    opcode = spelling.binary_opcode(node.op, scalar_of(node.type))
    if node.op in _DIVISIONS and not _is_safe(node.b):
        return w.value(f"{opcode} {w.typed(node.a)}, {_divisor(w, node)}")
    if opcode is not None:
        return w.value(f"{opcode} {w.typed(node.a)}, {w.use(node.b)}")
    intrinsic = spelling.BINARY_INTRINSICS.get(node.op)
    if intrinsic is not None:
        # Telling -0 from 0 in an extremum would cost x86 two more instructions of five.
        flags = "nsz " if node.op in (BinOp.MIN, BinOp.MAX) else ""
        return w.call(f"llvm.{intrinsic}", node.type, (node.a, node.b), flags)
    return _library(w, spelling.LIBM_BINARY.get(node.op), node.op.value, (node.a, node.b))


def _is_safe(divisor: Value) -> bool:
    """Whether a constant divisor cannot make the processor stop."""
    return (
        isinstance(divisor, Const)
        and isinstance(divisor.value, int)
        and divisor.value not in (0, -1)
    )


def _divisor(w: Writer, node: Binary) -> str:
    """The divisor, or 1 in lanes whose quotient does not exist or does not fit.

    Such lanes are undefined, but the instruction would end the process, and lanes that a mask has
    cut off hold zeros. The lowest number divided by -1 wraps to itself, as by 1.
    """
    text, elem = type_text(node.type), scalar_of(node.type)
    flag = type_text(with_elem(node.type, I1))
    divisor = w.use(node.b)
    bad = w.value(f"icmp eq {text} {divisor}, {spelling.constant(node.type, 0)}")
    if node.op in (BinOp.DIV_S, BinOp.REM_S):
        lowest = spelling.constant(node.type, -(1 << (elem.bits - 1)))
        low = w.value(f"icmp eq {text} {w.use(node.a)}, {lowest}")
        back = w.value(f"icmp eq {text} {divisor}, {spelling.constant(node.type, -1)}")
        wraps = w.value(f"and {flag} {low}, {back}")
        bad = w.value(f"or {flag} {bad}, {wraps}")
    one = spelling.constant(node.type, 1)
    return w.value(f"select {flag} {bad}, {text} {one}, {text} {divisor}")


def _library(w: Writer, symbol: str | None, op: str, operands: tuple[Value, ...]) -> str:
    """A function of the C library, lane by lane; it exists for f64 alone."""
    type_ = operands[0].type
    if symbol is None or scalar_of(type_) is not F64:
        raise InternalError(f"llvm: {op} of {type_} in {w.kernel}; legalize expands it before")
    w.declarations.need(symbol, "double", ", ".join(("double",) * len(operands)))
    uses = [w.use(operand) for operand in operands]
    if not isinstance(type_, VecType):
        arguments = ", ".join(f"double {use}" for use in uses)
        return w.value(f"call double @{symbol}({arguments})")
    text = type_text(type_)
    result = "poison"
    for lane in range(type_.lanes):
        parts = [w.value(f"extractelement {text} {use}, i64 {lane}") for use in uses]
        arguments = ", ".join(f"double {part}" for part in parts)
        scalar = w.value(f"call double @{symbol}({arguments})")
        result = w.value(f"insertelement {text} {result}, double {scalar}, i64 {lane}")
    return result


def _convert(w: Writer, node: Convert) -> str:
    source, target = scalar_of(node.x.type), scalar_of(node.type)
    operand = w.typed(node.x)
    # bfloat16 meets other types in f32: the hardware has no other path, and NumPy does the same.
    if target is BF16 and source is not F32:
        opcode = spelling.convert_opcode(node.op, source, F32)
        operand = _through(w, f"{opcode} {operand}", node.type, F32)
        return w.value(f"fptrunc {operand} to {type_text(node.type)}")
    if source is BF16 and target is not F32:
        operand, source = _through(w, f"fpext {operand}", node.type, F32), F32
    opcode = spelling.convert_opcode(node.op, source, target)
    return w.value(f"{opcode} {operand} to {type_text(node.type)}")


def _through(w: Writer, instruction: str, type_: Type, elem: ScalarType) -> str:
    """The typed result of a conversion to ``elem`` with the lanes of ``type_``."""
    text = type_text(with_elem(type_, elem))
    return f"{text} {w.value(f'{instruction} to {text}')}"


def _reduce(w: Writer, node: Reduce) -> str:
    assert isinstance(node.x.type, VecType)
    name, start = spelling.reduction(node.op, node.x.type)
    result, vector = type_text(node.type), type_text(node.x.type)
    first = f"{result}, " if start else ""
    w.declarations.need(name, result, f"{first}{vector}")
    flag = "reassoc " if start else ""
    return w.value(f"call {flag}{result} @{name}({start}{w.typed(node.x)})")
