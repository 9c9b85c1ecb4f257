"""GGUF model files: metadata, tensors, and the Llama architecture by name.

The format and the block layouts are those of ggml; parsing and dequantisation are the ``gguf``
library's. This module adds what the library leaves open: errors that say which file, what was found
and what was expected, the completeness check, tensors that are arrays of blocks over the mapped
file, and the row order of the query and key projections.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, final, get_args, overload

import ml_dtypes
import numpy as np
from gguf import GGUFReader, ReaderTensor, quants
from numpy.typing import DTypeLike, NDArray

from vkjit.blocks import BLOCK_TYPES
from vkjit.errors import ArgumentError, DataError

from .smollm2 import find_smollm2

__all__ = [
    "LAYER_NAMES",
    "SUPPORTED_ARCHITECTURES",
    "SUPPORTED_TYPES",
    "GgufFile",
    "HostWeight",
    "LlamaHyper",
    "WeightFormat",
    "check_format",
    "find_smollm2",
    "llama_hyper",
    "llama_weights",
    "open_gguf",
    "permute_rows",
    "read_llama",
    "unpermute_rows",
]

SUPPORTED_ARCHITECTURES: tuple[str, ...] = ("llama",)
"""Values of ``general.architecture`` that :func:`read_llama` accepts."""

SUPPORTED_TYPES: tuple[str, ...] = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0",
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
"""Tensor types that :meth:`GgufFile.load_tensor` expands."""

WeightFormat: TypeAlias = Literal["packed", "float32", "bfloat16", "float16"]
"""How weights are held: "packed" as they lie in the file, else all matrices in one float type."""

_FLOATS: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16),
}  # fmt: skip
_FILE_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_MAGIC = b"GGUF"
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Hugging Face names of a block's modules by their names in the file (``blk.N.<name>``)."""


@final
@dataclass(frozen=True)
class LlamaHyper:
    """Sizes and constants of a Llama-shaped model, as its file states them.

    Args:
        vocab_size: rows of the embedding matrix.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated MLP.
        layers: number of blocks.
        heads: query heads per block.
        kv_heads: key and value heads per block; divides ``heads``.
        head_dim: width of one head; even, all of it rotated by RoPE.
        rope_theta: base of the RoPE frequencies.
        rms_eps: added to the mean square inside every RMS norm.
        tied: the output head is the embedding matrix.
        context_length: longest window, in tokens, that the model was trained for.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    rms_eps: float
    tied: bool
    context_length: int


@final
@dataclass(frozen=True)
class HostWeight:
    """One weight of a model on the host.

    Args:
        name: Its Hugging Face name.
        kind: The type that it has in the file.
        value: Numbers, or blocks: an array of a block dtype (:mod:`vkjit.blocks`) whose last axis
            counts blocks. Over the mapped file where nothing was copied.
        file_bytes: What it takes in the file.
        copied_bytes: What was written on the host to make ``value``; 0 over the mapping.
    """

    name: str
    kind: str
    value: NDArray[Any]
    file_bytes: int
    copied_bytes: int


@final
@dataclass(frozen=True)
class GgufFile:
    """An open GGUF: metadata as plain Python values, tensors mapped from disk until loaded."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, ReaderTensor]

    @property
    def architecture(self) -> str:
        """Value of ``general.architecture``."""
        return self.text("general.architecture")

    def load_tensor(self, name: str) -> NDArray[np.float32]:
        """Expand one tensor to float32, in row-major (outermost first) shape.

        Raises:
            DataError: no such tensor, or its type is not in :data:`SUPPORTED_TYPES`.
        """
        tensor = self._find(name)
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        return np.array(values, np.float32, order="C").reshape(_shape(tensor))

    def map_tensor(self, name: str) -> NDArray[Any] | None:
        """One tensor as it lies in the mapped file; None where its type is no dtype of vkjit.

        Its elements are numbers (F32, F16, BF16) or blocks: ``(rows, blocks of a row)``.

        Raises:
            DataError: As :meth:`load_tensor`.
        """
        tensor = self._find(name)
        kind, shape = tensor.tensor_type.name, _shape(tensor)
        raw = cast("NDArray[Any]", tensor.data).reshape(-1).view(np.uint8)
        if kind in _FLOATS:
            return raw.view(_FLOATS[kind]).reshape(shape)
        if kind not in BLOCK_TYPES:
            return None
        block = BLOCK_TYPES[kind]
        return raw.view(block.dtype).reshape(*shape[:-1], shape[-1] // block.size)

    def in_format(self, name: str, wanted: WeightFormat) -> tuple[NDArray[Any], int]:
        """A tensor in a format, and the bytes that were written to make it.

        With "packed" it is what :meth:`map_tensor` gives, or float32 where that is None.
        """
        mapped = self.map_tensor(name)
        dtype = None if wanted == "packed" else _FLOATS[_FILE_NAMES[wanted]]
        if mapped is not None and dtype in (None, mapped.dtype):
            return mapped, 0
        value = self.load_tensor(name)
        copied = value.nbytes
        if dtype is not None and dtype != value.dtype:
            value = value.astype(dtype)
            copied += value.nbytes
        return value, copied

    def check_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse the file unless it holds exactly the tensors ``shapes``, of supported types."""
        missing = [name for name in shapes if name not in self.tensors]
        foreign = [name for name in self.tensors if name not in shapes]
        for word, names in (("lacks", missing), ("has unexpected", foreign)):
            if names:
                raise DataError(
                    f"gguf: {self.path} {word} {len(names)} tensors ({', '.join(names[:4])}), "
                    f"expected the {len(shapes)} of a {self.architecture} with the sizes in its "
                    "metadata"
                )
        for name, shape in shapes.items():
            found = _shape(self.tensors[name])
            if found != shape:
                raise DataError(
                    f"gguf: tensor {name!r} of {self.path} has shape {found}, expected {shape} "
                    "from the sizes in its metadata"
                )
        for tensor in self.tensors.values():
            self._require_type(tensor)

    def _find(self, name: str) -> ReaderTensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise DataError(
                f"gguf: {self.path} has no tensor {name!r}, it holds {len(self.tensors)} others; "
                f"the file is incomplete or of another architecture"
            )
        self._require_type(tensor)
        return tensor

    def _require_type(self, tensor: ReaderTensor) -> None:
        kind = tensor.tensor_type.name
        if kind not in SUPPORTED_TYPES:
            raise DataError(
                f"gguf: tensor {tensor.name!r} of {self.path} has type {kind}, expected one of "
                f"{', '.join(SUPPORTED_TYPES)}; convert the file to a supported type"
            )

    def text(self, key: str) -> str:
        """Metadata value that must be a string."""
        return self._value(key, str, "a string")

    def integer(self, key: str, default: int | None = None) -> int:
        """Metadata value that must be an integer; ``default`` when the key is absent."""
        if default is not None and key not in self.metadata:
            return default
        return self._value(key, int, "an integer")

    def number(self, key: str, default: float | None = None) -> float:
        """Metadata value that must be a number; ``default`` when the key is absent."""
        if default is not None and key not in self.metadata:
            return default
        return float(self._value(key, (int, float), "a number"))

    @overload
    def array(self, key: str, kind: Literal["string"]) -> list[str]: ...
    @overload
    def array(self, key: str, kind: Literal["integer"]) -> list[int]: ...
    def array(self, key: str, kind: Literal["string", "integer"]) -> list[str] | list[int]:
        """Metadata value that must be an array of strings or of integers."""
        values = self._value(key, list, f"an array of {kind}s")
        wanted = str if kind == "string" else int
        if not all(isinstance(value, wanted) for value in values):
            raise DataError(f"gguf: {key} of {self.path} is mixed, expected an array of {kind}s")
        return values

    def _value(self, key: str, types: type | tuple[type, ...], wanted: str) -> Any:
        if key not in self.metadata:
            raise DataError(f"gguf: {self.path} lacks the metadata key {key}, expected {wanted}")
        value = self.metadata[key]
        if not isinstance(value, types) or isinstance(value, bool):
            raise DataError(
                f"gguf: {key} of {self.path} is {type(value).__name__}, expected {wanted}"
            )
        return value


@final
class _Reader(GGUFReader):
    """The library's reader, whose small reads slice a plain array.

    It makes 250,000 of them for a vocabulary; slices of a memory map cost five times as much.
    """

    def _get(
        self,
        offset: int,
        dtype: DTypeLike,
        count: int = 1,
        override_order: Literal["I", "S", "<"] | None = None,
    ) -> NDArray[Any]:
        order = self.byte_order if override_order is None else override_order
        of = np.dtype(dtype).newbyteorder(order)
        plain: NDArray[np.uint8] = self.__dict__.setdefault("_plain", self.data.view(np.ndarray))
        return plain[offset : offset + int(count) * of.itemsize].view(of)


def open_gguf(path: Path | str) -> GgufFile:
    """Map a GGUF file and read its header; tensor data stay on disk until asked for.

    Raises:
        DataError: the file is missing, is not a GGUF, or ends before the data its header describes.
    """
    path = Path(path)
    try:
        with path.open("rb") as handle:
            magic = handle.read(len(_MAGIC))
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"gguf: cannot read {path}: {error.strerror}, expected a GGUF file") from (
            error
        )
    if magic != _MAGIC:
        raise DataError(
            f"gguf: {path} starts with {magic!r}, expected {_MAGIC!r}; it is not a GGUF model file"
        )
    try:
        reader = _Reader(path)
        metadata = {field.name: field.contents() for field in reader.fields.values()}
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError, TypeError) as error:
        # the library has no exception of its own: these are what slicing past the end gives
        raise DataError(
            f"gguf: {path} ({size} bytes) is truncated or damaged, expected the data its header "
            f"describes ({error}); fetch the file again"
        ) from error
    return GgufFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})


def read_llama(
    source: Path | str | GgufFile, weights: WeightFormat = "float32"
) -> tuple[LlamaHyper, dict[str, NDArray[Any]]]:
    """Sizes and weights of a Llama-architecture GGUF, by Hugging Face name.

    The weights are those of :func:`llama_weights`, all at once: with the default on the host in
    float32, with "packed" mostly over the mapped file.

    Raises:
        ArgumentError: ``weights`` is none of the formats.
        DataError: unsupported architecture, tensor type or RoPE scaling; missing, foreign or
            misshapen tensors.
    """
    file = source if isinstance(source, GgufFile) else open_gguf(source)
    hyper = llama_hyper(file)
    return hyper, {weight.name: weight.value for weight in llama_weights(file, hyper, weights)}


def llama_hyper(file: GgufFile) -> LlamaHyper:
    """Sizes and constants of a Llama-architecture file whose tensors are all there.

    Raises:
        DataError: As :func:`read_llama`.
    """
    if file.architecture not in SUPPORTED_ARCHITECTURES:
        raise DataError(
            f"gguf: {file.path} has architecture {file.architecture!r}, expected one of "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}; choose another model"
        )
    hyper = _hyper(file)
    file.check_tensors(dict(_expected_tensors(hyper)))
    return hyper


def llama_weights(file: GgufFile, hyper: LlamaHyper, weights: WeightFormat) -> Iterator[HostWeight]:
    """The weights of a file that :func:`llama_hyper` accepted, one after the other.

    Matrices are (out, in). The rows of ``q_proj`` and ``k_proj`` are put into Hugging Face order
    (:func:`unpermute_rows`), so that RoPE pairs (j, j + head_dim/2) and adapters need no order of
    their own: packed files are copied there, and nowhere else, a row of blocks at a time.
    ``lm_head.weight`` is present only when the model is not tied.

    With "packed" tensors stay what they are in the file; a type that is no dtype of vkjit (IQ4_NL,
    Q2_K, ...) is expanded to float32. With a float type matrices become it and vectors (the norms)
    float32.

    Raises:
        ArgumentError: ``weights`` is none of the formats.
    """
    check_format("read_llama", weights)
    for name, shape in _expected_tensors(hyper):
        tensor = file.tensors[name]
        wanted = weights if len(shape) > 1 or weights == "packed" else "float32"
        value, copied = file.in_format(name, wanted)
        heads = hyper.heads if ".attn_q." in name else hyper.kv_heads if ".attn_k." in name else 0
        if heads:
            value = unpermute_rows(value, heads)
            copied += value.nbytes
        kind, size = tensor.tensor_type.name, int(tensor.n_bytes)
        yield HostWeight(_hugging_face_name(name), kind, value, size, copied)


def check_format(op: str, weights: str) -> None:
    """Refuse what is no :data:`WeightFormat`, in the name of ``op``."""
    if weights not in get_args(WeightFormat):
        raise ArgumentError(
            f"{op}: weights={weights!r} was given, expected one of "
            f"{', '.join(get_args(WeightFormat))}"
        )


def unpermute_rows(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows of a query or key projection from GGUF order to Hugging Face order.

    GGUF row 2j+s of a head (s = 0, 1) is Hugging Face row s*D/2 + j: llama.cpp rotates neighbours,
    Hugging Face rotates halves. ``weight`` is (heads*D, in) or an adapter's B, (heads*D, r).
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def permute_rows(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Inverse of :func:`unpermute_rows`: Hugging Face order to GGUF order."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def _hyper(file: GgufFile) -> LlamaHyper:
    hidden = file.integer("llama.embedding_length")
    heads = file.integer("llama.attention.head_count")
    kv_heads = file.integer("llama.attention.head_count_kv", heads)
    if heads <= 0 or kv_heads <= 0 or heads % kv_heads or hidden <= 0:
        raise DataError(
            f"gguf: {file.path} states width {hidden}, {heads} heads and {kv_heads} kv heads, "
            f"expected positive numbers with heads a multiple of kv heads"
        )
    head_dim = file.integer("llama.attention.key_length", hidden // heads)
    _check_variant(file, head_dim)
    embedding = file.tensors.get("token_embd.weight")
    vocab = file.integer("llama.vocab_size", _shape(embedding)[0] if embedding is not None else 0)
    return LlamaHyper(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=file.integer("llama.feed_forward_length"),
        layers=file.integer("llama.block_count"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=file.number("llama.rope.freq_base", 10000.0),
        rms_eps=file.number("llama.attention.layer_norm_rms_epsilon"),
        tied="output.weight" not in file.tensors,
        context_length=file.integer("llama.context_length"),
    )


def _check_variant(file: GgufFile, head_dim: int) -> None:
    """Refuse what would load and compute something else: partial RoPE, scaling, experts."""
    rotated = file.integer("llama.rope.dimension_count", head_dim)
    value_dim = file.integer("llama.attention.value_length", head_dim)
    scaling = file.metadata.get("llama.rope.scaling.type", "none")
    experts = file.integer("llama.expert_count", 0)
    found = []
    if rotated != head_dim or head_dim % 2:
        found.append(
            f"RoPE over {rotated} of {head_dim} dimensions (supported: all, an even number)"
        )
    if value_dim != head_dim:
        found.append(
            f"value heads of {value_dim} beside key heads of {head_dim} (supported: equal)"
        )
    if scaling != "none" or "rope_freqs.weight" in file.tensors:
        found.append(f"RoPE scaling {scaling!r} (supported: none)")
    if experts:
        found.append(f"{experts} experts (supported: dense MLP)")
    if found:
        raise DataError(f"gguf: {file.path} uses {'; '.join(found)}; choose another model")


def _expected_tensors(hyper: LlamaHyper) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, ff = hyper.hidden_size, hyper.intermediate_size
    q, kv = hyper.heads * hyper.head_dim, hyper.kv_heads * hyper.head_dim
    shapes = {
        "attn_norm": (d,), "attn_q": (q, d), "attn_k": (kv, d), "attn_v": (kv, d),
        "attn_output": (d, q), "ffn_norm": (d,), "ffn_gate": (ff, d), "ffn_up": (ff, d),
        "ffn_down": (d, ff),
    }  # fmt: skip
    yield "token_embd.weight", (hyper.vocab_size, d)
    for layer in range(hyper.layers):
        for kind, shape in shapes.items():
            yield f"blk.{layer}.{kind}.weight", shape
    yield "output_norm.weight", (d,)
    if not hyper.tied:
        yield "output.weight", (hyper.vocab_size, d)


def _hugging_face_name(name: str) -> str:
    top = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if name in top:
        return top[name]
    _, layer, kind, _ = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[kind]}.weight"


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))
