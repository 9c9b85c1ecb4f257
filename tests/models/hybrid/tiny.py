"""The tiny hybrid of golden/hybrid: its files, its weights on each device, its bounds.

The reference files are computed in float64 from the stored float32 weights. What plain float32
costs there (transformers in float32) is 4.5e-5 in logits and 3e-5 of each tensor's maximum in
gradients; the bounds below are three times that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file

import vkjit as vj
import vkjit.numpy as jnp
from vkjit_models.common.adapter_io import load_adapter
from vkjit_models.hybrid.config import HybridHyper, from_hugging_face
from vkjit_models.hybrid.model import from_peft
from vkjit_models.llama.model import Batch, LoraPair

LOGITS = 3 * 4.5e-5
GRADIENT = 3 * 3e-5  # of the tensor's largest entry
LOSS = 2e-6


class Tiny(NamedTuple):
    """A model's weights and adapters on a device."""

    params: dict[str, Any]
    adapters: dict[str, LoraPair]


def hyper_of(folder: Path) -> HybridHyper:
    return from_hugging_face(json.loads((folder / "config.json").read_text()))


@cache
def tiny_on(folder: Path, device: str) -> Tiny:
    with vj.default_device(device):
        weights = load_file(folder / "weights.safetensors")
        params = {name: jnp.asarray(value) for name, value in weights.items()}
        return Tiny(params, from_peft(hyper_of(folder), load_adapter(folder)[1]))


def batch_of(folder: Path, name: str) -> Batch:
    data = load_file(folder / f"{name}.safetensors")
    ids, labels = (np.atleast_2d(data[k]) for k in ("input_ids", "labels"))
    places = (data.get(k) for k in ("position_ids", "document_ids"))
    positions, segments = (None if x is None else np.int32(np.atleast_2d(x)) for x in places)
    return Batch(np.int32(ids), np.int32(labels), positions, segments)


def assert_gradients(
    got: Mapping[str, Any], want: Mapping[str, np.ndarray], relative: float = GRADIENT
) -> None:
    assert got.keys() == want.keys()
    for name, reference in want.items():
        bound = relative * np.abs(reference).max()
        np.testing.assert_allclose(got[name], reference, rtol=0, atol=bound, err_msg=name)
