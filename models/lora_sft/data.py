"""From records to windows: what a run trains on and what it holds out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

import vkjit.numpy as jnp
from vkjit_models.common.chat import IGNORE
from vkjit_models.common.conversation import Conversation, Record, question_of
from vkjit_models.common.encoding import RecordEncoder
from vkjit_models.common.fit import Fit, fit_documents
from vkjit_models.common.packing import (
    PADDING_SEGMENT,
    Document,
    PackedWindows,
    pack_fullest,
)
from vkjit_models.common.tokenizer import Tokenizer
from vkjit_models.llama.model import Batch, target_rows

from .config import DataSection
from .gather import gather

Progress: TypeAlias = Callable[[int, int], None]
"""Called with how many are done and how many there are."""

_PROGRESS_STEP = 500  # records between calls of a `Progress`
_ROW_STEP = 64  # rows that meet the head come in multiples of this, which tiles like


@final
@dataclass(frozen=True)
class WindowSet:
    """Packed windows, and of which record and category each document in them is.

    Args:
        windows: The windows; their segment ids are indices of documents.
        records: Id of the record that document i was made of.
        categories: Category of document i.
        category_names: All categories of the data set, sorted; a category's id is its place here,
            the same for training and held-out windows.
        pad_id: Token that fills windows up.
    """

    windows: PackedWindows
    records: tuple[str, ...]
    categories: tuple[str, ...]
    category_names: tuple[str, ...]
    pad_id: int

    def __len__(self) -> int:
        """Number of windows."""
        return len(self.windows.input_ids)

    @cached_property
    def capacity(self) -> int:
        """Targets that a window has room for in a `Batch`: one number, so one program, for all."""
        most = int(self.windows.target_tokens.max())
        return min(self.windows.labels.shape[1], -(-most // _ROW_STEP) * _ROW_STEP)

    @cached_property
    def category_ids(self) -> NDArray[np.int32]:
        """Place in `category_names` of each document's category; int32 (documents,)."""
        place = {name: i for i, name in enumerate(self.category_names)}
        return np.array([place[name] for name in self.categories], np.int32)

    def batch(self, rows: Sequence[int]) -> Batch:
        """The windows ``rows`` as device arrays."""
        w, index = self.windows, np.asarray(rows)
        fields = [x[index] for x in (w.input_ids, w.labels, w.position_ids, w.segment_ids)]
        targets = target_rows(fields[1], self.capacity * len(rows))
        fields += [targets, self._categories_of(fields[3], targets)]
        return Batch(*(jnp.asarray(np.ascontiguousarray(field)) for field in fields))

    def counts(self) -> dict[str, tuple[int, int]]:
        """Documents and targets of every category, by its name, also where there are none."""
        size = len(self.category_names)
        documents = np.bincount(self.category_ids, minlength=size)
        targets = np.zeros(size, np.int64)
        learned = self.windows.labels != IGNORE
        of_target = self.category_ids[self.windows.segment_ids[learned]]
        targets += np.bincount(of_target, minlength=size)
        pairs = zip(documents.tolist(), targets.tolist(), strict=True)
        return dict(zip(self.category_names, pairs, strict=True))

    def records_of(self, row: int) -> tuple[str, ...]:
        """Ids of the records in window ``row``, from its beginning to its end."""
        segments = self.windows.segment_ids[row]
        starts = np.flatnonzero(np.diff(segments, prepend=PADDING_SEGMENT))
        return tuple(self.records[i] for i in segments[starts] if i != PADDING_SEGMENT)

    def probe(self, count: int) -> WindowSet:
        """A fixed sample of ``count`` records (or all, where there are fewer), in own windows.

        The records with the least SHA-256 of their tokens and labels are taken, equal contents
        once: the choice depends on what the records say and on nothing else, neither their order
        nor the seed nor the packing, and a record that joins the data set displaces one at most.
        """
        documents = self.documents()
        order = sorted(range(len(documents)), key=lambda i: self.records[i], reverse=True)
        by_hash = {_hash_of(documents[i]): i for i in order}  # of equal ones, the least id
        chosen = [by_hash[key] for key in sorted(by_hash)[:count]]
        windows = pack_fullest(
            [documents[i] for i in chosen], self.windows.labels.shape[1], self.pad_id
        )
        return WindowSet(
            windows,
            tuple(self.records[i] for i in chosen),
            tuple(self.categories[i] for i in chosen),
            self.category_names,
            self.pad_id,
        )

    def documents(self) -> list[Document]:
        """The documents as they are in the windows, by segment id, cut and with masked starts."""
        w = self.windows
        found: dict[int, Document] = {}
        for ids, labels, segments in zip(w.input_ids, w.labels, w.segment_ids, strict=True):
            cuts = np.flatnonzero(np.diff(segments)) + 1
            for start, end in zip([0, *cuts], [*cuts, len(segments)], strict=True):
                if segments[start] != PADDING_SEGMENT:
                    span = slice(start, end)
                    found[int(segments[start])] = Document(ids[span], labels[span])
        return [found[i] for i in range(len(found))]

    def _categories_of(
        self, segments: NDArray[np.int32], places: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """Category id of each place in ``places``; -1 where the place is negative."""
        # A target never starts a document, so the segment of its predictor is its own.
        documents = segments.reshape(-1)[places]
        return np.where(places >= 0, self.category_ids[documents], np.int32(-1)).astype(np.int32)


@final
@dataclass(frozen=True)
class TrainingData:
    """Both sides of the split.

    Args:
        train: Windows to learn from.
        held_out: Windows of sources that are never trained on.
        held_out_windows: Which of them are evaluated.
        sample: The shortest question of a held-out record, for the sample reply.
        sha256: Of all training windows: a resumed run must see the same.
        fits: What the context cost the training records and the held-out ones.
        leaked: Held-out documents whose tokens are those of a training document.
    """

    train: WindowSet
    held_out: WindowSet
    held_out_windows: tuple[int, ...]
    sample: Conversation
    sha256: str
    fits: tuple[Fit, Fit]
    leaked: int


def load_data(
    section: DataSection, tokenizer: Tokenizer, seed: int, progress: Progress | None = None
) -> TrainingData:
    """Builds or reads the records, splits them and packs both sides.

    Args:
        section: Where they come from and how they are split.
        tokenizer: The model's.
        seed: Of the source questions and of the choice of evaluated windows.
        progress: Called now and then with the records tokenised and their number.

    Raises:
        DataError: No or bad records, a side of the split is empty, every label is masked, or a
            record is longer than the context where that is an error.
    """
    train, held_out = gather(section, seed)
    names = tuple(sorted({one.category for one in (*train, *held_out)}))
    encoder = RecordEncoder(tokenizer, section.control_tokens)
    documents, pad = _documents([*train, *held_out], encoder, progress), tokenizer.pad_id
    train_set, train_fit = _windows(train, documents[: len(train)], names, section, pad)
    held_set, held_fit = _windows(held_out, documents[len(train) :], names, section, pad)
    order = np.random.default_rng([seed, 1]).permutation(len(held_set))
    return TrainingData(
        train=train_set,
        held_out=held_set,
        held_out_windows=tuple(sorted(order[: section.held_out_windows].tolist())),
        sample=_sample(held_out),
        sha256=_digest(train_set.windows),
        fits=(train_fit, held_fit),
        leaked=_common(documents[: len(train)], documents[len(train) :]),
    )


def training_rows(count: int, per_step: int, seed: int, step: int) -> NDArray[np.int64]:
    """Windows of one step, out of ``count``; int64 (per_step,).

    Every epoch visits all windows once, in an order that depends on the seed and the epoch alone:
    a resumed run goes on exactly where the first one stopped.
    """
    places = range(step * per_step, (step + 1) * per_step)
    return np.array([_order(count, seed, i // count)[i % count] for i in places])


# A step asks for each of its windows: at most, at the turn of an epoch, of two orders.
@lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    order = np.random.default_rng([seed, 0, epoch]).permutation(count)
    order.setflags(write=False)
    return order


def _documents(
    records: Sequence[Record], encoder: RecordEncoder, progress: Progress | None
) -> list[Document]:
    documents: list[Document] = []
    for count, record in enumerate(records):
        if progress is not None and not count % _PROGRESS_STEP:
            progress(count, len(records))
        encoded = encoder.encode(record)
        documents.append(Document(encoded.input_ids, encoded.labels))
    return documents


def _windows(
    records: Sequence[Record],
    documents: Sequence[Document],
    names: tuple[str, ...],
    section: DataSection,
    pad_id: int,
) -> tuple[WindowSet, Fit]:
    """One side of the split, packed, and what did not fit into its windows."""
    identities = [(one.id, one.category) for one in records]
    fit = fit_documents(documents, identities, section.context, section.too_long)
    windows = pack_fullest([documents[i] for i in fit.kept], section.context, pad_id)
    kept = [identities[i] for i in fit.kept]
    ids, categories = (tuple(column) for column in zip(*kept, strict=True))
    return WindowSet(windows, ids, categories, names, pad_id), fit


def _sample(records: Sequence[Record]) -> Conversation:
    """The shortest question as a conversation of one message."""
    asked = min(records, key=_question_length)
    message = {"role": "user", "content": question_of(asked)}
    return Conversation(asked.id, asked.category, (message,))


def _question_length(record: Record) -> int:
    return len(question_of(record))


def _common(train: Sequence[Document], held_out: Sequence[Document]) -> int:
    known = {_hash_of(one) for one in train}
    return sum(_hash_of(one) in known for one in held_out)


def _hash_of(document: Document) -> bytes:
    digest = hashlib.sha256(document.input_ids.tobytes())
    digest.update(document.labels.tobytes())
    return digest.digest()


def _digest(windows: PackedWindows) -> str:
    digest = hashlib.sha256()
    for field in (windows.input_ids, windows.labels, windows.segment_ids):
        digest.update(np.ascontiguousarray(field).tobytes())
    return digest.hexdigest()
