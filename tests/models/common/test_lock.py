"""A folder that one process holds at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vkjit.errors import ConfigError
from vkjit_models.common.lock import sole_user

HOLD = """
import sys
from pathlib import Path
from vkjit_models.common.lock import sole_user
with sole_user(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_held_folder_is_refused_and_free_again_after_a_kill(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder:
        holder.stdout.readline()
        want = f"process {holder.pid} is training in .*set another output.folder"
        with pytest.raises(ConfigError, match=want), sole_user(folder):
            pass
        holder.kill()
    with sole_user(folder):
        pass
    with sole_user(folder):
        pass
