"""A fine-tuning run from its config to what is left in its folder.

A run's folder holds ``config.json`` (every key, resolved), ``run.json`` (receipts, adapters,
memory, how it ended), the logs of `logs`, ``checkpoints/``, ``adapter/`` (PEFT's layout),
``loss.png``, ``report.html`` and ``result.json``. A run resumed from a checkpoint gives the same
numbers, bit for bit, as one that was never stopped.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, final

import numpy as np
from rich.console import Console

import vkjit.numpy as jnp
from vkjit import Lowered, eval_shape, random
from vkjit.errors import ConfigError, OutOfMemoryError
from vkjit_models.common.adapter_io import save_adapter
from vkjit_models.common.atomic import remove_partial, write_atomic
from vkjit_models.common.checkpoint import CheckpointStore
from vkjit_models.common.lock import sole_user
from vkjit_models.common.steplog import json_text
from vkjit_models.llama.lora import (
    LoraPlan,
    plan_adapters,
    switched_off,
    to_peft,
    with_row_squares,
)
from vkjit_models.llama.loss import pullback_relative

from . import admission, alarms
from .admission import Need, Room
from .alarms import AlarmError
from .config import RunConfig
from .data import TrainingData
from .data_report import context_warnings, show_data, show_warnings, tokenising
from .divergence import Stop
from .evaluate import HeldOut
from .logs import RunLogs
from .loop import Loop, Parts, pack_state, unpack_state
from .movement import AdapterWatch
from .page import write_report
from .plot import plot_losses
from .progress import Display, Interrupt
from .receipt import device_peak, process_peak, receipt
from .record import RunRecord
from .report import (
    Costs,
    Replies,
    show_comparison,
    show_costs,
    show_plan,
    show_replies,
)
from .shared import Shared
from .start import start_adapters
from .step import TrainState, initial_state, zero_totals

__all__ = ["RunResult", "pack_state", "plan", "train", "unpack_state"]


@final
@dataclass(frozen=True)
class RunResult:
    """What came of a run.

    Args:
        step: Optimizer steps done.
        interrupted: The run was stopped from outside before its last step.
        stop: Why the run ended itself before its last step, or None.
        before: Held-out loss without the adapter; None for a run that did not end.
        after: Held-out loss with it.
        replies: A sample question and both replies.
        warnings: Signs that the run did not learn.
        costs: Time and memory of the run, predicted and measured.
    """

    step: int
    interrupted: bool
    stop: Stop | None = None
    before: HeldOut | None = None
    after: HeldOut | None = None
    replies: Replies | None = None
    warnings: tuple[str, ...] = ()
    costs: Costs | None = None


def train(  # noqa: PLR0913  the run, then ways to run it
    config: RunConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    stop_after: int | None = None,
    console: Console | None = None,
    shared: Shared | None = None,
) -> RunResult:
    """Fine-tunes as ``config`` says.

    Args:
        config: The run.
        resume: Go on from the newest checkpoint in the folder, if there is one.
        overwrite: Begin anew although the folder holds checkpoints; they are deleted.
        stop_after: Stop after this many steps as if interrupted, leaving a checkpoint.
        console: Where the progress goes; standard output where None.
        shared: What earlier runs of this process loaded and compiled.

    Raises:
        ConfigError: The folder holds checkpoints and neither flag is given, or they belong to
            another config; or both flags are given; or another process trains in the folder.
        DataError: Model, data or a checkpoint cannot be read or written.
        AlarmError: The adapters did not move, or the evaluation does not see them. Checkpoint,
            adapter, logs and report are written before.
    """
    console, shared = console or Console(), shared or Shared()
    last = config.train.steps if stop_after is None else min(stop_after, config.train.steps)
    with sole_user(config.output.folder):
        remove_partial(config.output.folder)  # of a process that was killed while it wrote
        _check_folder(config, resume=resume, overwrite=overwrite)
        run = _prepared(config, shared, console)
        result = run.whole(last, overwrite=overwrite)
    if result.stop is not None and result.stop.kind in ("did not move", "evaluation blind"):
        raise AlarmError(f"train: {result.stop.message}")
    return result


def _prepared(config: RunConfig, shared: Shared, console: Console) -> _Run:
    """Reads model and data, and shows what will be trained on what."""
    with console.status("reading the model"):
        base = shared.base(config.model)
    console.print(base.receipt.text(), markup=False, highlight=False)
    with console.status("reading the records") as status:
        data = shared.data(config.data, base, config.train.seed, tokenising(status))
    run = _Run(config, shared, data, console)
    show_plan(console, run.plan, sum(int(np.prod(p.shape)) for p in base.params.values()))
    show_data(console, data, config.data)
    show_warnings(console, context_warnings(config.data, base.hyper.context_length))
    return run


def plan(config: RunConfig, console: Console | None = None) -> None:
    """Prints the memory that a run will need and what the device has; trains nothing.

    Raises:
        ConfigError: The run does not fit; with the smallest change that does.
        DataError: Model or data cannot be read.
    """
    console, shared = console or Console(), Shared()
    with console.status("reading the model"):
        base = shared.base(config.model)
    console.print(base.receipt.text(), markup=False, highlight=False)
    with console.status("reading the records") as status:
        data = shared.data(config.data, base, config.train.seed, tokenising(status))
    _Run(config, shared, data, console).plan_only()


@final
class _Run:
    """The objects of one run and the order in which they are used."""

    def __init__(
        self, config: RunConfig, shared: Shared, data: TrainingData, console: Console
    ) -> None:
        base = shared.base(config.model)
        self.plan: LoraPlan = plan_adapters(base.hyper, config.lora.spec)
        self._config, self._base, self._data, self._console = config, base, data, console
        spec = replace(
            self.plan.llama_spec(base.hyper, recompute=config.train.recompute), dtype=base.dtype
        )
        key = random.PRNGKey(config.train.seed)
        adapters = start_adapters(self.plan, base.hyper, base.params, key, config.lora.start)
        params = with_row_squares(base.params, adapters)
        self._spec, self._params = spec, params
        self._step = shared.step(spec, params, config)
        chosen = config.log.probe_records
        self._probe = data.train.probe(chosen) if chosen else None
        capacity = max(side.capacity for side in (data.held_out, self._probe) if side)
        self._evaluator = shared.evaluator(spec, params, capacity)
        identity = {**config.identity(), "data_sha256": data.sha256}
        self._store = CheckpointStore(config.output.folder / "checkpoints", identity)
        self._watch = AdapterWatch(adapters, spec.lora_frozen)
        self._off = switched_off(adapters, base.params)
        self._initial = initial_state(spec, config, adapters)
        self._device = self._initial.step.device
        self._costs: Costs | None = None
        self.facts = receipt(self._device, data.sha256)
        self.record = RunRecord(config.output.folder, config, self.plan, self.facts)

    def whole(self, last: int, *, overwrite: bool) -> RunResult:
        """The run until ``last``; nothing of an older one is deleted before this one is admitted.

        Args:
            last: Steps after which it stops.
            overwrite: Begin anew although there are checkpoints; they are deleted.
        """
        state, step, stored = (self._initial, 0, {}) if overwrite else self.start()
        trains = step < self._config.train.steps
        memory = self.compile() if trains else None
        if overwrite:
            self._store.clear()
        self._begin(step, memory)
        names = self._data.train.category_names
        with RunLogs(self._config.output.folder, names, step or None) as logs:
            loop = self.loop(logs, state, step, stored)
            logs.event(step, "resume" if step else "start", **self.facts)
            if trains:
                with _without_collections():
                    self.go(loop, last)
            result = self.finish(loop)
            logs.event(loop.step, "end", status=self.record.status)
        self.report()
        return result

    def start(self) -> tuple[TrainState, int, Mapping[str, Any]]:
        """State, steps done and what the logs remember: of the newest checkpoint, or the first."""
        found = self._store.load()
        if found is None:
            return self._initial, 0, {}
        if found.state.get("model", self._base.fingerprint) != self._base.fingerprint:
            raise ConfigError(
                f"resume: {self._base.name} is not the file that {found.path} was trained on, "
                "expected the same weights; restore the file or use another output.folder"
            )
        last = self._config.train.steps
        what = f"resuming after step {found.step} of {last}"
        if found.step >= last:
            what = (
                f"all {last} steps are done: showing what came of them; --overwrite begins anew, "
                "another output.folder keeps this run"
            )
        self._console.print(what, markup=False, highlight=False)
        return unpack_state(self._initial, found.arrays), found.step, found.state

    def compile(self) -> tuple[Need, Room]:
        """Compiles the step, tells how long that took, and admits the run.

        Raises:
            ConfigError: The device has too little memory for it.
        """
        adapters, began = self._initial.adapters, time.perf_counter()
        train, context = self._config.train, self._config.data.context
        batch = admission.batch_like(self._data.train, train.micro_batch, context)
        with self._console.status("compiling the training step"):
            totals = self._step.zero(adapters, self._initial.loss_scale)
            place = jnp.asarray(np.array([0, 0], np.int32))
            given = (adapters, totals, batch, place, self._initial.initial)
            try:
                step = self._step.accumulate.compile(*given)
            except OutOfMemoryError:  # a program that no such device can hold is not loaded
                self.admit(self._step.accumulate.lower(*given))
                raise
            update = self._step.update.compile(self._initial, totals, self._step.rates)
        seconds = time.perf_counter() - began
        launches = f"{len(step.plan.steps):,} kernel launches"
        self._console.print(
            f"training step: {launches}, ready after {seconds:.1f} s", highlight=False
        )
        found, there = self.admit(step, update.memory().temporaries)
        self._costs = Costs(seconds, 0.0, found.peak, 0, 0)
        return found, there

    def _begin(self, step: int, memory: tuple[Need, Room] | None) -> None:
        """Writes what is known before the first step: config, receipt and planned memory."""
        self.record.begin(step)
        if memory is None or self._costs is None:
            return
        admission.save(self._config.output.folder, *memory)
        needed, loaded = asdict(memory[0]), asdict(self._base.receipt)
        self.record.compiled(self._costs.compile_seconds, needed, loaded)

    def plan_only(self) -> None:
        """Prints what the run needs, from plans alone."""
        adapters = self._initial.adapters
        totals = eval_shape(zero_totals, adapters, self._initial.loss_scale)
        with self._console.status("planning the update"):
            update = self._step.update.lower(self._initial, totals, self._step.rates).memory()
        self.admit(None, update.temporaries)

    def admit(self, step: Lowered | None = None, update: int = 0) -> tuple[Need, Room]:
        """Prints what the run needs and what there is.

        Args:
            step: The program of a micro-batch; planned here where None.
            update: Temporaries of the update.

        Raises:
            ConfigError: It does not fit; with the smallest change that does.
        """
        plan = admission.Plan(self._spec, self._params, self._initial, self._data.train)
        with self._console.status("planning memory"):
            evaluation = self._evaluator.temporaries(
                self._initial.adapters, self._data.held_out, compiles=step is not None
            )
            found = admission.need(
                self._base.receipt.device_bytes,
                plan,
                admission.nbytes(self._off),
                step or plan.step(self._config),
                (update, evaluation),
            )
        there = admission.room(self._config.memory, self._device)
        admission.show(self._console, found, there)
        with self._console.status("looking for a change that fits"):
            admission.require(self._config, found, there, plan)
        return found, there

    def loop(self, logs: RunLogs, state: TrainState, step: int, stored: Mapping[str, Any]) -> Loop:
        """The loop that goes on from ``state``."""
        parts = Parts(
            self._config, self._data, self._step, self._evaluator, self._off, self._watch,
            self._store, self._console, self._device, self._base.fingerprint,
            self._probe, self._costs.predicted_bytes if self._costs else 0,
        )  # fmt: skip
        if step:
            self._watch.resume(step, state.adapters)
        return Loop(parts, logs, state, step, stored)

    def go(self, loop: Loop, last: int) -> None:
        """Steps until ``last``, a stop or an interrupt."""
        loop.alarm(*self._pulls())
        total = self._config.train.steps
        with Interrupt() as interrupt, Display(self._console, total, loop.step) as display:
            loop.run(last, display, lambda: interrupt.requested)
        if self._costs is not None and loop.rates:
            middle = float(np.median(loop.rates))
            peaks = device_peak(self._device), process_peak()
            self._costs = Costs(
                self._costs.compile_seconds, middle, self._costs.predicted_bytes, *peaks
            )

    def finish(self, loop: Loop) -> RunResult:
        """Writes the adapter and, of a run that came to its end, what it brought."""
        folder, ended = self._config.output.folder, loop.step >= self._config.train.steps
        peft = self.plan.peft_config(self._base.name)
        save_adapter(folder / "adapter", peft, to_peft(loop.state.adapters))
        warnings = tuple(one.message for one in loop.raised)
        if ended and loop.stop is None:
            result = self._compare(loop, warnings)
        else:
            result = RunResult(loop.step, loop.stop is None, loop.stop, warnings=warnings)
            self._tell_stop(loop)
        if self._costs is not None and loop.rates:
            show_costs(self._console, self._costs)
        self.record.ended(result.step, _status(result), self._costs)
        target = folder / "result.json"
        if self._costs is not None or not target.exists():  # who trained knows the costs
            write_atomic(target, (json_text(asdict(result), indent=2) + "\n").encode())
        return result

    def report(self) -> None:
        """Writes plot and page from the files of the run."""
        folder = self._config.output.folder
        if self._config.output.plot:
            plot_losses(folder / "steps.csv", folder / "held_out.csv", folder / "loss.png")
        if self._config.log.report:
            write_report(folder)
        self._console.print(f"adapter, logs and report are in {folder}", markup=False)

    def _compare(self, loop: Loop, warnings: tuple[str, ...]) -> RunResult:
        with self._console.status("evaluating without the adapter"):
            before = loop.off()
        after, least = loop.on(), self._config.log.moved
        show_comparison(self._console, before, after)
        replies = self._replies(loop.state)
        if replies is not None:
            show_replies(self._console, replies)
        loop.alarm(*alarms.outcome(loop.movement(), before, after, least))
        told = (*warnings, *(one.message for one in loop.raised if one.message not in warnings))
        return RunResult(loop.step, False, loop.stop, before, after, replies, told, self._costs)

    def _tell_stop(self, loop: Loop) -> None:
        what = f"stopped after step {loop.step}; `vkjit train ... --resume` goes on from there"
        if loop.stop is not None:
            what = f"stopped after step {loop.step}: {loop.stop.kind}"
        self._console.print(what, markup=False)

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

    def _pulls(self) -> list[alarms.Alarm]:
        """Tells how strong pulls on the weights are; alarms where they cannot matter."""
        rate, decay = self._config.optimizer.learning_rate, self._config.optimizer.weight_decay
        pullback = self._config.loss.pullback_weight
        found = alarms.weak_decay(rate, decay, self._config.train.steps)
        move, warning = pullback_relative(rate, pullback)
        for name, weight, share in (
            ("optimizer.weight_decay", decay, rate * decay),
            ("loss.pullback_weight", pullback, move),
        ):
            if weight:
                text = f"{name}: learning rate x weight = {share:.3g} of the way per step"
                self._console.print(text, markup=False, highlight=False)
        if warning is not None:
            found.append(alarms.Alarm("pull too weak", "warning", warning))
        return found


def _status(result: RunResult) -> str:
    if result.stop is not None:
        return result.stop.kind
    return "interrupted" if result.interrupted else "finished"


@contextmanager
def _without_collections() -> Generator[None]:
    """Keeps what exists out of Python's garbage collections, whose pauses of 0.1 s steps show."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _check_folder(config: RunConfig, *, resume: bool, overwrite: bool) -> None:
    if resume and overwrite:
        raise ConfigError(
            "train: --resume and --overwrite were given, expected one of them; --resume goes on "
            "from a checkpoint, --overwrite deletes it"
        )
    steps = CheckpointStore(config.output.folder / "checkpoints", {}).steps()
    if steps and not (resume or overwrite):
        raise ConfigError(
            f"train: {config.output.folder} holds a checkpoint of step {steps[-1]}, expected a "
            "folder without; pass --resume to go on from it, --overwrite to begin anew, or set "
            "another output.folder"
        )
