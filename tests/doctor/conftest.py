"""A software Vulkan device, and climbs in this process."""

from __future__ import annotations

import gc

import pytest

from vkjit.device_array import default_device
from vkjit.doctor.ladder import STAGES, run_stage
from vkjit.doctor.session import Session
from vkjit.lowering.target import Addressing
from vkjit.runtime import get_device


@pytest.fixture(scope="module")
def vulkan():
    """A device of its own, with device addresses."""
    try:
        from vkjit.runtime.vulkan import open_device  # noqa: PLC0415  needs a Vulkan loader
        from vkjit.runtime.vulkan.instance import instance  # noqa: PLC0415
    except OSError as error:
        pytest.skip(f"no Vulkan loader: {error}")
    if not instance().physical_devices():
        pytest.skip("no Vulkan driver")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VKJIT_VULKAN_ADDRESSING", Addressing.DEVICE_ADDRESS.value)
        device = open_device("vulkan:0")
    yield device
    device.close()
    gc.collect()
    assert device.live_objects() == {}


def climbed(device, names, box: float, plant: str | None = None):
    """Results of some stages, quick, against ``cpu``."""
    session = Session(device, get_device("cpu"), quick=True, plant=plant)
    with default_device("cpu"):
        return [run_stage(session, stage, box) for stage in STAGES if stage.name in names]
