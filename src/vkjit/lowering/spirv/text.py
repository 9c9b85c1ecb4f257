"""SPIR-V as text: a disassembler over the generated tables, for people and for tests.

It prints what SPIRV-Tools' ``spirv-dis`` prints, in that syntax, for modules of the instructions in
``grammar``; no tool is needed.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from vkjit.errors import InternalError
from vkjit.lowering.spirv import grammar
from vkjit.lowering.spirv.grammar import MAGIC, Glsl, Op
from vkjit.lowering.spirv.operands import FLAGS, OPERANDS, PARAMETERS

_HEADER_WORDS = 5
_INDENT = 15  # columns for "%name = "
_KNOWN = frozenset(map(int, OPERANDS))
_FLOATS = {32: ("<I", "<f", ".9g"), 64: ("<Q", "<d", ".17g")}
_SHORT_TYPES = {
    (Op.TypeFloat, 16): "half",
    (Op.TypeFloat, 32): "float",
    (Op.TypeFloat, 64): "double",
    (Op.TypeInt, 8): "uchar",
    (Op.TypeInt, 16): "ushort",
    (Op.TypeInt, 32): "uint",
    (Op.TypeInt, 64): "ulong",
}


@final
@dataclass(frozen=True, slots=True)
class Instruction:
    """An opcode and the words after the first."""

    op: int
    words: tuple[int, ...]


def instructions(words: array[int]) -> Iterator[Instruction]:
    """The instructions of a module, in order.

    Raises:
        InternalError: the words are no module.
    """
    if len(words) < _HEADER_WORDS or words[0] != MAGIC:
        raise InternalError("spirv: no module: the magic number is missing")
    position = _HEADER_WORDS
    while position < len(words):
        count, op = words[position] >> 16, words[position] & 0xFFFF
        if not count or position + count > len(words):
            raise InternalError(f"spirv: word {position} begins an instruction past the end")
        yield Instruction(op, tuple(words[position + 1 : position + count]))
        position += count


def text(words: array[int], *, names: bool = True) -> str:
    """The module as assembly text.

    Args:
        words: a module.
        names: whether ids are shown by their ``OpName``, types and small constants by their
            meaning; without it every id is its number.

    Raises:
        InternalError: the words are no module, or an instruction is unknown.
    """
    module = list(instructions(words))
    reader = _Reader(_names(module) if names else {})
    return "\n".join(reader.line(instruction) for instruction in module) + "\n"


@final
class _Reader:
    """Prints instructions one after another; remembers the types that numbers need."""

    def __init__(self, names: dict[int, str]) -> None:
        self._names = names
        self._numbers: dict[int, tuple[Op, int]] = {}  # scalar types: kind and width in bits
        self._words: list[int] = []
        self._type = 0

    def line(self, instruction: Instruction) -> str:
        """The text of the next instruction."""
        if instruction.op not in _KNOWN:
            raise InternalError(f"spirv: opcode {instruction.op} is not in the tables")
        op = Op(instruction.op)
        if op in (Op.TypeInt, Op.TypeFloat):
            self._numbers[instruction.words[0]] = (op, instruction.words[1])
        self._words = list(instruction.words)
        result = ""
        parts = [f"Op{op.name}"]
        for kind in OPERANDS[op].split():
            if kind == "IdResult":
                result = f"{self._id()} ="
            else:
                parts += self._operands(kind)
        if self._words:
            raise InternalError(f"spirv: Op{op.name} has {len(self._words)} words too many")
        return f"{result:>{_INDENT - 1}} {' '.join(parts)}"

    def _operands(self, kind: str) -> Iterator[str]:
        """The texts of an operand that may be absent or repeated."""
        if kind.endswith("*"):
            while self._words:
                yield from self._operand(kind[:-1])
        elif self._words or not kind.endswith("?"):
            yield from self._operand(kind.rstrip("?"))

    def _operand(self, kind: str) -> Iterator[str]:
        match kind:
            case "IdResultType":
                self._type = self._words[0]
                yield self._id()
            case "IdRef" | "IdScope" | "IdMemorySemantics":
                yield self._id()
            case "PairIdRefIdRef":
                yield from (self._id(), self._id())
            case "LiteralInteger":
                yield str(self._words.pop(0))
            case "LiteralString":
                yield f'"{self._string()}"'
            case "LiteralContextDependentNumber":
                yield self._number()
            case "LiteralExtInstInteger":
                yield Glsl(self._words.pop(0)).name
            case _:
                yield from self._enumerant(kind)

    def _enumerant(self, kind: str) -> Iterator[str]:
        """A named value, or a set of bits, followed by what its members carry."""
        value = self._words.pop(0)
        values = [1 << i for i in range(32) if value >> i & 1] if kind in FLAGS else [value]
        named = {m.value: m.name for m in getattr(grammar, kind, ())}
        found = [named.get(v, str(v)) for v in values]
        yield "|".join(found) or "None"
        for name in found:
            for parameter in PARAMETERS.get(f"{kind}.{name}", "").split():
                yield from self._operand(parameter)

    def _id(self) -> str:
        number = self._words.pop(0)
        return f"%{self._names.get(number, number)}"

    def _string(self) -> str:
        found, used = _string(self._words)
        del self._words[:used]
        return found.replace("\\", "\\\\").replace('"', '\\"')

    def _number(self) -> str:
        """A constant of the result type; integers are unsigned, as all of ours."""
        kind, bits = self._numbers[self._type]
        value = sum(word << 32 * i for i, word in enumerate(self._words))
        self._words.clear()
        if kind is Op.TypeInt:
            return str(value)
        return _float_text(value, bits)


def _float_text(pattern: int, bits: int) -> str:
    """A number in decimal if it is normal or zero, else in hexadecimal."""
    exponent, mantissa = {16: (5, 10), 32: (8, 23), 64: (11, 52)}[bits]
    biased = pattern >> mantissa & ((1 << exponent) - 1)
    fraction = pattern & ((1 << mantissa) - 1)
    is_plain = (0 < biased < (1 << exponent) - 1) or not (biased or fraction)
    if bits in _FLOATS and is_plain:
        whole, real, digits = _FLOATS[bits]
        return format(struct.unpack(real, struct.pack(whole, pattern))[0], digits)
    sign = "-" if pattern >> (bits - 1) else ""
    if not (biased or fraction):
        return f"{sign}0x0p+0"
    return sign + _hexadecimal(biased, fraction, exponent, mantissa)


def _hexadecimal(biased: int, fraction: int, exponent: int, mantissa: int) -> str:
    """A significand between 1 and 2 and a power of two; infinity and NaN one above the largest."""
    power = biased - (1 << exponent - 1) + 1
    if not biased:  # subnormal: shifted until its leading bit is the implicit one
        shift = mantissa - fraction.bit_length() + 1
        fraction = fraction << shift & ((1 << mantissa) - 1)
        power = 1 - shift - (1 << exponent - 1) + 1
    digits = -(-mantissa // 4)
    shown = f"{fraction << 4 * digits - mantissa:0{digits}x}".rstrip("0")
    return f"0x1{'.' if shown else ''}{shown}p{power:+d}"


def _string(words: Sequence[int]) -> tuple[str, int]:
    """A zero-terminated string, and the words it takes."""
    data = struct.pack(f"<{len(words)}I", *words)
    end = data.index(b"\0")
    return data[:end].decode(errors="replace"), end // 4 + 1


# -- names ----------------------------------------------------------------------------------------


def _names(module: Sequence[Instruction]) -> dict[int, str]:
    """Ids by their names in the module, scalar types and constants by what they are."""
    wanted: dict[int, str] = {}
    for instruction in module:
        name = _given_name(instruction) or _plain_name(instruction, wanted)
        if name:
            words = instruction.words
            wanted.setdefault(words[0] if name[0] else words[1], name[1])
    counts = Counter(wanted.values())
    return {i: name if counts[name] == 1 else f"{name}_{i}" for i, name in wanted.items()}


def _given_name(instruction: Instruction) -> tuple[bool, str] | None:
    """The name that an instruction gives to the id in its first word."""
    if instruction.op != Op.Name:
        return None
    name = re.sub(r"\W", "_", _string(instruction.words[1:])[0])
    return (True, name) if name and not name.isdecimal() else None


def _plain_name(instruction: Instruction, known: dict[int, str]) -> tuple[bool, str] | None:
    """A name for what the instruction defines, in its first (True) or second word."""
    op, words = instruction.op, instruction.words
    match op:
        case Op.TypeVoid:
            return True, "void"
        case Op.TypeBool:
            return True, "bool"
        case Op.TypeInt | Op.TypeFloat if len(words) == 2 or op == Op.TypeInt:
            return True, _SHORT_TYPES[Op(op), words[1]]
        case Op.TypeVector if words[1] in known:
            return True, f"v{words[2]}{known[words[1]]}"
        case Op.ConstantTrue | Op.ConstantFalse:
            return False, "true" if op == Op.ConstantTrue else "false"
        case Op.Constant if known.get(words[0]) in ("uint", "ulong", "ushort", "uchar"):
            value = sum(word << 32 * i for i, word in enumerate(words[2:]))
            return False, f"{known[words[0]]}_{value}"
        case _:
            return None
