"""A GGUF file written again with some tensors replaced, everything else byte for byte.

Metadata (tokenizer, chat template, sizes) are copied as bytes, never decoded and encoded again; the
one value that may change is ``general.file_type``, which names the type of most weights. Tensors
keep their order. Data go from the mapped file to the new one in pieces: memory stays that of one
piece, whatever the size of the file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast, final

import numpy as np
from gguf import GGMLQuantizationType, LlamaFileType, ReaderTensor

from vkjit.errors import DataError

from .atomic import replacing, write_all
from .gguf import GgufFile
from .tensor_rows import row_bytes

Piece: TypeAlias = bytes | memoryview
"""A run of bytes of a tensor."""

_HEADER = struct.Struct("<4sIQQ")  # magic, version, number of tensors, number of keys
_FILE_TYPE = struct.pack("<Q", 17) + b"general.file_type" + struct.pack("<I", 4)
_FILE_TYPES = {
    "F32": LlamaFileType.ALL_F32, "F16": LlamaFileType.MOSTLY_F16,
    "BF16": LlamaFileType.MOSTLY_BF16, "Q4_0": LlamaFileType.MOSTLY_Q4_0,
    "Q4_1": LlamaFileType.MOSTLY_Q4_1, "Q5_0": LlamaFileType.MOSTLY_Q5_0,
    "Q5_1": LlamaFileType.MOSTLY_Q5_1, "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q4_K": LlamaFileType.MOSTLY_Q4_K_S, "Q5_K": LlamaFileType.MOSTLY_Q5_K_S,
    "Q6_K": LlamaFileType.MOSTLY_Q6_K,
}  # fmt: skip


@final
@dataclass(frozen=True)
class Replacement:
    """What a tensor becomes, its shape staying.

    Args:
        kind: The new type, as ``GGMLQuantizationType`` spells it.
        pieces: Gives the new data in order, called once.
    """

    kind: str
    pieces: Callable[[], Iterator[Piece]]


def rewrite_gguf(file: GgufFile, path: Path, replaced: Mapping[str, Replacement]) -> int:
    """Writes ``file`` to ``path`` with some tensors replaced; returns the bytes written.

    The new file takes its place when it is complete, or not at all.

    Raises:
        DataError: ``path`` is the file itself, a name is no tensor of it, the file is big-endian,
            or pieces are not as long as type and shape say.
        OSError: The file cannot be written.
    """
    if path.exists() and path.samefile(file.path):
        raise DataError(
            f"gguf: {path} is the file that is read, expected another name; choose one for the "
            "result"
        )
    unknown = sorted(replaced.keys() - file.tensors.keys())
    if unknown:
        raise DataError(f"gguf: {file.path} has no tensor {unknown[0]!r} that could be replaced")
    alignment = file.integer("general.alignment", 32)
    kinds = {name: _kind(file, name, replaced) for name in file.tensors}
    infos, sizes = _infos(file, kinds, alignment)
    with replacing(path) as partial, partial.open("wb") as out:
        out.write(_head(file, kinds))
        out.write(infos)
        _pad(out, alignment)
        for name, tensor in file.tensors.items():
            pieces = replaced[name].pieces() if name in replaced else _as_it_is(tensor)
            begin = out.tell()
            for piece in pieces:
                write_all(out, piece)
            if out.tell() - begin != sizes[name]:
                raise DataError(
                    f"gguf: {out.tell() - begin} bytes were made for {name!r}, expected "
                    f"{sizes[name]} of {kinds[name]}; this is a fault of the program"
                )
            _pad(out, alignment)
        return out.tell()


def _kind(file: GgufFile, name: str, replaced: Mapping[str, Replacement]) -> str:
    return replaced[name].kind if name in replaced else file.tensors[name].tensor_type.name


def _as_it_is(tensor: ReaderTensor) -> Iterator[Piece]:
    yield memoryview(cast("Any", tensor.data).reshape(-1).view(np.uint8))


def _head(file: GgufFile, kinds: Mapping[str, str]) -> bytes:
    """Everything before the tensors' descriptions: fixed header and metadata."""
    end = min(tensor.field.offset for tensor in file.tensors.values())
    with file.path.open("rb") as handle:
        head = bytearray(handle.read(end))
    magic, version, tensors, _ = _HEADER.unpack_from(head)
    if magic != b"GGUF" or version > 0xFFFF or tensors != len(file.tensors):
        raise DataError(
            f"gguf: {file.path} has version {version} and {tensors} tensors, expected a "
            "little-endian file of the tensors that were read; convert it"
        )
    at = head.find(_FILE_TYPE)
    before = {name: tensor.tensor_type.name for name, tensor in file.tensors.items()}
    if kinds != before and at >= 0:
        struct.pack_into("<I", head, at + len(_FILE_TYPE), _file_type(file, kinds))
    return bytes(head)


def _file_type(file: GgufFile, kinds: Mapping[str, str]) -> int:
    """The value of ``general.file_type`` for the type that most weights have."""
    numbers: dict[str, int] = {}
    for name, kind in kinds.items():
        numbers[kind] = numbers.get(kind, 0) + int(file.tensors[name].n_elements)
    most = max(numbers, key=lambda kind: numbers[kind])
    return int(_FILE_TYPES.get(most, file.integer("general.file_type", 0)))


def _infos(
    file: GgufFile, kinds: Mapping[str, str], alignment: int
) -> tuple[bytes, dict[str, int]]:
    """The tensors' descriptions, and the bytes of each one's data."""
    out, sizes, offset = bytearray(), dict[str, int](), 0
    for name, tensor in file.tensors.items():
        dims = [int(size) for size in tensor.shape]  # innermost first, as in the file
        raw = name.encode()
        out += struct.pack("<Q", len(raw)) + raw
        out += struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        out += struct.pack("<IQ", GGMLQuantizationType[kinds[name]], offset)
        rows = int(np.prod(dims[1:], dtype=np.int64))
        sizes[name] = row_bytes(kinds[name], dims[0]) * rows
        offset += -(-sizes[name] // alignment) * alignment
    return bytes(out), sizes


def _pad(out: BinaryIO, alignment: int) -> None:
    out.write(bytes(-out.tell() % alignment))
