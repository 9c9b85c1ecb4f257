"""``vkjit merge`` and ``vkjit export``: what they write, print and refuse."""

from __future__ import annotations

import io
import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file
from typer.testing import CliRunner

import vkjit as vj
import vkjit.numpy as jnp
from vkjit import random, tree
from vkjit.errors import ConfigError, DataError
from vkjit_models.cli import app
from vkjit_models.common.adapter_gguf import load_any_adapter
from vkjit_models.common.adapter_io import save_adapter
from vkjit_models.common.gguf import llama_hyper, open_gguf, read_llama
from vkjit_models.llama.lora import (
    LoraSpec,
    from_peft,
    init_adapters,
    plan_adapters,
    to_peft,
    with_adapter,
)
from vkjit_models.llama.model import Inputs, LlamaSpec, forward
from vkjit_models.lora_sft.merge_check import check_merge, default_text
from vkjit_models.lora_sft.merge_command import export, merge

from .conftest import GGUF

HYPER = llama_hyper(open_gguf(GGUF))
NUMBERS = re.compile(
    r"largest change of a logit: (\S+) \(their root mean square is (\S+)\)\n"
    r"perplexity on (\d+) tokens: (\S+) with the adapter apart, (\S+) merged"
)
TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank."


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A rank-stabilised adapter of two kinds of layers that moved from its start."""
    plan = plan_adapters(HYPER, LoraSpec(2, 3.0, ("q_proj", "up_proj"), rslora=True))
    adapters = init_adapters(plan, random.key(0))
    moved = tree.map(lambda x: x + 0.05, adapters)
    save_adapter(tmp_path / "adapter", plan.peft_config(str(GGUF)), to_peft(moved))
    return tmp_path / "adapter"


def console() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=200), text


@pytest.mark.parametrize("name", ["tiny_llama_lora.gguf", "peft"])
def test_either_format_gives_the_logits_that_llama_cpp_agrees_with(
    name: str, shared: Path, tmp_path: Path
) -> None:
    """golden/gguf: exported here and read again, tolerance 1e-4."""
    folder = shared / "golden" / "gguf"
    path = folder / "tiny_llama_lora.gguf"
    if name == "peft":
        export(console()[0], path, tmp_path / "peft", "peft", str(GGUF))
        path = tmp_path / "peft"
    config, tensors = load_any_adapter(path, HYPER)
    adapters = from_peft(HYPER, tensors)
    params = {n: jnp.asarray(value) for n, value in read_llama(GGUF)[1].items()}
    want = load_file(folder / "tiny_llama_expected.safetensors")
    spec = with_adapter(LlamaSpec(HYPER), config, adapters)
    tokens = jnp.asarray(np.ascontiguousarray(want["input_ids"]))
    logits = vj.jit(partial(forward, spec))(params, adapters, Inputs(tokens))
    np.testing.assert_allclose(logits, want["lora_logits"], rtol=0, atol=1e-4)


def test_a_merged_file_is_the_base_with_the_adapter(adapter: Path, tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text(TEXT)
    to, text = console()
    merged = merge(to, str(GGUF), adapter, tmp_path / "out.gguf", "f32", text=words)
    printed = text.getvalue()
    assert f"{merged.written:,} bytes, 4 tensors merged, 17 copied" in printed
    assert "warning" not in printed
    change, size, tokens, apart, together = (float(x) for x in NUMBERS.findall(printed)[0])
    assert change < 1e-4 < size
    assert tokens > 16
    assert together == pytest.approx(apart, rel=1e-5)
    off = check_merge(str(GGUF), adapter, GGUF, TEXT)  # the base itself: not the merged model
    assert off.logit_change > 0.01
    assert off.merged != off.apart


def test_gguf_and_back_is_the_same_adapter(adapter: Path, tmp_path: Path) -> None:
    to, text = console()
    export(to, adapter, tmp_path / "a.gguf", "gguf", None)
    assert "note: adapter.lora.alpha = 4.24264 (alpha * sqrt(r)" in text.getvalue()
    export(to, tmp_path / "a.gguf", tmp_path / "back", "peft", str(GGUF))
    first, second = (load_any_adapter(p, HYPER) for p in (adapter, tmp_path / "back"))
    assert second[0].scale == pytest.approx(first[0].scale, rel=1e-6)
    assert not second[0].use_rslora
    for name, array in first[1].items():
        np.testing.assert_array_equal(second[1][name], array)


def test_mistakes_are_named(adapter: Path, tmp_path: Path) -> None:
    to, _ = console()
    with pytest.raises(ConfigError, match=r"--type q9 was given, expected one of keep, f32, f16"):
        merge(to, str(GGUF), adapter, tmp_path / "out.gguf", "q9")
    with pytest.raises(DataError, match=r"cannot read .*absent.txt"):
        merge(to, str(GGUF), adapter, tmp_path / "o.gguf", "f16", text=tmp_path / "absent.txt")
    assert not (tmp_path / "o.gguf").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"export: cannot write .*: Not a directory, expected"):
        export(to, adapter, tmp_path / "file" / "peft", "peft", None)
    with pytest.raises(DataError, match=r"export: cannot write .*: File exists, expected"):
        export(to, adapter, tmp_path / "file" / "a.gguf", "gguf", None)
    with pytest.raises(DataError, match=r"merge: cannot write .*: (File|Not) .*, expected"):
        merge(to, str(GGUF), adapter, tmp_path / "file" / "o.gguf", "f16", check=False)
    with pytest.raises(DataError, match="the text has 1 tokens, expected at least 2"):
        check_merge(str(GGUF), adapter, GGUF, "a")
    export(to, adapter, tmp_path / "a.gguf", "gguf", None)
    with pytest.raises(ConfigError, match=r"names no base model, .* pass --model"):
        export(to, tmp_path / "a.gguf", tmp_path / "back", "peft", None)
    path = adapter / "adapter_config.json"
    config = json.loads(path.read_text()) | {"base_model_name_or_path": "someone/llama"}
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"names 'someone/llama' as its base model"):
        export(to, adapter, tmp_path / "b.gguf", "gguf", None)


def test_the_commands(adapter: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    out = str(tmp_path / "out.gguf")
    done = run(app, ["merge", str(GGUF), str(adapter), "-o", out, "--type", "q8_0", "--no-check"])
    assert done.exit_code == 0, done.output
    assert "q8_0" in done.output
    done = run(app, ["export", str(adapter), "-o", str(tmp_path / "a.gguf"), "--format", "gguf"])
    assert done.exit_code == 0, done.output
    assert run(app, ["merge", str(GGUF), str(adapter), "-o", str(GGUF)]).exit_code == 2
    assert run(app, ["export", str(adapter), "-o", "x", "--format", "onnx"]).exit_code == 2


def test_the_default_text_is_long_enough_for_the_default_windows() -> None:
    assert len(default_text()) > 10_000
