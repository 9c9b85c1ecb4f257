"""The steps of a run: each computed, logged, watched; evaluations, checkpoints, alarms."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

import vkjit.numpy as jnp
from vkjit import tree
from vkjit.errors import DataError
from vkjit_models.common.checkpoint import CheckpointStore
from vkjit_models.llama.model import Adapters

from . import alarms
from .alarms import Alarm
from .config import RunConfig
from .data import TrainingData, WindowSet, training_rows
from .divergence import DivergenceGuard, Stop
from .evaluate import Evaluator, HeldOut
from .logs import RunLogs
from .movement import AdapterWatch, Movement
from .probe import Probe
from .progress import Display, StepView
from .receipt import device_peak, process_peak
from .step import StepFunctions, TrainState
from .tally import FirstLosses, StepTally, mean_change


@final
@dataclass(frozen=True)
class Parts:
    """What a loop works with.

    Args:
        config: The run.
        data: Both sides of the split.
        step: The compiled step.
        evaluator: The compiled evaluation.
        off: Adapters under which the model is the base model.
        watch: Knows the initial adapters.
        store: Where checkpoints go.
        console: Where alarms are printed.
        device: Name of the device that computes.
        model: Fingerprint of the base model's file, which checkpoints record.
        probe: The records that are followed, in windows of their own; None: none.
        predicted_bytes: Arrays that a step holds, known before it ran.
    """

    config: RunConfig
    data: TrainingData
    step: StepFunctions
    evaluator: Evaluator
    off: Adapters
    watch: AdapterWatch
    store: CheckpointStore
    console: Console
    device: str
    model: str
    probe: WindowSet | None
    predicted_bytes: int


@final
class Loop:
    """A run between two checkpoints.

    Attributes:
        state: Adapters, optimizer and counts after `step` steps.
        step: Steps done.
        stop: Why the run should not go on, or None.
        raised: Alarms of this process.
        rates: Tokens per second of this process's steps.
    """

    def __init__(
        self,
        parts: Parts,
        logs: RunLogs,
        state: TrainState,
        step: int,
        stored: Mapping[str, Any],
    ) -> None:
        """Goes on from a state.

        Args:
            parts: What to work with.
            logs: Where rows go.
            state: Adapters, optimizer and counts.
            step: Steps done.
            stored: What the checkpoint of that step holds beside arrays; empty at the start.
        """
        self.state, self.step = state, step
        self.stop: Stop | None = None
        self.raised: list[Alarm] = []
        self.rates: list[float] = []
        self._parts, self._logs = parts, logs
        self._off: HeldOut | None = None
        self._on: tuple[int, HeldOut] | None = None
        self._saved = step if step else -1
        self._guard = DivergenceGuard(parts.config.stop, stored.get("divergence"))
        self._first = FirstLosses(stored.get("windows"))
        self._known: set[str] = set(stored.get("alarms", ()))
        self._probe = Probe(parts.probe, stored.get("probe")) if parts.probe else None
        self._held_out_before: float | None = stored.get("held_out")
        self._moving = bool(stored.get("moving", False))

    def run(self, last: int, display: Display, interrupted: Callable[[], bool]) -> None:
        """Steps until ``last``, a reason to stop, or an interrupt; leaves a checkpoint."""
        if not self.step:
            self._observe()
            self._guard.expect(self.off().loss)
            self.alarm(*alarms.few_targets(self.off(), self._parts.config.log.few_targets))
        while self.step < last and self.stop is None and not interrupted():
            row, tally = self._advance()
            self._show(display, row, tally)
            self._observe()
        if self._saved != self.step:
            self._save()

    def on(self) -> HeldOut:
        """Held-out loss with the adapters as they are, computed once a step."""
        if self._on is None or self._on[0] != self.step:
            self._on = (self.step, self._held_out(self.state.adapters))
        return self._on[1]

    def off(self) -> HeldOut:
        """Held-out loss of the base model, by the same program; its weights never change."""
        if self._off is None:
            self._off = self._held_out(self._parts.off)
        return self._off

    def movement(self) -> Movement:
        """How far the adapters have come; logged at the first time of a step."""
        found = self._parts.watch.measure(self.step, self.state.adapters)
        if self._logs.adapters.last < self.step:
            self._logs.adapters.append(*found.rows())
        return found

    def alarm(self, *found: Alarm) -> None:
        """Tells of alarms, each kind once a run; an error ends the run."""
        for one in found:
            if one.kind in self._known:
                continue
            self._known.add(one.kind)
            self.raised.append(one)
            self._logs.event(self.step, "alarm", **vars(one))
            style = "red" if one.is_error else "yellow"
            text = f"{one.level}: {one.message}"
            self._parts.console.print(text, style=style, markup=False, highlight=False)
            if one.is_error and one.kind in ("did not move", "evaluation blind", "not finite"):
                self.stop = Stop(one.kind, self.step, one.message)

    def _advance(self) -> tuple[dict[str, Any], StepTally]:
        """One optimizer step and its rows in the logs."""
        section, windows = self._parts.config.train, self._parts.data.train
        step, functions = self.step, self._parts.step
        per_step = section.micro_batch * section.accumulation
        began = time.perf_counter()
        rows = training_rows(len(windows), per_step, section.seed, step)
        totals = functions.zero(self.state.adapters, self.state.loss_scale)
        batches: list[tuple[list[int], Any, Any]] = []
        for i in range(section.accumulation):
            part = rows[i * section.micro_batch : (i + 1) * section.micro_batch].tolist()
            batch = windows.batch(part)
            place = jnp.asarray(np.array([step, i], np.int32))
            totals, losses = functions.accumulate(
                self.state.adapters, totals, batch, place, self.state.initial
            )
            batches.append((part, batch, losses))
        self.state, metrics = functions.update(self.state, totals, functions.rates)
        values = {name: float(value) for name, value in metrics._asdict().items()}
        seconds = time.perf_counter() - began
        self.step += 1
        tally = StepTally(windows.category_names)
        for part, batch, losses in batches:
            tally.add(part, batch, losses)
        epoch = step * per_step // len(windows)
        changes = self._first.changes(self.step, epoch, tally.windows)
        row = self._row(epoch, values, tally, seconds) | {"loss_change": mean_change(changes)}
        self._logs.windows.append(*changes)
        self._logs.steps.append(row)
        self.rates.append(row["tokens_per_second"])
        self._judge(row)
        return row, tally

    def _row(
        self, epoch: int, values: Mapping[str, float], tally: StepTally, seconds: float
    ) -> dict[str, Any]:
        return {
            "step": self.step,
            "epoch": epoch,
            **values,
            "tokens": tally.tokens,
            "seconds": seconds,
            "tokens_per_second": tally.tokens / seconds,
            "targets_per_second": tally.targets / seconds,
            "predicted_bytes": self._parts.predicted_bytes,
            "device_bytes": device_peak(self._parts.device),
            "process_bytes": process_peak(),
            **tally.columns(),
        }

    def _judge(self, row: Mapping[str, Any]) -> None:
        """Gives the run up where it diverges."""
        stop = self._guard.see(self.step, row["loss"], skipped=bool(row["skipped"]))
        if stop is not None and stop.kind in ("diverged", "not finite"):
            self.alarm(Alarm(stop.kind, "error", stop.message))
            self.stop = stop

    def _observe(self) -> None:
        """Whatever is due after this many steps: probe, evaluation, checks, checkpoint."""
        train, log = self._parts.config.train, self._parts.config.log
        ends = self.step in (0, train.steps)
        evaluates = ends or _due(self.step, train.eval_every)
        probes = ends or (_due(self.step, log.probe_every) if log.probe_every else evaluates)
        if probes:
            self._evaluate_probe()
        if evaluates:
            self._evaluate()
        if log.still_steps and self.step >= log.still_steps and not self._moving:
            still = alarms.still_tensors(self.movement(), log.still_steps)
            self._moving = not still
            self.alarm(*still)
        if _due(self.step, train.checkpoint_every):
            self._save()

    def _evaluate_probe(self) -> None:
        if self._probe is None:
            return
        found, log = self._probe.evaluate(self.step, *self._measured()), self._parts.config.log
        self._logs.probe.append(*found.rows)
        self.alarm(*alarms.still_tensors(self.movement(), log.still_steps))
        moved = self._parts.watch.moved_since("probe", self.state.adapters)
        if self._probe.last is not None:
            before = self._probe.last
            self.alarm(*alarms.flat_loss("probe", moved, before, found.loss, log.moved))
        self._probe.last = found.loss

    def _evaluate(self) -> None:
        on, off, log = self.on(), self.off(), self._parts.config.log
        movement = self.movement()
        self._logs.held_out.append(self._logs.held_out_row(self.step, on, off))
        self.alarm(*alarms.still_tensors(movement, log.still_steps))
        self.alarm(*alarms.blind_evaluation(movement, off, on, log.moved))
        before, self._held_out_before = self._held_out_before, on.loss
        moved = self._parts.watch.moved_since("held-out", self.state.adapters)
        if before is not None:
            self.alarm(*alarms.flat_loss("held-out", moved, before, on.loss, log.moved))

    def _measured(self) -> tuple[Evaluator, Adapters]:
        return self._parts.evaluator, self.state.adapters

    def _held_out(self, adapters: Adapters) -> HeldOut:
        data = self._parts.data
        return self._parts.evaluator.held_out(adapters, data.held_out, data.held_out_windows)

    def _save(self) -> None:
        """Writes a checkpoint; every row of its steps is on the disk before it."""
        self.movement()
        path = self._parts.store.save(self.step, pack_state(self.state), self._stored())
        self._logs.event(self.step, "checkpoint", file=path.name)
        self._saved = self.step

    def _stored(self) -> dict[str, Any]:
        return {
            "model": self._parts.model,
            "divergence": self._guard.stored(),
            "windows": self._first.stored(),
            "probe": self._probe.stored() if self._probe else None,
            "held_out": self._held_out_before,
            "moving": self._moving,
            # Errors are told again: a run that was ended and goes on must end again.
            "alarms": sorted(self._known - {one.kind for one in self.raised if one.is_error}),
        }

    def _show(self, display: Display, row: Mapping[str, Any], tally: StepTally) -> None:
        names = self._parts.data.train.category_names
        notes = [name for name in ("clipped", "skipped") if row[name]]
        display.show(StepView(
            self.step, row["loss"], row["learning_rate"], row["gradient_norm"],
            row["tokens_per_second"], row["process_bytes"], notes,
            {name: row[f"loss_{name}"] for name in names}, self._held_out_before,
        ))  # fmt: skip


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


def median_and_spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, lower and upper decile."""
    low, middle, high = np.quantile(np.asarray(values), (0.1, 0.5, 0.9))
    return float(middle), float(low), float(high)


def _due(step: int, every: int) -> bool:
    return every > 0 and step > 0 and step % every == 0
