"""Where a plan's buffers and arguments stand: in the list of a call's spans, and in one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, final

from vkjit.errors import InternalError, MissingRuleError
from vkjit.lowering.artifact import Copy, Launch, Plan, Range, Role
from vkjit.lowering.target import Addressing
from vkjit.runtime.device import indices

if TYPE_CHECKING:
    from vkjit.runtime.vulkan.device import VulkanDevice

_ROLES = (Role.INPUT, Role.OUTPUT, Role.ARENA, Role.CONSTANT)
_VECTOR_BYTES = 16  # the alignment that emitted accesses count on


@final
class Layout:
    """The order of a call's spans, and the table of all arguments of all launches.

    ``order`` maps the plan's buffers to places in the list of spans: inputs, outputs, arena,
    constants. ``arguments`` picks the span of every argument out of such a list, ``offsets`` are
    the bytes to add, ``starts`` the first argument of each launch, ``launch_at`` the number of the
    launch at a step. ``copies_outside`` tells whether a copy touches an array that changes between
    calls.
    """

    def __init__(self, plan: Plan) -> None:
        listed = [index for role in _ROLES for index in indices(plan, role)]
        self.order = [listed.index(index) for index in range(len(listed))]
        self.launches: list[Launch] = []
        self.launch_at: dict[int, int] = {}
        self.starts: list[int] = []
        self.places: list[Range] = []
        for position, step in enumerate(plan.steps):
            if isinstance(step, Launch):
                self.launch_at[position] = len(self.launches)
                self.launches.append(step)
                self.starts.append(len(self.places))
                self.places.extend(step.arguments)
        self.arguments = _picker([self.order[p.buffer] for p in self.places])
        self.offsets = [p.offset for p in self.places]
        copies = [step for step in plan.steps if isinstance(step, Copy)]
        self.copies_outside = any(
            plan.buffers[place.buffer].role is not Role.CONSTANT
            for step in copies
            for place in (step.source, step.target)
        )


def _picker(places: list[int]) -> Callable[[Sequence[int]], Sequence[int]]:
    """Picks ``places`` of a list, in one call of C code where there are several."""
    if len(places) > 1:
        return itemgetter(*places)

    def pick(values: Sequence[int]) -> Sequence[int]:
        return [values[place] for place in places]

    return pick


def check_ranges(device: VulkanDevice, plan: Plan, layout: Layout) -> None:
    """Refuses arguments that start where kernels cannot read, or are too long to bind."""
    described = device.target.addressing is Addressing.DESCRIPTOR
    limits = device.capabilities
    alignment = max(_VECTOR_BYTES, limits.storage_alignment if described else 0)
    for step in layout.launches:
        for buffer, place in zip(step.kernel.buffers, step.arguments, strict=True):
            where = f"{device.name}: {buffer.name} of kernel {step.kernel.name} in {plan.name}"
            if place.offset % alignment:
                raise InternalError(f"{where}: offset {place.offset}, expected * {alignment}")
            if described and place.size > limits.max_storage_range:
                raise MissingRuleError(
                    f"{where}: {place.size} bytes, descriptors reach {limits.max_storage_range}; "
                    "use device addresses (unset VKJIT_VULKAN_ADDRESSING) or the cpu"
                )
            if place.size < buffer.length * buffer.elem.bytes:
                raise InternalError(
                    f"{where}: {place.size} bytes for {buffer.length} {buffer.elem}"
                )
