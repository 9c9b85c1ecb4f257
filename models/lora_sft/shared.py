"""What runs in one process share: loaded models, packed data, compiled programs.

A program is shared by runs for which everything that it was traced with is equal. The learning
rate and the weight decay are data of the update, so runs that differ in nothing else share all.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, final

from vkjit_models.llama.model import LlamaSpec, Params

from .base import BaseModel, load_base
from .config import DataSection, ModelSection, RunConfig
from .data import Progress, TrainingData, load_data
from .evaluate import Evaluator
from .step import StepFunctions, compile_step, rates_of


@final
class Shared:
    """Makes each thing once and hands it out again.

    One model and one data set are kept, the newest: a run that needs another one replaces it, and
    the programs of a model go with it. What runs add to its weights (`with_row_squares`) follows
    from them, so programs are told apart by its names.
    """

    def __init__(self) -> None:
        """Holds nothing yet."""
        self._base: tuple[str, BaseModel] | None = None
        self._data: tuple[str, TrainingData] | None = None
        self._steps: dict[str, StepFunctions] = {}
        self._evaluators: dict[str, Evaluator] = {}

    def base(self, section: ModelSection) -> BaseModel:
        """The model of ``section``."""
        key = section.model_dump_json()
        if self._base is None or self._base[0] != key:
            self._base = None  # the old weights go before the new ones come
            self._steps.clear()
            self._evaluators.clear()
            self._base = (key, load_base(section.path, section.weights, section.activations))
        return self._base[1]

    def data(
        self, section: DataSection, base: BaseModel, seed: int, progress: Progress | None = None
    ) -> TrainingData:
        """The packed data of ``section``; as in `load_data`."""
        key = json.dumps([base.name, seed, section.model_dump(mode="json")])
        if self._data is None or self._data[0] != key:
            self._data = (key, load_data(section, base.tokenizer, seed, progress))
        return self._data[1]

    def step(self, spec: LlamaSpec, params: Params, config: RunConfig) -> StepFunctions:
        """The step of ``config``, compiled before where a run of this process needed the same."""
        key = repr((spec, sorted(params), _traced(config)))
        if key not in self._steps:
            self._steps[key] = compile_step(spec, params, config)
        return replace(self._steps[key], rates=rates_of(config.optimizer))

    def evaluator(self, spec: LlamaSpec, params: Params, capacity: int) -> Evaluator:
        """The evaluation of a model with adapters of one scale and placement."""
        key = repr((spec, sorted(params), capacity))
        if key not in self._evaluators:
            self._evaluators[key] = Evaluator(spec, params, capacity)
        return self._evaluators[key]


def _traced(config: RunConfig) -> dict[str, Any]:
    """What the programs of a step are traced with, beside the model's description."""
    found: dict[str, Any] = {
        "loss": config.loss.model_dump(),
        "optimizer": config.optimizer.model_dump(
            exclude={"learning_rate", "weight_decay", "loss_scale"}
        ),
        "schedule": config.schedule.model_dump(),
        "steps": config.train.steps,
    }
    if config.lora.dropout:
        found["seed"] = config.train.seed
    return found
