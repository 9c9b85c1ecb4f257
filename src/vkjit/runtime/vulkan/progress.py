"""How far the device came in a plan: what the error of a lost device says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from vkjit.lowering.artifact import HostCall, Launch, Leaf, Plan, leaves
from vkjit.runtime.vulkan.ffi import ffi
from vkjit.runtime.vulkan.memory import Span
from vkjit.runtime.vulkan.outline import Work

if TYPE_CHECKING:
    from vkjit.runtime.vulkan.queue import Commands

_NAMED = 4  # steps that a message lists

Counters = Mapping[int, tuple[int, int]]
"""Addresses of the host of the turns of both tables of a loop, by its depth."""


@final
class Progress:
    """Notes the work that one recording is at, in a word of host memory the device writes.

    It can be asked after the device was lost, and does not keep the plan's objects alive.
    """

    def __init__(self, plan: Plan, span: Span) -> None:
        self._name = plan.name
        self._plan = plan
        self._place = (span.block.buffer, span.offset)
        self._word: Any = ffi.cast("uint32_t *", span.mapped)
        self._marked: list[tuple[Work, Counters]] = []
        self._turns: Sequence[int] = ()
        self._word[0] = 0

    def reset(self, turns: Sequence[int] = ()) -> None:
        """Nothing is finished in these turns of the host; the commands must not be running."""
        self._word[0] = 0
        self._turns = turns

    def forget(self) -> None:
        """Recording begins anew."""
        self._marked.clear()

    def mark(self, commands: Commands, work: Work, counters: Counters) -> None:
        """Records that everything before ``work`` is finished; a barrier stands there."""
        self._marked.append((work, counters))
        commands.fill(self._place, len(self._marked))

    def close(self) -> None:
        """The memory belongs to somebody else from now on."""
        self._word = None

    def describe(self) -> str:
        """The last step known to be finished, and those that may have been running."""
        if self._word is None:
            return f"{self._name}, dropped since"
        steps = tuple(leaves(self._plan.steps))
        number = int(self._word[0])
        if number > len(self._marked):  # the memory went with the device
            number = 0
        none: tuple[None, Counters] = (None, {})
        work, counters = self._marked[number - 1] if number else none
        done = (work.leaf if work else 0) or 0
        before = f", the last of them {step_text(steps[done - 1])}" if done else ""
        where = f" in {self._turn_text(work, counters)}" if work and work.turns else ""
        names = [step_text(step) for step in steps[done : done + _NAMED]]
        rest = len(steps) - done - len(names)
        more = f", or one of {rest} later steps" if rest else ""
        return (
            f"{self._name}, {done} of {len(steps)} steps known to be done{where}{before}; running "
            f"was {', '.join(names) or 'nothing'}{more}"
        )

    def _turn_text(self, work: Work, counters: Counters) -> str:
        """The turns of the loops around a work, counted from 1."""
        named: list[str] = []
        for depth, turn in enumerate(work.turns):
            at = 0
            if turn.every and depth < len(self._turns):
                at = self._turns[depth]
            elif turn.every:
                words = [ffi.cast("int64_t *", address)[0] for address in counters[depth]]
                # The later table is made while the device is at the turn before.
                at = max(*words, 1) - 1
            known = min(turn.first + turn.every * at + 1, turn.length)
            named.append(f"turn {known} of {turn.length}")
        return ", ".join(named)


def step_text(step: Leaf) -> str:
    """A step for people: its kernel, and the operations and source lines it comes from."""
    match step:
        case Launch(kernel, _, origin):
            name = f"kernel {kernel.name}"
        case HostCall(_, _, _, origin):
            name = "a call of the host"
        case _:
            return f"a copy of {step.source.size} bytes"
    return f"{name} ({'; '.join(origin)})" if origin else name
