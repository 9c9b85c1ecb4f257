"""Targets that several test modules compile for."""

from __future__ import annotations

from vkjit.lowering.kernel.types import I32
from vkjit.lowering.target import ALL_SCALARS, Target, TargetKind

LARGE_GPU = Target(
    name="large-gpu",
    kind=TargetKind.GPU,
    index_type=I32,
    storage=ALL_SCALARS,
    arithmetic=ALL_SCALARS,
    max_workgroup=(1024, 1024, 64),
    max_invocations=1024,
    shared_bytes=49152,
    subgroup_sizes=(32,),
    subgroup_ops=True,
    features=frozenset({"subgroup_shuffle"}),
)
"""A discrete GPU with every type, run by the interpreter."""
