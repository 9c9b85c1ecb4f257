"""Blockwise cross-entropy of a linear head on every device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import vkjit as vj
import vkjit.numpy as jnp
from tests.nn.head import Head, cross_entropy, make_head
from vkjit import nn, quant
from vkjit.errors import ArgumentError, DTypeError, MissingRuleError, ShapeError
from vkjit.nn._chunks import slice_size

DTYPES: dict[str, Any] = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
# Of the largest entry. 16-bit: exponentials and cotangents are rounded before they are multiplied.
BOUNDS = {"f32": 4e-6, "bf16": 2e-2, "f16": 3e-3}


def pulled(loss: Callable[..., Any], head: Head) -> tuple[Any, ...]:
    """Losses, and what ``head.cotangent`` is pulled back to in hidden states and head."""

    @vj.jit
    def run(hidden: Any, weight: Any, targets: Any, cotangent: Any) -> Any:
        out, pull = vj.vjp(lambda h, w: loss(h, w, targets), hidden, weight)
        return out, *pull(cotangent)

    return run(head.hidden, head.weight, head.targets, head.cotangent)


def check(got: Any, want: np.ndarray, bound: float) -> None:
    np.testing.assert_allclose(
        np.asarray(got, np.float64), want, rtol=0, atol=bound * max(np.abs(want).max(), 1e-3)
    )


@pytest.mark.parametrize(
    ("rows", "block", "smoothing", "z_loss"),
    [(7, (None, None), 0.0, 0.0), (6, (3, 4), 0.2, 0.05), (5, (3, 5), 0.0, 0.0)],
    ids=["one block", "equal blocks", "remainders"],
)
def test_values_and_gradients(
    device: str, rows: int, block: Any, smoothing: float, z_loss: float
) -> None:
    head = make_head(rows, rows, 12, 5)
    loss = partial(
        nn.linear_cross_entropy,
        label_smoothing=smoothing,
        z_loss=z_loss,
        row_chunk=block[0],
        vocab_chunk=block[1],
    )
    with vj.default_device(device):
        found = pulled(loss, head)
    for got, want in zip(found, cross_entropy(head, smoothing, z_loss), strict=True):
        check(got, want, BOUNDS["f32"])


@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_sums_of_16_bit_operands_are_f32(name: str, device: str) -> None:
    head = make_head(8, 6, 24, 5, DTYPES[name])
    with vj.default_device(device):
        found = pulled(partial(nn.linear_cross_entropy, row_chunk=3, vocab_chunk=8), head)
    assert [x.dtype for x in found] == [np.float32, head.hidden.dtype, head.hidden.dtype]
    losses, *grads = cross_entropy(head, 0.0, 0.0)
    check(found[0], losses, BOUNDS["f32"])
    for got, want in zip(found[1:], grads, strict=True):
        check(got, want, BOUNDS[name])


@given(data=st.data())
@settings(max_examples=12)
def test_any_block_gives_the_whole(data: st.DataObject) -> None:
    rows, vocabulary, width = (data.draw(st.integers(1, most)) for most in (9, 40, 9))
    name = data.draw(st.sampled_from(sorted(DTYPES)))
    head = make_head(data.draw(st.integers(0, 99)), rows, vocabulary, width, DTYPES[name])
    smoothing, z_loss = data.draw(st.sampled_from([(0.0, 0.0), (0.1, 0.0), (0.0, 0.01)]))
    loss = partial(
        nn.linear_cross_entropy,
        label_smoothing=smoothing,
        z_loss=z_loss,
        row_chunk=data.draw(st.integers(1, rows)),
        vocab_chunk=data.draw(st.integers(max(1, vocabulary // 5), vocabulary)),
    )
    losses, *grads = pulled(loss, head)
    assert losses.dtype == np.float32
    assert [g.dtype for g in grads] == [head.hidden.dtype] * 2
    wanted = cross_entropy(head, smoothing, z_loss)
    check(losses, wanted[0], BOUNDS["f32"])  # products of 16-bit numbers are exact in f32
    for got, want in zip(grads, wanted[1:], strict=True):
        check(got, want, BOUNDS[name])


@pytest.mark.parametrize("vocabulary", [12, 13])
def test_a_quantized_head_is_frozen(vocabulary: int, device: str) -> None:
    """Losses and slopes are those of its numbers; its blocks have no cotangent."""
    head = make_head(1, 6, vocabulary, 64)
    loss = partial(nn.linear_cross_entropy, label_smoothing=0.1, row_chunk=3, vocab_chunk=4)
    divergence = partial(nn.linear_target_masked_kl, row_chunk=3, vocab_chunk=4)

    @vj.jit
    def run(hidden: Any, weight: Any) -> Any:
        def total(hidden: Any) -> Any:
            losses = loss(hidden, weight, head.targets)
            return (losses + divergence(hidden, head.base, weight, head.targets)).sum()

        return vj.value_and_grad(total)(hidden)

    with vj.default_device(device):
        packed = quant.quantize(jnp.asarray(head.weight), "q8_0")
        found = run(head.hidden, packed)
        wanted = run(head.hidden, packed.dequantize())
    for got, want in zip(found, wanted, strict=True):
        check(got, np.asarray(want), BOUNDS["f32"])


GOLDEN = {"plain": 0.0, "smoothed": 0.1, "extreme": 0.0, "wide": 0.05}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str, shared: Path, device: str) -> None:
    """Given logits are hidden states of a head that is the identity."""
    if name == "wide" and device != "cpu":
        pytest.skip("the others show as much; the interpreter takes a minute for this one")
    data = load_file(shared / "golden" / "ops" / f"cross_entropy_{name}.safetensors")
    logits, labels = data["in.logits"], data["in.labels"]
    vocabulary = logits.shape[1]
    loss = partial(
        nn.linear_cross_entropy, label_smoothing=GOLDEN[name], vocab_chunk=-(-vocabulary // 3)
    )
    whole = Head(logits, logits, np.eye(vocabulary, dtype=np.float32), labels, np.ones(len(labels)))
    with vj.default_device(device):
        losses, slope, _ = pulled(loss, whole._replace(cotangent=np.ones(len(labels), np.float32)))
    check(losses, data["out.per_token"], 2e-6)
    check(slope, data["out.grad_sum"], 2e-6)


def test_no_targets_give_zeros_everywhere(device: str) -> None:
    head = make_head(0, 4, 9, 3)._replace(targets=np.array([-1, -100, -1, -7], np.int32))
    with vj.default_device(device):
        for out in pulled(partial(nn.linear_cross_entropy, z_loss=1.0, vocab_chunk=3), head):
            assert not np.asarray(out).any()


def test_a_row_without_a_target_may_hold_anything() -> None:
    head = make_head(1, 3, 8, 4)._replace(targets=np.array([2, -1, 5], np.int32))
    head.hidden[1] = np.nan
    losses, hidden, _ = pulled(nn.linear_cross_entropy, head)
    assert np.asarray(losses)[1] == 0.0
    assert not np.asarray(hidden)[1].any()
    assert np.isfinite(losses).all()


def test_a_target_without_a_class_gives_nan(device: str) -> None:
    """Neither the loss nor a gradient of such a row could be taken for one that means something."""
    head = make_head(1, 4, 8, 4)._replace(targets=np.array([2, 8, -1, 2**30], np.int32))
    with vj.default_device(device):
        losses, hidden, weight = pulled(nn.linear_cross_entropy, head)
    outside = np.array([False, True, False, True])
    np.testing.assert_array_equal(np.isnan(losses), outside)
    np.testing.assert_array_equal(np.isnan(hidden).all(-1), outside)
    assert np.isnan(weight).all()


@pytest.mark.parametrize("dtype", ["i1", "u1", "u4"])
def test_targets_of_narrow_integers_count_every_class(dtype: str) -> None:
    head = make_head(1, 3, 300, 4)._replace(targets=np.array([2, 44, 127], np.int32))
    want, _, _ = cross_entropy(head, 0.0, 0.0)
    check(nn.linear_cross_entropy(head.hidden, head.weight, head.targets.astype(dtype)), want, 4e-6)


def test_large_logits_lose_nothing() -> None:
    """The loss is the difference of logits, not of a logsumexp and a logit of 1e5."""
    hidden = np.array([[1e5, 1e5 - 0.5, 1e5 - 30.0]], np.float32)
    eye, target = np.eye(3, dtype=np.float32), np.array([1], np.int32)
    found = nn.linear_cross_entropy(hidden, eye, target, vocab_chunk=2)
    np.testing.assert_allclose(found, [np.log1p(np.exp(-0.5)) + 0.5], rtol=2e-7)


def test_second_derivatives() -> None:
    head = make_head(3, 4, 7, 3)

    def slopes(loss: Callable[..., Any]) -> Any:
        def total(hidden: Any) -> Any:
            return (loss(hidden, head.weight, head.targets) * head.cotangent).sum()

        def probe(hidden: Any) -> Any:
            return (vj.grad(total)(hidden) ** 2).sum()

        return np.asarray(vj.jit(vj.grad(probe))(head.hidden))

    def plain(hidden: Any, weight: Any, targets: Any) -> Any:
        logp = nn.log_softmax(hidden @ jnp.asarray(weight).T)
        picked = jnp.take_along_axis(logp, jnp.maximum(targets, 0)[:, None], axis=1)[:, 0]
        return jnp.where(jnp.asarray(targets) >= 0, -picked, 0.0)

    blocks = partial(nn.linear_cross_entropy, vocab_chunk=3, row_chunk=2)
    check(slopes(blocks), slopes(plain), 1e-5)


def test_a_batch_of_heads_and_states() -> None:
    heads = [make_head(seed, 4, 9, 3) for seed in range(2)]
    stacked = [np.stack(x) for x in zip(*heads, strict=True)]

    def pull(hidden: Any, weight: Any, targets: Any, cotangent: Any) -> Any:
        loss = partial(nn.linear_cross_entropy, vocab_chunk=3)
        out, pull = vj.vjp(lambda h, w: loss(h, w, targets), hidden, weight)
        return out, *pull(cotangent)

    found = vj.jit(vj.vmap(pull))(stacked[0], *stacked[2:])
    wanted = zip(*(cross_entropy(head, 0.0, 0.0) for head in heads), strict=True)
    for got, want in zip(found, wanted, strict=True):
        check(got, np.stack(want), BOUNDS["f32"])


def test_forward_mode_is_refused() -> None:
    head = make_head(0, 4, 9, 3)
    with pytest.raises(MissingRuleError, match="use reverse mode"):
        vj.jvp(
            lambda h: nn.linear_cross_entropy(h, head.weight, head.targets),
            (head.hidden,),
            (head.hidden,),
        )


@pytest.mark.parametrize(
    ("change", "options", "error", "message"),
    [
        ({"targets": np.zeros(3, np.int32)}, {}, ShapeError, r"targets \(3,\) were given"),
        ({"weight": np.zeros((9, 4), np.float32)}, {}, ShapeError, r"expected \[N,d\], \[V,d\]"),
        ({"targets": np.zeros(4, np.float32)}, {}, DTypeError, "targets of float32"),
        ({}, {"label_smoothing": 1.5}, ArgumentError, "label_smoothing=1.5"),
        ({}, {"z_loss": -1.0}, ArgumentError, "z_loss=-1.0"),
        ({}, {"vocab_chunk": 0}, ArgumentError, "vocab_chunk=0, expected a positive"),
    ],
)
def test_mistakes_are_named(change: Any, options: Any, error: type, message: str) -> None:
    head = make_head(0, 4, 9, 3)._replace(**change)
    with pytest.raises(error, match=message):
        nn.linear_cross_entropy(head.hidden, head.weight, head.targets, **options)


def test_a_transpose_of_blocks_is_refused() -> None:
    head = make_head(0, 4, 32, 32)
    packed = quant.quantize(jnp.asarray(head.weight), "q8_0")
    with pytest.raises(ArgumentError, match="is a transpose of blocks"):
        nn.linear_cross_entropy(head.hidden, packed.T, head.targets)


def test_no_rows_give_no_losses() -> None:
    head = make_head(0, 4, 9, 3)
    for function in (nn.linear_cross_entropy, partial(nn.linear_target_masked_kl, head.base[:0])):
        found = vj.jit(function)(head.hidden[:0], head.weight, head.targets[:0])
        assert found.shape == (0,)


@pytest.mark.parametrize(
    ("total", "most", "want"),
    [(49152, 8192, 8192), (151936, 8192, 4748), (50257, 8192, 7232), (10, 10, 10), (7, 3, 3)],
)
def test_slices_are_equal_where_they_can_be(total: int, most: int, want: int) -> None:
    assert slice_size(total, most) == want
