"""Encoders of ggml's K types: 256 numbers as codes of sub-blocks whose scales are codes too.

They follow ``quantize_row_*_ref`` of ggml (``ggml-quants.c``, MIT): for each sub-block a search
over slightly different grids for the one with the least weighted error, then 6- or 8-bit codes of
the sub-blocks' scales. Sums are taken in ggml's order and in float32; where a compiler contracts a
product and a sum into one rounding, single codes can differ from its bytes by a step.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[Any]
"""float32 numbers."""
Codes: TypeAlias = NDArray[np.int32]

_TINY = np.float32(1e-15)  # GROUP_MAX_EPS: a sub-block below it is all zeros
_ONE = np.float32(1.0)


def encode_q4_k(rows: Floats, blocks: NDArray[Any]) -> None:
    """Writes ``rows`` (..., 256) into Q4_K ``blocks`` (...)."""
    codes = _affine(rows, blocks, _Search(15, -1.0, 0.1, 20))
    low, high = codes[..., 0, :], codes[..., 1, :]  # (..., 4, 32) each
    blocks["qs"] = (low | high << 4).reshape(*blocks.shape, 128)


def encode_q5_k(rows: Floats, blocks: NDArray[Any]) -> None:
    """Writes ``rows`` (..., 256) into Q5_K ``blocks`` (...)."""
    codes = _affine(rows, blocks, _Search(31, -0.5, 0.1, 15))
    low, high = codes[..., 0, :] & 15, codes[..., 1, :] & 15
    blocks["qs"] = (low | high << 4).reshape(*blocks.shape, 128)
    fifth = (codes >> 4).reshape(*blocks.shape, 8, 32)
    weights = (1 << np.arange(8, dtype=np.int32))[:, None]
    blocks["qh"] = np.sum(fifth * weights, axis=-2)


def encode_q6_k(rows: Floats, blocks: NDArray[Any]) -> None:
    """Writes ``rows`` (..., 256) into Q6_K ``blocks`` (...)."""
    groups = np.ascontiguousarray(rows.reshape(-1, 16).T)  # (16, groups)
    scales, codes = _symmetric(groups, 32)
    of_block = scales.reshape(-1, 16)
    extreme = np.take_along_axis(of_block, np.abs(of_block).argmax(axis=1)[:, None], axis=1)
    empty = np.abs(extreme[:, 0]) < _TINY
    inverse = np.float32(-128.0) / np.where(empty[:, None], _ONE, extreme)
    d = (_ONE / inverse).astype(np.float16)
    coded = np.minimum(np.rint(inverse * of_block), 127).astype(np.int8)
    step = (d.astype(np.float32) * coded.astype(np.float32)).reshape(-1)
    again = _rounded(groups / np.where(step == 0, _ONE, step), -32, 31) + 32
    codes = np.where(step == 0, codes, again).astype(np.int32)
    codes = np.where(np.repeat(empty, 16), 0, codes)
    blocks["d"] = np.where(empty, np.float16(0), d[:, 0]).reshape(blocks.shape)
    blocks["scales"] = np.where(empty[:, None], np.int8(0), coded).reshape(*blocks.shape, 16)
    quarters = codes.T.reshape(*blocks.shape, 2, 4, 32)  # halves of 128, quarters of 32
    first, second, third, fourth = (quarters[..., i, :] for i in range(4))
    low = np.stack([first & 15 | (third & 15) << 4, second & 15 | (fourth & 15) << 4], axis=-2)
    blocks["ql"] = low.reshape(*blocks.shape, 128)
    high = first >> 4 | second >> 4 << 2 | third >> 4 << 4 | fourth >> 4 << 6
    blocks["qh"] = high.reshape(*blocks.shape, 64)


@final
class _Search(NamedTuple):
    """The grids that are tried: ``(first + i * delta + top) / range`` for i from 0 to ``steps``."""

    top: int
    first: float
    delta: float
    steps: int


def _affine(rows: Floats, blocks: NDArray[Any], search: _Search) -> Codes:
    """Codes (..., 4, 2, 32) of ``d * scale * code - dmin * least``; writes d, dmin and scales."""
    groups = np.ascontiguousarray(rows.reshape(-1, 32).T)  # (32, groups)
    scales, least, codes = _best_grid(groups, search)
    of_block, least_of_block = scales.reshape(-1, 8), least.reshape(-1, 8)
    most, most_least = (np.maximum(x.max(axis=1), 0) for x in (of_block, least_of_block))
    coded, coded_least = (
        np.minimum(np.rint(_over(np.float32(63), top)[:, None] * x), 63).astype(np.int32)
        for x, top in ((of_block, most), (least_of_block, most_least))
    )
    blocks["d"] = (most / np.float32(63)).reshape(blocks.shape)
    blocks["dmin"] = (most_least / np.float32(63)).reshape(blocks.shape)
    blocks["scales"] = _pack_scales(coded, coded_least).reshape(*blocks.shape, 12)
    step, offset = (
        (blocks[name].reshape(-1, 1).astype(np.float32) * code.astype(np.float32)).reshape(-1)
        for name, code in (("d", coded), ("dmin", coded_least))
    )
    again = _rounded((groups + offset) / np.where(step == 0, _ONE, step), 0, search.top)
    codes = np.where(step == 0, codes, again).astype(np.int32)
    return codes.T.reshape(*blocks.shape, 4, 2, 32)


def _best_grid(x: Floats, search: _Search) -> tuple[Floats, Floats, Codes]:
    """Scale, minus minimum and codes of each column: ``make_qkx2_quants``.

    Errors are weighted by the root mean square of the column plus the number's size.
    """
    weights = np.sqrt(_sum(x * x) / np.float32(len(x))) + np.abs(x)
    sums = _sum(weights), _sum(weights * x)
    least: Floats = np.minimum(x.min(axis=0), np.float32(0))
    high: Floats = x.max(axis=0)
    flat = high == least
    high = np.where(flat, least + _ONE, high)
    top = np.float32(search.top)
    inverse: Floats = top / (high - least)
    scale: Floats = _ONE / inverse
    codes = _rounded(inverse * (x - least), 0, search.top)
    error = _sum(weights * np.square(scale * codes + least - x))
    for i in range(search.steps + 1):
        # The grids start from the best minimum so far, not from the smallest number.
        shift = np.float32(search.first) + np.float32(search.delta) * np.float32(i) + top
        tried = _rounded(shift / (high - least) * (x - least), 0, search.top)
        this_scale, this_least, solvable = _fit(weights, tried, x, sums)
        this_error = _sum(weights * np.square(this_scale * tried + this_least - x))
        better = solvable & (this_error < error)
        codes = np.where(better, tried, codes)
        error = np.where(better, this_error, error)
        scale = np.where(better, this_scale, scale)
        least = np.where(better, this_least, least)
    scale = np.where(flat, np.float32(0), scale)
    return scale, -least, np.where(flat, 0, codes).astype(np.int32)


def _fit(
    weights: Floats, codes: Floats, x: Floats, sums: tuple[Floats, Floats]
) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Least squares of x by scale and minimum for given codes; the minimum is at most 0."""
    total, total_x = sums
    weighted = weights * codes
    by_one, by_code, by_x = _sum(weighted), _sum(weighted * codes), _sum(weighted * x)
    determinant = total * by_code - by_one * by_one
    solvable = determinant > 0
    safe = np.where(solvable, determinant, _ONE)
    scale = (total * by_x - total_x * by_one) / safe
    least = (by_code * total_x - by_one * by_x) / safe
    above = least > 0
    alone = by_x / np.where(by_code > 0, by_code, _ONE)
    return np.where(above, alone, scale), np.where(above, np.float32(0), least), solvable


def _symmetric(x: Floats, top: int) -> tuple[Floats, Floats]:
    """Scale and codes from 0 to 2 top - 1 of each column: ``make_qx_quants`` with weights x²."""
    at = np.abs(x).argmax(axis=0)
    extreme = np.take_along_axis(x, at[None], axis=0)[0]
    empty = np.abs(extreme) < _TINY
    extreme = np.where(empty, _ONE, extreme)
    weights = x * x
    scale = best = np.zeros(x.shape[1], np.float32)
    codes = np.zeros(x.shape, np.float32)
    for i in (0, *range(-9, 0), *range(1, 10)):
        grid = np.float32(top) + np.float32(0.1) * np.float32(i)
        tried = _rounded(-grid / extreme * x, -top, top - 1)
        by_x, by_code = _sum(weights * x * tried), _sum(weights * tried * tried)
        this_scale = by_x / np.where(by_code > 0, by_code, _ONE)
        better = (by_code > 0) & (by_x * by_x > best * by_code)
        codes = np.where(better, tried, codes)
        scale = np.where(better, this_scale, scale)
        best = np.where(better, this_scale * by_x, best)
    codes = codes + np.float32(top)
    return np.where(empty, np.float32(0), scale), np.where(empty, np.float32(0), codes)


def _pack_scales(scales: Codes, least: Codes) -> NDArray[np.uint8]:
    """6-bit codes (n, 8) of scales and minima in 12 bytes (n, 12): ggml's ``get_scale_min_k4``."""
    out = np.zeros((len(scales), 12), np.int32)
    out[:, :4] = scales[:, :4] | scales[:, 4:] >> 4 << 6
    out[:, 4:8] = least[:, :4] | least[:, 4:] >> 4 << 6
    out[:, 8:] = scales[:, 4:] & 15 | (least[:, 4:] & 15) << 4
    return out.astype(np.uint8)


def _rounded(x: Floats, low: int, high: int) -> Floats:
    """The nearest integers, ties to even, held to a range."""
    return np.clip(np.rint(x), low, high).astype(np.float32, copy=False)


def _sum(x: Floats) -> Floats:
    """Sums of the columns, row after row in float32."""
    return np.add.reduce(x, axis=0, dtype=np.float32)


def _over(number: np.float32, x: Floats) -> Floats:
    """``number / x``, 0 where x is."""
    return np.where(x > 0, number / np.where(x > 0, x, _ONE), np.float32(0)).astype(np.float32)
