"""Stage ``transfer``: bytes go to the device and come back the same."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from vkjit.doctor.session import Session

_STAGING = 16 << 20
"""Bytes of one staging copy of the Vulkan runtime: larger transfers go in parts."""
_SIZES = (0, 1, 3, 4, 255, 4097, 65_537, _STAGING - 1, _STAGING + 3)
_LARGE = (2 * _STAGING, 5 * _STAGING + 1)
_DTYPES = (np.bool_, np.int8, np.uint16, np.int32, np.float16, ml_dtypes.bfloat16, np.float32)


def transfer(session: Session) -> None:
    """Sizes around the staging chunk, every dtype, many arrays in flight, memory used again."""
    for size in session.cases(_SIZES if session.quick else _SIZES + _LARGE):
        values = session.rng.integers(0, 256, size, np.uint8)
        buffer = session.device.upload(values)
        session.compare(f"{size} bytes", session.device.download(buffer, np.uint8, (size,)), values)
        buffer.release()
    for kind in _DTYPES:
        values = (session.rng.integers(0, 64, (5, 7)) + 1).astype(kind)
        buffer = session.device.upload(values)
        got = session.device.download(buffer, values.dtype, values.shape)
        session.compare(f"5 x 7 of {values.dtype}", got, values)
        part = session.device.download(buffer, values.dtype, (3,))
        session.compare(f"first 3 of {values.dtype}", part, values.reshape(-1)[:3])
    _in_flight(session)


def _in_flight(session: Session) -> None:
    """Uploads that follow each other without a wait, into memory that was just given back."""
    for turn in session.cases(range(3)):
        arrays = [session.rng.integers(0, 1 << 31, 1 << 14, np.int32) for _ in range(32)]
        buffers = [session.device.upload(values) for values in arrays]
        for number in reversed(range(32)):
            got = session.device.download(buffers[number], np.int32, (1 << 14,))
            session.compare(f"array {number} of 32, turn {turn}", got, arrays[number])
            buffers[number].release()
