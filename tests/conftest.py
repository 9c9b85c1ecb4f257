"""Settings shared by all tests: hypothesis profiles and shared data; devices: tests/devices.py."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

CI = os.environ.get("CI", "").lower() not in ("", "0", "false")
SHARED = Path(__file__).resolve().parents[2] / "shared"

# Read when vkjit is imported: every kernel is verified before it is legalized, too.
os.environ.setdefault("VKJIT_DEBUG", "1")

pytest_plugins = ["tests.devices"]  # imported after this module: it imports vkjit

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


@pytest.fixture(scope="session")
def shared() -> Path:
    """The sibling folder with reference data that nobody here computed; skips without it."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared folder beside the checkout: its reference data is not there")
    return SHARED
