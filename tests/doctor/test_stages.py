"""Each stage passes on a software driver and finds an error of 1% that is planted in it."""

from __future__ import annotations

import numpy as np
import pytest

from tests import devices
from tests.doctor.conftest import climbed
from vkjit.doctor import order
from vkjit.doctor.ladder import NAMES, STAGES, run_stage
from vkjit.doctor.report import Status
from vkjit.doctor.session import Session
from vkjit.errors import DeviceError
from vkjit.ir.evaluate import evaluate
from vkjit.runtime import get_device

BOX = 0.7
WATCHED = [name for name in devices.names() if name.endswith(devices.SUFFIX)]
# Checks of a stage that compare no arrays: a planted error is not theirs to find.
CONDITIONS = {"norm": 1, "attention": 2, "loss": 2, "training": 1, "precision": 1, "memory": 7}


@pytest.mark.parametrize("name", NAMES)
def test_a_stage_passes_and_finds_a_planted_error(name: str, vulkan) -> None:
    (clean,) = climbed(vulkan, [name], BOX)
    assert clean.details() == []
    assert clean.status is Status.OK
    assert clean.checks > 0
    assert clean.worst <= 1
    (planted,) = climbed(vulkan, [name], BOX, plant=name)
    assert planted.status is Status.FAILED
    assert planted.faults > 0
    assert planted.advice
    if name not in ("primitives", "reductions", "transfer"):  # those have empty results, too
        assert planted.faults >= planted.checks - CONDITIONS.get(name, 0)


@pytest.mark.parametrize("device", WATCHED, indirect=True, scope="session")
@pytest.mark.parametrize("name", [n for n in NAMES if n != "memory"])  # opens one of its own
def test_descriptors_under_the_validation_layer(name: str, device: str) -> None:
    (result,) = climbed(get_device(device), [name], BOX)
    assert result.details() == []
    assert result.checks > 0


def test_a_planted_overflow_is_found(vulkan) -> None:
    (result,) = climbed(vulkan, ["precision"], BOX, plant="overflow")
    assert result.failed
    assert "loss scale 128" in result.mismatches[0]["what"]
    assert "overflowed" in result.mismatches[0]["got"]


def test_a_plant_is_for_its_stage_only(vulkan) -> None:
    (result,) = climbed(vulkan, ["optimizer"], BOX, plant="training")
    assert result.status is Status.OK


def test_a_stale_read_spoils_every_later_round() -> None:
    rng = np.random.default_rng(0)
    start = [rng.integers(-99, 99, (64, 64), np.int32) for _ in range(2)]
    key = np.int32(5)

    def rounds(stale: int | None) -> list[np.ndarray]:
        state, before = start, start
        for turn in range(8):
            read = [before[0], state[1]] if turn == stale else state
            before, state = state, list(order_round(*read, key))
        return state

    fresh, spoiled = rounds(None), rounds(3)
    for right, wrong in zip(fresh, spoiled, strict=True):
        assert np.mean(right != wrong) > 0.5


def order_round(x, y, key):
    device = get_device("reference")
    program = order.Program(device, order.copy_then_read, (x, y, np.asarray(key)))
    return evaluate(program.lowered.program, [x, y, np.asarray(key)])


class _Gone:
    """A device that is lost at the first call."""

    name = "vulkan:9"

    def upload(self, array):
        raise DeviceError("vulkan: vkQueueSubmit failed with VK_ERROR_DEVICE_LOST")


def test_a_lost_device_is_that_stages_failure() -> None:
    session = Session(_Gone(), get_device("cpu"), quick=True)  # type: ignore[arg-type]
    result = run_stage(session, STAGES[0], BOX)
    assert result.failed
    assert result.device_lost
    assert "VK_ERROR_DEVICE_LOST" in result.details()[-4] + result.error
    assert any("dmesg" in sentence for sentence in result.advice)


def test_time_that_runs_out_is_said() -> None:
    session = Session(get_device("reference"), get_device("cpu"), quick=True)
    stage = next(s for s in STAGES if s.name == "primitives")
    result = run_stage(session, stage, 0.0)
    assert (result.status, result.done) == (Status.OK, 1)
    assert f"1 of {result.cases} cases in the time" in result.line()
