"""A participant's process, asked over pipes, with a limit on time and address space."""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
from typing import Any, final

from benchmarks.machine import ROOT, process_seconds

# Variables that say where vkjit, what uses the XDG folders, and PyTorch keep compiled code.
CACHES = ("VKJIT_CACHE_DIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR")


@final
class Process:
    """Runs ``benchmarks.worker`` in a given Python; `dead` says why it answers no more.

    `caches` is where compilers keep what they made; an empty folder makes the first call cold.
    """

    def __init__(
        self, python: str, participant: tuple[str, str], limit: float, caches: str = ""
    ) -> None:
        self.dead = ""
        self._limit = limit
        trace = None if os.environ.get("VKJIT_BENCH_TRACE") else subprocess.DEVNULL
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.worker", *participant],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=trace,
            cwd=ROOT,
            env={**os.environ, **{name: caches for name in CACHES if caches}},
            text=True,
        )

    def cap_memory(self, gib: float) -> None:
        """Limits the address space: a compiler that explodes must not take the machine along."""
        size = int(gib * 2**30)
        resource.prlimit(self._process.pid, resource.RLIMIT_AS, (size, size))

    def seconds(self) -> float:
        """Processor seconds spent so far; zero when it is gone."""
        return 0.0 if self.dead else process_seconds(self._process.pid)

    def ask(self, command: str, **fields: Any) -> dict[str, Any]:
        """The answer to a command: fields with ``ok``, and ``failure`` where that is false."""
        if not self.dead:
            try:
                self._stdin.write(json.dumps({"command": command, **fields}) + "\n")
                self._stdin.flush()
            except BrokenPipeError:
                self.dead = "process died"
        return self.read()

    def read(self) -> dict[str, Any]:
        """The next answer, or a failure when the process dies or exceeds its time."""
        if self.dead:
            return {"ok": False, "failure": self.dead}
        stdout = self._process.stdout
        assert stdout is not None
        ready, _, _ = select.select([stdout], [], [], self._limit)
        line = stdout.readline() if ready else ""
        if line:
            return json.loads(line)
        self.dead = "process died" if ready else f"no answer in {self._limit:.0f} s"
        self._process.kill()
        self._process.wait()
        return {"ok": False, "failure": self.dead}

    def close(self) -> None:
        """Ends the process."""
        if self._process.poll() is None:
            self._stdin.close()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self.dead = self.dead or "closed"
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    @property
    def _stdin(self) -> Any:
        assert self._process.stdin is not None
        return self._process.stdin
