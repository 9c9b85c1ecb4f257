"""ggml's blocks and their numbers, as computed by its own C functions."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vkjit.blocks import BlockType

GOLDEN = np.load(Path(__file__).parent / "data" / "quant" / "blocks.npz")
"""``source`` [3, 512] float32 and of each type its quantized bytes and their numbers."""


def golden_blocks(block_type: BlockType, part: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Blocks [rows, n] and their numbers [rows, n * size]; ``random_`` ones are arbitrary bits."""
    name = block_type.name
    raw = np.ascontiguousarray(GOLDEN[f"{name}.{part}raw"])
    return raw.view(block_type.dtype), GOLDEN[f"{name}.{part}dequantized"]
