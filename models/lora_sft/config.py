"""The configuration of one fine-tuning run: one TOML file, validated, unknown keys refused.

Relative paths are taken from the current directory.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vkjit.errors import ConfigError
from vkjit_models.llama.lora import ALL_LINEAR, LoraSpec


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


@final
class ModelSection(_Section):
    """Which base model is tuned."""

    path: str = "smollm2"
    """A GGUF file, or "smollm2" for SmolLM2-135M-Instruct, fetched on first use."""


@final
class DataSection(_Section):
    """Conversations, from a source tree or from a JSONL file."""

    source: Path | None = None
    """A source tree to ask questions about; the Python standard library where neither is given."""
    jsonl: Path | None = None
    """Conversations, one JSON object a line; excludes `source`."""
    context: int = Field(default=512, ge=16)
    """Tokens in a window."""
    held_out: float = Field(default=0.1, gt=0.0, lt=1.0)
    """Share of the sources (files) that is never trained on."""
    held_out_windows: int = Field(default=8, ge=1)
    """Windows of held-out conversations that are evaluated, at most."""
    files: int | None = Field(default=None, ge=1)
    """Files of the source tree that are used, at most."""
    functions_per_file: int = Field(default=2, ge=0)
    """Functions of a file that are asked about, at most."""

    @model_validator(mode="after")
    def _one_origin(self) -> DataSection:
        if self.source is not None and self.jsonl is not None:
            raise ValueError("source and jsonl were given, expected one of them; remove the other")
        return self


@final
class LoraSection(_Section):
    """Rank, scale and placement of the adapters."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0.0)
    rslora: bool = False
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    targets: tuple[str, ...] = (ALL_LINEAR,)

    @property
    def spec(self) -> LoraSpec:
        """The section as the model library takes it."""
        return LoraSpec(self.rank, self.alpha, self.targets, self.rslora, self.dropout)


@final
class OptimizerSection(_Section):
    """The update rule. ``b1`` and ``b2`` are the rule's defaults where they are not given."""

    name: Literal["adamw", "lion", "sgd"] = "adamw"
    learning_rate: float = Field(default=2e-4, gt=0.0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    b1: float | None = Field(default=None, ge=0.0, lt=1.0)
    """Decay of the mean gradient; of "sgd", its momentum."""
    b2: float | None = Field(default=None, ge=0.0, lt=1.0)
    eps: float = Field(default=1e-8, gt=0.0)
    clip_norm: float = Field(default=1.0, ge=0.0)
    """Largest norm of a step's gradient; 0: no clipping."""


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

    steps: int = Field(ge=1)
    micro_batch: int = Field(default=1, ge=1)
    """Windows that are computed at once."""
    accumulation: int = Field(default=1, ge=1)
    """Micro-batches whose gradients are summed before a step."""
    recompute: bool = False
    """Whether gradients keep each block's input alone and compute the rest again: less memory."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    eval_every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0: only before the first step and after the last."""
    checkpoint_every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0: only after the last step or when interrupted."""


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
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    train: TrainSection
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
        del everything["output"]
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
        data = tomllib.loads(path.read_text(encoding="utf-8"))
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
    if not key:
        return str(problem["msg"]).removeprefix("Value error, ")
    return f"{key} = {problem['input']!r}: {problem['msg']}"


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
