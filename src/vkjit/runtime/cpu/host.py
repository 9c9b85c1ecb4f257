"""What this processor is, and the compiler target that follows from it."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from vkjit.lowering.kernel.types import F16, F32, F64, I1, I8, I16, I32, I64, SCALARS
from vkjit.lowering.target import Target, TargetKind

if TYPE_CHECKING:
    from collections.abc import Mapping


@final
@dataclass(frozen=True)
class Host:
    """Names as LLVM knows them: the processor, and every feature it has or lacks.

    The features count more than the name: hypervisors mask the model, so that the name alone
    stands for a smaller processor than the one that runs.
    """

    cpu: str
    features: Mapping[str, bool]
    llvm: str

    @property
    def feature_text(self) -> str:
        """The features as LLVM takes them, in a fixed order."""
        return ",".join(f"{'+' if on else '-'}{name}" for name, on in sorted(self.features.items()))

    def has(self, feature: str) -> bool:
        """Whether the processor has a feature, by LLVM's name."""
        return self.features.get(feature, False)

    @property
    def vector_bytes(self) -> int:
        """Width of the widest vector registers."""
        if self.has("avx512f"):
            return 64
        return 32 if self.has("avx2") else 16

    @functools.cached_property
    def key(self) -> str:
        """Equal on hosts that run the same code."""
        text = f"{platform.machine()} {self.cpu} {self.feature_text} {self.llvm}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def detect() -> Host:
    """The host, as LLVM sees it."""
    # A large library without types, loaded when the device is opened.
    llvm: Any = importlib.import_module("llvmlite.binding")
    version = str(importlib.metadata.version("llvmlite"))
    features: dict[str, bool] = dict(llvm.get_host_cpu_features())
    return Host(str(llvm.get_host_cpu_name()), features, version)


def target(host: Host, threads: int) -> Target:
    """The compiler target of ``host`` with ``threads`` threads.

    float16 is computed with where the processor does it. bfloat16 never is: its conversion
    instruction flushes subnormal numbers, so ``legalize`` rounds with integers instead, which is
    exact.
    """
    half = host.has("avx512fp16") or host.has("fullfp16")
    arithmetic = {I1, I8, I16, I32, I64, F32, F64}
    if half:
        arithmetic.add(F16)
    return Target(
        name=f"cpu-{host.cpu}-{host.key}",
        kind=TargetKind.CPU,
        index_type=I64,
        storage=frozenset(SCALARS.values()) - {I1},
        arithmetic=frozenset(arithmetic),
        vector_bytes=host.vector_bytes,
        threads=threads,
        alignment=1,
        features=frozenset(name for name, on in host.features.items() if on),
    )


def processor_name() -> str:
    """The processor's name for people."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def memory_limit() -> int:
    """Bytes this process may use: physical memory, or less in a control group."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        group = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return physical
    return min(physical, int(group)) if group.isdecimal() else physical
