"""Plans as the host sees them: what the device does on its own, and what the host must drive.

A counted loop without decisions of the host is unrolled where it is short; a longer one is a
``Replay``, a few turns that are recorded once and executed again and again, or, where the device
cannot advance the arguments by itself, a ``Repeat`` of the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import assert_never, final

from vkjit.lowering.artifact import (
    Block,
    Branch,
    Copy,
    HostCall,
    Launch,
    Loop,
    Move,
    Plan,
    Range,
    Step,
    While,
)
from vkjit.lowering.artifact import leaves as leaves_of

SHORT = 64  # commands up to which a loop is unrolled
TOGETHER = 32  # commands of turns that are executed as one: what makes executing cheap
RECORDED = 1024  # commands that the host records at once where nothing can be replayed
FLAG_BYTES = 16


@final
@dataclass(frozen=True, slots=True)
class Turn:
    """Turn ``first + every * t`` of a loop with ``length`` turns; who runs the loop counts t."""

    first: int
    every: int
    length: int


@final
@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A launch or a copy.

    ``leaf`` is the position of its step among the leaves of the plan; None if the plan has no such
    step. ``places`` are arguments, or source and target. With ``barrier`` a barrier must stand
    before it. ``turns`` tells in which turns of the loops around it it runs, outermost first.
    """

    step: Launch | Copy
    leaf: int | None
    places: tuple[Range, ...]
    barrier: bool
    turns: tuple[Turn, ...] = ()


@final
@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """``length`` turns of ``body``, which the device runs and counts; it is the ``depth``-th loop.

    The body begins with a barrier, and so does what follows.
    """

    body: tuple[Item, ...]
    length: int
    depth: int


Item = Work | Replay


@final
@dataclass(frozen=True, slots=True, eq=False)
class Play:
    """Everything in ``items``, without the host."""

    items: tuple[Item, ...]


@final
@dataclass(frozen=True, slots=True)
class Repeat:
    """``length`` turns of ``body``; it is the ``depth``-th loop."""

    body: Script
    length: int
    depth: int


@final
@dataclass(frozen=True, slots=True)
class Until:
    """Runs ``first``, and ``body`` again and again while the flag of ``size`` bytes is not 0."""

    first: Script
    body: Script
    size: int


@final
@dataclass(frozen=True, slots=True)
class Choice:
    """Runs one of ``scripts``, by the number in the flag."""

    scripts: tuple[Script, ...]


@final
@dataclass(frozen=True, slots=True)
class Call:
    """Calls a function of the host; ``turns`` as in ``Work``."""

    step: HostCall
    leaf: int
    places: tuple[Range, ...]
    turns: tuple[Turn, ...]


Driven = Repeat | Until | Choice | Call
Script = tuple[Play | Driven, ...]
_Node = Item | Driven


def outline(plan: Plan, *, replays: bool) -> Script:
    """What to do for one call of a plan.

    With ``replays`` the device can advance the arguments of a loop's body. The flag that the host
    reads is the buffer after those of the plan.
    """
    maker = _Outline(replays=replays, flag=len(plan.buffers))
    return _script(maker.block(Block(plan.steps, plan.barriers), 0, (), starts=False))


@final
class _Outline:
    """Walks a plan; ``leaf`` is the number of the next leaf."""

    def __init__(self, *, replays: bool, flag: int) -> None:
        self._replays = replays
        self._flag = flag
        self._leaf = 0

    def block(
        self, block: Block, depth: int, turns: tuple[Turn, ...], *, starts: bool = True
    ) -> list[_Node]:
        """The steps of a block inside ``depth`` loops; with ``starts`` a barrier stands first."""
        found: list[_Node] = []
        barrier = starts
        for position, step in enumerate(block.steps):
            barrier = barrier or position in block.barriers
            made = self._step(step, depth, turns, barrier=barrier)
            found += made
            if not isinstance(step, Launch | Copy):
                barrier = True  # also after a loop of which nothing is left
            elif made:
                barrier = False
        return found

    def _step(
        self, step: Step, depth: int, turns: tuple[Turn, ...], *, barrier: bool
    ) -> list[_Node]:
        match step:
            case Launch():
                return [Work(step, self._next(), step.arguments, barrier, turns)]
            case Copy():
                leaf, places = self._next(), (step.source, step.target)
                return [Work(step, leaf, places, barrier, turns)] if step.source.size else []
            case Loop():
                return self._loop(step, depth, turns)
            case While():
                condition = self.block(step.condition, depth, turns)
                condition.append(self._fetch(step.predicate, turns))
                body = self.block(step.body, depth, turns)
                return [
                    Until(_script(condition), _script([*body, *condition]), step.predicate.size)
                ]
            case Branch():
                branches = [self.block(block, depth, turns) for block in step.branches]
                fetch = replace(self._fetch(step.index, turns), barrier=True)
                return [fetch, Choice(tuple(map(_script, branches)))]
            case HostCall():
                return [Call(step, self._next(), step.arguments, turns)]
            case _:
                assert_never(step)

    def _next(self) -> int:
        self._leaf += 1
        return self._leaf - 1

    def _fetch(self, source: Range, turns: tuple[Turn, ...]) -> Work:
        """Copies what the host decides by to where it can read it."""
        target = Range(self._flag, 0, source.size)
        return Work(Copy(source, target), None, (source, target), True, turns)

    def _loop(self, loop: Loop, depth: int, turns: tuple[Turn, ...]) -> list[_Node]:
        length = loop.length
        body = self.block(loop.body, depth + 1, (*turns, Turn(0, 1, length)))
        items = [node for node in body if isinstance(node, Work | Replay)]
        if not body or not length:
            return []
        if len(items) < len(body):
            return [Repeat(_script(body), length, depth)]
        commands = sum(map(_commands, items))
        if length == 1 or commands * length <= (SHORT if self._replays else RECORDED):
            return [*_unrolled(items, depth, range(length), 0)]
        together = max((TOGETHER if self._replays else RECORDED) // commands, 1)
        if any(isinstance(item, Replay) for item in items):
            together = 1
        rounds = length // together
        round_ = tuple(_unrolled(items, depth, range(together), together))
        rest = _unrolled(items, depth, range(rounds * together, length), 0)
        if self._replays:
            return [Replay(round_, rounds, depth), *rest]
        return [Repeat(_script(round_), rounds, depth), *rest]


def _commands(item: Item) -> int:
    return 1 if isinstance(item, Work) else sum(map(_commands, item.body))


def _unrolled(items: Sequence[Item], depth: int, turns: range, every: int) -> list[Item]:
    """``items`` for turns ``t + every * c`` of the loop at ``depth``, t in ``turns``."""
    return [_moved(item, depth, turn, every) for turn in turns for item in items]


def _moved(item: Item, depth: int, first: int, every: int) -> Item:
    """An item in turns ``first + every * c`` instead of turns c of the loop at ``depth``."""
    if isinstance(item, Replay):
        return replace(item, body=tuple([_moved(i, depth, first, every) for i in item.body]))
    turns = list(item.turns)
    turns[depth] = replace(turns[depth], first=first, every=every)
    places = tuple([_moved_range(place, depth, first, every) for place in item.places])
    return replace(item, places=places, turns=tuple(turns))


def _moved_range(place: Range, depth: int, first: int, every: int) -> Range:
    if all(move.depth != depth for move in place.moves):
        return place
    offset, moves = place.offset, list[Move]()
    for move in place.moves:
        if move.depth != depth:
            moves.append(move)
        elif every:
            start = move.first + move.step * first
            moves.append(replace(move, first=start, step=move.step * every))
        else:
            offset += move.at(first)
    return Range(place.buffer, offset, place.size, tuple(moves))


def _script(nodes: Sequence[_Node]) -> Script:
    """Joins what needs no host in between."""
    script: list[Play | Driven] = []
    items: list[Item] = []
    for node in nodes:
        if isinstance(node, Work | Replay):
            items.append(node)
            continue
        if items:
            script.append(Play(tuple(items)))
            items = []
        script.append(node)
    if items:
        script.append(Play(tuple(items)))
    return tuple(script)


def leaf_count(plan: Plan) -> int:
    """How many leaves a plan has."""
    return sum(1 for _ in leaves_of(plan.steps))
