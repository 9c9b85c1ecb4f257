"""Records of all kinds to ids and labels: what is learned, ends, beginnings, control tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from vkjit.errors import DataError
from vkjit_models.common.chat import IGNORE, ChatTemplate, encode_conversation, encode_prompt
from vkjit_models.common.conversation import Completion, Conversation, PlainText, Record
from vkjit_models.common.encoding import RecordEncoder
from vkjit_models.common.gguf import open_gguf
from vkjit_models.common.tokenizer import Tokenizer, encode_rendered

TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=20)
SPECIAL = st.lists(
    st.one_of(st.sampled_from(["<|im_end|>", "<|im_start|>", "\n", " "]), TEXT), min_size=1
).map("".join)


@pytest.fixture
def with_bos(tmp_path: Path) -> Tokenizer:
    """Bytes and ``<s>``, ``</s>``; the file asks for a beginning token in front of every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer = GGUFWriter(tmp_path / "vocabulary.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<s>", "</s>", *alphabet, "aa"])
    writer.add_token_types([3, 3] + [1] * (len(alphabet) + 1))
    writer.add_token_merges(["a a"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return Tokenizer(open_gguf(tmp_path / "vocabulary.gguf"))


def learned(tokenizer: Tokenizer, record: Record) -> str:
    encoded = RecordEncoder(tokenizer).encode(record)
    assert encoded.input_ids.dtype == encoded.labels.dtype == np.int32
    assert len(encoded.offsets) == len(encoded.labels)
    targets = encoded.labels != IGNORE
    np.testing.assert_array_equal(encoded.labels[targets], encoded.input_ids[targets])
    return tokenizer.decode(encoded.input_ids[targets])


def test_what_is_learned(tiny_tokenizer: Tokenizer) -> None:
    turns = (
        {"role": "user", "content": "ask"},
        {"role": "assistant", "content": "tell"},
    )
    end = tiny_tokenizer.token_text(tiny_tokenizer.eos_id)
    assert learned(tiny_tokenizer, Conversation("a", "x", turns)) == "tell<|im_end|>"
    assert learned(tiny_tokenizer, Completion("a", "x", "1 + 1 =", "\n2")) == "\n2" + end
    assert learned(tiny_tokenizer, PlainText("a", "x", "All of it.")) == "All of it." + end


@given(prompt=TEXT, completion=TEXT)
def test_a_token_with_a_character_of_the_completion_is_learned(
    tiny_tokenizer: Tokenizer, prompt: str, completion: str
) -> None:
    encoded = RecordEncoder(tiny_tokenizer).encode(Completion("a", "x", prompt, completion))
    assert encoded.text == prompt + completion
    assert encoded.input_ids[-1] == encoded.labels[-1] == tiny_tokenizer.eos_id
    assert tiny_tokenizer.decode(encoded.input_ids[:-1]) == encoded.text
    places = zip(encoded.offsets[:-1].tolist(), encoded.labels[:-1].tolist(), strict=True)
    for (_, end), label in places:
        assert (label != IGNORE) == (end > len(prompt))


@given(text=SPECIAL)
def test_control_tokens_in_the_data_are_ordinary_text(tiny_tokenizer: Tokenizer, text: str) -> None:
    control = set(tiny_tokenizer.control_tokens.values())
    for record in (PlainText("a", "x", text), Completion("a", "x", text, text)):
        ids = RecordEncoder(tiny_tokenizer).encode(record).input_ids
        assert not control & set(ids[:-1].tolist())


def test_control_tokens_on_demand(tiny_tokenizer: Tokenizer) -> None:
    end = tiny_tokenizer.token_text(tiny_tokenizer.eos_id)
    record = PlainText("a", "x", f"over{end}")
    parsed = RecordEncoder(tiny_tokenizer, "parse").encode(record).input_ids.tolist()
    assert parsed.count(tiny_tokenizer.eos_id) == 1
    assert parsed[-1] == tiny_tokenizer.eos_id
    with pytest.raises(DataError, match=r"record 'a': chat: the text contains the control token"):
        RecordEncoder(tiny_tokenizer, "reject").encode(record)


def test_one_beginning_token(with_bos: Tokenizer) -> None:
    """Whether the template writes it or leaves it to the tokenizer."""
    assert (
        with_bos.encode("aa").ids.tolist() != with_bos.encode("aa", add_special=True).ids.tolist()
    )
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "w"}]
    body = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{{ eos_token }}{% endfor %}"
    rows = []
    for source in (body, "{{ bos_token }}" + body):
        template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
        chat = encode_conversation(with_bos, template, turns)
        assert chat.input_ids.tolist().count(0) == 1
        assert chat.input_ids[0] == 0
        assert with_bos.decode(chat.input_ids[chat.labels != IGNORE]) == "w</s>"
        assert encode_prompt(with_bos, template, turns[:1])[0] == 0
        rows.append(chat.input_ids.tolist())
    assert rows[0] == rows[1]


def test_a_beginning_token_that_the_user_wrote_is_text(with_bos: Tokenizer) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", bos_token="<s>")
    turns = [{"role": "user", "content": "<s>q"}, {"role": "assistant", "content": "a"}]
    ids = encode_conversation(with_bos, template, turns, control_tokens="escape").input_ids.tolist()
    assert ids[0] == 0
    assert ids.count(0) == 1
    assert with_bos.decode(ids[1:]) == "<s>qa"


def test_plain_texts_begin_once_too(with_bos: Tokenizer) -> None:
    encoded = RecordEncoder(with_bos).encode(PlainText("a", "x", "aa"))
    assert encoded.input_ids.tolist() == [0, with_bos.encode("aa").ids[0], 1]
    assert encoded.labels.tolist() == [IGNORE, *encoded.input_ids[1:]]
    parsed = RecordEncoder(with_bos, "parse").encode(PlainText("a", "x", "<s>aa</s>"))
    assert parsed.input_ids.tolist() == encoded.input_ids.tolist()


def test_a_model_without_beginning_tokens_gets_none(tiny_tokenizer: Tokenizer) -> None:
    assert not tiny_tokenizer.adds_bos
    assert encode_rendered("hi", tiny_tokenizer.encode, "").ids.tolist() == (
        tiny_tokenizer.encode("hi").ids.tolist()
    )


def test_a_model_without_a_template_takes_texts_only(with_bos: Tokenizer) -> None:
    turn = {"role": "assistant", "content": "a"}
    with pytest.raises(DataError, match=r"record 'r': chat template: .* has no tokenizer"):
        RecordEncoder(with_bos).encode(Conversation("r", "x", (turn,)))
