"""Reads the text form of a kernel back; ``text(parse(s)) == s`` for every ``s`` that text made."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import cast, final

from vkjit.errors import InternalError
from vkjit.lowering.kernel.nodes import (
    AtomicAdd,
    Barrier,
    BarrierScope,
    Binary,
    Bitcast,
    BlockArg,
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
    MatLayout,
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
    Tensor,
    TensorLoad,
    TensorStore,
    Unary,
    Value,
)
from vkjit.lowering.kernel.types import (
    SCALARS,
    Access,
    BinOp,
    Buffer,
    CmpOp,
    ConvertOp,
    IndexKind,
    MatScope,
    MatType,
    MatUse,
    Memory,
    Number,
    Scratch,
    Space,
    Type,
    UnOp,
    VecType,
)

_HEADER = re.compile(
    r"kernel (?P<name>\S+) grid=\((?P<grid>[\d,]+)\) workgroup=\((?P<workgroup>[\d,]+)\) "
    r"index=(?P<index>\w+)(?: subgroup=(?P<subgroup>\d+))? \{"
)
_BUFFER = re.compile(r"buffer (\S+): (\w+)\[(\d+)\] (\w+)")
_SCRATCH = re.compile(r"scratch (\S+): (\w+)\[(\d+)\] (\w+)")
_FOR = re.compile(
    r"for (?P<index>%\S+): \S+ in (?P<lower>%\S+?)\.\.(?P<upper>%\S+) step (?P<step>%\S+)"
    r"(?: carry \((?P<carried>.*)\) -> \((?P<results>.*)\))? \{"
)
_IF = re.compile(r"if (?P<cond>%\S+)(?: -> \((?P<results>.*)\))? \{")
_ASSIGN = re.compile(r"(?P<name>%\d+): (?P<type>\S+) = (?P<op>\w+) ?(?P<rest>.*)")
_TYPED = re.compile(r"(%\S+): ([^\s,<]+(?:<[^>]*>)?)(?: = (%\S+?))?(?:, |$)")
_PLACE = re.compile(r"(\S+)\[(%\S+?)\](?:, (%\S+))?(?: mask (%\S+))?")
_STRIDED = re.compile(r"(\S+)\[(%\S+?)\] stride (%\S+) (\w+)(?:, (%\S+))?")
_TENSOR = re.compile(
    r"(\S+)\[(%\S+?)\] shape \((\d+),(\d+)\) strides \((\d+),(\d+)\)( clamped)?( turned)?"
    r" at \((%\S+), (%\S+)\)(?:, (%\S+))?"
)
_MAP = re.compile(r"(.*) as \((.*)\) \{")
_LANE = re.compile(r"(%\S+?)\[(\d+)\](?:, (%\S+))?")
_SHUFFLE = re.compile(r"(%\S+), (%\S+) \((.*)\)")
_VEC = re.compile(r"vec<(\w+),(\d+)>")
_MAT = re.compile(r"mat<(\w+),(\w+),(\d+),(\d+),(\w+)>")

_UNARY = {op.value: op for op in UnOp}
_BINARY = {op.value: op for op in BinOp}
_INDEX = {kind.value: kind for kind in IndexKind}


def parse(source: str) -> Kernel:
    """The kernel that ``source`` describes.

    Raises:
        InternalError: A line is not of the text form; the message quotes it with its number.
    """
    return _Parser(source).kernel()


def parse_type(source: str) -> Type:
    """A scalar, vector or matrix type from its text."""
    found = SCALARS.get(source)
    if found is not None:
        return found
    vector = _VEC.fullmatch(source)
    if vector is not None:
        return VecType(SCALARS[vector[1]], int(vector[2]))
    matrix = _MAT.fullmatch(source)
    if matrix is None:
        raise InternalError(f"parse: no type {source!r}")
    elem, scope, rows, cols, use = matrix.groups()
    return MatType(SCALARS[elem], int(rows), int(cols), MatUse(use), MatScope(scope))


def _constant(source: str) -> Number:
    if source in ("true", "false"):
        return source == "true"
    return int(source) if re.fullmatch(r"-?\d+", source) else float(source)


@final
class _Parser:
    def __init__(self, source: str) -> None:
        self._lines = [line.strip() for line in source.strip().split("\n")]
        self._at = 0
        self._values: dict[str, Value] = {}
        self._memory: dict[str, Memory] = {}

    def kernel(self) -> Kernel:
        head = self._match(_HEADER, self._next())
        kernel = Kernel(head["name"], SCALARS[head["index"]])
        kernel.grid = _triple(head["grid"])
        kernel.workgroup = _triple(head["workgroup"])
        kernel.subgroup = int(head["subgroup"]) if head["subgroup"] else None
        while self._peek().startswith("origin "):
            kernel.origin += (json.loads(self._next().removeprefix("origin ")),)
        while self._peek().startswith("buffer "):
            name, elem, length, access = self._match(_BUFFER, self._next()).groups()
            buffer = Buffer(name, SCALARS[elem], int(length), Access(access))
            kernel.buffers += (buffer,)
            self._memory[name] = buffer
        while self._peek().startswith("scratch "):
            name, elem, length, space = self._match(_SCRATCH, self._next()).groups()
            scratch = Scratch(name, SCALARS[elem], int(length), Space(space))
            kernel.scratch += (scratch,)
            self._memory[name] = scratch
        self._region(kernel.body)
        if self._next() != "}":
            raise self._error("expected the end of the kernel")
        return kernel

    # -- lines ----------------------------------------------------------------------------------

    def _peek(self) -> str:
        if self._at >= len(self._lines):
            raise self._error("unexpected end")
        return self._lines[self._at]

    def _next(self) -> str:
        line = self._peek()
        self._at += 1
        return line

    def _error(self, what: str) -> InternalError:
        line = self._lines[self._at - 1] if self._at else ""
        return InternalError(f"parse: line {self._at}: {what}: {line!r}")

    def _match(self, pattern: re.Pattern[str], source: str) -> re.Match[str]:
        found = pattern.fullmatch(source)
        if found is None:
            raise self._error("not of the text form")
        return found

    def _value(self, name: str) -> Value:
        found = self._values.get(name)
        if found is None:
            raise self._error(f"{name} is not defined")
        return found

    def _list(self, source: str) -> tuple[Value, ...]:
        return tuple(self._value(name) for name in source.split(", "))

    # -- statements -----------------------------------------------------------------------------

    def _region(self, region: Region) -> None:
        while not self._peek().startswith("}"):
            line = self._next()
            if line.startswith("yield "):
                region.yields = self._list(line.removeprefix("yield "))
            else:
                region.nodes.append(self._node(line))

    def _node(self, line: str) -> Node:
        word, _, rest = line.partition(" ")
        if word.startswith("%"):
            return self._assignment(line)
        match word:
            case "store" | "atomic_add":
                name, index, value, mask = self._match(_PLACE, rest).groups()
                parts = (self._memory[name], self._value(index), self._value(value))
                if word == "atomic_add":
                    return AtomicAdd(*parts)
                return Store(*parts, None if mask is None else self._value(mask))
            case "mat_store":
                name, index, stride, layout, value = self._match(_STRIDED, rest).groups()
                place = (self._memory[name], self._value(index), self._value(stride))
                return MatStore(*place, MatLayout(layout), self._value(value))
            case "tensor_store":
                memory, start, tensor, at, stored = self._tensor(rest)
                if stored is None:
                    raise self._error("expected a value to store")
                return TensorStore(memory, start, tensor, at, stored)
            case "barrier":
                return Barrier(BarrierScope(rest))
            case "for":
                return self._for(line)
            case "if":
                return self._if(line)
            case _:
                raise self._error("no such statement")

    def _for(self, line: str) -> For:
        found = self._match(_FOR, line)
        lower, upper, step = (self._value(found[name]) for name in ("lower", "upper", "step"))
        carried = _TYPED.findall(found["carried"] or "")
        inits = tuple(self._value(init) for _, _, init in carried)
        node = For(lower, upper, step, inits, found["index"][1:].rpartition(".")[0])
        self._values[found["index"]] = node.index
        for (name, _, _), value in zip(carried, node.carried, strict=True):
            self._values[name] = value
        self._region(node.body)
        self._close()
        self._define(node.results, found["results"])
        return node

    def _if(self, line: str) -> If:
        found = self._match(_IF, line)
        types = tuple(parse_type(t) for _, t, _ in _TYPED.findall(found["results"] or ""))
        node = If(self._value(found["cond"]), types)
        self._region(node.then)
        if self._peek() == "} else {":
            self._next()
            self._region(node.otherwise)
        self._close()
        self._define(node.results, found["results"])
        return node

    def _close(self) -> None:
        if self._next() != "}":
            raise self._error("expected }")

    def _define(self, values: tuple[BlockArg, ...], source: str | None) -> None:
        for (name, _, _), value in zip(_TYPED.findall(source or ""), values, strict=True):
            self._values[name] = value

    # -- expressions ----------------------------------------------------------------------------

    def _assignment(self, line: str) -> Expr:
        found = self._match(_ASSIGN, line)
        type_ = parse_type(found["type"])
        op, rest = found["op"], found["rest"]
        if op in _UNARY:
            made: Expr = Unary(_UNARY[op], self._value(rest))
        elif op in _BINARY:
            a, b = self._list(rest)
            made = Binary(_BINARY[op], a, b)
        elif op in _INDEX:
            made = Index(type_, _INDEX[op], int(rest or 0))
        else:
            reader = _READERS.get(op)
            if reader is None:
                raise self._error(f"no operation {op!r}")
            made = reader(self, rest, type_)
        if made.type != type_:
            raise self._error(f"the operands give {made.type}, not {type_}")
        self._values[found["name"]] = made
        return made

    def const(self, rest: str, type_: Type) -> Expr:
        if rest.startswith("("):
            return Const(type_, tuple(_constant(part) for part in rest[1:-1].split(", ")))
        return Const(type_, _constant(rest))

    def load(self, rest: str, type_: Type) -> Expr:
        name, index, _, mask = self._match(_PLACE, rest).groups()
        found = None if mask is None else self._value(mask)
        return Load(self._memory[name], self._value(index), type_, found)

    def mat_load(self, rest: str, type_: Type) -> Expr:
        name, index, stride, layout, _ = self._match(_STRIDED, rest).groups()
        place = (self._memory[name], self._value(index), self._value(stride))
        return MatLoad(*place, MatLayout(layout), cast("MatType", type_))

    def tensor_load(self, rest: str, type_: Type) -> Expr:
        memory, index, tensor, at, _ = self._tensor(rest)
        return TensorLoad(memory, index, tensor, at, cast("MatType", type_))

    def _tensor(self, rest: str) -> tuple[Memory, Value, Tensor, tuple[Value, Value], Value | None]:
        found = self._match(_TENSOR, rest)
        rows, columns, down, along = (int(found[i]) for i in range(3, 7))
        flags = (found[7] is not None, found[8] is not None)
        tensor = Tensor((rows, columns), (down, along), *flags)
        at = (self._value(found[9]), self._value(found[10]))
        value = None if found[11] is None else self._value(found[11])
        return self._memory[found[1]], self._value(found[2]), tensor, at, value

    def mat_map(self, rest: str, _: Type) -> Expr:
        found = self._match(_MAP, rest)
        node = MatMap(self._list(found[1]))
        inside = (node.row, node.column, *node.elements)
        self._values.update(zip(found[2].split(", "), inside, strict=True))
        self._region(node.body)
        self._close()
        return node

    def compare(self, rest: str, _: Type) -> Expr:
        op, names = rest.split(" ", 1)
        a, b = self._list(names)
        return Compare(CmpOp(op), a, b)

    def convert(self, rest: str, type_: Type) -> Expr:
        op, name = rest.split(" ", 1)
        return Convert(ConvertOp(op), self._value(name), type_)

    def reduce(self, rest: str, _: Type) -> Expr:
        op, name = rest.split(" ", 1)
        return Reduce(BinOp(op), self._value(name))

    def subgroup_reduce(self, rest: str, _: Type) -> Expr:
        op, name = rest.split(" ", 1)
        return SubgroupReduce(BinOp(op), self._value(name))

    def subgroup_shuffle(self, rest: str, _: Type) -> Expr:
        name, mask = rest.split(" xor ")
        return SubgroupShuffle(self._value(name), int(mask))

    def extract(self, rest: str, _: Type) -> Expr:
        found = self._match(_LANE, rest)
        return Extract(self._value(found[1]), int(found[2]))

    def insert(self, rest: str, _: Type) -> Expr:
        name, lane, scalar = self._match(_LANE, rest).groups()
        return Insert(self._value(name), self._value(scalar), int(lane))

    def shuffle(self, rest: str, _: Type) -> Expr:
        a, b, lanes = self._match(_SHUFFLE, rest).groups()
        return Shuffle(self._value(a), self._value(b), tuple(map(int, lanes.split(", "))))

    def plain(self, make: Callable[..., Expr], rest: str) -> Expr:
        """A node whose only fields are its operands."""
        return make(*self._list(rest))

    def typed(self, make: Callable[..., Expr], rest: str, type_: Type) -> Expr:
        """A node of one operand and a type."""
        return make(self._value(rest), type_)


_Reader = Callable[[_Parser, str, Type], Expr]
_READERS: dict[str, _Reader] = {
    "const": _Parser.const,
    "load": _Parser.load,
    "mat_load": _Parser.mat_load,
    "tensor_load": _Parser.tensor_load,
    "mat_map": _Parser.mat_map,
    "cmp": _Parser.compare,
    "convert": _Parser.convert,
    "reduce": _Parser.reduce,
    "subgroup_reduce": _Parser.subgroup_reduce,
    "subgroup_shuffle": _Parser.subgroup_shuffle,
    "extract": _Parser.extract,
    "insert": _Parser.insert,
    "shuffle": _Parser.shuffle,
    "select": lambda p, rest, _: p.plain(Select, rest),
    "fma": lambda p, rest, _: p.plain(Fma, rest),
    "mat_mul_add": lambda p, rest, _: p.plain(MatMulAdd, rest),
    "bitcast": lambda p, rest, type_: p.typed(Bitcast, rest, type_),
    "splat": lambda p, rest, type_: p.typed(Splat, rest, type_),
    "mat_fill": lambda p, rest, type_: p.typed(MatFill, rest, type_),
    "mat_convert": lambda p, rest, type_: p.typed(MatConvert, rest, type_),
}


def _triple(source: str) -> tuple[int, int, int]:
    x, y, z = (int(part) for part in source.split(","))
    return x, y, z
