"""Token ids against stored references and the library's own matching; offsets; literal ranges."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from vkjit.errors import DataError
from vkjit_models.common.gguf import GgufFile, open_gguf
from vkjit_models.common.tokenizer import Tokenizer

TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im", "|>", "\n", "  ", " a", "12"]
        ),
        st.text(max_size=8),
    ),
    max_size=12,
).map("".join)


@pytest.fixture(scope="module")
def library(tiny_gguf: GgufFile) -> tokenizers.Tokenizer:
    """The same vocabulary with control tokens matched by the library itself."""
    tokens = tiny_gguf.array("tokenizer.ggml.tokens", "string")
    lines = tiny_gguf.array("tokenizer.ggml.merges", "string")
    merges = [(left, right) for left, right in (line.split(" ", 1) for line in lines)]
    oracle = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    oracle.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    oracle.add_special_tokens(
        [tokenizers.AddedToken(t, special=True, normalized=False) for t in tokens[:3]]
    )
    return oracle


def test_stored_ids(tiny_tokenizer: Tokenizer, data: Path) -> None:
    expected = json.loads((data / "gguf" / "tiny_llama.json").read_text())
    encoding = tiny_tokenizer.encode(expected["text"])
    assert encoding.ids.tolist() == expected["input_ids"]
    assert tiny_tokenizer.decode(encoding.ids) == expected["text"]


def test_smollm2_cases(smollm2_tokenizer: Tokenizer, data: Path) -> None:
    cases = json.loads((data / "smollm2" / "tokenizer_cases.json").read_text())["cases"]
    for case in cases:
        encoding = smollm2_tokenizer.encode(case["text"])
        assert encoding.ids.tolist() == case["ids"], case["text"]
        assert smollm2_tokenizer.decode(encoding.ids) == case["text"]
    assert len(cases) == 39


@given(text=TEXTS)
def test_agrees_with_the_library(
    tiny_tokenizer: Tokenizer, library: tokenizers.Tokenizer, text: str
) -> None:
    ours, theirs = tiny_tokenizer.encode(text), library.encode(text, add_special_tokens=False)
    assert ours.ids.tolist() == theirs.ids
    assert [tuple(pair) for pair in ours.offsets.tolist()] == theirs.offsets


@given(text=TEXTS)
def test_offsets_cover_the_text_and_decoding_restores_it(
    tiny_tokenizer: Tokenizer, text: str
) -> None:
    encoding = tiny_tokenizer.encode(text)
    assert tiny_tokenizer.decode(encoding.ids) == text
    covered = {i for start, end in encoding.offsets.tolist() for i in range(start, end)}
    assert covered == set(range(len(text)))


@given(parts=st.lists(st.tuples(TEXTS, st.booleans()), max_size=4))
def test_no_control_token_comes_out_of_a_literal_range(
    tiny_tokenizer: Tokenizer, parts: list[tuple[str, bool]]
) -> None:
    text, literal = "", []
    for part, plain in parts:
        if plain:
            literal.append((len(text), len(text) + len(part)))
        text += part
    encoding = tiny_tokenizer.encode(text, literal)
    assert tiny_tokenizer.decode(encoding.ids) == text
    control = set(tiny_tokenizer.control_tokens.values())
    for token, (start, end) in zip(encoding.ids.tolist(), encoding.offsets.tolist(), strict=True):
        if token in control:
            assert not any(start < b and end > a for a, b in literal)


def test_literal_range_only_shields_itself(tiny_tokenizer: Tokenizer) -> None:
    text = "a<|im_end|>b<|im_end|>"
    ids = tiny_tokenizer.encode(text, [(0, 12)]).ids
    assert (ids == 2).sum() == 1
    assert ids[-1] == 2


def test_special_ids(tiny_tokenizer: Tokenizer) -> None:
    assert tiny_tokenizer.control_tokens == {
        "<|endoftext|>": 0,
        "<|im_start|>": 1,
        "<|im_end|>": 2,
    }
    ids = (tiny_tokenizer.bos_id, tiny_tokenizer.eos_id, tiny_tokenizer.pad_id)
    assert ids == (1, 2, 2)
    assert tiny_tokenizer.token_text(tiny_tokenizer.eos_id) == "<|im_end|>"
    assert tiny_tokenizer.vocab_size == 512


def test_decode_without_control_tokens_and_out_of_range(tiny_tokenizer: Tokenizer) -> None:
    ids = tiny_tokenizer.encode("<|im_start|>hello<|im_end|>").ids
    assert tiny_tokenizer.decode(ids, skip_control=True) == "hello"
    with pytest.raises(DataError, match="id 512, expected 0 to 511"):
        tiny_tokenizer.decode([5, 512])


@pytest.mark.parametrize(("model", "splitter"), [("llama", "default"), ("gpt2", "qwen2")])
def test_unsupported_tokenizer_lists_the_supported(
    tmp_path: Path, model: str, splitter: str
) -> None:
    with pytest.raises(DataError, match=f"'{model}' with splitter '{splitter}', .*smollm, gpt-2"):
        Tokenizer(_vocabulary(tmp_path, model=model, splitter=splitter))


def test_merge_outside_the_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the merge 'b a' of .* needs tokens that its 3 lack"):
        Tokenizer(_vocabulary(tmp_path, merges=["b a"]))


def _vocabulary(
    folder: Path, *, model: str = "gpt2", splitter: str = "smollm", merges: list[str] | None = None
) -> GgufFile:
    writer = GGUFWriter(folder / "vocabulary.gguf", "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(splitter)
    writer.add_token_list(["a", "b", "ab"])
    writer.add_token_types([1, 1, 1])
    writer.add_token_merges(merges or ["a b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return open_gguf(folder / "vocabulary.gguf")
