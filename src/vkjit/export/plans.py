"""Plans as plain data: kernels as text, buffers and steps as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, final

from vkjit.errors import ArgumentError, DataError
from vkjit.export.files import reading
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
    blocks,
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
    with reading("the plan in the file is damaged"):
        kernels = [parse(source) for source in data["kernels"]]
        plan = Plan(
            str(data["name"]),
            tuple(
                PlannedBuffer(Role(role), _number(size), _number(position), *rest)
                for role, size, position, *rest in data["buffers"]
            ),
            tuple(_step(s, kernels) for s in data["steps"]),
            frozenset(map(_number, data["barriers"])),
            _number(data["peak_bytes"]),
            _number(data["arena_bytes"]),
        )
        _require_inside(plan, plan.steps)
        check_order(plan)
        return plan


def _number(value: object) -> int:
    """A size, count or position.

    Raises:
        DataError: it is none.
    """
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise DataError(f"load: the plan in the file is damaged: {value!r} is no size or position")
    return value


def _require_inside(plan: Plan, steps: Sequence[Step]) -> None:
    """Refuses ranges beyond their buffer, and ranges too short for what reads them."""
    for step in steps:
        places, short = _touched(step)
        outside = any(
            place.offset + place.cover().size > plan.buffers[place.buffer].size for place in places
        )
        if short or outside:
            raise DataError("load: a step of the plan reaches beyond its buffer")
        for block in blocks(step):
            _require_inside(plan, block.steps)


def _touched(step: Step) -> tuple[tuple[Range, ...], bool]:
    """The ranges that a step names, and whether one is too short."""
    match step:
        case Launch(kernel=kernel, arguments=places):
            pairs = zip(kernel.buffers, places, strict=True)
            return places, any(b.length * b.elem.bytes > place.size for b, place in pairs)
        case Copy(source=source, target=target):
            return (source, target), source.size != target.size
        case While(predicate=flag):
            return (flag,), flag.size < 1
        case Branch(index=index):
            return (index,), index.size < 4 or not step.branches
        case Loop() | HostCall():
            return (), False


def _step(data: Data, kernels: list[Kernel]) -> Step:
    origin = tuple(cast("list[str]", data.get("origin", [])))
    if "launch" in data:
        places = tuple(_placed(place) for place in data["arguments"])
        return Launch(kernels[_number(data["launch"])], places, origin)
    if "copy" in data:
        source, target = data["copy"]
        return Copy(_placed(source), _placed(target))
    if "loop" in data:
        return Loop(_block(data["loop"], kernels), _number(data["length"]), origin)
    if "while" in data:
        condition, body = _block(data["while"], kernels), _block(data["body"], kernels)
        return While(condition, _placed(data["predicate"]), body, origin)
    if "branch" in data:
        branches = tuple(_block(block, kernels) for block in data["branches"])
        return Branch(_placed(data["branch"]), branches, origin)
    raise DataError(f"load: {sorted(data)} is no step of a plan; the file is damaged")


def _block(data: Data, kernels: list[Kernel]) -> Block:
    steps = tuple(_step(s, kernels) for s in data["steps"])
    return Block(steps, frozenset(map(_number, data["barriers"])))


def _placed(data: Sequence[Any]) -> Range:
    moves = cast("list[list[int]]", data[3]) if len(data) > 3 else []
    buffer, offset, size = map(_number, data[:3])
    return Range(buffer, offset, size, tuple(map(_move, moves)))


def _move(data: Sequence[int]) -> Move:
    depth, stride, ring, first, step = data
    if step not in (1, -1) or _number(ring) < 1:
        raise DataError(f"load: the plan in the file is damaged: {data!r} is no move of a range")
    return Move(_number(depth), _number(stride), ring, _number(first), step)
