"""A loaded plan with what makes arrays of its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from vkjit import tree, tuning
from vkjit.api.ref import Ref
from vkjit.api.staged import Lowered
from vkjit.debug.modes import modes
from vkjit.debug.nans import watched
from vkjit.device_array import DeviceArray, placed
from vkjit.errors import DonatedBufferError, InternalError
from vkjit.ir.primitive import Value
from vkjit.runtime.device import Device, Loaded
from vkjit.runtime.profiling import active


@final
class Executable:
    """A loaded plan, and what is needed to make arrays of its outputs."""

    __slots__ = (
        "closed_over",
        "device",
        "donated",
        "loaded",
        "lowered",
        "out_avals",
        "out_tree",
        "single",
        "tuned_at",
    )

    def __init__(
        self, lowered: Lowered, loaded: Loaded, device: Device, out_tree: tree.TreeDef
    ) -> None:
        self.lowered = lowered
        self.loaded = loaded
        self.device = device
        self.out_tree = out_tree
        self.out_avals = lowered.program.out_avals
        self.donated = lowered.donated
        # The plan reads the memory of these arrays, which a call of another function may take over.
        found = [v for v in lowered.constants if isinstance(v, DeviceArray)]
        self.closed_over = [v for v in found if v.buffer.device is device]
        self.single = out_tree == tree.structure(0)
        self.tuned_at = tuning.version()

    @classmethod
    def load(cls, lowered: Lowered, device: Device, out_tree: tree.TreeDef) -> Executable:
        """Uploads and packs the constants of a plan and loads its code.

        Raises:
            DonatedBufferError: a constant was donated to a call.
        """
        _require_constants(lowered.constants)
        constants = [placed(v, device.name).buffer for v in lowered.constants]
        setup = lowered.compiled.setup
        packed = [] if setup is None else device.load(setup).run(constants)
        if modes.watching and not lowered.donated:
            loaded = watched(device, lowered.plan, lowered.program, constants, packed)
        else:
            loaded = device.load(lowered.plan, [*constants, *packed])
        return cls(lowered, loaded, device, out_tree)

    def __call__(self, leaves: Sequence[DeviceArray], refs: Sequence[Ref] = ()) -> Any:
        """Runs the plan on the leaves of the arguments; the last outputs go to ``refs``."""
        buffers = [v.buffer for v in leaves]
        if self.closed_over:
            _require_constants(self.closed_over)
        if self.donated:
            _check_donation(leaves, self.donated)
            _check_constants(leaves, self.donated, self.closed_over)
        try:
            measured = active.profile
            if measured is None:
                outs = self.loaded.run(buffers, self.donated)
            else:
                outs = measured.run(self.loaded, self.lowered.plan, buffers, self.donated)
        except InternalError:
            _require_alive(leaves)
            raise
        arrays = [DeviceArray(of, b) for of, b in zip(self.out_avals, outs, strict=True)]
        for ref in reversed(refs):
            ref.replace(arrays.pop())
        return arrays[0] if self.single else tree.unflatten(self.out_tree, arrays)

    def is_current(self) -> bool:
        """Whether the kernels are those that compiling again would choose."""
        now = tuning.version()
        choices = self.lowered.compiled.choices
        if self.tuned_at != now and tuning.is_current(self.device, choices):
            self.tuned_at = now
        return self.tuned_at == now


def _require_constants(constants: Sequence[Value]) -> None:
    """Refuses to read memory that a call of another function took over."""
    for value in constants:
        if isinstance(value, DeviceArray) and value.buffer.released:
            raise DonatedBufferError(
                f"jit: an array {value.aval} that the function closes over was donated to another "
                "call; pass it as an argument, or do not donate it (donate_argnums)"
            )


def _check_constants(
    leaves: Sequence[DeviceArray], donated: Sequence[int], constants: Sequence[DeviceArray]
) -> None:
    """What the function closes over must not be donated to it."""
    kept = {id(v.buffer) for v in constants}
    for position in donated:
        if id(leaves[position].buffer) in kept:
            raise DonatedBufferError(
                f"jit: an array {leaves[position].aval} is donated that the function closes over; "
                "pass a copy, or do not donate it"
            )


def _require_alive(leaves: Sequence[DeviceArray]) -> None:
    """Says which argument was donated before, if one was."""
    for position, leaf in enumerate(leaves):
        if leaf.buffer.released:
            raise DonatedBufferError(
                f"jit: array {position} of the call, {leaf.aval}, was donated to an earlier call; "
                "use that call's result, or do not donate it (donate_argnums)"
            )


def _check_donation(leaves: Sequence[DeviceArray], donated: Sequence[int]) -> None:
    """A donated buffer must not be passed anywhere else in the same call."""
    seen: dict[int, int] = {}
    for position, leaf in enumerate(leaves):
        key = id(leaf.buffer)
        if key in seen and (position in donated or seen[key] in donated):
            raise DonatedBufferError(
                f"jit: one array {leaf.aval} is passed twice, once donated; pass a copy, or do "
                "not donate it"
            )
        seen[key] = position
