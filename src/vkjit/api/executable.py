"""A loaded plan with what makes arrays of its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from vkjit import tree, tuning
from vkjit.api.ref import Ref
from vkjit.api.staged import Lowered
from vkjit.debug.modes import modes
from vkjit.debug.nans import watched
from vkjit.device_array import DeviceArray, device_put
from vkjit.errors import DonatedBufferError, InternalError
from vkjit.runtime.device import Device, Loaded
from vkjit.runtime.profiling import active


@final
class Executable:
    """A loaded plan, and what is needed to make arrays of its outputs."""

    __slots__ = (
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
        self.single = out_tree == tree.structure(0)
        self.tuned_at = tuning.version()

    @classmethod
    def load(cls, lowered: Lowered, device: Device, out_tree: tree.TreeDef) -> Executable:
        """Uploads and packs the constants of a plan and loads its code."""
        constants = [device_put(v, device.name).buffer for v in lowered.constants]
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
        if self.donated:
            _check_donation(leaves, self.donated)
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
