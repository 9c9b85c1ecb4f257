"""What a device can do, as plain data: made by a ``Device`` or written in a test."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import final

from vkjit.lowering.kernel.types import F32, I32, I64, SCALARS, MatScope, ScalarType


class TargetKind(Enum):
    """Which family of schedules serves the target."""

    CPU = "cpu"
    GPU = "gpu"


class Addressing(Enum):
    """How kernels of a GPU target reach their buffers."""

    DEVICE_ADDRESS = "device_address"
    DESCRIPTOR = "descriptor"


@final
@dataclass(frozen=True, slots=True)
class CoopShape:
    """One cooperative-matrix shape: ``c[m,n] += a[m,k] @ b[k,n]``."""

    a: ScalarType
    b: ScalarType
    accumulator: ScalarType
    m: int
    n: int
    k: int
    scope: MatScope = MatScope.SUBGROUP


@final
@dataclass(frozen=True, slots=True)
class TensorShape:
    """Cooperative matrices of any multiple of ``m`` x ``n`` x ``k``: those of flexible dimensions.

    ``invocations`` is the size of the workgroups that may hold matrices of workgroup scope; it is
    0 for subgroups.
    """

    a: ScalarType
    b: ScalarType
    accumulator: ScalarType
    m: int
    n: int
    k: int
    scope: MatScope
    invocations: int = 0


@final
@dataclass(frozen=True, slots=True)
class Quirk:
    """A known fault of a driver: where it is reported, what finds it, and when it may go."""

    name: str
    link: str
    removal: str
    probe: str = ""


@final
@dataclass(frozen=True, slots=True)
class Target:
    """Limits and legal types of one device.

    Sizes are in bytes, ``grid`` and ``workgroup`` limits in workgroups and invocations per axis.
    ``storage`` types may be loaded and stored, ``arithmetic`` types computed with; ``legalize``
    rewrites kernels that need others. ``cores`` is 0 where a GPU does not say how many it has.
    ``max_bindings`` arrays may one kernel have, and ``max_buffer_bytes`` one buffer; 0 stands for
    any number. Arrays start at multiples of ``alignment`` bytes, see ``start_of``.
    ``tensor_shapes`` are cooperative matrices of flexible dimensions, none of them longer than
    ``tensor_dimension``. ``name`` is part of every cache key.
    """

    name: str
    kind: TargetKind
    index_type: ScalarType
    storage: frozenset[ScalarType]
    arithmetic: frozenset[ScalarType]
    vector_bytes: int = 16
    threads: int = 1
    cores: int = 0
    max_grid: tuple[int, int, int] = (65535, 65535, 65535)
    max_workgroup: tuple[int, int, int] = (128, 128, 64)
    max_invocations: int = 128
    shared_bytes: int = 16384
    subgroup_sizes: tuple[int, ...] = (1,)
    subgroup_ops: bool = False
    addressing: Addressing = Addressing.DEVICE_ADDRESS
    max_bindings: int = 0
    alignment: int = 16
    max_buffer_bytes: int = 0
    coop_shapes: tuple[CoopShape, ...] = ()
    tensor_shapes: tuple[TensorShape, ...] = ()
    tensor_dimension: int = 0
    features: frozenset[str] = field(default_factory=frozenset[str])
    quirks: tuple[Quirk, ...] = ()

    def start_of(self, elem: ScalarType, length: int) -> int:
        """Bytes at whose multiples an array may start.

        A single word is never read as part of a vector; where kernels have its address, it may be
        any.
        """
        word = length == 1 and elem.bytes == _WORD_BYTES
        if word and self.addressing is Addressing.DEVICE_ADDRESS:
            return min(_WORD_BYTES, self.alignment)
        return self.alignment


_WORD_BYTES = 4
"""What every GPU can read and write."""

ALL_SCALARS = frozenset(SCALARS.values())

REFERENCE = Target(
    name="reference",
    kind=TargetKind.CPU,
    index_type=I64,
    storage=ALL_SCALARS,
    arithmetic=ALL_SCALARS,
    vector_bytes=16,
)
"""The interpreter: every type, CPU schedules with short vectors."""

MINIMAL_GPU = Target(
    name="minimal-gpu",
    kind=TargetKind.GPU,
    index_type=I32,
    storage=frozenset({F32, I32}),
    arithmetic=frozenset({F32, I32}),
)
"""What Vulkan 1.1 promises: a target for tests of legalization."""
