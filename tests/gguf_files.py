"""Small GGUF files that tests write, whole or broken in one place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType, GGUFWriter


def write_gguf(
    path: Path, architecture: str, settings: Mapping[str, Any], tensors: Mapping[str, Any]
) -> Path:
    """Writes a file.

    Args:
        path: Of the file.
        architecture: Value of ``general.architecture``.
        settings: Integers, floats and texts by their whole keys.
        tensors: Arrays, pairs of raw blocks and the name of their type, or None to leave one out.
    """
    writer = GGUFWriter(path, architecture)
    for key, value in settings.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key, value)
    for name, value in tensors.items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[0], raw_dtype=GGMLQuantizationType[value[1]])
        elif value is not None:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
