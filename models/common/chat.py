"""Conversations to token ids and labels: the model's own chat template, assistant-only targets.

Targets are found in the characters of the whole rendering and carried over to the tokens by their
offsets, never by tokenising a prompt on its own: a reply that begins with white space shares a
token with the newline that ends its header, so the prompt's ids are then no prefix of the whole's.

Where a reply stands in the rendering is asked of the template itself, whichever it is: it renders
the conversation a second time with every content put between two marks that occur nowhere in it,
and the marks show the place. The method is safe because it is checked: taking the marks out must
give the first rendering back, character for character. A template that strips contents fails that
check, so contents are then stripped before and the check repeated; one that cuts or rearranges them
is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, final

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy.typing import NDArray

from vkjit.errors import DataError

from .tokenizer import Encoding, Tokenizer, encode_rendered

IGNORE = -100
"""Label of a position that is no target."""

Message = Mapping[str, str]
ControlPolicy = Literal["reject", "escape", "parse"]
"""Control tokens inside contents: refuse, tokenise as ordinary characters, let them take effect."""

_MARK_CANDIDATES = tuple(map(chr, range(0xE000, 0xE100)))  # private use: never in sensible text


@final
@dataclass(frozen=True)
class ContentSpan:
    """Characters [start, end) of a rendering that are the content of message ``index``."""

    index: int
    role: str
    start: int
    end: int


@final
@dataclass(frozen=True)
class Rendering:
    """A conversation as the template prints it, and where each content stands in it."""

    text: str
    contents: tuple[ContentSpan, ...]


@final
@dataclass(frozen=True)
class EncodedChat:
    """A tokenised conversation.

    Args:
        input_ids: int32 (n,).
        labels: int32 (n,), aligned with ``input_ids`` (the loss shifts): the id where the token
            belongs to a reply or to the control token that ends it, ``IGNORE`` elsewhere.
        rendering: the text and its contents.
        offsets: int32 (n, 2), characters of each token.
    """

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    rendering: Rendering
    offsets: NDArray[np.int32]


@final
class ChatTemplate:
    """A Jinja chat template in a sandbox, with the settings that transformers renders it with."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        """Compile ``source``.

        Raises:
            DataError: it is not valid Jinja.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise DataError(f"chat template: invalid Jinja: {error}; use another template") from (
                error
            )
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplate:
        """Template of the tokenizer's own GGUF."""
        if tokenizer.chat_template is None:
            raise DataError(
                "chat template: the model file has no tokenizer.chat_template, expected one; use "
                "an instruction-tuned model"
            )
        return cls(
            tokenizer.chat_template,
            bos_token=tokenizer.token_text(tokenizer.bos_id),
            eos_token=tokenizer.token_text(tokenizer.eos_id),
        )

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Text of a conversation; with the generation prompt, up to where the reply would start."""
        check_messages(messages)
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            )
        except jinja2.TemplateError as error:
            raise DataError(
                f"chat template: cannot render {len(messages)} messages with roles "
                f"{[message['role'] for message in messages]}: {error}"
            ) from error

    def locate(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False
    ) -> Rendering:
        """Render and find every content in the text, as the module's docstring describes.

        Raises:
            DataError: the template rewrites contents, or prints a reply twice or not at all.
        """
        text = self.render(messages, add_generation_prompt=add_generation_prompt)
        stripped = [{**message, "content": message["content"].strip()} for message in messages]
        for candidate in (messages, stripped):
            contents = self._contents(candidate, text, add_generation_prompt=add_generation_prompt)
            if contents is not None:
                return Rendering(text, contents)
        raise DataError(
            "chat template: it changes the contents of messages, expected them printed as they "
            "are (or stripped); use a template that does"
        )

    def _contents(
        self, messages: Sequence[Message], text: str, *, add_generation_prompt: bool
    ) -> tuple[ContentSpan, ...] | None:
        """Spans of the contents, or ``None`` when the marks changed more than themselves."""
        mark = _unused_mark(text, messages)
        marked_messages = [
            {**message, "content": f"{mark}{i}{mark}{message['content']}{mark}/{i}{mark}"}
            for i, message in enumerate(messages)
        ]
        marked = self.render(marked_messages, add_generation_prompt=add_generation_prompt)
        spans: list[ContentSpan] = []
        starts: dict[int, int] = {}
        pieces: list[str] = []
        length = 0
        position = 0
        for match in re.finditer(f"{mark}(/?)(\\d+){mark}", marked):
            pieces.append(marked[position : match.start()])
            length += match.start() - position
            position = match.end()
            index = int(match.group(2))
            if match.group(1):
                spans.append(
                    ContentSpan(index, messages[index]["role"], starts.pop(index, length), length)
                )
            else:
                starts[index] = length
        pieces.append(marked[position:])
        if "".join(pieces) != text or starts:
            return None
        _check_replies(messages, spans)
        return tuple(spans)


def encode_conversation(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    control_tokens: ControlPolicy = "reject",
) -> EncodedChat:
    """Tokenise a conversation and label the assistant's words.

    A token is a target when its characters overlap a reply or the control token right behind it
    (the end of the turn); the header before and the newline after are not.

    Raises:
        DataError: no assistant message, so that every label is masked; or, under ``"reject"``, a
            control token inside a content.
    """
    rendering = template.locate(messages)
    encoding = _encode(tokenizer, rendering, messages, control_tokens)
    target = np.zeros(len(encoding.ids), bool)
    for span in rendering.contents:
        if span.role == "assistant":
            end = span.end + len(tokenizer.control_at(rendering.text, span.end) or "")
            starts, ends = encoding.offsets[:, 0], encoding.offsets[:, 1]
            target |= (starts < end) & (ends > span.start)
    if not target.any():
        raise DataError(
            f"chat: all {len(target)} labels are masked (roles "
            f"{[message['role'] for message in messages]}), expected an assistant reply to learn"
        )
    labels = np.where(target, encoding.ids, np.int32(IGNORE)).astype(np.int32)
    return EncodedChat(encoding.ids, labels, rendering, encoding.offsets)


def encode_prompt(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    control_tokens: ControlPolicy = "reject",
) -> NDArray[np.int32]:
    """Ids of a conversation with the header of the reply to generate; int32 (n,)."""
    rendering = template.locate(messages, add_generation_prompt=True)
    return _encode(tokenizer, rendering, messages, control_tokens).ids


def check_messages(messages: Sequence[Message]) -> None:
    """Refuse a conversation that is empty or whose messages lack a role or a content."""
    if not messages:
        raise DataError("chat: an empty conversation, expected at least one message")
    for index, message in enumerate(messages):
        fields = [message.get(key) for key in ("role", "content")]
        if not all(isinstance(field, str) for field in fields) or not fields[0]:
            raise DataError(
                f"chat: message {index} has role {fields[0]!r} and content of type "
                f"{type(fields[1]).__name__}, expected two strings"
            )


def _encode(
    tokenizer: Tokenizer,
    rendering: Rendering,
    messages: Sequence[Message],
    control_tokens: ControlPolicy,
) -> Encoding:
    spans = [(span.start, span.end) for span in rendering.contents]
    for index, message in enumerate(messages):
        if control_tokens == "reject":
            refuse_control(tokenizer, message["content"], f"message {index} ({message['role']})")
    return encode_text(tokenizer, rendering.text, sorted(spans), control_tokens)


def encode_text(
    tokenizer: Tokenizer, text: str, contents: list[tuple[int, int]], policy: ControlPolicy
) -> Encoding:
    """Tokens of ``text``, with one beginning token where the model expects one.

    Args:
        tokenizer: the model's.
        text: what a template printed, or a text of the data set as it is.
        contents: character ranges [start, end), sorted, that the data set and not a template wrote.
        policy: whether control tokens in the contents take effect.
    """
    literal = [] if policy == "parse" else contents
    bos = tokenizer.token_text(tokenizer.bos_id)
    if literal and literal[0][0] == 0:
        bos = ""  # what stands there is no token but somebody's text
    return encode_rendered(text, partial(tokenizer.encode, literal=literal), bos)


def refuse_control(tokenizer: Tokenizer, text: str, where: str) -> None:
    """Raise a `DataError` that says ``where`` if ``text`` contains a control token."""
    found = tokenizer.find_control(text)
    if found is not None:
        raise DataError(
            f"chat: {where} contains the control token {found}, expected plain text; remove it, "
            f"or pass control_tokens='escape' to tokenise it as ordinary characters"
        )


def _check_replies(messages: Sequence[Message], spans: Sequence[ContentSpan]) -> None:
    printed = [span.index for span in spans if span.role == "assistant"]
    expected = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if sorted(printed) != expected:
        raise DataError(
            f"chat template: it prints the replies {printed}, expected each of {expected} once; "
            f"use a template that keeps the whole conversation"
        )


def _unused_mark(text: str, messages: Sequence[Message]) -> str:
    used = set(text).union(*(message["content"] for message in messages))
    for candidate in _MARK_CANDIDATES:
        if candidate not in used:
            return candidate
    raise DataError("chat: the text uses every private-use character from U+E000 to U+E0FF")


def _raise_exception(message: str) -> None:
    """``raise_exception`` of the templates: the way they refuse a conversation."""
    raise jinja2.TemplateRuntimeError(message)


@final
class _GenerationBlock(Extension):
    """``{% generation %}…{% endgeneration %}``: prints its body; the marks find replies anyway."""

    tags = {"generation"}  # noqa: RUF012  the name and the kind are Jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
