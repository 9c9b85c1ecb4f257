"""Where a plan's buffers and arguments stand: in the list of a call's spans, and in tables."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, final

import numpy as np
from numpy.typing import NDArray

from vkjit.errors import InternalError, MissingRuleError
from vkjit.lowering.artifact import Launch, Move, Plan, Range, Role, leaves
from vkjit.lowering.kernel.nodes import Kernel
from vkjit.lowering.target import Addressing
from vkjit.runtime.device import indices
from vkjit.runtime.vulkan.outline import Item, Replay, Work

if TYPE_CHECKING:
    from vkjit.runtime.vulkan.device import VulkanDevice

_ROLES = (Role.INPUT, Role.OUTPUT, Role.ARENA, Role.CONSTANT)
_FEW = 64  # arguments up to which NumPy's calls cost more than they save

_STILL = Move(0, 0, 1)


def span_order(plan: Plan) -> tuple[int, ...]:
    """The places of the plan's buffers in the list of a call's spans.

    Those are inputs, outputs, arena, constants, and last the flag that the host reads.
    """
    listed = [index for role in _ROLES for index in indices(plan, role)]
    return (*(listed.index(index) for index in range(len(listed))), len(listed))


@final
class Columns:
    """How far arguments move with one loop: an array for each field of ``Move``."""

    __slots__ = ("first", "ring", "step", "stride")

    def __init__(self, places: Sequence[Range], depth: int) -> None:
        moves = [next((m for m in p.moves if m.depth == depth), _STILL) for p in places]
        self.stride = np.array([m.stride for m in moves], np.int64)
        self.first = np.array([m.first for m in moves], np.int64)
        self.step = np.array([m.step for m in moves], np.int64)
        self.ring = np.array([m.ring for m in moves], np.int64)

    def at(self, turn: int) -> NDArray[np.int64]:
        """Bytes that each argument lies further on in a turn."""
        return self.stride * ((self.first + self.step * turn) % self.ring)


@final
class Layout:
    """The table of all arguments of what runs without the host.

    ``launches`` are the works whose kernels find arguments through the table, ``starts`` their
    first arguments in it. Those of a replayed loop's body stand together, from ``loops`` on.

    Args:
        items: what runs.
        order: see ``span_order``.
        kernels: of the works, copies included, that are launches.
    """

    def __init__(
        self, items: Sequence[Item], order: Sequence[int], kernels: Mapping[Work, Kernel]
    ) -> None:
        self.order = order
        self.starts: dict[Work, int] = {}
        self.loops: dict[Replay, tuple[int, int]] = {}
        self.places: list[Range] = []
        self._add(items, kernels)
        self._spans = [order[p.buffer] for p in self.places]
        self._offsets = [p.offset for p in self.places]
        self._picked = np.array(self._spans, np.intp)
        self._added = np.array(self._offsets, np.int64)
        self._columns: dict[int, Columns] = {}

    def _add(self, items: Sequence[Item], kernels: Mapping[Work, Kernel]) -> None:
        for item in items:
            start = len(self.places)
            if isinstance(item, Replay):
                self._add(item.body, kernels)
                self.loops[item] = (start, len(self.places) - start)
            elif item in kernels:
                self.starts[item] = start
                self.places.extend(item.places)

    def table(self, addresses: Sequence[int], turns: Sequence[int] = ()) -> bytes:
        """The address of every argument in these turns of the host's loops, outermost first."""
        if turns or len(self._spans) > _FEW:
            found = np.array(addresses, np.int64)[self._picked] + self._added
            for depth, turn in enumerate(turns):
                found += self.columns(depth).at(turn)
            return found.tobytes()
        pairs = zip(self._spans, self._offsets, strict=True)
        listed = [addresses[span] + offset for span, offset in pairs]
        return struct.pack(f"{len(listed)}Q", *listed)

    def columns(self, depth: int) -> Columns:
        """How all arguments move with the loop at ``depth``."""
        found = self._columns.get(depth)
        if found is None:
            found = self._columns[depth] = Columns(self.places, depth)
        return found


def works(items: Sequence[Item]) -> Iterator[Work]:
    """All works, those in loops too, each once."""
    for item in items:
        if isinstance(item, Replay):
            yield from works(item.body)
        else:
            yield item


def check_ranges(device: VulkanDevice, plan: Plan) -> None:
    """Refuses arguments that lie where kernels cannot read, or are too long to bind."""
    described = device.target.addressing is Addressing.DESCRIPTOR
    limits = device.capabilities
    for step in leaves(plan.steps):
        if not isinstance(step, Launch):
            continue
        for buffer, place in zip(step.kernel.buffers, step.arguments, strict=True):
            where = f"{device.name}: {buffer.name} of kernel {step.kernel.name} in {plan.name}"
            alignment = device.target.start_of(buffer.elem, buffer.length)
            if place.offset % alignment:
                raise InternalError(f"{where}: offset {place.offset}, expected * {alignment}")
            strides = [move.stride for move in place.moves if move.stride % alignment]
            if strides:
                raise InternalError(f"{where}: moves by {strides[0]}, expected * {alignment}")
            if described and place.size > limits.max_storage_range:
                raise MissingRuleError(
                    f"{where}: {place.size} bytes, descriptors reach {limits.max_storage_range}; "
                    "use device addresses (unset VKJIT_VULKAN_ADDRESSING) or the cpu"
                )
            if place.size < buffer.length * buffer.elem.bytes:
                raise InternalError(
                    f"{where}: {place.size} bytes for {buffer.length} {buffer.elem}"
                )
