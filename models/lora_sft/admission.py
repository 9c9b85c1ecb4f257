"""Whether a run fits its device, told before its first step: a table, or the change that fits.

All numbers are those of static plans (`Lowered.memory`); none is a rule of thumb.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

from rich.console import Console
from rich.table import Table

import vkjit as vj
from vkjit import tree
from vkjit.errors import ConfigError
from vkjit_models.common.atomic import write_atomic
from vkjit_models.common.steplog import json_text
from vkjit_models.llama.model import Batch, LlamaSpec, Params

from .config import MemorySection, RunConfig
from .data import WindowSet
from .receipt import MIB
from .step import TrainState, compile_step, zero_totals

NAME = "memory.json"
_LEAST_CONTEXT = 16
_CHUNKS = (4096, 1024)  # vocabulary entries of a block of logits that are tried


@final
@dataclass(frozen=True)
class Room:
    """What the arrays of a run may take.

    Args:
        device: Name of the device.
        bytes: The most.
        source: Who says so.
    """

    device: str
    bytes: int
    source: str


@final
@dataclass(frozen=True)
class Need:
    """Bytes of a run's arrays. Those of the second group never exist at the same time.

    Args:
        weights: The base model's, as they are held.
        prepared: Copies of weights in the layout that products read; none of packed ones.
        adapters: Trained weights, and what stands for them where the base model is evaluated.
        gradients: Sums over the micro-batches.
        optimizer: Its state, and the initial adapters where the loss pulls back to them.
        context: Tokens, labels, positions and segments of a micro-batch, and its losses.
        activations: Temporaries of the forward and backward pass of a micro-batch.
        update: Temporaries of the update.
        evaluation: Temporaries of the evaluation of held-out and probe windows.
        cache: Keys and values kept between tokens of a reply: none, each is computed anew.
    """

    weights: int
    prepared: int
    adapters: int
    gradients: int
    optimizer: int
    context: int
    activations: int
    update: int
    evaluation: int
    cache: int = 0

    @property
    def fixed(self) -> int:
        """Bytes that no change of the step takes away."""
        base = self.weights + self.prepared + self.cache
        return base + self.adapters + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """The most at one time."""
        largest = max(self.activations, self.update, self.evaluation - self.gradients)
        return self.fixed + self.context + largest


@final
@dataclass(frozen=True)
class Plan:
    """The programs and arrays of a run that its memory follows from.

    Args:
        spec: The model as it is trained.
        params: Its weights.
        state: The state before the first step.
        windows: Training windows: their shapes are those of a batch.
    """

    spec: LlamaSpec
    params: Params
    state: TrainState
    windows: WindowSet

    @property
    def kept(self) -> int:
        """Bytes of a micro-batch's arguments that are there between steps, too."""
        return 2 * nbytes(self.state.adapters) + nbytes(self.state.initial)

    def step(self, config: RunConfig) -> vj.Lowered:
        """The program of a micro-batch under ``config``; nothing is compiled or run."""
        spec = replace(self.spec, recompute=config.train.recompute)
        functions, state = compile_step(spec, self.params, config), self.state
        totals = vj.eval_shape(zero_totals, state.adapters, state.loss_scale)
        place = vj.ShapeDtypeStruct((2,), "int32")
        batch = batch_like(self.windows, config.train.micro_batch, config.data.context)
        return functions.accumulate.lower(state.adapters, totals, batch, place, state.initial)


def room(section: MemorySection, device: str) -> Room:
    """What the device has: the limit of the config, or what it allows this process now."""
    if section.limit_mib is not None:
        return Room(device, section.limit_mib * MIB, "memory.limit_mib")
    with vj.default_device(device) as opened:
        stats = opened.memory_stats()
    if device.startswith("vulkan"):
        return Room(device, stats.limit_bytes, "the driver's budget")
    free = _available()
    held = stats.live_bytes + stats.pooled_bytes
    if free is None or free + held >= stats.limit_bytes:
        return Room(device, stats.limit_bytes, "the machine or its control group")
    return Room(device, free + held, "available now")


def need(
    base_bytes: int, plan: Plan, off_bytes: int, step: vj.Lowered, others: tuple[int, int]
) -> Need:
    """The bytes of a run.

    Args:
        base_bytes: The base model's weights on the device.
        plan: Programs and arrays.
        off_bytes: Adapters that stand for the base model.
        step: The program of a micro-batch.
        others: Temporaries of update and evaluation.
    """
    adapters, state = nbytes(plan.state.adapters), plan.state
    memory, initial = step.memory(), nbytes(state.initial)
    return Need(
        weights=base_bytes,
        prepared=memory.constants - sum(one.nbytes for one in step.constants),
        adapters=adapters + off_bytes,
        gradients=adapters,
        optimizer=nbytes(state.optimizer) + initial,
        context=max(memory.inputs + memory.outputs - plan.kept, 0),
        activations=memory.temporaries,
        update=others[0],
        evaluation=others[1],
    )


def nbytes(arrays: Any) -> int:
    """Bytes of all arrays of a pytree."""
    return sum(leaf.nbytes for leaf in tree.leaves(arrays))


def show(console: Console, found: Need, there: Room) -> None:
    """Prints the table."""
    table = Table(
        "what", "MiB", "", title=f"Memory on {there.device}, planned", title_justify="left"
    )
    table.columns[1].justify = "right"
    for name, size, note in rows(found):
        table.add_row(name, f"{size / MIB:,.1f}", note)
    table.add_section()
    table.add_row("predicted peak", f"{found.peak / MIB:,.1f}", "")
    table.add_row("there is", f"{there.bytes / MIB:,.1f}", there.source)
    console.print(table)


def rows(found: Need) -> list[tuple[str, int, str]]:
    """Name, bytes and a note for each part."""
    return [
        ("weights", found.weights, "of the base model, as held"),
        ("prepared", found.prepared, "weights in the layout that products read"),
        ("adapters", found.adapters, "trained, and switched off for comparison"),
        ("gradients", found.gradients, "summed over micro-batches"),
        ("optimizer", found.optimizer, ""),
        ("context", found.context, "tokens, labels, positions, segments, losses"),
        ("activations", found.activations, "and temporaries of forward and backward pass"),
        ("update", found.update, "temporaries, while there are no activations"),
        ("evaluation", found.evaluation, "and probe; while there are no gradients"),
        ("cache", found.cache, "keys and values: none, replies are computed anew"),
    ]


def save(folder: Path, found: Need, there: Room) -> None:
    """Writes ``memory.json``."""
    content = {"need": asdict(found), "peak": found.peak, "room": asdict(there)}
    write_atomic(folder / NAME, (json_text(content, indent=2) + "\n").encode())


def require(config: RunConfig, found: Need, there: Room, plan: Plan) -> None:
    """Refuses a run that does not fit.

    Raises:
        ConfigError: With the smallest change that fits, if there is one.
    """
    if found.peak <= there.bytes:
        return
    what = (
        f"memory: the run needs {_mib(found.peak)} on {there.device}, expected at most "
        f"{_mib(there.bytes)} ({there.source})"
    )
    others = found.fixed + max(found.update, found.evaluation - found.gradients)
    if others > there.bytes:
        raise ConfigError(
            f"{what}; {_mib(others)} are weights, adapters, optimizer and evaluation, which no "
            'setting of the step changes: use model.weights = "packed", a smaller lora.rank or a '
            "smaller model"
        )

    def peak_of(changes: Mapping[str, Any]) -> int:
        changed = plan.step(with_changes(config, changes)).memory()
        context = changed.inputs + changed.outputs - plan.kept
        return replace(found, activations=changed.temporaries, context=max(context, 0)).peak

    fitting = smallest_change(config, peak_of, found.peak, there.bytes)
    if fitting is None:
        raise ConfigError(
            f"{what}; no change of train.recompute, train.micro_batch, data.context and "
            "loss.vocab_chunk fits: use a smaller lora.rank or a smaller model"
        )
    changes, peak = fitting
    named = ", ".join(f"{key} = {_toml(value)}" for key, value in changes.items())
    raise ConfigError(f"{what}; set {named}: that needs {_mib(peak)}")


def smallest_change(
    config: RunConfig, peak_of: Callable[[Mapping[str, Any]], int], now: int, limit: int
) -> tuple[dict[str, Any], int] | None:
    """The first change under which a run fits, and its peak; None where none does.

    Tried are, in this order: computing activations again; smaller micro-batches, more of them;
    both; shorter windows; smaller blocks of logits.

    Args:
        config: The run.
        peak_of: Plans the run with other values at dotted keys.
        now: Its peak without a change.
        limit: The largest peak that fits.
    """
    recompute: dict[str, Any] = {}
    if not config.train.recompute:
        changes = {"train.recompute": True}
        peak = peak_of(changes)
        if peak <= limit:
            return changes, peak
        recompute = changes if peak < now else {}  # a model of few layers gains nothing by it
    for changes in _candidates(config, recompute):
        peak = peak_of(changes)
        if peak <= limit:
            return changes, peak
    return None


def with_changes(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """``config`` with other values at dotted keys."""
    content = config.model_dump()
    for key, value in changes.items():
        section, _, name = key.partition(".")
        content[section][name] = value
    return RunConfig.model_validate(content)


def _candidates(config: RunConfig, recompute: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Changes to the portions of a step, to the data, to the loss; also with ``recompute``."""
    train = config.train
    sizes = [n for n in range(train.micro_batch - 1, 0, -1) if train.micro_batch % n == 0]
    portions = [
        {
            "train.micro_batch": size,
            "train.accumulation": train.accumulation * train.micro_batch // size,
        }
        for size in sizes
    ]
    yield from portions
    if recompute:
        yield from (recompute | portion for portion in portions)
    least = recompute | (portions[-1] if portions else {})
    context = config.data.context // 2
    while context >= _LEAST_CONTEXT:
        yield least | {"data.context": context}
        context //= 2
    for chunk in _CHUNKS:
        yield least | {"loss.vocab_chunk": chunk}


def batch_like(windows: WindowSet, size: int, context: int) -> Batch:
    """Shapes of a batch of ``size`` windows.

    Shorter ones are packed anew, so that their targets are not known: they get room for as many as
    the longer ones have, which is the most that they can need.
    """
    targets = min(context, windows.capacity)
    tokens = vj.ShapeDtypeStruct((size, context), "int32")
    places = vj.ShapeDtypeStruct((size * targets,), "int32")
    return Batch(tokens, tokens, tokens, tokens, places, places)


def _available() -> int | None:
    """Bytes that the system can still give to processes; None where it does not say."""
    if sys.platform != "linux":
        return None
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f} MiB"


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
