"""Plans as text: buffers, then steps with the barriers before them, blocks indented.

A range is ``buffer[from:to]``. Inside loops it lies further on by what follows, where ``t0`` is the
turn of the outermost loop, ``t1`` that of the one inside it, and so on:

    2: loop 5 turns  # scan at model.py:12
      2.0: fused (4,) (3[0:64]+64*(t0%5), 7[0:64]+256*((1+t0)%2))  # tanh at model.py:13
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

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
    Step,
    While,
)


def plan_text(plan: Plan) -> str:
    """Buffers and steps of a plan."""
    lines = [f"plan {plan.name} peak={plan.peak_bytes} arena={plan.arena_bytes}"]
    lines += [f"  buffer {i}: {_buffer(b)}" for i, b in enumerate(plan.buffers)]
    lines += _block(Block(plan.steps, plan.barriers), "", "  ")
    return "\n".join(lines)


def range_text(place: Range) -> str:
    """A range, and how it moves."""
    moves = "".join(map(_move, place.moves))
    return f"{place.buffer}[{place.offset}:{place.offset + place.size}]{moves}"


def _move(move: Move) -> str:
    turn = f"t{move.depth}"
    if move.step < 0:
        turn = f"({move.first}-{turn})"
    elif move.first:
        turn = f"({move.first}+{turn})"
    return f"+{move.stride}*({turn}%{move.ring})"


def _buffer(b: PlannedBuffer) -> str:
    taken = f" takes input {b.donated}" if b.donated is not None else ""
    place = " of the host" if b.host else ""
    return f"{b.role.value} {b.position} {b.size} bytes{place}{taken}"


def _block(block: Block, number: str, indent: str) -> Iterator[str]:
    for position, step in enumerate(block.steps):
        if position in block.barriers:
            yield f"{indent}barrier"
        yield from _step(step, f"{number}{position}", indent)


def _step(step: Step, number: str, indent: str) -> Iterator[str]:
    head, inside, inner = f"{indent}{number}: ", f"{number}.", f"{indent}  "
    match step:
        case Launch(kernel, arguments, origin):
            yield f"{head}{kernel.name} {kernel.grid} ({_list(arguments)}){_note(origin)}"
        case Copy(source, target):
            yield f"{head}copy {range_text(source)} -> {range_text(target)}"
        case HostCall(_, arguments, _, origin):
            yield f"{head}call of the host ({_list(arguments)}){_note(origin)}"
        case Loop(body, length, origin):
            yield f"{head}loop {length} turns{_note(origin)}"
            yield from _block(body, inside, inner)
        case While(condition, predicate, body, origin):
            yield f"{head}while {range_text(predicate)}{_note(origin)}"
            yield from _block(condition, f"{inside}c", inner)
            yield f"{indent}do"
            yield from _block(body, inside, inner)
        case Branch(index, branches, origin):
            yield f"{head}branch {range_text(index)}{_note(origin)}"
            for case, block in enumerate(branches):
                yield f"{indent}case {case}"
                yield from _block(block, f"{inside}{case}.", inner)
        case _:
            assert_never(step)


def _list(arguments: tuple[Range, ...]) -> str:
    return ", ".join(map(range_text, arguments))


def _note(origin: tuple[str, ...]) -> str:
    return f"  # {'; '.join(origin)}" if origin else ""
