"""The configuration of one fine-tuning run: one TOML file, validated, unknown keys refused.

Relative paths are taken from the current directory.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, final

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from vkjit.errors import ConfigError
from vkjit_models.common.chat import ControlPolicy
from vkjit_models.common.conversation import SplitBy
from vkjit_models.common.fit import TooLong
from vkjit_models.common.gguf import WeightFormat
from vkjit_models.common.jsonl import Layout
from vkjit_models.common.source_chat import CATEGORIES as SOURCE_CATEGORIES
from vkjit_models.common.source_chat import Category as SourceCategory
from vkjit_models.llama.lora import ALL_LINEAR, LoraSpec
from vkjit_models.llama.loss import Kl, LossSpec


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


@final
class ModelSection(_Section):
    """Which base model is tuned."""

    path: str = "smollm2"
    """A GGUF file, or "smollm2" for SmolLM2-135M-Instruct, fetched on first use."""
    weights: WeightFormat = "packed"
    """How weights are held: "packed" in the file's blocks, else all matrices in one float type."""
    activations: Literal["float32", "bfloat16"] = "float32"
    """Type of the states between layers and of the factors of products."""


@final
class DataSection(_Section):
    """Records, from a source tree or from files of JSON lines."""

    source: Path | None = None
    """A source tree to ask questions about; the Python standard library where neither is given."""
    jsonl: tuple[Path, ...] | None = None
    """A file of JSON lines, or a list of them; excludes `source`."""
    weights: tuple[float, ...] | None = None
    """How often the training records of each file are used in an epoch: 2 is twice, 0.5 a half."""
    format: Layout = "auto"
    """Layout of the lines: "chat", "sharegpt", "completion", "text"; "auto": told line by line."""
    ignore_keys: tuple[str, ...] = ()
    """Keys of lines and messages that are not read; any other unknown key is an error."""
    control_tokens: ControlPolicy = "escape"
    """What control tokens inside the records are: "escape": ordinary text, "parse": themselves."""
    context: int = Field(default=512, ge=16)
    """Tokens in a window."""
    too_long: TooLong = "truncate"
    """What becomes of a record longer than the context: "truncate", "skip" or "error"."""
    validation: tuple[Path, ...] | None = None
    """Files of JSON lines that are held out; the other records are then all trained on."""
    held_out: float = Field(default=0.1, gt=0.0, lt=1.0)
    """Share that is never trained on, where `validation` is not given."""
    split: SplitBy = "source"
    """What is held out whole: "source", "record"; "category": a record, of each category alike."""
    held_out_windows: int = Field(default=8, ge=1)
    """Windows of held-out conversations that are evaluated, at most."""
    files: int | None = Field(default=None, ge=1)
    """Files of the source tree that are used, at most."""
    functions_per_file: int = Field(default=2, ge=0)
    """Functions of a file that are asked about, at most."""
    categories: tuple[SourceCategory, ...] = SOURCE_CATEGORIES
    """Kinds of question that are asked about the source tree."""

    @field_validator("jsonl", "validation", mode="before")
    @classmethod
    def _one_or_more_files(cls, value: object) -> object:
        if isinstance(value, str | Path):
            return (value,)
        if value is not None and not isinstance(value, list | tuple):
            raise ValueError("expected a path or a list of paths")
        return value

    @model_validator(mode="after")
    def _one_origin(self) -> DataSection:
        if self.source is not None and self.jsonl is not None:
            raise ValueError(
                "data.source and data.jsonl were given, expected one of them; remove the other"
            )
        for name in ("jsonl", "validation", "categories"):
            if getattr(self, name) == ():
                raise ValueError(f"data.{name} is an empty list, expected at least one entry")
        files = len(self.jsonl or ())
        if self.weights is not None and (
            len(self.weights) != files or not all(0.0 < one < math.inf for one in self.weights)
        ):
            raise ValueError(
                f"data.weights = {list(self.weights)} was given with {files} files in data.jsonl, "
                f"expected one positive number for each file"
            )
        return self


@final
class LoraSection(_Section):
    """Rank, scale and placement of the adapters."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0.0)
    rslora: bool = False
    """Scale by alpha/sqrt(rank) in place of alpha/rank."""
    dora: bool = False
    """Train the norms of the adapted rows beside A and B."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Layers that get adapters: names or their ends, globs, "re:" and a regular expression."""
    exclude: tuple[str, ...] = ()
    """Layers that get none although a target chooses them, written as targets are."""
    layers: str | None = None
    """Blocks that get adapters, such as "0-7,28-"; all where not given."""
    attention: bool = True
    """Whether attention's layers get adapters; gradients pass through them in any case."""
    mlp: bool = True
    """Likewise the MLP's."""
    rank_pattern: dict[str, int] = {}
    """Ranks of single layers, by regular expressions for the ends of their names (PEFT's)."""
    alpha_pattern: dict[str, float] = {}
    """Likewise alphas."""
    start: Path | None = None
    """Adapter whose values the run starts from: a folder in PEFT's layout or a GGUF file."""
    frozen: tuple[str, ...] = ()
    """Layers of `start` that act and are not trained, written as targets are."""

    @model_validator(mode="after")
    def _frozen_have_values(self) -> LoraSection:
        if self.frozen and self.start is None:
            raise ValueError(
                "lora.frozen was given without lora.start, expected both: an adapter that starts "
                "at zero and is not trained does nothing; give lora.start or remove lora.frozen"
            )
        return self

    @property
    def spec(self) -> LoraSpec:
        """The section as the model library takes it."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        del values["start"]
        return LoraSpec(**values)


@final
class LossSection(_Section):
    """The terms of the loss besides cross-entropy."""

    label_smoothing: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of each label that is spread over the vocabulary."""
    z_loss: float = Field(default=0.0, ge=0.0)
    """Weight of the squared logsumexp of the logits."""
    kl: Kl = "none"
    """Divergence from the base model: KL(adapted||base) as "kl", without the target as "tmkl";
    KL(base||adapted) as "kl_reverse" and "tmkl_reverse"."""
    kl_weight: float = Field(default=0.0, ge=0.0)
    """Weight of the divergence, averaged over targets."""
    pullback_weight: float = Field(default=0.0, ge=0.0)
    """Weight of half the squared distance from the initial adapters."""
    vocab_chunk: int | None = Field(default=None, ge=1)
    """Vocabulary entries of a block of logits: fewer take less memory. Chosen where not given."""

    @model_validator(mode="after")
    def _divergence_is_weighted(self) -> LossSection:
        if (self.kl == "none") != (self.kl_weight == 0.0):
            raise ValueError(
                f"loss.kl={self.kl!r} was given with loss.kl_weight={self.kl_weight:g}, expected a "
                'divergence with a weight above 0, or "none" without; set both, or leave out both'
            )
        return self

    @property
    def spec(self) -> LossSpec:
        """The section as the model library takes it."""
        return LossSpec(**{name: getattr(self, name) for name in type(self).model_fields})


@final
class OptimizerSection(_Section):
    """The update rule. ``b1`` and ``b2`` are the rule's defaults where they are not given."""

    name: Literal["adamw", "lion", "sgd"] = "adamw"
    learning_rate: float = Field(default=2e-4, gt=0.0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    decay_toward: Literal["zero", "init"] = "zero"
    """Where weight decay pulls the adapters: to zero or to their initial values."""
    b1: float | None = Field(default=None, ge=0.0, lt=1.0)
    """Decay of the mean gradient; of "sgd", its momentum."""
    b2: float | None = Field(default=None, ge=0.0, lt=1.0)
    eps: float = Field(default=1e-8, gt=0.0)
    clip_norm: float = Field(default=1.0, ge=0.0)
    """Largest norm of a step's gradient; 0: no clipping."""
    loss_scale: float = Field(default=1.0, ge=1.0, le=2.0**24)
    """Factor on the loss that gradients are computed with: keeps small ones in 16-bit formats."""
    loss_scale_growth: int = Field(default=0, ge=0)
    """Finite steps after which the loss scale doubles, others halve it; 0: it is constant."""


@final
class ScheduleSection(_Section):
    """The learning rate over the steps; with a warm-up the first step has the rate 0."""

    name: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0)
    end_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """Rate after the last step, as a share of the peak."""


@final
class TrainSection(_Section):
    """How long and in what portions."""

    steps: int = Field(ge=1, lt=2**31)
    micro_batch: int = Field(default=1, ge=1)
    """Windows that are computed at once."""
    accumulation: int = Field(default=1, ge=1)
    """Micro-batches whose gradients are summed before a step."""
    recompute: bool = False
    """Whether gradients keep each block's input alone and compute the rest again: less memory."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    eval_every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0: only before the first step and after the last."""
    checkpoint_every: int = Field(default=100, ge=0)
    """Steps between checkpoints, which is what a killed run repeats; 0: none but the last one."""


@final
class LogSection(_Section):
    """What is watched beside the loss, and when the run is told that something is wrong."""

    probe_records: int = Field(default=16, ge=0)
    """Training records that are evaluated again and again, chosen by content; 0: none."""
    probe_every: int = Field(default=0, ge=0)
    """Steps between evaluations of the probe; 0: together with the held-out windows."""
    moved: float = Field(default=1e-4, gt=0.0)
    """Change of the adapters, as a share of their norm, above which they count as moved."""
    still_steps: int = Field(default=20, ge=0)
    """Steps after which an adapter tensor that has not changed ends the run; 0: none does."""
    few_targets: int = Field(default=500, ge=0)
    """Labelled tokens of a held-out category below which its loss is called uncertain."""
    report: bool = True
    """Whether `report.html` is written."""


@final
class StopSection(_Section):
    """When a run ends because it diverges."""

    factor: float = Field(default=3.0, ge=0.0)
    """A step's loss above this many times the best smoothed loss counts; 0: none does."""
    patience: int = Field(default=5, ge=1)
    """Such steps in a row that end the run."""
    smoothing: int = Field(default=10, ge=1)
    """Steps that the smoothed loss is a mean of."""
    floor: float = Field(default=0.5, ge=0.0)
    """Losses below this never count: a run that has learned everything may be restless."""
    non_finite: int = Field(default=5, ge=1)
    """Steps in a row with a NaN or infinite gradient that end the run."""


@final
class MemorySection(_Section):
    """What the arrays of a run may take."""

    limit_mib: int | None = Field(default=None, ge=1)
    """MiB at most; a run that needs more is refused. What the device has where not given."""


@final
class OutputSection(_Section):
    """Where results go and what the sample asks."""

    folder: Path
    sample_prompt: str | None = None
    """Question of the sample reply; None: the shortest of the held-out ones."""
    sample_tokens: int = Field(default=48, ge=0)
    """Longest sample reply; 0: no sample."""
    plot: bool = True


@final
class RunConfig(_Section):
    """A whole run."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    lora: LoraSection = LoraSection()
    loss: LossSection = LossSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    train: TrainSection
    log: LogSection = LogSection()
    stop: StopSection = StopSection()
    memory: MemorySection = MemorySection()
    output: OutputSection

    @model_validator(mode="after")
    def _warmup_ends(self) -> RunConfig:
        if self.schedule.warmup_steps > self.train.steps:
            raise ValueError(
                f"schedule.warmup_steps={self.schedule.warmup_steps} was given with "
                f"train.steps={self.train.steps}, expected no more; lower it"
            )
        return self

    def resolved(self) -> dict[str, Any]:
        """Every key with its value, as JSON values."""
        return self.model_dump(mode="json")

    def identity(self) -> dict[str, Any]:
        """What decides the numbers of the run: a resumed run must agree in all of it."""
        everything = self.resolved()
        for section in ("output", "log", "stop", "memory"):
            del everything[section]
        for key in ("eval_every", "checkpoint_every", "recompute"):
            del everything["train"][key]
        return everything


def load_config(path: Path, *, steps: int | None = None) -> RunConfig:
    """Reads and validates a TOML file.

    Args:
        path: The file.
        steps: Replaces ``train.steps``, as the command line's ``--steps`` does; a longer warm-up
            shrinks to it.

    Raises:
        ConfigError: The file cannot be read, is no TOML, has an unknown key (the message names the
            nearest valid one) or a value outside its domain.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(
            f"config: cannot read {path}: {error.strerror}; check the path"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: {path} is not valid TOML: {error}; correct it") from error
    if steps is not None:
        _replace_steps(data, steps)
    return parse_config(data, str(path))


def _replace_steps(data: dict[str, Any], steps: int) -> None:
    """Sets ``train.steps``; what is no table or no number is left for the validation to name."""
    if isinstance(data.setdefault("train", {}), dict):
        data["train"]["steps"] = steps
    schedule = data.get("schedule")
    if isinstance(schedule, dict) and isinstance(schedule.get("warmup_steps"), int):
        schedule["warmup_steps"] = min(schedule["warmup_steps"], steps)


def parse_config(data: Mapping[str, Any], name: str = "config") -> RunConfig:
    """Validates the content of a TOML file; ``name`` stands in the messages.

    Raises:
        ConfigError: As `load_config`.
    """
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        problems = "; ".join(_explain(dict(one)) for one in error.errors())
        raise ConfigError(f"config: {name}: {problems}") from error


def _explain(problem: Mapping[str, Any]) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key!r}; {_nearest(key)}"
    if problem["type"] == "missing":
        return f"key {key!r} is missing; give it a value"
    said = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "value_error" and len(problem["loc"]) < 2:
        return said  # of a section's validator, which names the keys
    wanted = said.removeprefix("Input should be ").removeprefix("expected ")
    return f"{key} = {problem['input']!r} was given, expected {wanted}; correct it"


def _nearest(key: str) -> str:
    """Advice that names the valid key most like ``key``, in its own section first."""
    section, _, last = key.rpartition(".")
    known = list(_keys(RunConfig))
    siblings = [one for one in known if one.rpartition(".")[0] == section]
    for candidates in (siblings, known):
        by_last = {one.rpartition(".")[2]: one for one in reversed(candidates)}
        near = difflib.get_close_matches(last, by_last, n=1, cutoff=0.5)
        if near:
            return f"did you mean {by_last[near[0]]!r}?"
    return f"valid here: {', '.join(siblings) or ', '.join(RunConfig.model_fields)}"


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of all keys, sections included."""
    for name, field in section.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(field.annotation, f"{prefix}{name}.")
