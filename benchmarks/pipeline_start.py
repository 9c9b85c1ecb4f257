"""Time to make a program ready, in the first process and in the next one, which finds its caches.

``python -m benchmarks.pipeline_start [--device vulkan:0] [--no-record]``. The program is the
gradient of a perceptron whose layers all differ in width, so that no two share a kernel, with
normalised rows and softmax. Each process is fresh; the first has empty caches, those of the driver
included. *Build* is emitting, validating and compiling all kernels of the lowered program, without
tracing and lowering; *first call* is the run after that. Their sum is held to the gate, because
some drivers translate in the first and compile in the second.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine

RESULTS = Path(__file__).parent / "results" / "pipeline_start.jsonl"
WIDTHS = (64, 80, 96, 112, 48, 32)
ROWS = 40
GATE = 0.2
"""Most of the first process's time for build and first call that the second may take."""
# Where vkjit, what uses the XDG folders, Mesa and NVIDIA's driver keep compiled code.
CACHES = (
    "VKJIT_CACHE_DIR",
    "XDG_CACHE_HOME",
    "MESA_SHADER_CACHE_DIR",
    "__GL_SHADER_DISK_CACHE_PATH",
)


def worker(device_name: str) -> dict[str, Any]:
    """Times one start in this process."""
    import vkjit as vj  # noqa: PLC0415  the parent process must not load a driver
    import vkjit.numpy as jnp  # noqa: PLC0415
    from vkjit.runtime import get_device  # noqa: PLC0415

    generator = np.random.default_rng(3)
    sizes = list(itertools.pairwise(WIDTHS))
    weights = [0.1 * generator.standard_normal(s, dtype=np.float32) for s in sizes]
    x = generator.standard_normal((ROWS, WIDTHS[0]), dtype=np.float32)

    def loss(weights: list[Any], x: Any) -> Any:
        for weight in weights:
            centred = x - x.mean(1, keepdims=True)
            x = jnp.tanh(centred / jnp.sqrt((centred * centred).mean(1, keepdims=True) + 1e-5))
            x = x @ weight
        shifted = x - x.max(1, keepdims=True)
        return (jnp.log(jnp.exp(shifted).sum(1)) - shifted[:, 0]).mean()

    started = time.perf_counter()
    device = get_device(device_name)
    opened = time.perf_counter()
    with vj.default_device(device_name):
        lowered = vj.jit(vj.value_and_grad(loss)).lower(weights, x)
        given = [device.upload(np.ascontiguousarray(a)) for a in (*weights, x)]
        constants = [vj.device_put(c, device_name).buffer for c in lowered.constants]
    ready = time.perf_counter()
    loaded = device.load(lowered.plan, constants)
    built = time.perf_counter()
    outputs = loaded.run(given)
    value = float(device.download(outputs[0], np.float32, ()))
    ended = time.perf_counter()
    device.close()
    return {
        "kernels": len(lowered.plan.steps),
        "value": value,
        "open_s": opened - started,
        "lower_s": ready - opened,
        "build_s": built - ready,
        "first_call_s": ended - built,
    }


def start(device: str, caches: str) -> dict[str, Any]:
    """One start in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.pipeline_start", "--worker", "--device", device]
    environment = {**os.environ, **dict.fromkeys(CACHES, caches)}
    done = subprocess.run(
        command, cwd=machine.ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"pipeline_start: {done.stderr.strip() or done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def _ready(times: dict[str, Any]) -> float:
    return times["build_s"] + times["first_call_s"]


def main() -> int:
    """Prints the table; 1 if the second start is not fast enough or differs in its result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="vulkan:0")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--no-record", action="store_true", help="leave results/ alone")
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(worker(options.device)))
        return 0
    with tempfile.TemporaryDirectory() as caches:
        first, second = (start(options.device, caches) for _ in range(2))
    builds = second["build_s"] / first["build_s"]
    ratio = _ready(second) / _ready(first)
    print(f"{first['kernels']} kernels on {options.device}, milliseconds")
    print(f"{'':14}{'first':>10}{'second':>10}")
    for name in ("open_s", "lower_s", "build_s", "first_call_s"):
        label = name.removesuffix("_s").replace("_", " ")
        print(f"{label:14}{1e3 * first[name]:10.1f}{1e3 * second[name]:10.1f}")
    print(f"second / first: build {builds:.3f}, build and first call {ratio:.3f} (gate {GATE})")
    if not options.no_record:
        record = {
            "benchmark": "pipeline_start",
            "device": options.device,
            **machine.facts(),
            "first": first,
            "second": second,
            "build_ratio": builds,
            "ratio": ratio,
        }
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, sort_keys=True) + "\n")
    return int(ratio >= GATE or first["value"] != second["value"])


if __name__ == "__main__":
    sys.exit(main())
