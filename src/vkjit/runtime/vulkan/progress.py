"""How far the device came in a plan: what the error of a lost device says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from vkjit.lowering.artifact import Launch, Plan, Step
from vkjit.runtime.vulkan.ffi import ffi
from vkjit.runtime.vulkan.memory import Span

if TYPE_CHECKING:
    from vkjit.runtime.vulkan.queue import Commands

_NAMED = 4  # steps that a message lists


@final
class Progress:
    """Counts the finished steps of one recording, in a word of host memory the device writes.

    It can be asked after the device was lost, and does not keep the plan's objects alive.
    """

    def __init__(self, plan: Plan, span: Span) -> None:
        self._plan = plan
        self._place = (span.block.buffer, span.offset)
        self._word: Any = ffi.cast("uint32_t *", span.mapped)
        self.reset()

    def reset(self) -> None:
        """No step is finished; the commands must not be running."""
        self._word[0] = 0

    def mark(self, commands: Commands, position: int) -> None:
        """Records that all steps before ``position`` are finished; a barrier stands there."""
        commands.fill(self._place, position)

    def close(self) -> None:
        """The memory belongs to somebody else from now on."""
        self._word = None

    def describe(self) -> str:
        """The last step known to be finished, and those that may have been running."""
        steps = self._plan.steps
        if self._word is None:
            return f"{self._plan.name}, dropped since"
        done = int(self._word[0])
        if done >= len(steps):  # the memory went with the device
            done = 0
        before = f", the last of them {step_text(steps[done - 1])}" if done else ""
        names = [step_text(step) for step in steps[done : done + _NAMED]]
        rest = len(steps) - done - len(names)
        more = f", or one of {rest} later steps" if rest else ""
        return (
            f"{self._plan.name}, {done} of {len(steps)} steps known to be done{before}; running "
            f"was {', '.join(names) or 'nothing'}{more}"
        )


def step_text(step: Step) -> str:
    """A step for people: its kernel, and the operations and source lines it comes from."""
    if not isinstance(step, Launch):
        return f"a copy of {step.source.size} bytes"
    origin = f" ({'; '.join(step.origin)})" if step.origin else ""
    return f"kernel {step.kernel.name}{origin}"
