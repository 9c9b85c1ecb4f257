"""A staged check of a device against the host, for hardware that nobody has tried yet.

``vkjit doctor`` and ``python -m vkjit.doctor`` climb from transfers to whole training steps; each
stage runs on the device and on ``cpu`` with the same values and says what is off, by how much and
what to do. The second form needs only NumPy and what the device needs. ``docs/doctor.md`` tells how
to read the result.
"""

from __future__ import annotations

from vkjit.doctor.cli import Options, diagnose, main
from vkjit.doctor.ladder import STAGES

__all__ = ["STAGES", "Options", "diagnose", "main"]
