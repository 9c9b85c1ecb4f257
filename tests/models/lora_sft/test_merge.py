"""Merging into GGUF: the numbers, the bytes that must not change, the report, and bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants
from numpy.typing import NDArray
from safetensors.numpy import load_file

from vkjit.errors import DataError
from vkjit_models.common.adapter_config import AdapterConfig
from vkjit_models.common.adapter_io import peft_name, save_adapter
from vkjit_models.common.gguf import GgufFile, llama_hyper, open_gguf, read_llama
from vkjit_models.common.gguf_rewrite import Replacement, rewrite_gguf
from vkjit_models.common.tensor_rows import ENCODED_TYPES, decoded, encode_rows
from vkjit_models.llama.config import linear_shapes
from vkjit_models.lora_sft import merge as merge_module
from vkjit_models.lora_sft.merge import Delta, merge_adapter

from .conftest import GGUF

FILE = open_gguf(GGUF)
HYPER, BASE = read_llama(FILE)
Q, K, OUT, UP, DOWN = (
    "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.k_proj",
    "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.up_proj",
    "model.layers.0.mlp.down_proj",
)  # fmt: skip
KINDS = {Q: "Q4_K", K: "F16", OUT: "Q4_0", UP: "Q5_0", DOWN: "Q5_1"}  # in the tiny file


def write_adapter(folder: Path, size: float = 0.3, **config: Any) -> AdapterConfig:
    """Random adapters of five layers; ``size`` is that of B's numbers."""
    settings = AdapterConfig(2, 3.0, tuple(KINDS), **config)
    rng = np.random.default_rng(0)
    tensors: dict[str, NDArray[np.float32]] = {}
    for name in KINDS:
        rows, columns = linear_shapes(HYPER)[name]
        rank = settings.rank_of(name)
        tensors[peft_name(name, "A")] = rng.standard_normal((rank, columns), np.float32)
        tensors[peft_name(name, "B")] = size * rng.standard_normal((rows, rank), np.float32)
        if settings.use_dora:
            tensors[peft_name(name, "magnitude")] = rng.random(rows, np.float32) + 0.5
    save_adapter(folder, settings, tensors)
    return settings


def expected(folder: Path, config: AdapterConfig, name: str) -> NDArray[Any]:
    """W + s B A in float64, by another reader of the adapter; DoRA by its definition."""
    tensors = load_file(folder / "adapter_model.safetensors")
    a, b = (tensors[peft_name(name, which)].astype(np.float64) for which in ("A", "B"))
    out = BASE[f"{name}.weight"].astype(np.float64) + config.scale_of(name) * b @ a
    if config.use_dora:
        magnitude = tensors[peft_name(name, "magnitude")]
        out *= (magnitude / np.linalg.norm(out, axis=1))[:, None]
    return out


@pytest.mark.parametrize(
    "changes",
    [{}, {"use_rslora": True, "rank_pattern": {"up_proj": 3}, "alpha_pattern": {"q_proj": 1.0}},
     {"use_dora": True}],
)  # fmt: skip
def test_merged_weights_are_the_sum_in_the_order_of_the_file(
    tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_module, "_CHUNK", 3000)  # rows in several runs, the last one short
    config = write_adapter(tmp_path / "a", **changes)
    merged = merge_adapter(FILE, tmp_path / "a", tmp_path / "out.gguf", "f32")
    _, weights = read_llama(tmp_path / "out.gguf")
    for name in KINDS:
        want = expected(tmp_path / "a", config, name)
        bound = 1e-6 * np.abs(want).max()
        np.testing.assert_allclose(weights[f"{name}.weight"], want, rtol=0, atol=bound)
    assert {row.name: row.source for row in merged.tensors}["blk.0.attn_q.weight"] == "Q4_K"
    assert (len(merged.tensors), merged.copied) == (5, len(FILE.tensors) - 5)
    assert merged.written == (tmp_path / "out.gguf").stat().st_size


def test_everything_else_is_the_same_bytes(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a")
    merge_adapter(FILE, tmp_path / "a", tmp_path / "out.gguf", "keep")
    old, new = GGUFReader(GGUF), GGUFReader(tmp_path / "out.gguf")
    begin, end = 24, min(tensor.field.offset for tensor in old.tensors)
    assert GGUF.read_bytes()[begin:end] == (tmp_path / "out.gguf").read_bytes()[begin:end]
    changed = {f"blk.0.{kind}.weight" for kind in ("attn_q", "attn_output", "ffn_up", "ffn_down")}
    changed.add("blk.1.attn_k.weight")
    for before, after in zip(old.tensors, new.tensors, strict=True):
        assert (before.name, before.tensor_type) == (after.name, after.tensor_type)
        assert np.array_equal(before.data, after.data) is (before.name not in changed)
        assert after.data_offset % 32 == 0
    assert {path.name for path in tmp_path.iterdir()} == {"a", "out.gguf"}


def test_the_files_type_names_what_most_weights_became(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    write_adapter(folder)
    rewrite_gguf(FILE, tmp_path / "same.gguf", {})
    assert (tmp_path / "same.gguf").read_bytes() == GGUF.read_bytes()
    merge_adapter(FILE, folder, tmp_path / "out.gguf", "f16")
    reader = GGUFReader(tmp_path / "out.gguf")
    (before, after) = (r.fields["general.file_type"].contents() for r in (GGUFReader(GGUF), reader))
    assert (before, after) == (15, 1)
    fields = {k for k, f in reader.fields.items() if f.contents() != FILE.metadata.get(k)}
    assert fields == {"general.file_type"}


@pytest.mark.parametrize("kind", ENCODED_TYPES)
def test_rows_are_encoded_as_the_gguf_library_does(kind: str) -> None:
    rows = BASE[f"{UP}.weight"][:8]
    raw = np.frombuffer(encode_rows(kind, rows).tobytes(), np.uint8).reshape(8, -1)
    theirs = GGMLQuantizationType[kind]
    np.testing.assert_array_equal(
        quants.dequantize(raw, theirs).reshape(rows.shape), decoded(kind, encode_rows(kind, rows))
    )
    if not kind.endswith("K"):  # the library decodes those and does not encode them
        np.testing.assert_array_equal(quants.quantize(rows, theirs).view(np.uint8).reshape(8, -1),
                                      raw)  # fmt: skip


def test_the_report_measures_what_encoding_did(tmp_path: Path) -> None:
    config = write_adapter(tmp_path / "a")
    merged = merge_adapter(FILE, tmp_path / "a", tmp_path / "out.gguf", "q4_0")
    _, stored = read_llama(tmp_path / "out.gguf")
    row = {row.name: row for row in merged.tensors}["blk.0.ffn_up.weight"]
    base, want = BASE[f"{UP}.weight"].astype(np.float64), expected(tmp_path / "a", config, UP)
    error, change = stored[f"{UP}.weight"] - want, want - base
    norm = np.linalg.norm
    assert row.relative_error == pytest.approx(norm(error) / norm(want), rel=1e-4)
    assert row.delta_error == pytest.approx(norm(error) / norm(change), rel=1e-4)
    kept = np.vdot(stored[f"{UP}.weight"] - base, change) / np.vdot(change, change)
    assert row.delta_kept == pytest.approx(kept, rel=1e-4)


@pytest.mark.parametrize(("kind", "warned"), [("q4_0", True), ("keep", True), ("f32", False)])
def test_a_change_that_encoding_rounds_away_is_told(
    tmp_path: Path,
    kind: str,
    warned: bool,  # noqa: FBT001  a case
) -> None:
    write_adapter(tmp_path / "a", size=1e-4)
    merged = merge_adapter(FILE, tmp_path / "a", tmp_path / "out.gguf", kind)
    assert any("partly rounded away; choose --type f16" in w for w in merged.warnings) is warned


def test_an_adapter_that_does_nothing_is_told(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", size=0.0)
    merged = merge_adapter(FILE, tmp_path / "a", tmp_path / "out.gguf", "f16")
    assert "changes nothing in 5 tensors" in merged.warnings[0]


def test_a_result_that_is_not_finite_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", size=1e6)
    with pytest.raises(DataError, match=r"not finite in F16.*choose bf16 or f32"):
        merge_adapter(FILE, tmp_path / "a", tmp_path / "out.gguf", "f16")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_types_that_cannot_be_written_name_the_nearest(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.o_proj"  # IQ4_NL in the tiny file
    rows, columns = linear_shapes(HYPER)[name]
    tensors = {
        peft_name(name, "A"): np.ones((1, columns), np.float32),
        peft_name(name, "B"): np.ones((rows, 1), np.float32),
    }
    save_adapter(tmp_path / "a", AdapterConfig(1, 1.0, (name,)), tensors)
    with pytest.raises(DataError, match=r"attn_output.* would be IQ4_NL, .*the nearest is q4_1"):
        merge_adapter(FILE, tmp_path / "a", tmp_path / "out.gguf", "keep")
    merge_adapter(FILE, tmp_path / "a", tmp_path / "out.gguf", "q4_1")


def test_paths_and_adapters_that_do_not_fit(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a")
    with pytest.raises(DataError, match="is the file that is read, expected another name"):
        merge_adapter(FILE, tmp_path / "a", GGUF, "f16")
    with pytest.raises(DataError, match="does not exist, expected a folder in PEFT's layout"):
        merge_adapter(FILE, tmp_path / "b", tmp_path / "out.gguf", "f16")
    with pytest.raises(DataError, match=r"no tensor 'blk\.9' that could be replaced"):
        rewrite_gguf(FILE, tmp_path / "x.gguf", {"blk.9": Replacement("F32", lambda: iter(()))})
    only = {"output_norm.weight": Replacement("F32", lambda: iter(()))}
    with pytest.raises(DataError, match=r"0 bytes were made for 'output_norm.weight', expected"):
        rewrite_gguf(FILE, tmp_path / "x.gguf", only)
    assert not (tmp_path / "x.gguf").exists()


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    small = small_llama(tmp_path / "small.gguf")
    name = "model.layers.0.mlp.up_proj"
    tensors = {
        peft_name(name, "A"): np.ones((1, 8), np.float32),
        peft_name(name, "B"): np.ones((16, 1), np.float32),
    }
    save_adapter(tmp_path / "a", AdapterConfig(1, 1.0, (name,)), tensors)
    with pytest.raises(DataError, match="has 8 numbers, expected whole blocks of 32 for Q8_0"):
        merge_adapter(small, tmp_path / "a", tmp_path / "out.gguf", "q8_0")


def small_llama(path: Path) -> GgufFile:
    """One layer of width 8."""
    writer = GGUFWriter(path, "llama")
    for key, value in {
        "embedding_length": 8, "feed_forward_length": 16, "block_count": 1,
        "attention.head_count": 2, "attention.head_count_kv": 1, "context_length": 32,
        "vocab_size": 4,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    shapes = {
        "token_embd": (4, 8), "output_norm": (8,), "blk.0.attn_norm": (8,), "blk.0.attn_q": (8, 8),
        "blk.0.attn_k": (4, 8), "blk.0.attn_v": (4, 8), "blk.0.attn_output": (8, 8),
        "blk.0.ffn_norm": (8,), "blk.0.ffn_gate": (16, 8), "blk.0.ffn_up": (16, 8),
        "blk.0.ffn_down": (8, 16),
    }  # fmt: skip
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(path)
    llama_hyper(file)
    return file


def test_a_delta_is_added_to_the_rows_it_belongs_to() -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal(shape, np.float32) for shape in ((2, 4), (5, 2)))
    base = rng.standard_normal((2, 4), np.float32)
    got = Delta(a, b, 0.5).merged(base, first=3)
    np.testing.assert_allclose(got, base + 0.5 * b[3:] @ a, rtol=1e-6)
