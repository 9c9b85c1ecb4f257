"""The training loop: steps, evaluations, checkpoints, and what is left in the run's folder.

A run's folder holds ``config.json`` (every key, resolved), ``steps.csv``, ``held_out.csv``,
``checkpoints/``, ``adapter/`` (PEFT's layout), ``loss.png`` and ``result.json``. A run resumed from
a checkpoint gives the same numbers, bit for bit, as one that was never stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

import vkjit.numpy as jnp
from vkjit import optim, random, tree
from vkjit.errors import ConfigError, DataError
from vkjit_models.common.adapter_io import save_adapter
from vkjit_models.common.atomic import write_atomic
from vkjit_models.common.checkpoint import CheckpointStore
from vkjit_models.common.steplog import StepLog
from vkjit_models.llama.lora import LoraPlan, init_adapters, plan_adapters, to_peft
from vkjit_models.llama.model import LlamaSpec

from .base import BaseModel, load_base
from .config import RunConfig
from .data import TrainingData, load_data, micro_batches, training_rows
from .evaluate import Evaluator, HeldOut
from .progress import MIB, Display, Interrupt, peak_memory_mib
from .report import (
    Costs,
    Replies,
    plot_losses,
    show_comparison,
    show_costs,
    show_plan,
    show_replies,
    show_step,
    warnings_of,
)
from .step import Metrics, TrainState, compile_step, initial_state

STEP_COLUMNS = (
    "step", *Metrics._fields, "tokens", "seconds", "tokens_per_second", "peak_memory_mib",
)  # fmt: skip

NON_FINITE_LIMIT = 5
"""Steps in a row whose gradient may be NaN or infinite before the run is given up."""


@final
@dataclass(frozen=True)
class RunResult:
    """What came of a run.

    Args:
        step: Optimizer steps done.
        interrupted: The run stopped before its last step; the rest is then None or empty.
        before: Held-out loss without the adapter.
        after: Held-out loss with it.
        replies: A sample question and both replies.
        warnings: Signs that the run did not learn.
        costs: Time and memory of the run, predicted and measured.
    """

    step: int
    interrupted: bool
    before: HeldOut | None = None
    after: HeldOut | None = None
    replies: Replies | None = None
    warnings: tuple[str, ...] = ()
    costs: Costs | None = None


def train(
    config: RunConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    stop_after: int | None = None,
    console: Console | None = None,
) -> RunResult:
    """Fine-tunes as ``config`` says.

    Args:
        config: The run.
        resume: Go on from the newest checkpoint in the folder, if there is one.
        overwrite: Begin anew although the folder holds checkpoints; they are deleted.
        stop_after: Stop after this many steps as if interrupted, leaving a checkpoint.
        console: Where the progress goes; standard output where None.

    Raises:
        ConfigError: The folder holds checkpoints and neither flag is given, or they belong to
            another config; or both flags are given.
        DataError: Model, data or a checkpoint cannot be read or written, or the gradient was not
            finite several steps in a row.
    """
    console = console or Console()
    folder = config.output.folder
    _check_folder(config, resume=resume, overwrite=overwrite)
    with console.status("reading the model"):
        base = load_base(config.model.path)
    with console.status("building the data set"):
        data = load_data(config.data, base.tokenizer, config.train.seed)
    run = _Run(config, base, data, console)
    show_plan(console, run.plan, sum(int(np.prod(p.shape)) for p in base.params.values()))
    console.print(
        f"data: {len(data.train)} windows of {config.data.context} tokens to train on, "
        f"{len(data.held_out_windows)} of {len(data.held_out)} held-out windows evaluated",
        highlight=False,
    )
    write_atomic(folder / "config.json", (json.dumps(config.resolved(), indent=2) + "\n").encode())
    state, step = run.start()
    if step < config.train.steps:
        run.compile()
        last = config.train.steps if stop_after is None else stop_after
        state, step = run.loop(state, step, last)
    if step < config.train.steps:
        console.print(
            f"stopped after step {step}; `vkjit train ... --resume` goes on from there",
            markup=False,
        )
        return RunResult(step, interrupted=True)
    return run.finish(state, step)


@final
class _Run:
    """The objects of one run and the order in which they are used."""

    def __init__(
        self, config: RunConfig, base: BaseModel, data: TrainingData, console: Console
    ) -> None:
        self.plan: LoraPlan = plan_adapters(base.hyper, config.lora.spec)
        self._config, self._base, self._data, self._console = config, base, data, console
        lora, train = self.plan.spec, config.train
        spec = LlamaSpec(base.hyper, lora.scale, lora.dropout, train.recompute)
        self._step = compile_step(spec, base.params, config)
        self._evaluator = Evaluator(spec, base.params)
        self._evaluated: tuple[int, HeldOut] | None = None
        self._compile_seconds, self._predicted_mib = 0.0, 0.0
        self._rates: list[float] = []
        identity = {**config.identity(), "data_sha256": data.sha256}
        self._store = CheckpointStore(config.output.folder / "checkpoints", identity)
        adapters = init_adapters(self.plan, random.PRNGKey(config.train.seed))
        self._first_norm = float(optim.global_norm(adapters))
        self._off = tree.map(jnp.zeros_like, adapters)
        self._initial = initial_state(config, adapters)

    def start(self) -> tuple[TrainState, int]:
        """The state to go on from and the steps done: the newest checkpoint's, or the first."""
        found = self._store.load()
        if found is None:
            return self._initial, 0
        last = self._config.train.steps
        what = f"resuming after step {found.step} of {last}"
        if found.step >= last:
            what = (
                f"all {last} steps are done: showing what came of them; --overwrite begins anew, "
                "another output.folder keeps this run"
            )
        self._console.print(what, markup=False, highlight=False)
        return unpack_state(self._initial, found.arrays), found.step

    def compile(self) -> None:
        """Compiles the step and tells how long that took and how much memory it will need."""
        batch = self._data.train.batch(range(self._config.train.micro_batch))
        adapters, began = self._initial.adapters, time.perf_counter()
        with self._console.status("compiling the training step"):
            lowered = self._step.accumulate.compile(
                adapters, self._step.zero(adapters, self._initial.loss_scale), batch, _place(0, 0)
            )
        self._compile_seconds = time.perf_counter() - began
        # Its arguments are adapters and gradients; the optimizer's state exists beside them.
        state = sum(leaf.nbytes for leaf in tree.leaves(self._initial.optimizer))
        self._predicted_mib = (lowered.memory().peak + state) / MIB
        show_step(self._console, self._compile_seconds, lowered, state)

    def loop(self, state: TrainState, step: int, last: int) -> tuple[TrainState, int]:
        """Steps until ``last`` or an interrupt; leaves a checkpoint in either case."""
        folder, section = self._config.output.folder, self._config.train
        resume_step = step if step else None
        saved = step
        with (
            StepLog(folder / "steps.csv", STEP_COLUMNS, resume_step=resume_step) as steps,
            StepLog(folder / "held_out.csv", self._columns(), resume_step=resume_step) as held_out,
            Interrupt() as interrupt,
            Display(self._console, section.steps, step) as display,
        ):
            if not step:
                held_out.append(self._evaluate(state, 0))
            bad = 0
            while step < min(last, section.steps) and not interrupt.requested:
                state, row = self._one_step(state, step)
                step += 1
                steps.append(row)
                display.show(step, row["loss"], row["tokens_per_second"])
                bad = bad + 1 if row["skipped"] else 0
                if bad == NON_FINITE_LIMIT:
                    raise DataError(_diverged(step, self._config))
                if _due(step, section.eval_every) or step == section.steps:
                    held_out.append(self._evaluate(state, step))
                if _due(step, section.checkpoint_every):
                    saved = self._save(state, step)
            if saved != step:
                self._save(state, step)
        return state, step

    def finish(self, state: TrainState, step: int) -> RunResult:
        """Writes the adapter and compares the model without and with it."""
        folder, output = self._config.output.folder, self._config.output
        peft = self.plan.peft_config(self._base.name)
        save_adapter(folder / "adapter", peft, to_peft(state.adapters))
        with self._console.status("evaluating without the adapter"):
            before = self._held_out(self._off)
        after = self._of_step(state, step)
        show_comparison(self._console, before, after)
        replies = self._replies(state)
        if replies is not None:
            show_replies(self._console, replies)
        norm = float(optim.global_norm(state.adapters))
        warnings = tuple(warnings_of(self._first_norm, norm, before, after))
        for warning in warnings:
            self._console.print(f"warning: {warning}", style="yellow", markup=False)
        if output.plot:
            plot_losses(folder / "steps.csv", folder / "held_out.csv", folder / "loss.png")
        costs = None
        if self._rates:
            middle = float(np.median(self._rates))
            costs = Costs(self._compile_seconds, middle, self._predicted_mib, peak_memory_mib())
            show_costs(self._console, costs)
        result = RunResult(step, False, before, after, replies, warnings, costs)
        target = folder / "result.json"
        if costs is not None or not target.exists():  # the process that trained knows the costs
            write_atomic(target, (json.dumps(asdict(result), indent=2) + "\n").encode())
        self._console.print(f"adapter, logs and plot are in {folder}", markup=False)
        return result

    def _one_step(self, state: TrainState, step: int) -> tuple[TrainState, dict[str, float]]:
        section, windows = self._config.train, self._data.train
        per_step = section.micro_batch * section.accumulation
        began = time.perf_counter()
        rows = training_rows(len(windows), per_step, section.seed, step)
        totals = self._step.zero(state.adapters, state.loss_scale)
        for i, batch in enumerate(micro_batches(windows, rows, section.micro_batch)):
            totals, _ = self._step.accumulate(state.adapters, totals, batch, _place(step, i))
        state, metrics = self._step.update(state, totals)
        values = {name: float(value) for name, value in metrics._asdict().items()}
        seconds, tokens = time.perf_counter() - began, per_step * self._config.data.context
        self._rates.append(tokens / seconds)
        return state, {
            "step": step + 1,
            **values,
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "peak_memory_mib": peak_memory_mib(),
        }

    def _evaluate(self, state: TrainState, step: int) -> dict[str, float]:
        result = self._of_step(state, step)
        losses = {f"loss_{name}": loss for name, loss in result.by_category.items()}
        return {
            "step": step, "loss": result.loss, "perplexity": result.perplexity,
            "targets": result.targets,
            **{name: losses.get(name, float("nan")) for name in self._columns()[4:]},
        }  # fmt: skip

    def _of_step(self, state: TrainState, step: int) -> HeldOut:
        """Held-out loss after ``step``, computed once."""
        if self._evaluated is None or self._evaluated[0] != step:
            self._evaluated = (step, self._held_out(state.adapters))
        return self._evaluated[1]

    def _columns(self) -> tuple[str, ...]:
        names = sorted(set(self._data.held_out.categories))
        return ("step", "loss", "perplexity", "targets", *(f"loss_{name}" for name in names))

    def _held_out(self, adapters: Mapping[str, Any]) -> HeldOut:
        data = self._data
        return self._evaluator.held_out(adapters, data.held_out, data.held_out_windows)

    def _replies(self, state: TrainState) -> Replies | None:
        output = self._config.output
        if not output.sample_tokens:
            return None
        question = output.sample_prompt or self._data.sample.messages[0]["content"]
        with self._console.status("writing the sample replies"):
            before, after = (
                self._evaluator.reply(self._base, adapters, question, output.sample_tokens)
                for adapters in (self._off, state.adapters)
            )
        return Replies(question, before, after)

    def _save(self, state: TrainState, step: int) -> int:
        self._store.save(step, pack_state(state), {})
        return step


def pack_state(state: TrainState) -> dict[str, NDArray[Any]]:
    """Arrays of a state by their place in it."""
    return {f"leaf-{i:05d}": np.asarray(leaf) for i, leaf in enumerate(tree.leaves(state))}


def unpack_state(like: TrainState, arrays: Mapping[str, NDArray[Any]]) -> TrainState:
    """A state with the structure of ``like`` and the values of `pack_state`.

    Raises:
        DataError: Number, shape or dtype of the arrays is not that of ``like``.
    """
    leaves, structure = tree.flatten(like)
    names = [f"leaf-{i:05d}" for i in range(len(leaves))]
    kinds = {n: (tuple(x.shape), np.dtype(x.dtype)) for n, x in zip(names, leaves, strict=True)}
    found = {name: (array.shape, array.dtype) for name, array in arrays.items()}
    if kinds != found:
        wrong = sorted(n for n in kinds.keys() | found.keys() if kinds.get(n) != found.get(n))
        raise DataError(
            f"resume: {wrong[0]} of the checkpoint is {found.get(wrong[0])}, expected "
            f"{kinds.get(wrong[0])}; the checkpoint is of another version, start the run anew"
        )
    return tree.unflatten(structure, [jnp.asarray(arrays[name]) for name in names])


def _check_folder(config: RunConfig, *, resume: bool, overwrite: bool) -> None:
    if resume and overwrite:
        raise ConfigError(
            "train: --resume and --overwrite were given, expected one of them; --resume goes on "
            "from a checkpoint, --overwrite deletes it"
        )
    store = CheckpointStore(config.output.folder / "checkpoints", {})
    steps = store.steps()
    if not steps or resume:
        return
    if not overwrite:
        raise ConfigError(
            f"train: {config.output.folder} holds a checkpoint of step {steps[-1]}, expected a "
            "folder without; pass --resume to go on from it, --overwrite to begin anew, or set "
            "another output.folder"
        )
    for step in steps:
        store.path(step).unlink()


def _place(step: int, micro_batch: int) -> Any:
    return jnp.asarray(np.array([step, micro_batch], np.int32))


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _diverged(step: int, config: RunConfig) -> str:
    return (
        f"train: the gradient was NaN or infinite in the {NON_FINITE_LIMIT} steps up to {step}, "
        f"with learning_rate={config.optimizer.learning_rate:g}; lower it, or raise the warm-up"
    )
