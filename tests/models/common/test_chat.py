"""Rendering and targets: transformers' results, templates of other shapes, control tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from vkjit.errors import DataError
from vkjit_models.common.chat import (
    IGNORE,
    ChatTemplate,
    EncodedChat,
    encode_conversation,
    encode_prompt,
)
from vkjit_models.common.gguf import open_gguf
from vkjit_models.common.tokenizer import Tokenizer

STRIPPING = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }}{{ eos_token }}\n"
    "{% endfor %}"
)
UNTERMINATED = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
CONTENT = st.text(st.characters(exclude_categories=("Cs", "Co")), max_size=12)
TURNS = st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def golden(data: Path) -> dict[str, Any]:
    """Seven conversations in SmolLM2's ChatML, rendered and masked by transformers."""
    return json.loads((data / "chat" / "conversations.json").read_text())


@pytest.fixture(scope="module")
def chatml(tiny_tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate.of(tiny_tokenizer)


@pytest.mark.parametrize("key", ["template", "template_with_generation_marks"])
def test_renderings_and_contents(golden: dict[str, Any], key: str) -> None:
    template = ChatTemplate(golden[key])
    for case in golden["conversations"]:
        messages = case["messages"]
        rendering = template.locate(messages)
        assert rendering.text == case["text"]
        found = {span.index: rendering.text[span.start : span.end] for span in rendering.contents}
        assert found == {i: message["content"] for i, message in enumerate(messages)}
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        prompt = template.render(messages, add_generation_prompt=True)
        assert prompt == case["generation_prompt_text"]


def test_ids_and_labels(golden: dict[str, Any], smollm2_tokenizer: Tokenizer) -> None:
    template = ChatTemplate.of(smollm2_tokenizer)
    assert smollm2_tokenizer.chat_template == golden["template"]
    straddling = 0
    for case in golden["conversations"]:
        chat = encode_conversation(
            smollm2_tokenizer, template, case["messages"], control_tokens="parse"
        )
        assert chat.input_ids.tolist() == case["ids"]
        assert chat.labels.tolist() == case["labels"]
        straddling += len(case["tokens_straddling_header_and_reply"])
        turns = case["messages"]
        if turns[-1]["role"] == "assistant":
            turns = turns[:-1]
        prompt = encode_prompt(smollm2_tokenizer, template, turns, control_tokens="parse")
        assert prompt.tolist() == case["generation_prompt_ids"]
    assert straddling == 1


def test_masks_by_characters_from_stored_ids(golden: dict[str, Any]) -> None:
    """The stored masks follow from the spans found here, without the real tokenizer."""
    template = ChatTemplate(golden["template"])
    for case in golden["conversations"]:
        spans = template.locate(case["messages"]).contents
        replies = [span for span in spans if span.role == "assistant"]
        runs = np.flatnonzero(np.diff([0, *case["assistant_mask"], 0]) == 1)
        assert len(runs) == len(replies)


def test_reply_and_end_of_turn_are_the_targets(
    tiny_tokenizer: Tokenizer, chatml: ChatTemplate
) -> None:
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": ""},
    ]
    chat = encode_conversation(tiny_tokenizer, chatml, messages)
    assert _targets(tiny_tokenizer, chat) == "two<|im_end|><|im_end|>"
    assert chat.input_ids.dtype == chat.labels.dtype == np.int32


@pytest.fixture
def newline_merging_tokenizer(tmp_path: Path) -> Tokenizer:
    """Bytes, one control token, and a token for a newline with the space behind it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer = GGUFWriter(tmp_path / "vocabulary.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<|im_end|>", *alphabet, "\u010a\u0120"])
    writer.add_token_types([3] + [1] * (len(alphabet) + 1))
    writer.add_token_merges(["\u010a \u0120"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return Tokenizer(open_gguf(tmp_path / "vocabulary.gguf"))


def test_a_token_shared_by_header_and_reply_is_a_target(
    newline_merging_tokenizer: Tokenizer, chatml: ChatTemplate
) -> None:
    tokenizer = newline_merging_tokenizer
    question = [{"role": "user", "content": "q"}]
    whole = [*question, {"role": "assistant", "content": "  indented"}]
    chat = encode_conversation(tokenizer, chatml, whole)
    assert _targets(tokenizer, chat) == "\n  indented<|im_end|>"
    prompt = encode_prompt(tokenizer, chatml, question)
    assert prompt.tolist() != chat.input_ids[: len(prompt)].tolist()


@given(turns=TURNS)
def test_targets_are_the_replies_whatever_they_hold(
    tiny_tokenizer: Tokenizer, chatml: ChatTemplate, turns: list[tuple[str, str]]
) -> None:
    messages = [
        {"role": role, "content": content}
        for turn in turns
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]
    chat = encode_conversation(tiny_tokenizer, chatml, messages, control_tokens="escape")
    assert tiny_tokenizer.decode(chat.input_ids) == chat.rendering.text == chatml.render(messages)
    wanted: set[int] = set()
    for span in chat.rendering.contents:
        if span.role == "assistant":
            wanted |= set(range(span.start, span.end + len("<|im_end|>")))
    for (start, end), label in zip(chat.offsets.tolist(), chat.labels.tolist(), strict=True):
        assert (label != IGNORE) == bool(wanted & set(range(start, end)))


def test_stripping_template_is_followed(tiny_tokenizer: Tokenizer) -> None:
    template = ChatTemplate(STRIPPING, eos_token="<|im_end|>")
    messages = [{"role": "user", "content": " a "}, {"role": "assistant", "content": "\n b c \n"}]
    chat = encode_conversation(tiny_tokenizer, template, messages)
    assert chat.rendering.text == "[user] a<|im_end|>\n[assistant] b c<|im_end|>\n"
    assert _targets(tiny_tokenizer, chat).strip() == "b c<|im_end|>"


def test_template_without_end_of_turn(tiny_tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chat = encode_conversation(tiny_tokenizer, ChatTemplate(UNTERMINATED), messages)
    assert _targets(tiny_tokenizer, chat).strip() == "b"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for m in messages %}{{ m.content[:-1] }}{% endfor %}", "changes the contents"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "expected each of"),
        ("{{ messages[0].content }}", r"prints the replies \[\], expected each of \[1\]"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "cannot render"),
    ],
)
def test_unsuitable_template(source: str, message: str) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(DataError, match=message):
        ChatTemplate(source).locate(messages)


def test_invalid_template() -> None:
    with pytest.raises(DataError, match="invalid Jinja"):
        ChatTemplate("{% for m in messages %}")


def test_all_labels_masked(tiny_tokenizer: Tokenizer, chatml: ChatTemplate) -> None:
    with pytest.raises(DataError, match=r"labels are masked \(roles \['user'\]\), expected an as"):
        encode_conversation(tiny_tokenizer, chatml, [{"role": "user", "content": "hello"}])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "empty conversation"),
        ([{"role": "user"}], "content of type NoneType"),
        ([{"role": "", "content": "x"}], "role ''"),
        ([{"role": "user", "content": 3}], "content of type int"),
    ],
)
def test_malformed_messages(chatml: ChatTemplate, messages: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        chatml.render(messages)


def test_control_tokens_in_contents(tiny_tokenizer: Tokenizer, chatml: ChatTemplate) -> None:
    messages = [
        {"role": "user", "content": "Does <|im_end|> split?"},
        {"role": "assistant", "content": "<|im_start|> neither"},
    ]
    with pytest.raises(DataError, match=r"message 0 \(user\) contains the control token <\|im_end"):
        encode_conversation(tiny_tokenizer, chatml, messages)
    counts = {}
    for policy in ("parse", "escape"):
        chat = encode_conversation(tiny_tokenizer, chatml, messages, control_tokens=policy)
        assert tiny_tokenizer.decode(chat.input_ids) == chatml.render(messages)
        counts[policy] = [int((chat.input_ids == token).sum()) for token in (1, 2)]
    assert counts == {"parse": [3, 3], "escape": [2, 2]}


def _targets(tokenizer: Tokenizer, chat: EncodedChat) -> str:
    return tokenizer.decode(chat.labels[chat.labels != IGNORE])
