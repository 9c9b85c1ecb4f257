"""Groups as text: one line for each, those of inner programs indented below what runs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import assert_never

from vkjit.ir.control import Branch, Call, Scan, Transfer, While
from vkjit.lowering.plan.groups import ControlGroup, Work


def groups_text(groups: Sequence[Work]) -> str:
    """Groups in order; arrays of an inner program are numbered from 0, its parameters first."""
    return "\n".join(_lines(groups, ""))


def _lines(groups: Sequence[Work], indent: str) -> Iterator[str]:
    for group in groups:
        if not isinstance(group, ControlGroup):
            yield f"{indent}{group}"
            continue
        yield (
            f"{indent}{_head(group)}(operands={group.operands}, results={group.results}, "
            f"origin={group.origin})"
        )
        for name, part in zip(_names(group), group.inner, strict=True):
            yield f"{indent}  {name}: {part.inputs} parameters, results {part.results}"
            yield from _lines(part.groups, f"{indent}    ")


def _head(group: ControlGroup) -> str:
    match group.control:
        case Scan(_, length, constants, carries, reverse):
            order = ", reverse" if reverse else ""
            return f"Scan[{length} turns, {constants} constants, {carries} carries{order}]"
        case While():
            return "While"
        case Branch():
            return "Branch"
        case Call():
            return "Call"
        case Transfer(away):
            return "Transfer[to the host]" if away else "Transfer[to the device]"
        case _:
            assert_never(group.control)


def _names(group: ControlGroup) -> Sequence[str]:
    match group.control:
        case Scan():
            return ("body",)
        case While():
            return ("condition", "body")
        case Branch(branches):
            return [f"branch {n}" for n in range(len(branches))]
        case Call() | Transfer():
            return ()
        case _:
            assert_never(group.control)
