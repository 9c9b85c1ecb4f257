"""What the machine is, and how fast it can be at all: the floor of every table.

The two rates are measured in the run itself, with code made by LLVM for this host: fused
multiply-adds on registers only, and a read of 256 MiB by every core. A floor is the larger of
flop/rate and byte/bandwidth; no program can be faster, and few come near. On a GPU the rates are
those of a copy and of large products in one of the participants, PyTorch where it is there.
"""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import llvmlite.binding as llvm
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
LANES = 16
CHAINS = 12  # independent accumulators: covers latency 4 times 2 units, with room
FMA_STEPS = 2_000_000
READ_BYTES = 256 << 20


@final
@dataclass(frozen=True)
class Rates:
    """float32 operations a second and bytes read a second, all cores together.

    `products` are the operations a second of products in other types, where they are known.
    """

    flops: float
    bandwidth: float
    products: Mapping[str, float] = field(default_factory=dict[str, float])

    def floor(self, flop: float, byte: float, dtype: str = "float32") -> float:
        """Seconds below which no implementation can go."""
        return max(flop / self.products.get(dtype, self.flops), byte / self.bandwidth)


def cpu_count() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def cpu_name() -> str:
    """Model name of the processor."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    """Short hash of the checkout, with ``+`` if tracked files differ from it.

    ``VKJIT_BENCH_COMMIT`` names it where the tree is a copy without its history.
    """
    if os.environ.get("VKJIT_BENCH_COMMIT"):
        return os.environ["VKJIT_BENCH_COMMIT"]
    short = _git("rev-parse", "--short=10", "HEAD")
    return short + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")


def facts() -> dict[str, Any]:
    """Fields that every recorded line carries."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "commit": commit(),
        "cpu": cpu_name(),
        "cores": cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or ("unknown" if result.returncode else "")


# ----------------------------------------------------------------------------- rates


def _fma_text() -> str:
    """Kernel fma(n): n rounds of CHAINS independent 16-lane multiply-adds."""
    vector = f"<{LANES} x float>"
    names = range(CHAINS)
    phis = [f"  %a{i} = phi {vector} [ zeroinitializer, %entry ], [ %b{i}, %loop ]" for i in names]
    calls = [
        f"  %b{i} = call {vector} @llvm.fma.v{LANES}f32({vector} %a{i}, {vector} %x, {vector} %x)"
        for i in names
    ]
    sums = ["  %s0 = extractelement " + f"{vector} %b0, i32 0"]
    for i in names[1:]:
        sums.append(f"  %e{i} = extractelement {vector} %b{i}, i32 0")
        sums.append(f"  %s{i} = fadd float %s{i - 1}, %e{i}")
    lines = [
        f"declare {vector} @llvm.fma.v{LANES}f32({vector}, {vector}, {vector})",
        "define float @fma(i64 %n, float %v) {",
        "entry:",
        f"  %i0 = insertelement {vector} poison, float %v, i32 0",
        f"  %x = shufflevector {vector} %i0, {vector} poison, <{LANES} x i32> zeroinitializer",
        "  br label %loop",
        "loop:",
        "  %k = phi i64 [ 0, %entry ], [ %k1, %loop ]",
        *phis,
        *calls,
        "  %k1 = add i64 %k, 1",
        "  %more = icmp ult i64 %k1, %n",
        "  br i1 %more, label %loop, label %done",
        "done:",
        *sums,
        f"  ret float %s{CHAINS - 1}",
        "}",
    ]
    return "\n".join(lines)


def _read_text() -> str:
    """Kernel read(pointer, n): the integer sum of n blocks of four 64-byte lines."""
    vector = "<16 x i32>"
    loads: list[str] = []
    for i in range(4):
        loads += [
            f"  %o{i} = add i64 %base, {i * 64}",
            f"  %q{i} = getelementptr i8, ptr %p, i64 %o{i}",
            f"  %v{i} = load {vector}, ptr %q{i}, align 4",
            f"  %b{i} = add {vector} %a{i}, %v{i}",
        ]
    phis = [
        f"  %a{i} = phi {vector} [ zeroinitializer, %entry ], [ %b{i}, %loop ]" for i in range(4)
    ]
    lines = [
        f"declare i32 @llvm.vector.reduce.add.v16i32({vector})",
        "define i32 @read(ptr %p, i64 %n) {",
        "entry:",
        "  br label %loop",
        "loop:",
        "  %k = phi i64 [ 0, %entry ], [ %k1, %loop ]",
        *phis,
        "  %base = mul i64 %k, 256",
        *loads,
        "  %k1 = add i64 %k, 1",
        "  %more = icmp ult i64 %k1, %n",
        "  br i1 %more, label %loop, label %done",
        "done:",
        f"  %c0 = add {vector} %b0, %b1",
        f"  %c1 = add {vector} %b2, %b3",
        f"  %c2 = add {vector} %c0, %c1",
        f"  %r = call i32 @llvm.vector.reduce.add.v16i32({vector} %c2)",
        "  ret i32 %r",
        "}",
    ]
    return "\n".join(lines)


def measure() -> Rates:
    """The rates of all cores this process may use; takes under two seconds."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(f"{_fma_text()}\n{_read_text()}")
    features = llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=f"{features},-prefer-256-bit", opt=3
    )
    engine = llvm.create_mcjit_compiler(module, target)
    engine.finalize_object()
    fma = ctypes.CFUNCTYPE(ctypes.c_float, ctypes.c_int64, ctypes.c_float)(
        engine.get_function_address("fma")
    )
    read = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64)(
        engine.get_function_address("read")
    )
    cores = cpu_count()
    data = np.ones(READ_BYTES // 4, np.int32)
    share = READ_BYTES // cores // 256
    seconds = _fastest(lambda _: fma(FMA_STEPS, 0.5), cores, time.thread_time)
    reading = _fastest(
        lambda core: read(data.ctypes.data + core * share * 256, share), cores, time.perf_counter
    )
    return Rates(
        flops=2.0 * LANES * CHAINS * FMA_STEPS * cores / seconds,
        bandwidth=share * 256.0 * cores / reading,
    )


def _fastest(work: Callable[[int], Any], cores: int, clock: Callable[[], float]) -> float:
    """Seconds of the slowest core in the best of nine rounds, all cores at work.

    Arithmetic is taken by the thread's own clock: other load then costs nothing. Bandwidth is
    shared with that load and can only be taken by the wall.
    """

    def timed(core: int) -> float:
        start = clock()
        work(core)
        return clock() - start

    with ThreadPoolExecutor(cores) as pool:
        return min(max(pool.map(timed, range(cores))) for _ in range(9))


# ------------------------------------------------------------------------ other load


def busy_seconds() -> float:
    """Processor seconds that this machine has spent on anything."""
    fields = [
        int(x) for x in Path("/proc/stat").read_text(encoding="ascii").split("\n")[0].split()[1:9]
    ]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def process_seconds(pid: int) -> float:
    """Processor seconds that one process has spent."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(text[11]) + int(text[12])) / os.sysconf("SC_CLK_TCK")


def spread(samples: list[float]) -> tuple[float, float]:
    """First and third quartile."""
    if len(samples) < 2:
        return samples[0], samples[0]
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, high
