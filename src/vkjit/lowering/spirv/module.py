"""A SPIR-V module under construction: ordered sections, fresh ids, unique types and constants.

This file knows the binary format and nothing of kernels. Words are collected in one list per
section, in the order that section 2.4 of the SPIR-V specification demands.
"""

from __future__ import annotations

import struct
from array import array
from typing import final

from vkjit.lowering.spirv.grammar import (
    MAGIC,
    AddressingModel,
    Capability,
    Decoration,
    ExecutionMode,
    ExecutionModel,
    MemoryModel,
    Op,
    StorageClass,
)

VERSION = 0x00010500
"""SPIR-V 1.5, Vulkan 1.2's: device addresses, 8 and 16 bit storage and float controls are in its
core, so modules need few extensions. A 1.6 module would let the driver vary the subgroup size from
dispatch to dispatch unless the pipeline forbids it; up to 1.5 the size is the advertised one."""

_SCALAR_FORMATS = {16: ("<e", "<H"), 32: ("<f", "<I"), 64: ("<d", "<Q")}


def string_words(text: str) -> list[int]:
    """UTF-8, zero terminated, padded to whole little-endian words."""
    data = text.encode() + b"\0"
    data += b"\0" * (-len(data) % 4)
    return list(struct.unpack(f"<{len(data) // 4}I", data))


def float_bits(value: float, bits: int) -> int:
    """The IEEE pattern of ``value`` rounded to ``bits``; overflow gives infinity."""
    float_format, int_format = _SCALAR_FORMATS[bits]
    try:
        return int(struct.unpack(int_format, struct.pack(float_format, value))[0])
    except OverflowError:
        infinity = float("inf") if value > 0 else float("-inf")
        return int(struct.unpack(int_format, struct.pack(float_format, infinity))[0])


@final
class Module:
    """Collects the parts of one module with one entry point ``main``; :meth:`words` joins them."""

    def __init__(self) -> None:
        self.capabilities: set[Capability] = set()
        self.extensions: set[str] = set()
        self.addressing = AddressingModel.Logical
        self.memory_model = MemoryModel.GLSL450
        self.modes: list[tuple[ExecutionMode, tuple[int, ...]]] = []
        self.interface: list[int] = []
        self.body: list[int] = []
        self.functions: list[int] = []
        self._bound = 1
        self._debug: list[int] = []
        self._line: tuple[int, ...] = ()
        self._names: list[int] = []
        self._decorations: list[int] = []
        self._declarations: list[int] = []
        self._unique: dict[tuple[object, ...], int] = {}
        self._glsl: int | None = None
        self.entry = self.new_id()

    # -- ids and instructions ---------------------------------------------------------------------

    def new_id(self) -> int:
        """A fresh result id."""
        fresh = self._bound
        self._bound += 1
        return fresh

    def value(self, op: Op, type_: int, *operands: int) -> int:
        """Appends an instruction with a result to the function body."""
        fresh = self._bound
        self._bound += 1
        self.body.extend(((len(operands) + 3) << 16 | op, type_, fresh, *operands))
        return fresh

    def effect(self, op: Op, *operands: int) -> None:
        """Appends an instruction without a result to the function body."""
        self.body.extend(((len(operands) + 1) << 16 | op, *operands))

    def glsl(self, instruction: int, type_: int, *operands: int) -> int:
        """Appends an instruction of the set GLSL.std.450."""
        if self._glsl is None:
            self._glsl = self.new_id()
        return self.value(Op.ExtInst, type_, self._glsl, instruction, *operands)

    # -- what the module needs --------------------------------------------------------------------

    def require(self, capability: Capability, extension: str | None = None) -> None:
        """Declares a capability, and the extension that defines it if it is not core."""
        self.capabilities.add(capability)
        if extension is not None:
            self.extensions.add(extension)

    # -- declarations -----------------------------------------------------------------------------

    def unique(self, op: Op, *operands: int) -> int:
        """A type: one id per ``op`` and operands."""
        return self._unique_or_new(op, operands)[0]

    def _unique_or_new(
        self, op: Op, operands: tuple[int, ...], layout: object = None
    ) -> tuple[int, bool]:
        """The type with these operands and this layout, and whether it was declared just now."""
        seen = (op, operands, layout)
        found = self._unique.get(seen)
        if found is not None:
            return found, False
        found = self._unique[seen] = self.new_id()
        _append(self._declarations, op, found, *operands)
        return found, True

    def constant(self, op: Op, type_: int, *operands: int) -> int:
        """A constant: one id per ``op``, type and operands."""
        seen = (op, type_, operands)
        found = self._unique.get(seen)
        if found is None:
            found = self._unique[seen] = self.new_id()
            _append(self._declarations, op, type_, found, *operands)
        return found

    def global_variable(self, pointer: int, storage: StorageClass) -> int:
        """A module-scope variable, listed in the entry point's interface."""
        fresh = self.new_id()
        _append(self._declarations, Op.Variable, pointer, fresh, storage)
        self.interface.append(fresh)
        return fresh

    def pointer(self, storage: StorageClass, pointee: int) -> int:
        """The type of pointers to ``pointee``."""
        return self.unique(Op.TypePointer, storage, pointee)

    def uint(self, value: int) -> int:
        """A 32-bit unsigned constant."""
        return self.constant(Op.Constant, self.unique(Op.TypeInt, 32, 0), value & 0xFFFFFFFF)

    def runtime_array(self, elem: int, stride: int) -> int:
        """An unsized array with an explicit stride in bytes."""
        made, is_new = self._unique_or_new(Op.TypeRuntimeArray, (elem,), stride)
        if is_new:
            self.decorate(made, Decoration.ArrayStride, stride)
        return made

    def block(
        self,
        members: tuple[int, ...],
        offsets: tuple[int, ...],
        decorations: tuple[Decoration, ...] = (),
    ) -> int:
        """A struct with member offsets in bytes; all members get the further ``decorations``."""
        made, is_new = self._unique_or_new(Op.TypeStruct, members, (offsets, decorations))
        if is_new:
            self.decorate(made, Decoration.Block)
            for member, offset in enumerate(offsets):
                self.decorate_member(made, member, Decoration.Offset, offset)
                for decoration in decorations:
                    self.decorate_member(made, member, decoration)
        return made

    # -- annotations ------------------------------------------------------------------------------

    def decorate(self, target: int, decoration: Decoration, *operands: int) -> None:
        """Annotates an id."""
        _append(self._decorations, Op.Decorate, target, decoration, *operands)

    def decorate_member(
        self, struct_type: int, member: int, decoration: Decoration, *operands: int
    ) -> None:
        """Annotates a member of a struct type."""
        _append(self._decorations, Op.MemberDecorate, struct_type, member, decoration, *operands)

    def name(self, target: int, text: str) -> None:
        """A name for disassemblies and debuggers."""
        _append(self._names, Op.Name, target, *string_words(text))

    def source(self, origin: tuple[str, ...]) -> None:
        """Where the module comes from, for disassemblies and debuggers.

        Each text ``<operation> at <file>:<line>`` is an OpSource of its own. The nodes of a kernel
        have no lines of their own: :meth:`line` puts all of them on the first one.
        """
        strings: dict[str, int] = {}

        def string(text: str) -> int:
            found = strings.get(text)
            if found is None:
                found = strings[text] = self.new_id()
                _append(self._debug, Op.String, found, *string_words(text))
            return found

        sources = [string(text) for text in origin]
        places = [place for text in origin if (place := _place(text))]
        if places:
            file, line = places[0]
            self._line = (string(file), line, 0)
        for text in sources:
            # Language 0: unknown, version 0.
            _append(self._debug, Op.Source, 0, 0, text)

    def line(self) -> None:
        """The source line of the instructions that follow in the block, if one is known."""
        if self._line:
            self.effect(Op.Line, *self._line)

    # -- the result -------------------------------------------------------------------------------

    def words(self) -> array[int]:
        """The whole module."""
        head: list[int] = []
        for capability in sorted(self.capabilities):
            _append(head, Op.Capability, capability)
        for extension in sorted(self.extensions):
            _append(head, Op.Extension, *string_words(extension))
        if self._glsl is not None:
            _append(head, Op.ExtInstImport, self._glsl, *string_words("GLSL.std.450"))
        _append(head, Op.MemoryModel, self.addressing, self.memory_model)
        kind = ExecutionModel.GLCompute
        _append(head, Op.EntryPoint, kind, self.entry, *string_words("main"), *self.interface)
        for mode, operands in self.modes:
            _append(head, Op.ExecutionMode, self.entry, mode, *operands)
        sections = (head, self._debug, self._names, self._decorations, self._declarations)
        joined = array("I", (MAGIC, VERSION, 0, self._bound, 0))
        for section in (*sections, self.body, self.functions):
            joined.extend(section)
        return joined


def _append(section: list[int], op: Op, *operands: int) -> None:
    section.append((len(operands) + 1) << 16 | op)
    section.extend(operands)


def _place(origin: str) -> tuple[str, int] | None:
    """File and line of ``<operation> at <file>:<line>``."""
    file, colon, line = origin.partition(" at ")[2].rpartition(":")
    return (file, int(line)) if colon and line.isdecimal() else None
