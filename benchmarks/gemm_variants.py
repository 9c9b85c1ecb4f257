"""Every kind of product kernel of a GPU on the same operands, beside PyTorch's in this process.

``python -m benchmarks.gemm_variants [--device vulkan:0] [--cases PATTERNS] [--no-record]``. The
best candidates of each kind run as one plan, whose steps the device times; every result is compared
with float64 before its time counts. Without PyTorch and CUDA the last column is empty.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np

import vkjit as vj
import vkjit.numpy as jnp
from benchmarks import machine
from benchmarks.gemm import TOLERANCES
from vkjit.lowering.artifact import Launch, Plan, PlannedBuffer, Range, Role
from vkjit.lowering.compile import compile_program
from vkjit.lowering.gpu.choose import GpuContract, candidates
from vkjit.lowering.plan.schedule import (
    CoopSchedule,
    NaiveSchedule,
    SkinnySchedule,
    TensorSchedule,
    TiledSchedule,
)
from vkjit.lowering.templates.context import TemplateContext
from vkjit.passes.pipeline import simplify
from vkjit.runtime import get_device

RESULTS = Path(__file__).parent / "results" / "gemm_variants.jsonl"
KINDS = ("naive", "tiled", "blocked", "skinny", "coop", "tensor")
PER_KIND = 3
WARM_SECONDS = 0.4
REPEATS = 7
ROWS = 32
"""Every so many rows of a result are compared with float64."""
PRECISIONS = {"high": 6e-5, "F16_F16_F32_X3": 4e-6}


@final
@dataclass(frozen=True)
class Product:
    """``m`` x ``n`` results of sums of ``k``, operands stored as ``layout`` says."""

    size: tuple[int, int, int]
    dtype: str = "float32"
    layout: str = "nn"
    precision: str = ""

    def __str__(self) -> str:
        kind = f"{self.dtype} {self.precision}".strip()
        return f"{kind} {'x'.join(map(str, self.size))} {self.layout}"

    @property
    def flop(self) -> float:
        """Multiplications and additions."""
        m, n, k = self.size
        return 2.0 * m * n * k

    def subscripts(self) -> str:
        """For einsum."""
        left = "km" if self.layout[0] == "t" else "mk"
        right = "nk" if self.layout[1] == "t" else "kn"
        return f"{left},{right}->mn"

    def operands(self) -> tuple[np.ndarray, np.ndarray]:
        """Standard normal numbers."""
        m, n, k = self.size
        generator = np.random.default_rng(4)
        shapes = (
            ((k, m) if self.layout[0] == "t" else (m, k)),
            ((n, k) if self.layout[1] == "t" else (k, n)),
        )
        kind = getattr(jnp, self.dtype)
        a, b = (generator.standard_normal(s, dtype=np.float32).astype(kind) for s in shapes)
        return a, b

    def tolerance(self) -> float:
        """Of the whole result, relative to its norm."""
        return PRECISIONS.get(self.precision, TOLERANCES[self.dtype])


SQUARES = (1024, 2048, 4096, 8192)
PRODUCTS = (
    *(Product((n, n, n), d) for d in ("float32", "bfloat16", "float16") for n in SQUARES),
    *(Product((n, n, n), precision=p) for p in PRECISIONS for n in (4096, 8192)),
    *(Product((4096, 4096, 4096), "bfloat16", layout) for layout in ("nt", "tn", "tt")),
    *(
        Product(size, d, layout)
        for d in ("float32", "bfloat16")
        for size, layout in (
            ((4096, 1536, 16), "nn"),
            ((1536, 16, 4096), "tn"),
            ((4096, 16, 1536), "nt"),
            ((512, 576, 576), "nt"),
            ((512, 1536, 576), "nt"),
            ((512, 576, 1536), "nn"),
            ((512, 16, 576), "nt"),
            ((16, 576, 512), "tn"),
        )
    ),
)


def kind_of(schedule: GpuContract) -> str:
    """The step of the ladder that a schedule stands on."""
    match schedule:
        case NaiveSchedule():
            return "naive"
        case SkinnySchedule():
            return "skinny"
        case TiledSchedule(tile_m=1, tile_n=1):
            return "tiled"
        case TiledSchedule():
            return "blocked"
        case CoopSchedule():
            return "coop"
        case TensorSchedule():
            return "tensor"


def offered(program: Any, target: Any) -> list[GpuContract]:
    """The first candidates of each kind for the only product of a program."""
    found: list[GpuContract] = []

    def collect(group: Any, arrays: Any, _target: Any) -> None:
        if not found:
            found.extend(candidates(group, TemplateContext(target, list(arrays))))

    compile_program(program, target, choose=collect)
    plain = TiledSchedule(16, 16, 16, 1, 1, 1)
    counts: dict[str, int] = dict.fromkeys(KINDS, 0)
    chosen: list[GpuContract] = []
    for schedule in [*found, plain]:
        kind = kind_of(schedule)
        if counts[kind] < (1 if kind in ("naive", "tiled") else PER_KIND):
            counts[kind] += 1
            chosen.append(schedule)
    return chosen


def joined(plans: Sequence[Plan]) -> tuple[Plan, list[range]]:
    """One plan that runs others one after another on the same inputs; and the steps of each."""
    buffers = [b for b in plans[0].buffers if b.role is Role.INPUT]
    steps: list[Launch] = []
    barriers: set[int] = set()
    spans: list[range] = []
    for number, plan in enumerate(plans):
        moved: dict[int, int] = {}
        for index, buffer in enumerate(plan.buffers):
            if buffer.role is Role.INPUT:
                moved[index] = buffer.position
            else:
                moved[index] = len(buffers)
                position = number if buffer.role is Role.OUTPUT else 0
                buffers.append(PlannedBuffer(buffer.role, buffer.size, position))
        first = len(steps)
        barriers |= {first + b for b in plan.barriers} | ({first} if first else set())
        for step in plan.steps:
            assert isinstance(step, Launch)
            places = tuple(Range(moved[r.buffer], r.offset, r.size) for r in step.arguments)
            steps.append(replace(step, arguments=places))
        spans.append(range(first, len(steps)))
    peak = sum(b.size for b in buffers)
    return Plan("variants", tuple(buffers), tuple(steps), frozenset(barriers), peak), spans


def measure(product: Product, device: Any) -> dict[str, dict[str, Any]]:
    """Per kind: the fastest right candidate, its seconds and its error."""
    a, b = product.operands()
    precision = product.precision or None
    program = simplify(
        vj.make_ir(lambda x, y: jnp.einsum(product.subscripts(), x, y, precision=precision))(a, b)
    )
    schedules = offered(program, device.target)
    plans = [
        compile_program(program, device.target, choose=lambda *_, s=s: s).plan for s in schedules
    ]
    plan, spans = joined(plans)
    loaded = device.load(plan)
    inputs = [device.upload(a), device.upload(b)]
    outputs = loaded.run(inputs)
    errors = [_error(product, a, b, device, out) for out in outputs]
    started = time.perf_counter()
    while time.perf_counter() - started < WARM_SECONDS:
        outputs = loaded.run(inputs)
        device.synchronize()
    samples = [loaded.timed(inputs)[1] for _ in range(REPEATS)]
    best: dict[str, dict[str, Any]] = {}
    for schedule, span, error in zip(schedules, spans, errors, strict=True):
        times = [sum(sample[i].seconds for i in span) for sample in samples]
        found = {
            "seconds": statistics.median(times),
            "schedule": schedule.text(),
            "error": error,
            "wrong": not error <= product.tolerance(),
        }
        kind = kind_of(schedule)
        known = best.get(kind)
        if known is None or (found["wrong"], found["seconds"]) < (known["wrong"], known["seconds"]):
            best[kind] = found
    return best


def _error(product: Product, a: np.ndarray, b: np.ndarray, device: Any, out: Any) -> float:
    m, n, _ = product.size
    got = device.download(out, getattr(jnp, product.dtype), (m, n))[::ROWS].astype(np.float64)
    left = a[:, ::ROWS] if product.layout[0] == "t" else a[::ROWS]
    wanted = np.einsum(
        product.subscripts(), left.astype(np.float64), b.astype(np.float64), optimize=True
    )
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def torch_timer() -> Callable[[Product], float] | None:
    """Seconds of PyTorch's product of the same kind on its CUDA device, where there is one."""
    try:
        torch: Any = importlib.import_module("torch")  # a peer, which need not be there
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    torch.backends.cuda.matmul.allow_tf32 = False

    def seconds(product: Product) -> float:
        a, b = (
            torch.from_numpy(x.astype(np.float32)).cuda().to(getattr(torch, product.dtype))
            for x in product.operands()
        )
        a = a.T if product.layout[0] == "t" else a
        b = b.T if product.layout[1] == "t" else b
        began = time.perf_counter()
        while time.perf_counter() - began < WARM_SECONDS / 2:
            torch.matmul(a, b)
            torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(10):
                torch.matmul(a, b)
        times = []
        for _ in range(REPEATS):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            graph.replay()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) / 1e4)
        return statistics.median(times)

    return seconds


def line(product: Product, best: dict[str, dict[str, Any]], peer: float | None) -> str:
    """One row of the table: rates, and ratios of time to the peer."""
    cells = [f"{product!s:<44}"]
    for kind in KINDS:
        found = best.get(kind)
        if found is None:
            cells.append(f"{'-':>15}")
            continue
        rate = f"{product.flop / found['seconds'] / 1e12:.1f}"
        share = f" ({found['seconds'] / peer:.2f})" if peer else ""
        cells.append(f"{'WRONG' if found['wrong'] else rate + share:>15}")
    cells.append(f"{product.flop / peer / 1e12:8.1f}" if peer else "       -")
    return " ".join(cells)


def chosen(patterns: str) -> Iterator[Product]:
    """The products that the command line names."""
    for product in PRODUCTS:
        if any(fnmatch.fnmatch(str(product), p) for p in patterns.split(",")):
            yield product


def main() -> int:
    """Prints the table and appends a line for each product; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="vulkan:0")
    parser.add_argument("--cases", default="*", help="patterns of products, with commas")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    device = get_device(options.device)
    described = device.describe().splitlines()[0]
    timer = torch_timer()
    header = {**machine.facts(), "benchmark": "gemm_variants", "device": described}
    print(f"{described}; TFLOP/s (time over PyTorch's), {header['date']}, {header['commit']}")
    print(f"{'':<44} " + " ".join(f"{kind:>15}" for kind in KINDS) + f" {'torch':>8}")
    wrong = False
    for product in chosen(options.cases):
        best = measure(product, device)
        peer = timer(product) if timer else None
        wrong |= any(found["wrong"] for found in best.values())
        print(line(product, best, peer), flush=True)
        if not options.no_record:
            record = {**header, "case": str(product), "results": best, "torch_s": peer}
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, sort_keys=True) + "\n")
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
