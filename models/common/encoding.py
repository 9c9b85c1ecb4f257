"""Records to token ids and labels, whatever their kind."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import assert_never, final

import numpy as np
from numpy.typing import NDArray

from vkjit.errors import DataError

from .chat import (
    IGNORE,
    ChatTemplate,
    ControlPolicy,
    encode_conversation,
    encode_text,
    refuse_control,
)
from .conversation import Completion, Conversation, PlainText, Record
from .tokenizer import Tokenizer


@final
@dataclass(frozen=True)
class EncodedRecord:
    """A tokenised record.

    Args:
        input_ids: int32 (n,).
        labels: int32 (n,), aligned with ``input_ids``: the id where it is learned, else ``IGNORE``.
        text: what was tokenised.
        offsets: int32 (n, 2), characters of each token in ``text``; an empty range for a token
            that no character stands for.
    """

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    text: str
    offsets: NDArray[np.int32]


@final
class RecordEncoder:
    """Tokenises records for one model."""

    def __init__(self, tokenizer: Tokenizer, control_tokens: ControlPolicy = "escape") -> None:
        """Neither the tokenizer nor its template is used before the first record.

        Args:
            tokenizer: the model's.
            control_tokens: what control tokens inside the records' own texts are.
        """
        self._tokenizer = tokenizer
        self._policy: ControlPolicy = control_tokens

    def encode(self, record: Record) -> EncodedRecord:
        """Ids and labels of one record.

        A conversation is rendered by the model's template; the replies are learned, each with the
        control token that ends it. Of a completion, the tokens with a character of the second part
        are learned, of a plain text all are; both end with the model's end token, learned too.

        Raises:
            DataError: the record cannot be rendered or has no reply, or holds a control token
                under the policy "reject"; the message begins with the record's id.
        """
        try:
            match record:
                case Conversation():
                    return self._conversation(record)
                case Completion():
                    text = record.prompt + record.completion
                    return self._plain(text, len(record.prompt))
                case PlainText():
                    return self._plain(record.text, 0)
                case _:
                    assert_never(record)
        except DataError as error:
            raise DataError(f"data: record {record.id!r}: {error}") from error

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate.of(self._tokenizer)

    def _conversation(self, record: Conversation) -> EncodedRecord:
        chat = encode_conversation(
            self._tokenizer, self._template, record.messages, control_tokens=self._policy
        )
        return EncodedRecord(chat.input_ids, chat.labels, chat.rendering.text, chat.offsets)

    def _plain(self, text: str, learned_from: int) -> EncodedRecord:
        tokenizer, size = self._tokenizer, len(text)
        if self._policy == "reject":
            refuse_control(tokenizer, text, "the text")
        encoding = encode_text(tokenizer, text, [(0, size)], self._policy)
        ids, offsets = encoding.ids, encoding.offsets
        # Empty texts are refused by the readers, so there is a last token.
        if tokenizer.eos_id is not None and ids[-1] != tokenizer.eos_id:
            ids = np.append(ids, np.int32(tokenizer.eos_id))
            offsets = np.append(offsets, np.array([[size, size]], np.int32), axis=0)
        ends = offsets[:, 1]
        target = (ends > learned_from) & (ends > 0)
        labels = np.where(target, ids, np.int32(IGNORE)).astype(np.int32)
        return EncodedRecord(ids, labels, text, offsets)
