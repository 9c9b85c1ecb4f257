"""Plans with loops, branches and calls of the host, made by hand from small integer kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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
)
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Kernel
from vkjit.lowering.kernel.types import I32, Access, BinOp, CmpOp, ConvertOp
from vkjit.lowering.plan.hazards import barriers, check_order
from vkjit.runtime.reference import ReferenceDevice

COUNT = 64
SLOT = 4 * COUNT
"""Bytes of an array; every range of these plans is one."""


@functools.cache
def mix() -> Kernel:
    """Z = 3 x + y + 1."""
    b = Builder("mix")
    x, y = (b.buffer(name, I32, COUNT, Access.READ) for name in "xy")
    z = b.buffer("z", I32, COUNT, Access.WRITE)
    i = b.local_id()
    b.store(z, i, b.add(b.offset(b.scaled(b.load(x, i), 3), 1), b.load(y, i)))
    return b.finish((1, 1, 1), (COUNT, 1, 1))


@functools.cache
def increment(amount: int = 1) -> Kernel:
    """Y += amount."""
    b = Builder(f"increment_{amount}")
    y = b.buffer("y", I32, COUNT, Access.READ_WRITE)
    i = b.local_id()
    b.store(y, i, b.offset(b.load(y, i), amount))
    return b.finish((1, 1, 1), (COUNT, 1, 1))


@functools.cache
def clear() -> Kernel:
    """Y = 0."""
    b = Builder("clear")
    y = b.buffer("y", I32, COUNT, Access.WRITE)
    b.store(y, b.local_id(), b.index(0))
    return b.finish((1, 1, 1), (COUNT, 1, 1))


@functools.cache
def below(limit: int) -> Kernel:
    """Y = x[0] < limit."""
    b = Builder(f"below_{limit}")
    x = b.buffer("x", I32, COUNT, Access.READ)
    y = b.buffer("y", I32, COUNT, Access.WRITE)
    is_below = b.compare(CmpOp.LT, b.load(x, b.index(0)), b.index(limit))
    b.store(y, b.local_id(), b.convert(ConvertOp.ZEXT, is_below, I32))
    return b.finish((1, 1, 1), (COUNT, 1, 1))


@functools.cache
def low_bits() -> Kernel:
    """Y = (x[0] & 7) - 2."""
    b = Builder("low_bits")
    x = b.buffer("x", I32, COUNT, Access.READ)
    y = b.buffer("y", I32, COUNT, Access.WRITE)
    low = b.binary(BinOp.AND, b.load(x, b.index(0)), b.index(7))
    b.store(y, b.local_id(), b.offset(low, -2))
    return b.finish((1, 1, 1), (COUNT, 1, 1))


def block(*steps: Step) -> Block:
    """A block with the barriers that it needs."""
    return Block(steps, barriers(steps))


def loop(length: int, *steps: Step) -> Loop:
    return Loop(block(*steps), length)


def plan_of(inputs: int, outputs: int, arena: int, *steps: Step) -> Plan:
    """Buffer 0 is an input, 1 an output and 2 the arena, each of so many arrays."""
    buffers = (
        PlannedBuffer(Role.INPUT, inputs * SLOT),
        PlannedBuffer(Role.OUTPUT, outputs * SLOT),
        PlannedBuffer(Role.ARENA, max(arena, 1) * SLOT),
    )
    size = sum(b.size for b in buffers)
    made = Plan("by_hand", buffers, steps, barriers(steps), size, buffers[2].size)
    check_order(made)
    return made


def at(buffer: int, slot: int = 0, *moves: Move) -> Range:
    return Range(buffer, slot * SLOT, SLOT, moves)


def along(depth: int, length: int, *, reverse: bool = False) -> Move:
    """Array t of a stack in turn t, or in turn ``length - 1 - t``."""
    return Move(depth, SLOT, length, length - 1 if reverse else 0, -1 if reverse else 1)


def carry(depth: int, first: int) -> Move:
    """One of two slots in turn, beginning with ``first``."""
    return Move(depth, SLOT, 2, first)


def start(plan: Plan, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(-(1 << 31), 1 << 31, plan.buffers[0].size // 4, np.int64).astype(np.int32)


def expected(plan: Plan, x: np.ndarray) -> np.ndarray:
    """What the interpreter makes of it."""
    device = ReferenceDevice()
    (y,) = device.load(plan).run([device.upload(x)])
    return np.array(device.download(y, np.int32, (plan.buffers[1].size // 4,)))


def run(device: Any, plan: Plan, x: np.ndarray, loaded: Any = None) -> np.ndarray:
    """What a device makes of it."""
    (y,) = (loaded or device.load(plan)).run([device.upload(x)])
    return device.download(y, np.int32, (plan.buffers[1].size // 4,))


def check(device: Any, plan: Plan, seed: int = 0) -> None:
    """Runs a plan three times, on other arrays each time, as the interpreter does."""
    loaded = device.load(plan)
    for turn in range(3):
        x = start(plan, seed + turn)
        np.testing.assert_array_equal(run(device, plan, x, loaded), expected(plan, x))


# -- random plans ----------------------------------------------------------------------------------

SLOTS = 12
"""Arrays of each buffer of a random plan; the last ones of the arena are flags."""
_FLAGS = 4
_TURNS = 130  # of nested loops together: the interpreter is slow


@dataclass
class Maker:
    """Random plans; with ``host`` those in which the host decides, too."""

    rng: np.random.Generator
    host: bool
    heard: list[np.ndarray] = field(default_factory=list)
    level: int = 0

    def plan(self) -> Plan:
        fill = [
            Launch(mix(), (at(0, n % SLOTS), at(0, 0), at(buffer, n)))
            for buffer in (1, 2)
            for n in range(SLOTS)
        ]
        return plan_of(SLOTS, SLOTS, SLOTS + _FLAGS, *fill, *self._steps((), 4))

    def _steps(self, lengths: tuple[int, ...], size: int) -> list[Step]:
        return [step for _ in range(self._upto(size)) for step in self._step(lengths)]

    def _upto(self, most: int) -> int:
        return int(self.rng.integers(1, most + 1))

    def _step(self, lengths: tuple[int, ...]) -> list[Step]:
        kinds = ["launch", "launch", "copy"]
        if len(lengths) < 3:
            kinds += ["loop", "loop"]
            if self.host:
                kinds += ["while"] * (self.level < 2) + ["branch", "call"]
        match kinds[int(self.rng.integers(len(kinds)))]:
            case "launch":
                sources = [self._range(lengths, int(self.rng.integers(3))) for _ in range(2)]
                return [Launch(mix(), (*sources, self._target(lengths)))]
            case "copy":
                source = self._range(lengths, int(self.rng.integers(2)))
                target = self._range(lengths, 2 if source.buffer else 1)
                return [Copy(*self._cut(source, target))]
            case "loop":
                return [self._loop(lengths)]
            case "while":
                return self._while(lengths)
            case "branch":
                index = at(2, SLOTS + 2)
                scripts = [block(*self._steps(lengths, 2)) for _ in range(self._upto(3))]
                choose = Launch(low_bits(), (self._range(lengths, 2), index))
                part = Range(index.buffer, index.offset, 4)
                return [choose, Branch(part, (*scripts, block()))]
            case _:
                places = tuple(self._range(lengths, b) for b in (0, 1, 2))
                kind = (np.dtype(np.int32), (COUNT,))
                return [HostCall(self._hear, places, (kind,) * 3)]

    def _hear(self, *arrays: np.ndarray) -> None:
        self.heard.extend(arrays)

    def _loop(self, lengths: tuple[int, ...]) -> Step:
        length = int(self.rng.choice([0, 1, 2, 3, 7] if self.host else [0, 1, 3, 20, 41]))
        length = min(length, _TURNS // max(math.prod(lengths), 1))
        return loop(length, *self._steps((*lengths, length), 3))

    def _while(self, lengths: tuple[int, ...]) -> list[Step]:
        """Counts in a slot of its own, for each level of such loops inside each other."""
        counter, flag = at(2, SLOTS + self.level), at(2, SLOTS + 3)
        self.level += 1
        body = self._steps(lengths, 2)
        self.level -= 1
        test = block(Launch(below(self._upto(4)), (counter, flag)))
        again = While(test, Range(2, flag.offset, 1), block(*body, Launch(increment(), (counter,))))
        return [Launch(clear(), (counter,)), again]

    def _target(self, lengths: tuple[int, ...]) -> Range:
        return self._range(lengths, int(self.rng.integers(1, 3)))

    def _range(self, lengths: Sequence[int], buffer: int) -> Range:
        """A slot that moves with some of the loops around, within the buffer."""
        moves: list[Move] = []
        room = SLOTS - 1
        for depth, length in enumerate(lengths):
            ring = min(int(self.rng.choice([1, 2, 3, max(length, 1)])), room + 1)
            if ring < 2:
                continue
            step = int(self.rng.choice([-1, 1]))
            moves.append(Move(depth, SLOT, ring, int(self.rng.integers(ring)), step))
            room -= ring - 1
        return at(buffer, int(self.rng.integers(room + 1)), *moves)

    def _cut(self, source: Range, target: Range) -> tuple[Range, Range]:
        """A part of both that is aligned to nothing but bytes, or the whole of both."""
        size = int(self.rng.choice([SLOT, 1, 2, 6, 12, 250]))
        found = [
            Range(r.buffer, r.offset + int(self.rng.integers(0, SLOT - size + 1)), size, r.moves)
            for r in (source, target)
        ]
        return found[0], found[1]
