"""Appends instructions to one function, and knows the operand of every value so far."""

from __future__ import annotations

from typing import final

from vkjit.errors import InternalError
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import Type, VecType
from vkjit.lowering.llvm.spelling import mangled, type_text


@final
class Declarations:
    """External functions a module needs, each declared once."""

    def __init__(self) -> None:
        self._lines: dict[str, str] = {}

    def need(self, name: str, result: str, parameters: str) -> None:
        """Notes that ``name`` is called."""
        if name not in self._lines:
            self._lines[name] = f"declare {result} @{name}({parameters})"

    def lines(self) -> list[str]:
        """The declarations in order of first use."""
        return list(self._lines.values())


@final
class Writer:
    """The lines of one function; ``block`` is the label of the block being filled.

    Values and blocks are named by number, counted from 0, so that equal kernels give equal text.
    """

    def __init__(self, kernel: str, declarations: Declarations) -> None:
        self.kernel = kernel
        self.declarations = declarations
        self.lines: list[str] = []
        self.names: dict[Value, str] = {}
        self.block = "entry"
        self._values = 0
        self._blocks = 0

    def use(self, value: Value) -> str:
        """The operand of a value that stands before."""
        name = self.names.get(value)
        if name is None:
            raise InternalError(
                f"llvm: {type(value).__name__} of type {value.type} is used before it is computed "
                f"in {self.kernel}"
            )
        return name

    def typed(self, value: Value) -> str:
        """``type operand`` of a value."""
        return f"{type_text(value.type)} {self.use(value)}"

    def value(self, instruction: str) -> str:
        """Appends an instruction and names its result."""
        name = f"%v{self._values}"
        self._values += 1
        self.lines.append(f"  {name} = {instruction}")
        return name

    def fresh(self, value: Value) -> str:
        """Names a value that a phi will define."""
        name = self.names[value] = f"%v{self._values}"
        self._values += 1
        return name

    def line(self, text: str) -> None:
        """Appends an instruction without a result."""
        self.lines.append(f"  {text}")

    def label(self) -> str:
        """A new block label."""
        self._blocks += 1
        return f"b{self._blocks}"

    def start(self, label: str) -> None:
        """Begins a block."""
        self.lines.append(f"{label}:")
        self.block = label

    def call(
        self, intrinsic: str, type_: Type, operands: tuple[Value, ...], flags: str = ""
    ) -> str:
        """An intrinsic overloaded on one type that all operands share with the result.

        ``flags`` are fast-math flags, each followed by a space.
        """
        text, name = type_text(type_), f"{intrinsic}.{mangled(type_)}"
        self.declarations.need(name, text, ", ".join((text,) * len(operands)))
        arguments = ", ".join(self.typed(operand) for operand in operands)
        return self.value(f"call {flags}{text} @{name}({arguments})")

    def splat(self, scalar: str, type_: VecType) -> str:
        """A scalar operand in every lane."""
        text, elem = type_text(type_), type_text(type_.elem)
        one = self.value(f"insertelement {text} poison, {elem} {scalar}, i64 0")
        return self.value(
            f"shufflevector {text} {one}, {text} poison, <{type_.lanes} x i32> zeroinitializer"
        )
