"""Where a plan's buffers and arguments stand: in the list of a call's spans, and in one table."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import numpy as np

from vkjit.errors import InternalError, MissingRuleError
from vkjit.lowering.artifact import Copy, Launch, Plan, Range, Role
from vkjit.lowering.target import Addressing
from vkjit.runtime.device import indices

if TYPE_CHECKING:
    from vkjit.runtime.vulkan.device import VulkanDevice

_ROLES = (Role.INPUT, Role.OUTPUT, Role.ARENA, Role.CONSTANT)
_VECTOR_BYTES = 16  # the alignment that emitted accesses count on
_FEW = 64  # arguments up to which NumPy's calls cost more than they save


@final
class Layout:
    """The order of a call's spans, and the table of all arguments of all launches.

    ``order`` maps the plan's buffers to places in the list of spans: inputs, outputs, arena,
    constants. ``starts`` are the first arguments of the launches, ``launch_at`` the number of the
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
        self._spans = [self.order[p.buffer] for p in self.places]
        self._offsets = [p.offset for p in self.places]
        self._picked = np.array(self._spans, np.intp)
        self._added = np.array(self._offsets, np.uint64)
        copies = [step for step in plan.steps if isinstance(step, Copy)]
        self.copies_outside = any(
            plan.buffers[place.buffer].role is not Role.CONSTANT
            for step in copies
            for place in (step.source, step.target)
        )

    def table(self, addresses: Sequence[int]) -> bytes:
        """The address of every argument of every launch, from those of a call's spans."""
        if len(self._spans) > _FEW:
            return (np.array(addresses, np.uint64)[self._picked] + self._added).tobytes()
        pairs = zip(self._spans, self._offsets, strict=True)
        found = [addresses[span] + offset for span, offset in pairs]
        return struct.pack(f"{len(found)}Q", *found)


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
