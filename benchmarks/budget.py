"""Step time against memory: budgets of vkjit, checkpoint policies of JAX and PyTorch beside them.

A training step of a decoder-only transformer (causal attention, gated MLP, SGD on all weights),
swept from the plan without recomputation down to the smallest one. Each point is a process of its
own: the peak that was predicted, the peak that the device then counted, time, and losses, which
have to be the same bits under every budget of one device. For JAX the peak is that of XLA's memory
analysis, for PyTorch what it had allocated (on a CPU: what was resident above the start).
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks import memory
from benchmarks.case import Array, Namespace, Tree, tree_leaves, tree_map
from benchmarks.frameworks import array_namespace

SIZES = {
    "layers": 24, "width": 256, "heads": 4, "hidden": 768, "vocabulary": 2048, "tokens": 512,
}  # fmt: skip
PARTS = (0.8, 0.6, 0.45, 0.3, 0.2)
"""Of the temporaries of the plan without recomputation."""
POLICIES = ("none", "dots_saveable", "nothing_saveable")
RATE, EPSILON = 1e-2, 1e-5
Sizes = Mapping[str, int]
Point = dict[str, Any]


def inputs(s: Sizes) -> tuple[Tree, np.ndarray]:
    """Weights, and tokens i32[1,S+1]."""
    generator = np.random.default_rng(8)
    d, f = s["width"], s["hidden"]
    shapes = {
        "q": (d, d), "k": (d, d), "v": (d, d), "o": (d, d), "gate": (d, f), "up": (d, f),
        "down": (f, d),
    }  # fmt: skip

    def normal(*shape: int) -> np.ndarray:
        drawn = generator.standard_normal(shape, dtype=np.float32)
        return drawn * np.float32(shape[0] ** -0.5)

    ones = np.ones(d, np.float32)
    blocks = [
        {name: normal(*shape) for name, shape in shapes.items()} | {"norm1": ones, "norm2": ones}
        for _ in range(s["layers"])
    ]
    weights = {"embedding": normal(s["vocabulary"], d), "norm": ones, "blocks": blocks}
    tokens = generator.integers(0, s["vocabulary"], (1, s["tokens"] + 1)).astype(np.int32)
    return weights, tokens


# ------------------------------------------------------------------- vkjit and JAX


def make_step(
    ns: Namespace, s: Sizes, wrap: Callable[..., Any], dtype: str
) -> Callable[[Tree, Array], tuple[Tree, Array]]:
    """(weights, tokens) to (weights, loss); ``wrap`` is put around each block."""
    n, d, heads = s["tokens"], s["width"], s["heads"]
    wide = ns.np.float32

    def low(x: Array) -> Array:
        return x if dtype == "float32" else x.astype(getattr(ns.np, dtype))

    def norm(x: Array, weight: Array) -> Array:
        x = x.astype(wide)
        scale = ns.lax.rsqrt(ns.np.mean(x * x, axis=-1, keepdims=True) + EPSILON)
        return low(x * scale * weight)

    def block(x: Array, w: Tree) -> Array:  # [1, S, d]
        y = norm(x, w["norm1"])
        q, k, v = (
            ns.np.reshape(ns.np.matmul(y, low(w[name])), (1, n, heads, d // heads))
            for name in "qkv"
        )
        mixed = ns.np.reshape(ns.nn.dot_product_attention(q, k, v, is_causal=True), (1, n, d))
        x = x + ns.np.matmul(mixed, low(w["o"]))
        y = norm(x, w["norm2"])
        gate, up = (ns.np.matmul(y, low(w[name])) for name in ("gate", "up"))
        return x + ns.np.matmul(ns.nn.silu(gate) * up, low(w["down"]))

    block = wrap(block)

    def loss(weights: Tree, tokens: Array) -> Array:
        x = low(ns.np.take(weights["embedding"], tokens[:, :-1], axis=0))
        for w in weights["blocks"]:
            x = block(x, w)
        x = norm(x, weights["norm"])
        logits = ns.np.matmul(x, low(weights["embedding"]).T).astype(wide)
        top = ns.lax.stop_gradient(ns.np.max(logits, axis=-1, keepdims=True))
        total = ns.np.log(ns.np.sum(ns.np.exp(logits - top), axis=-1)) + top[..., 0]
        picked = ns.np.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
        return ns.np.mean(total - picked)

    def step(weights: Tree, tokens: Array) -> tuple[Tree, Array]:
        value, gradients = ns.value_and_grad(loss)(weights, tokens)
        return tree_map(lambda w, g: w - RATE * g, weights, gradients), value

    return step


def run_vkjit(s: Sizes, given: Point) -> Point:
    """One budget."""
    os.environ["VKJIT_DEVICE"] = given["device"]
    ns, vj = array_namespace("vkjit"), importlib.import_module("vkjit")
    budget = given["budget"] or None
    step = make_step(ns, s, lambda block: block, given["dtype"])
    jitted = vj.jit(step, donate_argnums=0, memory_budget=budget)
    weights, tokens = tree_map(ns.np.asarray, inputs(s))
    start = time.perf_counter()
    try:
        lowered = jitted.compile(weights, tokens)
    except vj.errors.MemoryBudgetError as error:
        return {"smallest": error.smallest, "compile_s": time.perf_counter() - start}
    compiled = time.perf_counter() - start
    if given["picture"]:
        lowered.memory_report().save(given["picture"])
    device = importlib.import_module("vkjit.runtime").get_device(given["device"])
    found = _timed(jitted, weights, tokens, given["calls"])
    return {
        **found,
        "compile_s": compiled,
        "predicted": lowered.memory().peak,
        "temporaries": lowered.memory().temporaries,
        "measured": device.memory_stats().peak_bytes,
        "equations": len(lowered.program.eqns),
    }


def run_jax(s: Sizes, given: Point) -> Point:
    """One policy, put around each block."""
    os.environ["JAX_PLATFORMS"] = "cpu" if given["device"] == "cpu" else "cuda"
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if given["dtype"] == "float32":
        os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
    ns, jax = array_namespace("jax"), importlib.import_module("jax")
    name = given["policy"]

    def wrap(block: Callable[..., Any]) -> Callable[..., Any]:
        if name == "none":
            return block
        return jax.checkpoint(block, policy=getattr(jax.checkpoint_policies, name))

    step = jax.jit(make_step(ns, s, wrap, given["dtype"]), donate_argnums=0)
    weights, tokens = tree_map(ns.np.asarray, inputs(s))
    start = time.perf_counter()
    compiled = step.lower(weights, tokens).compile()
    seconds = time.perf_counter() - start
    sizes = compiled.memory_analysis()
    outside = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
    peak = outside - sizes.alias_size_in_bytes + sizes.temp_size_in_bytes
    found = _timed(compiled, weights, tokens, given["calls"])
    stats = jax.devices()[0].memory_stats() or {}
    return {
        **found,
        "compile_s": seconds,
        "predicted": peak,
        "temporaries": sizes.temp_size_in_bytes,
        "measured": stats.get("peak_bytes_in_use", 0),
    }


def _timed(function: Callable[..., Any], weights: Tree, tokens: Array, calls: int) -> Point:
    losses: list[float] = []
    samples: list[float] = []
    for _ in range(calls + 1):
        start = time.perf_counter()
        weights, loss = function(weights, tokens)
        for leaf in tree_leaves((weights, loss)):
            leaf.block_until_ready()
        samples.append(time.perf_counter() - start)
        losses.append(float(loss))
    return {"median_s": statistics.median(samples[1:]), "losses": losses}


# ------------------------------------------------------------------------- PyTorch


def run_torch(s: Sizes, given: Point) -> Point:
    """With or without checkpointing of each block."""
    torch = importlib.import_module("torch")
    checkpoint = importlib.import_module("torch.utils.checkpoint").checkpoint
    functional, is_gpu = torch.nn.functional, given["device"] != "cpu"
    place, dtype = "cuda" if is_gpu else "cpu", getattr(torch, given["dtype"])
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    n, d, heads = s["tokens"], s["width"], s["heads"]
    given_weights, given_tokens = inputs(s)
    gc.collect()
    before = memory.resident()

    def parameter(x: np.ndarray) -> Any:
        return torch.nn.Parameter(torch.from_numpy(x.copy()).to(place))

    weights = tree_map(parameter, given_weights)
    tokens = torch.from_numpy(given_tokens).long().to(place)

    def block(x: Any, w: Tree) -> Any:
        y = functional.rms_norm(x.float(), (d,), w["norm1"], EPSILON).to(dtype)
        q, k, v = (
            (y @ w[name].to(dtype)).view(1, n, heads, d // heads).transpose(1, 2) for name in "qkv"
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(1, 2).reshape(1, n, d) @ w["o"].to(dtype)
        y = functional.rms_norm(x.float(), (d,), w["norm2"], EPSILON).to(dtype)
        gate, up = (y @ w[name].to(dtype) for name in ("gate", "up"))
        return x + (functional.silu(gate) * up) @ w["down"].to(dtype)

    def step() -> Any:
        x = functional.embedding(tokens[:, :-1], weights["embedding"]).to(dtype)
        for w in weights["blocks"]:
            checks = given["policy"] != "none"
            x = checkpoint(block, x, w, use_reentrant=False) if checks else block(x, w)
        x = functional.rms_norm(x.float(), (d,), weights["norm"], EPSILON).to(dtype)
        logits = (x @ weights["embedding"].to(dtype).T).float()
        loss = functional.cross_entropy(logits[0], tokens[0, 1:])
        loss.backward()
        with torch.no_grad():
            for leaf in tree_leaves(weights):
                leaf.sub_(leaf.grad, alpha=RATE)
                leaf.grad = None
        return loss.detach()

    losses, samples = [], []
    for _ in range(given["calls"] + 1):
        start = time.perf_counter()
        losses.append(float(step()))  # waits for the device
        if is_gpu:
            torch.cuda.synchronize()
        samples.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if is_gpu else memory.peak() - before
    return {"median_s": statistics.median(samples[1:]), "losses": losses, "measured": peak}


RUNNERS = {"vkjit": run_vkjit, "jax": run_jax, "torch": run_torch}


# -------------------------------------------------------------------------- sweep


def child(python: str, options: argparse.Namespace, request: Point) -> Point:
    """What one process found, or its failure."""
    full = {
        "device": options.device, "dtype": options.dtype, "calls": options.calls, "budget": 0,
        "picture": "", "policy": "none", "sizes": sizes_of(options), **request,
    }  # fmt: skip
    command = [python, "-m", "benchmarks.budget", "--child", json.dumps(full)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=options.limit, check=False
        )
    except subprocess.TimeoutExpired:
        return {**request, "failure": f"no answer in {options.limit:.0f} s"}
    if done.returncode:
        return {**request, "failure": done.stderr.strip()[-300:]}
    point = {**request, **json.loads(done.stdout.splitlines()[-1])}
    print(_row(point), flush=True)
    return point


def sizes_of(options: argparse.Namespace) -> dict[str, int]:
    """The sizes asked for."""
    return {name: getattr(options, name) for name in SIZES}


def sweep(options: argparse.Namespace) -> list[Point]:
    """Points of vkjit from no budget down to the smallest, then the peers'."""
    ours = {"name": "vkjit"}
    first = child(sys.executable, options, {**ours, "picture": options.picture})
    points = [first]
    if "failure" in first:
        return points
    fixed = first["predicted"] - first["temporaries"]
    asked = [fixed + int(first["temporaries"] * part) for part in options.parts]
    points += [child(sys.executable, options, {**ours, "budget": budget}) for budget in asked]
    if options.smallest:
        refused = child(sys.executable, options, {**ours, "budget": fixed + 1})
        if "smallest" in refused:
            request = {**ours, "budget": refused["smallest"]}
            points.append(child(sys.executable, options, request))
    if options.peers_python:
        points += [
            child(options.peers_python, options, {"name": name, "policy": policy})
            for name, policies in (("jax", POLICIES), ("torch", ("none", "checkpoint")))
            for policy in policies
        ]
    return points


def _row(p: Point) -> str:
    what = p.get("policy") or (f"budget {p['budget'] / 2**20:.0f}" if p.get("budget") else "none")
    if "median_s" not in p:
        return f"{p['name']:<6} {what:<17} {p.get('failure', p)}"
    predicted, measured = (p.get(k, 0) / 2**20 for k in ("predicted", "measured"))
    return (
        f"{p['name']:<6} {what:<17} predicted {predicted:9.1f} MiB  measured {measured:9.1f} MiB  "
        f"step {p['median_s'] * 1e3:9.1f} ms  compile {p.get('compile_s', 0):6.1f} s  "
        f"loss {p['losses'][-1]:.6f}"
    )


def draw(points: list[Point], title: str, path: str) -> None:
    """Step time over peak memory."""
    from matplotlib.figure import Figure  # noqa: PLC0415  children do without it

    figure = Figure(figsize=(8, 5), layout="constrained", dpi=120)
    axes: Any = figure.add_subplot()
    marks = {"vkjit": ("o-", "vkjit, memory_budget"), "jax": ("s", "JAX, jax.checkpoint"),
             "torch": ("^", "PyTorch, checkpoint")}  # fmt: skip
    for name, (mark, label) in marks.items():
        found = [p for p in points if p["name"] == name and "median_s" in p]
        xs = [(p.get("measured") or p["predicted"]) / 2**20 for p in found]
        ys = [p["median_s"] * 1e3 for p in found]
        axes.plot(xs, ys, mark, label=label)
        for x, y, p in zip(xs, ys, found, strict=True):
            if name != "vkjit":
                axes.annotate(
                    p["policy"], (x, y), xytext=(5, 5), textcoords="offset points", fontsize=8
                )
    axes.set_xlabel("peak memory of a step, MiB")
    axes.set_ylabel("time of a step, ms")
    axes.set_title(title, fontsize=10)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", help="of products and activations")
    parser.add_argument("--peers-python", default=os.environ.get("VKJIT_PEERS_PYTHON", ""))
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds a point may take")
    parser.add_argument("--parts", type=_parts, default=PARTS, help="of the temporaries: 0.8,0.5")
    parser.add_argument("--smallest", action="store_true", help="search the smallest budget, too")
    parser.add_argument("--plot", default="", help="file for the picture of the sweep")
    parser.add_argument("--picture", default="", help="file for the picture of the first plan")
    parser.add_argument("--no-record", action="store_true", help="append nothing to results/")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _parts(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(",") if part)


def main(arguments: list[str] | None = None) -> int:
    """Runs the sweep; 1 if a budget was missed, or changed a bit of a loss."""
    options = parse(arguments)
    if options.child:
        request = json.loads(options.child)
        print(json.dumps(RUNNERS[request["name"]](request["sizes"], request)))
        return 0
    from benchmarks import machine  # noqa: PLC0415  needs llvmlite, which children may lack

    os.chdir(machine.ROOT)
    points = sweep(options)
    record = {
        **machine.facts(), "benchmark": "budget", "device": options.device,
        "dtype": options.dtype, "sizes": sizes_of(options), "points": points,
        "load": os.getloadavg()[0],
    }  # fmt: skip
    if not options.no_record:
        path = machine.ROOT / "benchmarks" / "results" / "budget.jsonl"
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, sort_keys=True) + "\n")
    if options.plot:
        s = sizes_of(options)
        title = f"{s['layers']} layers of width {s['width']}, {s['tokens']} tokens, {options.dtype}"
        draw(points, f"{title}, {options.device}", options.plot)
    return int(any(_is_bad(p, points[0]) for p in points if p["name"] == "vkjit"))


def _is_bad(point: Point, first: Point) -> bool:
    if "failure" in point or point.get("losses") != first.get("losses"):
        return True
    missed = bool(point["budget"]) if "budget" in point else False
    return missed and point["predicted"] > point["budget"]


if __name__ == "__main__":
    sys.exit(main())
