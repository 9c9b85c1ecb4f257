"""An exported function: made from a jitted one, or from a file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, final

from vkjit import tree
from vkjit.api.executable import Executable
from vkjit.api.jit import Jit
from vkjit.api.ref import Ref
from vkjit.api.staged import Lowered, ShapeDtypeStruct, lower_program
from vkjit.api.stages import CompiledCall
from vkjit.control.registry import CONTROL
from vkjit.device_array import DeviceArray, current_device, host_values
from vkjit.errors import ArgumentError, DataError
from vkjit.export import files, plans, trees
from vkjit.ir.check import check
from vkjit.ir.parse import parse
from vkjit.ir.program import Program
from vkjit.ir.text import text
from vkjit.lowering.compile import Compiled
from vkjit.lowering.plan.memory import Arena
from vkjit.lowering.target import Target
from vkjit.ops.registry import PRIMITIVES
from vkjit.runtime import get_device
from vkjit.runtime.device import Device

_DAMAGED = "the file is damaged"


@final
class Exported:
    """A function for one combination of shapes and dtypes, ready to be stored or called.

    ``program`` is simplified; its first parameters are the constants. Donation is part of it:
    ``donated`` are the leaves of the arguments whose memory results take over.
    """

    def __init__(
        self,
        program: Program,
        constants: Sequence[files.HostArray],
        trees_: tuple[tree.TreeDef, tree.TreeDef],
        donated: tuple[int, ...],
        known: dict[str, dict[str, Any]],
    ) -> None:
        self.program = program
        self.constants = tuple(constants)
        self.in_tree, self.out_tree = trees_
        self.donated = donated
        self._plans = known
        self._calls: dict[str, CompiledCall] = {}

    @property
    def in_avals(self) -> tuple[ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the leaves of the arguments."""
        return tuple(
            ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak)
            for a in self.program.in_avals[len(self.constants) :]
        )

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The result, on the device of the arguments.

        Raises:
            ArgumentError, ShapeError, DTypeError: the arguments are not those it was exported for.
        """
        device = _device_of(tree.leaves((args, kwargs)))
        found = self._calls.get(device.name)
        if found is None:
            found = self._calls[device.name] = self._compiled(device)
        return found(*args, **kwargs)

    def serialize(self) -> bytes:
        """The bytes of the file."""
        manifest = {
            "in_tree": trees.to_data(self.in_tree),
            "out_tree": trees.to_data(self.out_tree),
            "donated": list(self.donated),
        }
        return files.write(files.Bundle(manifest, text(self.program), self.constants, self._plans))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file; what was there before stays whole until the new one is complete."""
        target = Path(path)
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            partial.write_bytes(self.serialize())
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    def has_plan(self, device: str) -> bool:
        """Whether loading on ``device`` needs no lowering."""
        return target_key(get_device(device).target) in self._plans

    def lowered(self, device: str) -> Lowered:
        """Kernels and plan for a device: those of the file, or new ones."""
        target = get_device(device).target
        known = self._plans.get(target_key(target))
        if known is None:
            return lower_program(self.program, self.constants, target, self.donated)
        return Lowered(self.program, self.constants, _compiled(known), target, self.donated)

    def _compiled(self, device: Device) -> CompiledCall:
        lowered = self.lowered(device.name)
        return CompiledCall(Executable.load(lowered, device, self.out_tree), self.in_tree)


def export(jitted: Callable[..., Any], devices: Sequence[str] = ()) -> Callable[..., Exported]:
    """A function that exports ``jitted`` for its arguments.

    Args:
        jitted: what ``jit`` returned; static arguments become part of the program.
        devices: names of devices whose plans the file shall hold; by default the arguments' own.

    Returns:
        a function of the same arguments, or of ``ShapeDtypeStruct`` in their place.

    Raises:
        ArgumentError: the function is not jitted, a structure has other nodes than tuples, lists
            and dictionaries, or the function calls back into Python.
    """
    if not isinstance(jitted, Jit):
        raise ArgumentError(f"export: given {type(jitted).__name__}, expected what jit returns")

    def exported(*args: Any, **kwargs: Any) -> Exported:
        traced = jitted.trace(*args, **kwargs)
        chosen = [traced.lower(name) for name in devices] or [traced.lower()]
        first = chosen[0]
        for acting in (e for e in first.program.eqns if e.prim.acts()):
            raise ArgumentError(
                f"export: {acting.prim.name} at {acting.source} calls a Python function, which "
                "is no data; leave callbacks out of what is exported"
            )
        known = {target_key(item.target): _data(item.compiled) for item in chosen}
        constants = [host_values(v) for v in first.constants]
        ends = traced.in_tree, traced.out_tree
        for end in ends:
            trees.to_data(end)  # refuses now what could not be saved
        return Exported(first.program, constants, ends, first.donated, known)

    return exported


def deserialize(data: bytes) -> Exported:
    """The function of a file's bytes.

    Raises:
        DataError: this is no such file, it is damaged, or of a later version.
    """
    bundle = files.read(data)
    with files.reading(_DAMAGED):
        manifest = bundle.manifest
        ends = trees.from_data(manifest["in_tree"]), trees.from_data(manifest["out_tree"])
        program = parse(bundle.program, (*PRIMITIVES, *CONTROL))
        check(program)
        donated = tuple(int(n) for n in manifest["donated"])
        _require_fitting(program, bundle.constants, ends, donated)
    return Exported(program, bundle.constants, ends, donated, bundle.plans)


def _require_fitting(
    program: Program,
    constants: Sequence[files.HostArray],
    ends: tuple[tree.TreeDef, tree.TreeDef],
    donated: Sequence[int],
) -> None:
    """Refuses parts of a file that do not belong together."""
    avals, count = program.in_avals, len(constants)
    pairs = zip(constants, avals, strict=False)
    if len(avals) < count or any((c.shape, c.dtype) != (a.shape, a.dtype) for c, a in pairs):
        raise DataError(f"load: {_DAMAGED}: its constants are not those of its program")
    leaves = len(avals) - count
    # Contents of Refs are further results.
    if ends[0].num_leaves != leaves or ends[1].num_leaves > len(program.results):
        raise DataError(f"load: {_DAMAGED}: its structures are not those of its program")
    if any(not 0 <= n < leaves for n in donated):
        raise DataError(f"load: {_DAMAGED}: it donates {list(donated)} of {leaves} arguments")


def load(path: str | os.PathLike[str]) -> Exported:
    """The function of a file; see ``deserialize``."""
    return deserialize(Path(path).read_bytes())


def target_key(target: Target) -> str:
    """A name for all that the kernels of a target depend on."""
    return hashlib.sha256(_stable(target).encode()).hexdigest()[:24]


def _stable(value: object) -> str:
    """A text that is the same in every process; sets are sorted."""
    if is_dataclass(value) and not isinstance(value, type):
        inside = ", ".join(f"{f.name}={_stable(getattr(value, f.name))}" for f in fields(value))
        return f"{type(value).__name__}({inside})"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(_stable(v) for v in value))}}}"  # type: ignore[misc]
    if isinstance(value, tuple):
        return f"({', '.join(_stable(v) for v in value)})"  # type: ignore[misc]
    return repr(value)


def _data(compiled: Compiled) -> dict[str, Any]:
    setup = compiled.setup
    return {
        "plan": plans.to_data(compiled.plan),
        "setup": None if setup is None else plans.to_data(setup),
        "live_peak": compiled.arena.live_peak,
    }


def _compiled(data: dict[str, Any]) -> Compiled:
    with files.reading("the plan in the file is damaged"):
        plan = plans.from_data(data["plan"])
        setup = data["setup"]
        arena = Arena({}, plan.arena_bytes, data["live_peak"])
        return Compiled(plan, None if setup is None else plans.from_data(setup), (), arena)


def _device_of(leaves: Sequence[Any]) -> Device:
    for leaf in leaves:
        value = leaf.value if type(leaf) is Ref else leaf
        if type(value) is DeviceArray:
            return value.buffer.device
    return current_device()
