"""Byte-level BPE built from a GGUF's own metadata, with character offsets.

Control tokens (``<|im_end|>`` and the like) are matched before anything else, longest first, and
the text between them is split and merged on its own; this is what llama.cpp and the ``tokenizers``
library do. Doing the matching here lets a caller declare stretches of text in which control tokens
are ordinary characters, which is how user text is kept from ending its own turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, SupportsInt, TypeVar, final

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers

from vkjit.errors import DataError

from .gguf import GgufFile

SUPPORTED_MODELS: tuple[str, ...] = ("gpt2",)
SUPPORTED_SPLITTERS: tuple[str, ...] = ("smollm", "gpt-2")

_EncodingT = TypeVar("_EncodingT", covariant=True)

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type


@final
@dataclass(frozen=True)
class Encoding:
    """Token ids of a text and where each token's characters stand.

    Args:
        ids: int32 (n,).
        offsets: int32 (n, 2), character range [start, end) in the text. Tokens that share one
            multi-byte character share its range.
    """

    ids: NDArray[np.int32]
    offsets: NDArray[np.int32]


@final
class Tokenizer:
    """Text to ids and back, special ids, and the chat template, all from one GGUF."""

    def __init__(self, file: GgufFile) -> None:
        """Build from metadata ``tokenizer.*``.

        Raises:
            DataError: another tokenizer model or splitter than the supported ones, or a vocabulary
                that does not fit its merges or token types.
        """
        tokens = file.array("tokenizer.ggml.tokens", "string")
        self._vocabulary = {token: index for index, token in enumerate(tokens)}
        self._bpe = _build(file, self._vocabulary)
        self._tokens = tokens
        types = file.array("tokenizer.ggml.token_type", "integer")
        if len(types) != len(tokens) or len(self._vocabulary) != len(tokens):
            raise DataError(
                f"tokenizer: {file.path} has {len(tokens)} tokens, {len(self._vocabulary)} of them "
                f"distinct, and {len(types)} token types, expected three equal numbers"
            )
        self.control_tokens: dict[str, int] = _of_type(tokens, types, _CONTROL)
        """Text to id of the tokens that a model's protocol reserves."""
        self._user_defined = _of_type(tokens, types, _USER_DEFINED)
        self._everywhere = _matcher([*self.control_tokens, *self._user_defined])
        self._in_literal = _matcher(list(self._user_defined))
        self._in_control = _matcher(list(self.control_tokens))
        self.bos_id: int | None = self._special(file, "bos")
        self.eos_id: int | None = self._special(file, "eos")
        self.unknown_id: int | None = self._special(file, "unknown")
        padding = self._special(file, "padding")
        self.pad_id: int = padding if padding is not None else (self.eos_id or 0)
        """Id that fills windows; the end token's where the file names none (never a target)."""
        self.adds_bos: bool = file.metadata.get("tokenizer.ggml.add_bos_token") is True
        """Whether the model expects its beginning token in front of every text."""
        template = file.metadata.get("tokenizer.chat_template")
        self.chat_template: str | None = template if isinstance(template, str) else None

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return len(self._tokens)

    def token_text(self, token_id: int | None) -> str:
        """Text of a special token; empty for ``None``."""
        return "" if token_id is None else self._tokens[token_id]

    def encode(
        self, text: str, literal: Sequence[tuple[int, int]] = (), *, add_special: bool = False
    ) -> Encoding:
        """Tokenise ``text``.

        Args:
            text: any string.
            literal: character ranges [start, end), sorted and disjoint, in which control tokens
                are plain text. Elsewhere they become their ids.
            add_special: put the beginning token in front where `adds_bos`, with the offsets (0, 0).
                Nothing else is ever added.
        """
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        if add_special and self.adds_bos and self.bos_id is not None:
            ids.append(self.bos_id)
            offsets.append((0, 0))
        position = 0
        for start, end, token in self._special_matches(text, literal):
            self._encode_plain(text, (position, start), ids, offsets)
            ids.append(token)
            offsets.append((start, end))
            position = end
        self._encode_plain(text, (position, len(text)), ids, offsets)
        return Encoding(
            np.array(ids, np.int32), np.array(offsets, np.int32).reshape(len(offsets), 2)
        )

    def decode(self, ids: Iterable[SupportsInt], *, skip_control: bool = False) -> str:
        """Text of ``ids``; invalid UTF-8 becomes U+FFFD. ``skip_control`` drops control tokens."""
        values = [int(token) for token in ids]
        bad = [token for token in values if not 0 <= token < self.vocab_size]
        if bad:
            raise DataError(f"decode: id {bad[0]}, expected 0 to {self.vocab_size - 1}")
        if skip_control:
            control = set(self.control_tokens.values())
            values = [token for token in values if token not in control]
        return self._bpe.decode(values, skip_special_tokens=False)

    def find_control(self, text: str) -> str | None:
        """First control token that occurs in ``text``, or ``None``."""
        match = self._in_control.search(text)
        return None if match is None else match.group()

    def control_at(self, text: str, position: int) -> str | None:
        """Control token that starts exactly at ``position``, or ``None``."""
        match = self._in_control.match(text, position)
        return None if match is None else match.group()

    def _special_matches(
        self, text: str, literal: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[int, int, int]]:
        """Ranges and ids of tokens matched whole.

        A match that touches a literal range from outside is ordinary text too: half of it is not
        the template's.
        """
        ids = self.control_tokens | self._user_defined
        position, ranges = 0, list(literal)
        while True:
            match = self._everywhere.search(text, position)
            if match is None:
                return
            start, end = match.span()
            while ranges and ranges[0][1] <= start:
                ranges.pop(0)
            if ranges and ranges[0][0] < end and match.group() in self.control_tokens:
                inner = self._in_literal.match(text, start)
                position = start + 1 if inner is None else inner.end()
                if inner is not None:
                    yield start, inner.end(), ids[inner.group()]
                continue
            yield start, end, ids[match.group()]
            position = end

    def _encode_plain(
        self, text: str, span: tuple[int, int], ids: list[int], offsets: list[tuple[int, int]]
    ) -> None:
        start, end = span
        if start == end:
            return
        encoding = self._bpe.encode(text[start:end], add_special_tokens=False)
        ids.extend(encoding.ids)
        offsets.extend((start + first, start + last) for first, last in encoding.offsets)

    def _special(self, file: GgufFile, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in file.metadata:
            return None
        token = file.integer(key)
        if not 0 <= token < len(self._tokens):
            raise DataError(
                f"tokenizer: {key} of {file.path} is {token}, expected 0 to {len(self._tokens) - 1}"
            )
        return token


class SpecialEncode(Protocol[_EncodingT]):
    """A tokenizer that may put its beginning token in front of a text."""

    def __call__(self, text: str, *, add_special: bool) -> _EncodingT:
        """Tokenise ``text``; ``add_special``: as the model expects texts to begin."""
        ...


def encode_rendered(text: str, encode: SpecialEncode[_EncodingT], bos_text: str) -> _EncodingT:
    """Tokenise what a template printed, with one beginning token and not two.

    A template that writes the token itself has done the tokenizer's work; after any other, the
    tokenizer adds it where the model expects one.

    Args:
        text: the rendering.
        encode: the tokenizer.
        bos_text: text of the beginning token; empty where the model has none.
    """
    return encode(text, add_special=not (bos_text and text.startswith(bos_text)))


def _build(file: GgufFile, vocabulary: dict[str, int]) -> tokenizers.Tokenizer:
    model = file.text("tokenizer.ggml.model")
    splitter = file.text("tokenizer.ggml.pre")
    if model not in SUPPORTED_MODELS or splitter not in SUPPORTED_SPLITTERS:
        raise DataError(
            f"tokenizer: {file.path} has model {model!r} with splitter {splitter!r}, expected "
            f"{', '.join(SUPPORTED_MODELS)} with one of {', '.join(SUPPORTED_SPLITTERS)}"
        )
    merges: list[tuple[str, str]] = []
    for merge in file.array("tokenizer.ggml.merges", "string"):
        left, _, right = merge.partition(" ")
        # checked here because the library panics instead of raising
        if not {left, right, left + right} <= vocabulary.keys():
            raise DataError(
                f"tokenizer: the merge {merge!r} of {file.path} needs tokens that its "
                f"{len(vocabulary)} lack, expected both halves and the whole among them"
            )
        merges.append((left, right))
    bpe = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    ]
    if splitter == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(steps)
    bpe.decoder = decoders.ByteLevel()
    return bpe


def _of_type(tokens: Sequence[str], types: Sequence[int], wanted: int) -> dict[str, int]:
    pairs = enumerate(zip(tokens, types, strict=False))
    return {token: index for index, (token, kind) in pairs if kind == wanted}


def _matcher(texts: Sequence[str]) -> re.Pattern[str]:
    """Leftmost, then longest, of ``texts``; matches nothing when there are none."""
    ordered = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")
