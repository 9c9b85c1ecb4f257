"""What ``vkjit tune`` tunes: products by their size, and the step of a model."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import vkjit as vj
import vkjit.numpy as jnp
from vkjit.errors import ArgumentError
from vkjit_models.common.gguf import LlamaHyper
from vkjit_models.llama.config import linear_shapes, module_shapes
from vkjit_models.llama.model import Batch, LlamaSpec, LoraPair
from vkjit_models.lora_sft.step import StepSpec, Totals, accumulate

Job = tuple[Callable[..., Any] | str, tuple[Any, ...]]
"""A function and stand-ins for its arguments, or the text of a program and none."""

DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
LAYOUTS = ("nn", "nt", "tn", "tt")
_PRODUCT = re.compile(r"(\d+)x(\d+)x(\d+)(?::(\w+))?(?::(\w+))?")

SMOLLM2 = LlamaHyper(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    rope_theta=1e5,
    rms_eps=1e-5,
    tied=True,
    context_length=8192,
)
"""SmolLM2-135M: https://huggingface.co/HuggingFaceTB/SmolLM2-135M/blob/main/config.json."""
MODELS = {"smollm2": SMOLLM2}
_LEAST_SECONDS = 0.1
_DISTINCT_LAYERS = 3
"""A first, a middle and a last block: the products of the others are the same."""


def product(text: str) -> Job:
    """The product that ``MxNxK``, ``MxNxK:f16`` or ``MxNxK:bf16:nt`` names.

    In the layout ``nt`` the second factor is stored as N x K, in ``tn`` the first one as K x M.

    Raises:
        ArgumentError: it names none.
    """
    found = _PRODUCT.fullmatch(text)
    kind = (found[4] or "f32") if found else ""
    layout = (found[5] or "nn") if found else ""
    if found is None or kind not in DTYPES or layout not in LAYOUTS:
        raise ArgumentError(
            f"tune: shape {text!r}, expected MxNxK, MxNxK:TYPE or MxNxK:TYPE:LAYOUT with a type of "
            f"{', '.join(DTYPES)} and a layout of {', '.join(LAYOUTS)}"
        )
    m, n, k = (int(found[i]) for i in (1, 2, 3))
    left = (m, k) if layout[0] == "n" else (k, m)
    right = (k, n) if layout[1] == "n" else (n, k)

    def matmul(a: Any, b: Any) -> Any:
        return jnp.matmul(a if layout[0] == "n" else a.T, b if layout[1] == "n" else b.T)

    arguments = [vj.ShapeDtypeStruct(shape, DTYPES[kind]) for shape in (left, right)]
    return matmul, tuple(arguments)


def lora_step(name: str, tokens: int, rank: int = 16) -> Job:
    """One micro-batch of the trainer's step, adapters on every linear layer, ``tokens`` long.

    Raises:
        ArgumentError: there is no model of this name.
    """
    hyper = MODELS.get(name)
    if hyper is None:
        raise ArgumentError(f"tune: model {name!r}, expected one of {', '.join(MODELS)}")
    few = replace(hyper, layers=min(hyper.layers, _DISTINCT_LAYERS))

    def f32(*shape: int) -> vj.ShapeDtypeStruct:
        return vj.ShapeDtypeStruct(shape, "float32")

    params = {f"{module}.weight": f32(*shape) for module, shape in module_shapes(few).items()}
    adapters = {
        module: LoraPair(f32(rank, columns), f32(rows, rank))
        for module, (rows, columns) in linear_shapes(few).items()
    }
    totals = Totals(adapters, *(f32() for _ in Totals._fields[1:]))
    window = vj.ShapeDtypeStruct((1, tokens), "int32")
    batch = Batch(window, window, window, window)

    def step(params: Any, adapters: Any, totals: Any, batch: Any) -> Totals:
        spec = StepSpec(LlamaSpec(few, lora_scale=2.0))
        return accumulate(spec, params, adapters, totals, batch, None)[0]

    return step, (params, adapters, totals, batch)


def program(path: Path) -> Job:
    """The program whose text is in a file.

    Raises:
        ArgumentError: the file cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8"), ()
    except (OSError, ValueError) as error:
        raise ArgumentError(f"tune: cannot read {path} ({error}); pass a file of text") from error


def export(path: Path) -> int:
    """Writes all results to a file and returns their number.

    Raises:
        ArgumentError: the file cannot be written.
    """
    try:
        return vj.tuning.export(path)
    except OSError as error:
        raise ArgumentError(f"tune: cannot write {path} ({error}); name another file") from error


def run(
    jobs: Sequence[Job], console: Console, device: str | None, budget: float, *, again: bool
) -> None:
    """Tunes one job after another within ``budget`` seconds and prints what came of each."""
    end = time.monotonic() + budget
    for number, (function, arguments) in enumerate(jobs):
        left = max((end - time.monotonic()) / (len(jobs) - number), _LEAST_SECONDS)
        with _shown(console) as progress:
            report = vj.tuning.tune(
                function, *arguments, budget_s=left, device=device, again=again, progress=progress
            )
        console.print(str(report), markup=False, highlight=False)


@contextmanager
def _shown(console: Console) -> Generator[vj.tuning.Progress]:
    """A bar of the candidates timed so far, for one group after another."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
        bar = bars.add_task("compiling", total=None)

        def show(group: str, done: int, count: int) -> None:
            bars.update(bar, description=group, completed=done, total=count)

        yield show


def show(console: Console) -> None:
    """Prints every result with its receipt's date and times."""
    table = Table(box=None, pad_edge=False)
    for name in ("device", "group", "schedule", "ms", "default ms", "gain", "date"):
        table.add_column(name, overflow="fold")
    for r in vj.tuning.results():
        times = (f"{r.seconds * 1e3:.3f}", f"{r.default_seconds * 1e3:.3f}", f"{r.gain:.2f}")
        cells = (r.hardware.name, r.group, r.schedule, *times, r.receipt.date)
        table.add_row(*[escape(cell) for cell in cells])
    console.print(table)
