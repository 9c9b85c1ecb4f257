"""Settings shared by all tests: hypothesis profiles, the device argument, shared data.

`device` runs a test once per device that this machine offers: ``reference``, ``cpu`` and every
Vulkan device found, lavapipe included, with device addresses and once more with descriptors under
the validation layer (tests/watched.py). ``VKJIT_TEST_DEVICES=cpu,vulkan:0`` narrows the list.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import hypothesis
import pytest

CI = os.environ.get("CI", "").lower() not in ("", "0", "false")
SHARED = Path(__file__).resolve().parents[2] / "shared"

# Read when vkjit is imported: every kernel is verified before it is legalized, too.
os.environ.setdefault("VKJIT_DEBUG", "1")

pytest_plugins = ["tests.watched"]  # imported after this module: it imports vkjit

_QUIET = (hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large)
# ci: the same examples on every run, so that a red build means a changed program.
hypothesis.settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    max_examples=20,
    database=None,
    print_blob=True,
    suppress_health_check=_QUIET,
)
hypothesis.settings.register_profile(
    "dev", deadline=None, max_examples=20, suppress_health_check=_QUIET
)
hypothesis.settings.register_profile(
    "thorough", deadline=None, max_examples=1000, suppress_health_check=_QUIET
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if CI else "dev"))


@functools.cache
def _devices() -> tuple[str, ...]:
    """Names of the devices that tests run on, cheapest first."""
    chosen = os.environ.get("VKJIT_TEST_DEVICES")
    if chosen:
        return tuple(name.strip() for name in chosen.split(","))
    from vkjit.runtime import available_devices  # noqa: PLC0415  starts the Vulkan loader

    found = available_devices()
    return (*found, *(f"{name}+descriptors" for name in found if name.startswith("vulkan:")))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames and not _parametrized(metafunc, "device"):
        metafunc.parametrize("device", _devices(), indirect=True, scope="session")


def _parametrized(metafunc: pytest.Metafunc, name: str) -> bool:
    """True if the test or its class lists its own values for the argument `name`."""
    marks = metafunc.definition.iter_markers("parametrize")
    return any(name in str(mark.args[0]).replace(" ", "").split(",") for mark in marks)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The sibling folder with reference data that nobody here computed; skips without it."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared folder beside the checkout: its reference data is not there")
    return SHARED
