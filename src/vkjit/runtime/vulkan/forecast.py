"""What a call will need, told before it takes anything: a table by role and source line."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import final

from vkjit.errors import OutOfMemoryError
from vkjit.lowering.artifact import Copy, Launch, Plan, Range, Role, leaves
from vkjit.lowering.kernel.types import Access
from vkjit.runtime.vulkan.memory import Heap, rounded

_SHOWN = 8  # largest arrays in the table
_ROLES = {
    Role.INPUT: ("input", "inputs"),
    Role.OUTPUT: ("output", "outputs"),
    Role.CONSTANT: ("constant", "constants"),
    Role.ARENA: ("temporary", "temporaries"),
}


@final
class Forecast:
    """The memory of one call of a plan. ``fresh`` bytes are allocated at each call.

    Args:
        device: its name, for messages.
        heap: where arrays lie.
        plan: what is called.
    """

    def __init__(self, device: str, heap: Heap, plan: Plan) -> None:
        self._device = device
        self._heap = heap
        self._plan = plan
        self._fresh = [
            b.size
            for b in plan.buffers
            if (b.role is Role.ARENA and not b.host)
            or (b.role is Role.OUTPUT and b.donated is None)
        ]
        self.fresh = sum(rounded(size) for size in self._fresh)

    def require_possible(self) -> None:
        """Refuses a plan that cannot run even if nothing else were on the device.

        Raises:
            OutOfMemoryError: an array is larger than an allocation may be, or all together are
                larger than the memory.
        """
        largest, limit = self._heap.largest, self._heap.limit
        for index, buffer in enumerate(self._plan.buffers):
            if buffer.size > largest:
                raise OutOfMemoryError(
                    f"{self._device}: {self._plan.name} has an array of {_size(buffer.size)}, the "
                    f"device allows {_size(largest)} in one allocation: "
                    f"{_ROLES[buffer.role][0]}{self._made_by(Range(index, 0, buffer.size))}; "
                    "split the array"
                )
        if self._plan.peak_bytes > limit:
            raise OutOfMemoryError(self.table(self._heap.available(), limit))

    def require_room(self) -> None:
        """Refuses a call for which there is no room now; nothing is allocated.

        The driver is asked only where the call would go beyond what was ever in use.

        Raises:
            OutOfMemoryError: with the table.
        """
        heap = self._heap
        if heap.live + self.fresh <= heap.peak or self.fresh <= heap.available():
            return
        gc.collect()  # arrays in cycles of references
        available = heap.available()
        if self.fresh > available:
            raise OutOfMemoryError(self.table(available, heap.limit))

    def failure(self, error: OutOfMemoryError) -> OutOfMemoryError:
        """What to raise where the memory that is free turned out to be of no use."""
        return OutOfMemoryError(f"{error}\n{self.table(self._heap.available(), self._heap.limit)}")

    def table(self, available: int, limit: int) -> str:
        """What the plan needs by role, its largest arrays, and what there is."""
        plan = self._plan
        sums = dict.fromkeys(_ROLES, 0)
        for buffer in plan.buffers:
            if buffer.donated is None:
                sums[buffer.role] += buffer.size
        lines = [
            f"{self._device}: {plan.name} needs {_size(plan.peak_bytes)}, {_size(self.fresh)} of "
            f"it new; {_size(available)} are free of {_size(limit)}",
            *(f"  {_ROLES[role][1]:<12}{_size(size):>12}" for role, size in sums.items()),
            "  largest arrays:",
        ]
        lines += [
            f"  {_size(size):>12}  {_ROLES[role][0]}{where}"
            for size, role, where in self._largest()
        ]
        lines.append("  use smaller arrays, donate inputs (donate_argnums), or free arrays")
        return "\n".join(lines)

    def _largest(self) -> Iterable[tuple[int, Role, str]]:
        """The largest arrays with their role and what makes them; temporaries one by one."""
        found: dict[Range, Role] = {}
        for index, buffer in enumerate(self._plan.buffers):
            if buffer.role is not Role.ARENA and buffer.donated is None:
                found[Range(index, 0, buffer.size)] = buffer.role
        for place in self._places():
            if self._plan.buffers[place.buffer].role is Role.ARENA:
                found[place] = Role.ARENA
        order = sorted(found, key=lambda place: (-place.size, place.buffer, place.offset))
        return [(place.size, found[place], self._made_by(place)) for place in order[:_SHOWN]]

    def _places(self) -> Iterable[Range]:
        for step in leaves(self._plan.steps):
            places = (step.source, step.target) if isinstance(step, Copy) else step.arguments
            yield from (place.cover() for place in places)

    def _made_by(self, place: Range) -> str:
        """The operations and source lines of the first step that writes there, or reads it."""
        buffer = self._plan.buffers[place.buffer]
        number = "" if buffer.role is Role.ARENA else f" {buffer.position}"
        for wanted in ((Access.WRITE, Access.READ_WRITE), (Access.READ,)):
            for step in leaves(self._plan.steps):
                if not isinstance(step, Launch):
                    continue
                for argument, declared in zip(step.arguments, step.kernel.buffers, strict=True):
                    if argument.cover().overlaps(place) and declared.access in wanted:
                        verb = " read by " if declared.access is Access.READ else " made by "
                        return f"{number}{verb}{', '.join(step.origin) or step.kernel.name}"
        return number


def _size(count: int) -> str:
    """Bytes for people."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} B"
