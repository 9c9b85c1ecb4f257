"""Documents into windows of one length: nothing split, nothing lost, position and segment ids.

All packers share the layout and differ in which window a document goes to. Attention must stay
inside a segment (equal ids, causal) and positions restart at 0 with each document, so that a packed
window gives what its documents give one by one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from vkjit.errors import DataError

from .chat import IGNORE

PADDING_SEGMENT = -1
"""Segment id of padding."""


@final
@dataclass(frozen=True)
class Document:
    """One tokenised text: ids and labels, int32 (n,) each, aligned (the loss shifts)."""

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]


@final
@dataclass(frozen=True)
class PackedWindows:
    """Windows of ``window`` tokens; all arrays int32 (windows, window).

    Args:
        input_ids: token ids; the padding id behind the last document of a window.
        labels: targets aligned with ``input_ids``; ``IGNORE`` on padding and on the first token of
            each document, which nothing in its document predicts.
        position_ids: place of each token in its document; 0 on padding.
        segment_ids: index of the document in the order given; -1 on padding.
        truncated: documents that were cut to the window.
        dropped_tokens: tokens that the cuts removed.
    """

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    position_ids: NDArray[np.int32]
    segment_ids: NDArray[np.int32]
    truncated: int
    dropped_tokens: int

    @property
    def used_tokens(self) -> NDArray[np.int64]:
        """Tokens of each window that are not padding; (windows,)."""
        return (self.segment_ids != PADDING_SEGMENT).sum(axis=1)

    @property
    def target_tokens(self) -> NDArray[np.int64]:
        """Targets of each window, which is what its loss is divided by; (windows,)."""
        return (self.labels[:, 1:] != IGNORE).sum(axis=1)

    @property
    def utilisation(self) -> float:
        """Share of positions that hold a token, 0 to 1."""
        return float(self.used_tokens.sum() / self.segment_ids.size)


def pack_sequential(documents: Sequence[Document], window: int, pad_id: int) -> PackedWindows:
    """Pack in the order given; a document that does not fit what is left opens the next window.

    Documents longer than ``window`` are cut to it.

    Raises:
        DataError: no documents, an empty or misaligned one, or no targets at all.
    """
    lengths = _check(documents, window)
    windows: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if length > room:
            windows.append([])
            room = window
        windows[-1].append(index)
        room -= length
    return _fill(documents, windows, window, pad_id)


def pack_best_fit(documents: Sequence[Document], window: int, pad_id: int) -> PackedWindows:
    """Pack longest first, each into the fullest window that still has room for it.

    Best fit decreasing needs at most 11/9 of the least possible number of windows plus one, and
    O(n log n) comparisons to find them. Ties go to the earlier document and the older window, so
    the result depends on nothing but the lengths. Windows come out with the longest documents
    first: shuffle them before training.

    Raises:
        DataError: as :func:`pack_sequential`.
    """
    lengths = _check(documents, window)
    return _fill(documents, _best_fit(lengths, window), window, pad_id)


def pack_fullest(documents: Sequence[Document], window: int, pad_id: int) -> PackedWindows:
    """Pack windows one after another, each as full as the documents left can make it.

    A window takes the longest document left and then the set of others that fills it best: a
    subset sum, found over lengths with the bits of one integer as the table of reachable sums
    (Gupta and Ho's minimum bin slack heuristic, made exact for each window). Best fit decreasing
    puts single documents where there is room, and so leaves gaps that only several together fill.
    Where that still needs fewer windows, its windows are returned.

    Raises:
        DataError: as :func:`pack_sequential`.
    """
    lengths = _check(documents, window)
    fullest, best_fit = _fullest(lengths, window), _best_fit(lengths, window)
    plan = best_fit if len(best_fit) < len(fullest) else fullest
    return _fill(documents, plan, window, pad_id)


def _best_fit(lengths: Sequence[int], window: int) -> list[list[int]]:
    windows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # sorted (free positions, window)
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect_left(rooms, (lengths[index], -1))
        if place == len(rooms):
            room, target = window, len(windows)
            windows.append([])
        else:
            room, target = rooms.pop(place)
        windows[target].append(index)
        insort(rooms, (room - lengths[index], target))
    return windows


def _fullest(lengths: Sequence[int], window: int) -> list[list[int]]:
    queues: dict[int, list[int]] = {}  # indices by length, the earliest last
    for index in reversed(range(len(lengths))):
        queues.setdefault(lengths[index], []).append(index)
    windows: list[list[int]] = []
    ascending = sorted(queues)
    while ascending:
        longest = ascending[-1]
        chosen = [longest, *_fullest_sum(queues, ascending, window - longest)]
        windows.append([queues[length].pop() for length in chosen])
        for length in set(chosen):
            if not queues[length]:
                del ascending[bisect_left(ascending, length)]
    return windows


def _fullest_sum(
    queues: Mapping[int, Sequence[int]], ascending: Sequence[int], room: int
) -> list[int]:
    """Lengths, longest first, with the greatest sum up to ``room`` that single documents give.

    ``ascending[-1]`` has one document less than its queue: the window has it already.
    """
    reachable, everything = 1, (1 << (room + 1)) - 1
    before: list[tuple[int, int]] = []  # a length, and what was reachable without it
    for length in reversed(ascending[: bisect_right(ascending, room)]):
        count = len(queues[length]) - (length == ascending[-1])
        for _ in range(min(count, room // length)):
            before.append((length, reachable))
            reachable |= (reachable << length) & everything
        if reachable >> room:
            break
    total, chosen = reachable.bit_length() - 1, list[int]()
    for length, without in reversed(before):
        if not without >> total & 1:
            chosen.append(length)
            total -= length
    return chosen[::-1]


def _check(documents: Sequence[Document], window: int) -> list[int]:
    """Lengths after the cut to ``window``."""
    if window < 2:
        raise DataError(f"packing: a window of {window} tokens, expected at least 2")
    if not documents:
        raise DataError("packing: the data set is empty, expected at least one document")
    for index, document in enumerate(documents):
        shapes = document.input_ids.shape, document.labels.shape
        if len(shapes[0]) != 1 or shapes[0] != shapes[1] or not shapes[0][0]:
            raise DataError(
                f"packing: document {index} has ids {shapes[0]} and labels {shapes[1]}, expected "
                f"two equal one-dimensional shapes that are not empty"
            )
    return [min(len(document.input_ids), window) for document in documents]


def _fill(
    documents: Sequence[Document], windows: Iterable[Iterable[int]], window: int, pad_id: int
) -> PackedWindows:
    plan = list(windows)
    shape = (len(plan), window)
    ids = np.full(shape, pad_id, np.int32)
    labels = np.full(shape, IGNORE, np.int32)
    positions = np.zeros(shape, np.int32)
    segments = np.full(shape, PADDING_SEGMENT, np.int32)
    for row, members in enumerate(plan):
        start = 0
        for index in members:
            document = documents[index]
            length = min(len(document.input_ids), window - start)
            span = slice(start, start + length)
            ids[row, span] = document.input_ids[:length]
            labels[row, span] = document.labels[:length]
            labels[row, start] = IGNORE
            positions[row, span] = np.arange(length, dtype=np.int32)
            segments[row, span] = index
            start += length
    excess = [max(0, len(document.input_ids) - window) for document in documents]
    packed = PackedWindows(ids, labels, positions, segments, sum(map(bool, excess)), sum(excess))
    if not packed.target_tokens.any():
        raise DataError(
            f"packing: all labels of {len(documents)} documents are masked in windows of {window} "
            f"tokens, expected at least one target; use a longer window or other conversations"
        )
    return packed
