"""Order inside loops and branches: each barrier is needed, and turns hand over what they should."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.control_forms import run, traced
from tests.lowering.plan.control_programs import random_program
from vkjit import numpy as jnp
from vkjit.errors import InternalError
from vkjit.ir.avals import Aval, aval
from vkjit.ir.control import Scan
from vkjit.ir.program import Program
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
from vkjit.lowering.compile import compile_program
from vkjit.lowering.plan.hazards import barriers, check_order, footprint
from vkjit.lowering.plan.turns import check_turns
from vkjit.lowering.target import ALL_SCALARS, MINIMAL_GPU, REFERENCE

GPU = dataclasses.replace(MINIMAL_GPU, name="gpu", storage=ALL_SCALARS, arithmetic=ALL_SCALARS)
TARGETS = pytest.mark.parametrize("target", [REFERENCE, GPU], ids=["reference", "gpu"])


def f32(*shape: int) -> Aval:
    return aval(shape, np.dtype(np.float32))


def with_blocks(step: Step, inner: list[Block]) -> Step:
    match step:
        case Loop():
            return dataclasses.replace(step, body=inner[0])
        case While():
            return dataclasses.replace(step, condition=inner[0], body=inner[1])
        case Branch():
            return dataclasses.replace(step, branches=tuple(inner))
        case Launch() | Copy() | HostCall():
            return step


def without_one_barrier(block: Block) -> Iterator[Block]:
    """The block without one of its barriers, or of those inside it."""
    for position in block.barriers:
        yield dataclasses.replace(block, barriers=block.barriers - {position})
    for at, step in enumerate(block.steps):
        inner = list(blocks(step))
        for number, part in enumerate(inner):
            for less in without_one_barrier(part):
                changed = with_blocks(step, [*inner[:number], less, *inner[number + 1 :]])
                steps = (*block.steps[:at], changed, *block.steps[at + 1 :])
                yield dataclasses.replace(block, steps=steps)


@TARGETS
def test_every_barrier_of_random_programs_is_needed(target: Any) -> None:
    nested = 0
    for seed in range(12):
        plan = compile_program(random_program(seed), target).plan
        whole = Block(plan.steps, plan.barriers)
        for block in without_one_barrier(whole):
            nested += block.barriers == whole.barriers
            less = dataclasses.replace(plan, steps=block.steps, barriers=block.barriers)
            with pytest.raises(InternalError, match=r"(read|write) after (read|write) at step \d"):
                check_order(less)
    assert nested > 50


def layer(c: Any, x: Any) -> Any:
    """Needs two places for its carry, and copies slices of 12 bytes."""
    turned = jnp.flip(c, 0) * x
    return [turned, turned + c]


def looped() -> Plan:
    body = traced(layer, f32(3), f32(3))
    program = traced(lambda c, xs: run(Scan(body, 4, 0, 1), c, xs), f32(3), f32(4, 3))
    return compile_program(program, REFERENCE).plan


def test_the_message_names_the_step_inside_the_loop() -> None:
    plan = looped()
    (at,) = [i for i, step in enumerate(plan.steps) if isinstance(step, Loop)]
    loop = plan.steps[at]
    assert isinstance(loop, Loop)
    bare = dataclasses.replace(loop, body=dataclasses.replace(loop.body, barriers=frozenset()))
    steps = (*plan.steps[:at], bare, *plan.steps[at + 1 :])
    with pytest.raises(InternalError, match=rf"read after write at step {at}\.1 "):
        check_order(dataclasses.replace(plan, steps=steps))


def test_what_is_inside_counts_in_all_turns() -> None:
    """The footprint of a loop is all that it touches; what moves with outer turns still does."""
    inner = (Move(0, 64, 8), Move(1, 16, 4))
    copy = Copy(Range(0, 0, 16, inner), Range(1, 32, 16, (Move(1, 16, 4, 3, -1),)))
    loop = Loop(Block((copy,)), 4)
    touched = footprint(loop, depth=1)
    assert touched.reads == (Range(0, 0, 64, (Move(0, 64, 8),)),)
    assert touched.writes == (Range(1, 32, 64),)
    outer = footprint(Loop(Block((loop,)), 8))
    assert outer.reads == (Range(0, 0, 64 + 7 * 64),)


def test_slots_of_a_ring_do_not_conflict() -> None:
    first, second = (Range(0, 0, 16, (Move(0, 256, 2, n),)) for n in (0, 1))
    other = Range(1, 0, 16)
    assert barriers([Copy(first, second), Copy(first, other)]) == set()
    assert barriers([Copy(first, second), Copy(second, other)]) == {1}
    assert barriers([Copy(other, Range(0, 0, 16)), Copy(first, other)]) == {1}


def plan_of(*steps: Step) -> Plan:
    """A plan whose loop of 4 turns has these steps, with barriers between all."""
    loop = Loop(Block(steps, frozenset(range(1, len(steps)))), 4)
    buffers = tuple(PlannedBuffer(Role.ARENA, 1024, n) for n in range(2))
    return Plan("example", buffers, (loop,), frozenset(), 2048)


SLICE = Range(0, 0, 16, (Move(0, 16, 4),))
PLACE = Range(0, 512, 16, (Move(0, 256, 2, 0),))
NEXT = Range(0, 512, 16, (Move(0, 256, 2, 1),))
APART = Range(1, 0, 16)


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ((Copy(APART, SLICE), Copy(SLICE, Range(1, 64, 16))), ""),
        ((Copy(PLACE, NEXT),), ""),
        ((Copy(APART, Range(0, 0, 32, (Move(0, 16, 4),))),), "collide"),  # slices overlap
        ((Copy(APART, Range(0, 0, 16, (Move(0, 16, 4, 1),))), Copy(SLICE, APART)), "collide"),
        ((Copy(APART, Range(0, 0, 16, (Move(0, 16, 4, 3, -1),))), Copy(SLICE, APART)), "collide"),
        ((Copy(APART, Range(0, 32, 16)), Copy(SLICE, APART)), "collide"),  # a temporary in a stack
        ((Copy(PLACE, NEXT), Copy(APART, Range(0, 768, 4))), "collide"),  # one in a carry
        ((Copy(APART, Range(0, 1000, 16, (Move(0, 16, 4),))),), "not inside its buffer"),
        ((Copy(APART, Range(1, 1016, 16)),), "not inside its buffer"),
    ],
)
def test_turns_that_collide_are_found(steps: tuple[Step, ...], problem: str) -> None:
    plan = plan_of(*steps)
    if not problem:
        check_turns(plan)
        return
    with pytest.raises(InternalError, match=rf"plan example: step 0.*{problem}"):
        check_turns(plan)


@TARGETS
def test_plans_of_random_programs_collide_nowhere(target: Any) -> None:
    for seed in range(20, 32):
        plan = compile_program(random_program(seed), target).plan
        check_order(plan)
        check_turns(plan)


def moved_apart(program: Program) -> Plan:
    """A plan whose carry has its second place half over its first."""
    plan = compile_program(program, REFERENCE).plan
    (at,) = [i for i, step in enumerate(plan.steps) if isinstance(step, Loop)]
    loop = plan.steps[at]
    assert isinstance(loop, Loop)

    def closer(place: Range) -> Range:
        moves = [dataclasses.replace(m, stride=8) if m.ring == 2 else m for m in place.moves]
        return dataclasses.replace(place, moves=tuple(moves))

    steps = [
        dataclasses.replace(s, arguments=tuple(map(closer, s.arguments)))
        for s in loop.body.steps
        if isinstance(s, Launch)
    ]
    changed = dataclasses.replace(loop, body=Block(tuple(steps), loop.body.barriers))
    return dataclasses.replace(plan, steps=(*plan.steps[:at], changed, *plan.steps[at + 1 :]))


def test_places_of_a_carry_that_overlap_are_found() -> None:
    body = traced(layer, f32(4), f32(4))
    program = traced(lambda c, xs: run(Scan(body, 4, 0, 1), c, xs), f32(4), f32(4, 4))
    with pytest.raises(InternalError, match="collide"):
        check_turns(moved_apart(program))
