"""DoRA against PEFT's formula, written out in NumPy.

PEFT (``lora/dora.py``): with V = W + s B A, the layer is ``m / |V| * V x`` row by row; the norm is
detached, so that the gradient takes it for a constant.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from vkjit import quant, random
from vkjit.errors import ArgumentError
from vkjit_models.llama.lora import (
    LoraSpec,
    decays,
    init_adapters,
    plan_adapters,
    switched_off,
    to_peft,
    with_row_squares,
)
from vkjit_models.llama.model import Inputs, LoraPair, adapted_norms, forward

from .tiny import HYPER, INPUTS, random_adapters, random_params

PLAN = plan_adapters(
    HYPER,
    LoraSpec(
        2, 3.0, dora=True, rslora=True, rank_pattern={"q_proj": 3}, alpha_pattern={"mlp.*": 1}
    ),
)
SPEC = PLAN.llama_spec(HYPER)
PARAMS = random_params()
ADAPTERS = random_adapters(PLAN)
SCALES = {row.module: row.scale for row in PLAN.adapted}


def numbers(name: str) -> tuple[np.ndarray, ...]:
    """W, A, B, m of a layer in float64."""
    pair = ADAPTERS[name]
    of = (PARAMS[f"{name}.weight"], pair.a, pair.b, pair.magnitude)
    return tuple(np.asarray(x, np.float64) for x in of)


def merged(name: str) -> np.ndarray:
    w, a, b, m = numbers(name)
    v = w + SCALES[name] * b @ a
    return (m / np.linalg.norm(v, axis=1))[:, None] * v


def merged_params() -> dict[str, Any]:
    layers = {f"{name}.weight": jnp.asarray(np.float32(merged(name))) for name in ADAPTERS}
    return {**PARAMS, **layers}


def test_the_forward_pass_is_that_of_the_merged_weights() -> None:
    want = forward(SPEC, merged_params(), {}, INPUTS)
    got = vj.jit(partial(forward, SPEC))(PARAMS, ADAPTERS, INPUTS)
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-5 * np.abs(np.asarray(want)).max())
    again = forward(SPEC, with_row_squares(PARAMS, ADAPTERS), ADAPTERS, INPUTS)
    np.testing.assert_allclose(again, got, rtol=0, atol=1e-5)


def test_norms_of_rows_are_those_of_the_sum() -> None:
    for name, pair in ADAPTERS.items():
        w, a, b, _ = numbers(name)
        want = np.linalg.norm(w + SCALES[name] * b @ a, axis=1)
        got = adapted_norms(PARAMS[f"{name}.weight"], pair, SCALES[name])
        np.testing.assert_allclose(got, want, rtol=2e-6)


def test_gradients_take_the_norm_for_a_constant() -> None:
    def loss(params: Any, adapters: Any) -> Any:
        return jnp.sum(jnp.sin(forward(SPEC, params, adapters, INPUTS)))

    of_merged = vj.grad(partial(loss, adapters={}))(merged_params())
    got = vj.jit(vj.grad(loss, argnums=1))(PARAMS, ADAPTERS)
    for name, pair in got.items():
        w, a, b, m = numbers(name)
        s, d = SCALES[name], np.asarray(of_merged[f"{name}.weight"], np.float64)
        v = w + s * b @ a
        norm = np.linalg.norm(v, axis=1)
        dv = (m / norm)[:, None] * d
        want = LoraPair(s * b.T @ dv, s * dv @ a.T, (d * v).sum(1) / norm)
        for found, expected in zip(pair, want, strict=True):
            bound = 3e-4 * np.abs(expected).max()
            np.testing.assert_allclose(found, expected, rtol=0, atol=bound, err_msg=name)


def test_the_start_and_the_switched_off_adapter_leave_the_model_as_it_is() -> None:
    want = np.asarray(forward(SPEC, PARAMS, {}, INPUTS))
    for adapters in (init_adapters(PLAN, random.key(0), PARAMS), switched_off(ADAPTERS, PARAMS)):
        got = forward(SPEC, PARAMS, adapters, INPUTS)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    with pytest.raises(ArgumentError, match="init_adapters: no params were given, DoRA starts"):
        init_adapters(PLAN, random.key(0))


def test_dropout_drops_the_inputs_of_what_the_magnitudes_change() -> None:
    """As PEFT: ``W x + (m/|V| - 1) W drop(x) + m/|V| s B A drop(x)``."""
    name = "model.layers.1.mlp.down_proj"
    plan = plan_adapters(HYPER, LoraSpec(2, 2.0, (name,), dora=True, dropout=0.5))
    adapters, spec = random_adapters(plan), plan.llama_spec(HYPER)
    runs = [np.asarray(forward(spec, PARAMS, adapters, INPUTS, random.key(i))) for i in range(60)]
    plain = np.asarray(forward(spec, PARAMS, adapters, INPUTS))
    base = np.asarray(forward(spec, PARAMS, {}, INPUTS))
    assert not np.array_equal(runs[0], runs[1])
    # The final norm bends the mean a little; a shift of the whole size would be a wrong formula.
    assert np.abs(np.mean(runs, axis=0) - plain).max() < 0.5 * np.abs(plain - base).max()


def test_what_is_stored_counted_and_decayed() -> None:
    tensors = to_peft(ADAPTERS)
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector"
    assert tensors[name].shape == (12,)
    assert PLAN.parameters == sum(np.asarray(x).size for x in tensors.values())
    assert decays(ADAPTERS)["model.layers.0.mlp.up_proj"] == LoraPair(True, True, False)
    config = PLAN.peft_config("base")
    assert (config.use_dora, config.rank_pattern) == (True, {"q_proj": 3})


def test_states_of_half_precision_stay_so() -> None:
    tokens = Inputs(INPUTS.tokens)
    got = forward(replace(SPEC, dtype="bfloat16"), PARAMS, ADAPTERS, tokens)
    want = forward(SPEC, PARAMS, ADAPTERS, tokens)
    np.testing.assert_allclose(got, want, rtol=0, atol=0.05 * np.abs(np.asarray(want)).max())


@pytest.fixture
def compiled(device: str) -> Generator[str]:
    """A device that compiles, the default one meanwhile."""
    if device == "reference" or "+" in device:
        pytest.skip("minutes in the interpreter and under validation")
    with vj.default_device(device):
        yield device


@pytest.mark.usefixtures("compiled")
def test_norms_read_a_packed_weight_in_place() -> None:
    """No float copy: beside its arguments the program holds less than a tenth of the weight."""
    rng = np.random.default_rng(2)
    weight = quant.quantize(jnp.asarray(rng.standard_normal((256, 512), np.float32)), "q4_0")
    pair = LoraPair(
        *(jnp.asarray(rng.standard_normal(s, np.float32)) for s in ((3, 512), (256, 3)))
    )
    run = vj.jit(partial(adapted_norms, scale=0.5))
    numbers = np.asarray(weight.dequantize(), np.float64)
    want = np.linalg.norm(numbers + 0.5 * np.asarray(pair.b, np.float64) @ pair.a, axis=1)
    np.testing.assert_allclose(run(weight, pair), want, rtol=2e-6)
    memory = run.compile(weight, pair).memory()
    assert memory.peak - memory.inputs < 0.1 * 4 * 256 * 512


@pytest.mark.usefixtures("compiled")
def test_gradients_on_a_packed_base_are_those_on_its_numbers() -> None:
    hyper = replace(HYPER, hidden_size=32, intermediate_size=64, layers=1, head_dim=16)
    plan = plan_adapters(hyper, LoraSpec(2, 3.0, dora=True))
    inputs = Inputs(jnp.asarray(np.asarray(INPUTS.tokens)))  # on this test's device
    spec, adapters = plan.llama_spec(hyper), random_adapters(plan)
    params = random_params(3, hyper)
    packed = params | {
        f"{row.module}.weight": quant.quantize(params[f"{row.module}.weight"], "q8_0")
        for row in plan.adapted
    }
    plain = {
        name: value.dequantize() if isinstance(value, quant.QuantizedArray) else value
        for name, value in packed.items()
    }

    def loss(params: Any, adapters: Any) -> Any:
        return jnp.sum(jnp.sin(forward(spec, params, adapters, inputs)))

    got = vj.jit(vj.grad(partial(loss, with_row_squares(packed, adapters))))(adapters)
    want = vj.jit(vj.grad(partial(loss, plain)))(adapters)
    for name, pair in got.items():
        for found, expected in zip(pair, want[name], strict=True):
            bound = 1e-5 * np.abs(np.asarray(expected)).max()
            np.testing.assert_allclose(found, expected, rtol=0, atol=bound, err_msg=name)
