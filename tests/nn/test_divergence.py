"""Divergences from a base on every device: values, closed-form gradients, blocks of a head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import vkjit as vj
import vkjit.numpy as jnp
from tests.nn.head import Head, divergence, make_head
from vkjit import nn
from vkjit.errors import ArgumentError, DTypeError, ShapeError

DIRECTIONS = ("adapted||base", "base||adapted")
GOLDEN = ("small", "vocab2", "vocab3", "vocab128", "wide", "extreme", "identical")
BOUND = 2e-6  # of the largest entry: a few f32 roundings


def check(got: Any, want: np.ndarray, bound: float = BOUND) -> None:
    """Bounded relative to the largest entry, which counts for at least 0.1."""
    atol = bound * max(np.abs(want).max(), 0.1)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=atol)


def pulled(function: Callable[..., Any], *operands: Any, cotangent: np.ndarray) -> Any:
    """Values, and what the cotangent is pulled back to in all ``operands``."""

    @vj.jit
    def run(cotangent: Any, *operands: Any) -> Any:
        out, pull = vj.vjp(function, *operands)
        return out, pull(cotangent)

    return run(cotangent, *operands)


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_golden(name: str, direction: Any, shared: Path, device: str) -> None:
    """Of logits, and of the head that is the identity, in three blocks."""
    data = load_file(shared / "golden" / "tmkl" / f"{name}.safetensors")
    if name in ("wide", "vocab128") and device == "reference":
        pytest.skip("the others show as much; the interpreter takes minutes for these")
    adapted, base, labels = (data[f"in.{x}"] for x in ("adapted", "base", "labels"))
    which = {"adapted||base": "fwd", "base||adapted": "rev"}[direction]
    share = np.float32(1 / max((labels >= 0).sum(), 1))
    cotangent = np.full(len(labels), share, np.float32)
    eye = np.eye(adapted.shape[1], dtype=np.float32)

    def blocks(adapted: Any, base: Any) -> Any:
        return nn.linear_target_masked_kl(
            adapted, base, eye, labels, direction=direction, vocab_chunk=-(-len(eye) // 3)
        )

    def whole(adapted: Any, base: Any) -> Any:
        return nn.target_masked_kl(adapted, base, labels, direction=direction)

    rows = np.flatnonzero(labels >= 0)
    with vj.default_device(device):
        for function in (whole,) if name == "wide" else (whole, blocks):
            found, (slope, of_base) = pulled(function, adapted, base, cotangent=cotangent)
            check(found, data[f"out.{which}.rows"])
            check(slope, data[f"out.{which}.grad"])
            assert not np.asarray(slope)[rows, labels[rows]].any()
            assert not np.asarray(of_base).any()
            if name == "vocab2":
                assert not np.asarray(found).any()
                assert not np.asarray(slope).any()


def test_the_printed_formula_is_another_gradient(shared: Path) -> None:
    """``softmax(adapted) - q`` is the gradient of neither direction: the golden file has it."""
    data = load_file(shared / "golden" / "tmkl" / "vocab128.safetensors")
    printed = data["out.printed_formula.grad"]
    labels = data["in.labels"]
    share = np.full(len(labels), 1 / (labels >= 0).sum(), np.float32)
    for direction in DIRECTIONS:

        def divergence(adapted: Any, direction: Any = direction) -> Any:
            return nn.target_masked_kl(adapted, data["in.base"], labels, direction=direction)

        _, (slope,) = pulled(divergence, data["in.adapted"], cotangent=share)
        assert np.abs(np.asarray(slope) - printed).max() > 1e-4


@pytest.mark.parametrize("function", [nn.target_masked_kl, nn.kl_divergence])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gradients_are_those_of_finite_differences(function: Any, direction: Any) -> None:
    head = make_head(5, 4, 6, 3)
    rng = np.random.default_rng(5)
    logits, base = (rng.normal(size=(4, 6)).astype(np.float32) for _ in range(2))
    divergence = partial(function, direction=direction)
    vj.check_grads(lambda x: divergence(x, base, head.targets), (logits,), order=2)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_closed_form_is_what_differentiation_finds(direction: Any) -> None:
    rng = np.random.default_rng(6)
    logits, base = (rng.normal(size=(4, 6)).astype(np.float32) for _ in range(2))
    targets, cotangent = np.array([0, 5, 2, 2], np.int32), rng.normal(size=4).astype(np.float32)
    others = np.arange(6) != targets[:, None]

    def composed(logits: Any) -> Any:
        logp, logq = (nn.log_softmax(jnp.where(others, x, -1e30)) for x in (logits, base))
        first, second = (logp, logq) if direction == DIRECTIONS[0] else (logq, logp)
        return jnp.where(others, jnp.exp(first) * (first - second), 0.0).sum(-1)

    found, (slope,) = pulled(
        lambda x: nn.target_masked_kl(x, base, targets, direction=direction),
        logits,
        cotangent=cotangent,
    )
    wanted, (composed_slope,) = pulled(composed, logits, cotangent=cotangent)
    check(found, np.asarray(wanted))
    check(slope, np.asarray(composed_slope))


@given(data=st.data())
@settings(max_examples=10)
def test_any_block_gives_the_whole(data: st.DataObject) -> None:
    rows, vocabulary, width = (data.draw(st.integers(1, most)) for most in (7, 30, 7))
    head = make_head(data.draw(st.integers(0, 99)), rows, vocabulary, width)
    masked, direction = data.draw(st.booleans()), data.draw(st.sampled_from(DIRECTIONS))
    check_head(
        head,
        direction,
        data.draw(st.integers(1, rows)),
        data.draw(st.integers(max(1, vocabulary // 4), vocabulary)),
        masked=masked,
    )


@pytest.mark.parametrize(
    ("direction", "masked", "block"),
    [("adapted||base", True, (2, 3)), ("base||adapted", False, (4, 5))],
)
def test_blocks_of_a_head(device: str, direction: Any, masked: bool, block: Any) -> None:  # noqa: FBT001  a table
    with vj.default_device(device):
        check_head(make_head(2, 4, 12, 5), direction, *block, masked=masked)


def check_head(head: Head, direction: Any, rows: int, columns: int, *, masked: bool) -> None:
    function = nn.linear_target_masked_kl if masked else nn.linear_kl_divergence

    def blocks(hidden: Any, base: Any, weight: Any) -> Any:
        given = (hidden, base, weight, head.targets)
        return function(*given, direction=direction, row_chunk=rows, vocab_chunk=columns)

    found, (hidden, base, weight) = pulled(
        blocks, head.hidden, head.base, head.weight, cotangent=head.cotangent
    )
    wanted = divergence(head, direction, masked=masked)
    for got, want in zip((found, hidden, weight), wanted, strict=True):
        check(got, want, 1e-5)  # products of up to 7 terms around values of up to 40
    assert not np.asarray(base).any()


def test_one_class_leaves_nothing_to_differ() -> None:
    logits, target = np.array([[3.0], [1.0]], np.float32), np.array([0, -1], np.int32)
    found, (slope,) = pulled(
        lambda x: nn.target_masked_kl(x, logits + 1, target), logits, cotangent=np.ones(2, "f4")
    )
    assert not np.asarray(found).any()
    assert not np.asarray(slope).any()


def test_batches_of_rows() -> None:
    heads = [make_head(seed, 4, 9, 3) for seed in range(2)]
    stacked = [np.stack(x) for x in zip(*heads, strict=True)]
    function = partial(nn.linear_target_masked_kl, vocab_chunk=3)
    found = vj.jit(vj.vmap(function))(*stacked[:4])
    wanted = [divergence(head, "adapted||base", masked=True)[0] for head in heads]
    check(found, np.stack(wanted))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_classes_that_no_model_allows_do_not_differ(device: str, direction: Any) -> None:
    """A vocabulary padded with logits of -inf: values and gradients are those without it."""
    head = make_head(3, 4, 9, 9)
    logits, base = head.hidden @ head.weight.T, head.base @ head.weight.T
    wide = [np.pad(x, ((0, 0), (0, 3)), constant_values=-np.inf) for x in (logits, base)]
    with vj.default_device(device):
        for function in (nn.target_masked_kl, nn.kl_divergence):
            loss = partial(function, targets=head.targets, direction=direction)
            (plain, (slope, _)), (padded, (wide_slope, _)) = (
                pulled(loss, *operands, cotangent=head.cotangent)
                for operands in ((logits, base), wide)
            )
            check(padded, np.asarray(plain))
            check(wide_slope, np.pad(np.asarray(slope), ((0, 0), (0, 3))))


def test_a_target_without_a_class_gives_nan() -> None:
    head = make_head(3, 4, 9, 9)._replace(targets=np.array([2, 9, -1, 8], np.int32))
    logits, base = head.hidden @ head.weight.T, head.base @ head.weight.T
    linear = partial(
        nn.linear_target_masked_kl,
        base_hidden=head.base,
        weight=head.weight,
        targets=head.targets,
        vocab_chunk=4,
    )
    direct = partial(nn.target_masked_kl, base_logits=base, targets=head.targets)
    for loss, operand in ((linear, head.hidden), (direct, logits)):
        out, (slope,) = pulled(loss, operand, cotangent=head.cotangent)
        for found in (out, slope):
            rows = np.isnan(np.asarray(found)).reshape(4, -1)
            np.testing.assert_array_equal(rows.any(-1), [False, True, False, False])


def test_mistakes_are_named() -> None:
    head = make_head(0, 4, 9, 3)
    with pytest.raises(ArgumentError, match="direction='forward' was given, expected one of"):
        nn.target_masked_kl(head.hidden, head.hidden, head.targets, direction="forward")  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"base_logits \(9, 3\)"):
        nn.target_masked_kl(head.hidden, head.weight, head.targets)
    with pytest.raises(DTypeError, match="targets of float32"):
        nn.kl_divergence(head.hidden, head.hidden, head.cotangent)
    with pytest.raises(ShapeError, match=r"base_hidden float32\[9, 3\] was given with hidden"):
        nn.linear_kl_divergence(head.hidden, head.weight, head.weight, head.targets)
