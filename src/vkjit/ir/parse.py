"""Reads the text form of programs back, given the primitives that may occur."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, Field, fields
from enum import Enum
from typing import cast, final

import numpy as np

from vkjit.dtypes import NAMED
from vkjit.errors import ArgumentError
from vkjit.ir.avals import Aval, aval
from vkjit.ir.primitive import Primitive
from vkjit.ir.program import Atom, Eqn, Literal, Program, Var

_AVAL = re.compile(r"(\w+)\[([\d,]*)\](\*?)$")
_HEAD = re.compile(r"([\w.<>]+)\((.*)\) \{$")
_EQN = re.compile(
    r"(?:((?:%\d+: \S+?(?:, )?)+) = )?(\w+)(?:@(\d+))?(?:\[([^\]]*)\])?(?: ((?:%|[-\w]).*))?$"
)
_RETURN = re.compile(r"return\b")
_INNER = re.compile(r"(\w+)(?:\[(\d+)\])? = ([\w.<>]+\(.*\) \{)$")


def parse(source: str, primitives: Iterable[type[Primitive]]) -> Program:
    """The program that ``text`` prints as ``source``.

    Args:
        source: text of one program; ``#`` starts a comment.
        primitives: classes whose names may occur.

    Raises:
        ArgumentError: a line is not in the text form; the message shows it.
    """
    lines = [line.split("  #")[0].strip() for line in source.strip().splitlines()]
    program, rest = _program(lines, {p.name: p for p in primitives})
    if rest:
        raise ArgumentError(f"parse: expected nothing after the program, got {rest[0]!r}")
    return program


def _program(
    lines: Sequence[str], primitives: dict[str, type[Primitive]]
) -> tuple[Program, Sequence[str]]:
    """The program that the lines begin with, and the lines after it."""
    reader = _Reader(primitives)
    head = _HEAD.match(lines[0])
    if head is None:
        raise ArgumentError(f"parse: expected 'name(params) {{ ... }}', got {lines[0]!r}")
    params = tuple(reader.define(p) for p in _split(head.group(2)))
    eqns: list[Eqn] = []
    rest = lines[1:]
    while rest and not _RETURN.match(rest[0]):
        line, rest = rest[0], rest[1:]
        inner: dict[str, object] = {}
        while rest and (start := _INNER.match(rest[0])):
            name, position, first = start.groups()
            program, rest = _program([first, *rest[1:]], primitives)
            before = cast("tuple[Program, ...]", inner.get(name, ()))
            inner[name] = program if position is None else (*before, program)
        eqns.append(reader.eqn(line, inner))
    if len(rest) < 2 or rest[1] != "}":
        raise ArgumentError(f"parse: expected 'return ...' and '}}' at the end of {lines[0]!r}")
    results = tuple(reader.atom(r) for r in _split(rest[0].removeprefix("return").strip()))
    return Program(params, tuple(eqns), results, head.group(1)), rest[2:]


@final
class _Reader:
    """Variables met so far."""

    __slots__ = ("primitives", "vars")

    def __init__(self, primitives: dict[str, type[Primitive]]) -> None:
        self.primitives = primitives
        self.vars: dict[str, Var] = {}

    def define(self, item: str) -> Var:
        name, of = item.split(": ")
        self.vars[name] = found = Var(_aval(of))
        return found

    def atom(self, item: str) -> Atom:
        if item.startswith("%"):
            return self.vars[item]
        value, of = item.rsplit(":", 1)
        found = _aval(of)
        number: object = (
            float(value) if value in ("nan", "inf", "-inf") else ast.literal_eval(value)
        )
        return Literal(np.asarray(number, found.dtype)[()], found)

    def eqn(self, line: str, inner: dict[str, object]) -> Eqn:
        match = _EQN.match(line)
        if match is None or match.group(2) not in self.primitives:
            raise ArgumentError(f"parse: expected '%n: aval = primitive operands', got {line!r}")
        outs, name, region, inside, args = match.groups()
        prim = self.primitives[name]
        given = _parameters(inside or "") | inner
        named = {f.name: _field(f, given) for f in fields(prim)}  # type: ignore[arg-type]
        made = prim(**named)
        atoms = tuple(self.atom(a) for a in _split(args or ""))
        defined = tuple(self.define(o) for o in _split(outs or ""))
        return Eqn(made, atoms, defined, region=int(region or 0))


def _aval(source: str) -> Aval:
    match = _AVAL.match(source)
    if match is None or match.group(1) not in NAMED:
        raise ArgumentError(f"parse: {source!r} is not an aval such as f32[3,4]")
    dtype, dims, weak = match.groups()
    return aval(tuple(int(d) for d in dims.split(",") if d), NAMED[dtype], bool(weak))


def _split(source: str) -> list[str]:
    """Splits at commas outside brackets."""
    items, depth, start = list[str](), 0, 0
    for i, char in enumerate(source):
        depth += (char in "([") - (char in ")]")
        if char == "," and depth == 0:
            items.append(source[start:i].strip())
            start = i + 1
    rest = source[start:].strip()
    return [*items, rest] if rest else items


def _field(field: Field[object], given: dict[str, object]) -> object:
    """A parameter as its primitive wants it: the default where none is printed, enum members."""
    if field.name not in given and field.default is not MISSING:
        return field.default
    value = given[field.name]
    return type(field.default)(value) if isinstance(field.default, Enum) else value


def _parameters(inside: str) -> dict[str, object]:
    """``a=(1, 2), dtype=f32`` as a dictionary."""
    found: dict[str, object] = {}
    for item in _split(inside):
        name, value = item.split("=", 1)
        found[name] = NAMED[value] if value in NAMED else ast.literal_eval(value)
    return found
