"""Plans as plain data: kernels as text, buffers and steps as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, final

from vkjit.errors import ArgumentError, DataError
from vkjit.lowering.artifact import (
    Block,
    Branch,
    Copy,
    HostCall,
    Launch,
    Loop,
    Move,
    Plan,
    PlannedBuffer,
    Range,
    Role,
    Step,
    While,
    leaves,
)
from vkjit.lowering.kernel.nodes import Kernel
from vkjit.lowering.kernel.parse import parse
from vkjit.lowering.kernel.text import text
from vkjit.lowering.plan.hazards import check_order

Data = dict[str, Any]


def to_data(plan: Plan) -> Data:
    """Everything of ``plan``.

    Raises:
        ArgumentError: the plan calls the host: a Python function is no data.
    """
    writer = _Writer()
    steps = [writer.step(step) for step in plan.steps]
    return {
        "name": plan.name,
        "buffers": [_buffer(b) for b in plan.buffers],
        "steps": steps,
        "barriers": sorted(plan.barriers),
        "peak_bytes": plan.peak_bytes,
        "arena_bytes": plan.arena_bytes,
        "kernels": writer.texts,
    }


@final
class _Writer:
    """Texts of the kernels met so far."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[int, int] = {}

    def kernel(self, kernel: Kernel) -> int:
        """The number of a kernel."""
        found = self._numbers.get(id(kernel))
        if found is None:
            found = self._numbers[id(kernel)] = len(self.texts)
            self.texts.append(text(kernel))
        return found

    def step(self, step: Step) -> Data:
        match step:
            case Launch():
                return {
                    "launch": self.kernel(step.kernel),
                    "arguments": [_range(r) for r in step.arguments],
                    "origin": list(step.origin),
                }
            case Copy():
                return {"copy": [_range(step.source), _range(step.target)]}
            case Loop():
                return {
                    "loop": self.block(step.body),
                    "length": step.length,
                    "origin": list(step.origin),
                }
            case While():
                return {
                    "while": self.block(step.condition),
                    "predicate": _range(step.predicate),
                    "body": self.block(step.body),
                    "origin": list(step.origin),
                }
            case Branch():
                return {
                    "branch": _range(step.index),
                    "branches": [self.block(b) for b in step.branches],
                    "origin": list(step.origin),
                }
            case HostCall():
                raise ArgumentError(
                    f"export: the function calls {step.function!r} of Python "
                    f"({'; '.join(step.origin)}), which is no data; leave callbacks out of what "
                    "is exported"
                )

    def block(self, block: Block) -> Data:
        return {"steps": [self.step(s) for s in block.steps], "barriers": sorted(block.barriers)}


def _buffer(buffer: PlannedBuffer) -> list[Any]:
    always = [buffer.role.value, buffer.size, buffer.position, buffer.donated]
    return [*always, True] if buffer.host else always


def _range(place: Range) -> list[Any]:
    moves = [[m.depth, m.stride, m.ring, m.first, m.step] for m in place.moves]
    return [place.buffer, place.offset, place.size, *([moves] if moves else [])]


def from_data(data: Data) -> Plan:
    """The plan that ``to_data`` wrote.

    Raises:
        DataError: the data is something else.
    """
    try:
        kernels = [parse(source) for source in data["kernels"]]
        plan = Plan(
            data["name"],
            tuple(PlannedBuffer(Role(role), *rest) for role, *rest in data["buffers"]),
            tuple(_step(s, kernels) for s in data["steps"]),
            frozenset(data["barriers"]),
            data["peak_bytes"],
            data["arena_bytes"],
        )
        _require_inside(plan)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DataError(f"load: the plan in the file is damaged: {error!r}") from error
    check_order(plan)
    return plan


def _require_inside(plan: Plan) -> None:
    """Refuses ranges beyond their buffer, and ranges too short for what a kernel declares."""
    for step in leaves(plan.steps):
        match step:
            case Launch():
                places = step.arguments
                pairs = zip(step.kernel.buffers, places, strict=True)
                short = any(b.length * b.elem.bytes > place.size for b, place in pairs)
            case Copy():
                places, short = (step.source, step.target), step.source.size != step.target.size
            case HostCall():
                continue
        outside = any(
            place.offset < 0 or place.offset + place.cover().size > plan.buffers[place.buffer].size
            for place in places
        )
        if short or outside:
            raise ValueError("a step reaches beyond its buffer")


def _step(data: Data, kernels: list[Kernel]) -> Step:
    origin = tuple(cast("list[str]", data.get("origin", [])))
    if "launch" in data:
        number: int = data["launch"]
        places = tuple(_placed(place) for place in data["arguments"])
        return Launch(kernels[number], places, origin)
    if "copy" in data:
        source, target = data["copy"]
        return Copy(_placed(source), _placed(target))
    if "loop" in data:
        return Loop(_block(data["loop"], kernels), data["length"], origin)
    if "while" in data:
        condition, body = _block(data["while"], kernels), _block(data["body"], kernels)
        return While(condition, _placed(data["predicate"]), body, origin)
    if "branch" in data:
        branches = tuple(_block(block, kernels) for block in data["branches"])
        return Branch(_placed(data["branch"]), branches, origin)
    raise DataError(f"load: {sorted(data)} is no step of a plan; the file is damaged")


def _block(data: Data, kernels: list[Kernel]) -> Block:
    return Block(tuple(_step(s, kernels) for s in data["steps"]), frozenset(data["barriers"]))


def _placed(data: Sequence[Any]) -> Range:
    moves = cast("list[list[int]]", data[3]) if len(data) > 3 else []
    return Range(data[0], data[1], data[2], tuple(Move(*move) for move in moves))
