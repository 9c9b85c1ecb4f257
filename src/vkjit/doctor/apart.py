"""Stages in a process of their own, so that a driver that crashes or hangs fails one stage only.

The worker writes one JSON object a line to a pipe: ``device`` once, ``start`` and ``stage`` for
each stage, then ``end``; instead of these ``fatal`` or ``wrong``. After a crash, a hang or a lost
device a new worker takes the stages that are left.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import IO, Any, final

Event = dict[str, Any]

PATIENCE = 120.0
"""Seconds beyond a stage's time after which a worker that says nothing is taken to hang."""
_LAST_WORDS = 12
"""Lines of the worker's standard error that a report keeps."""
_SOURCE = Path(__file__).resolve().parents[2]


@final
class Worker:
    """A process that runs stages; ``events`` yields what it says."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._reader, writer = os.pipe()
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed by close
        known = [str(_SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "vkjit.doctor", *arguments, "--worker", str(writer)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            pass_fds=(writer,),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(known)},
        )
        os.close(writer)

    def events(self, silence: float) -> Generator[Event]:
        """What the worker says, up to ``end``; the last event is ``gone`` if it never says that.

        It is killed when it says nothing for ``silence`` seconds.
        """
        pending = b""
        while True:
            ready, _, _ = select.select([self._reader], [], [], silence)
            if not ready:
                self._process.kill()
                yield {"gone": f"no answer for {silence:.0f} s; the process was ended"}
                return
            data = os.read(self._reader, 1 << 16)
            if not data:
                yield {"gone": self._death()}
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                event: Event = json.loads(line)
                if "end" in event:
                    return
                yield event

    def _death(self) -> str:
        """How the process ended and what it said last, for people."""
        code = self._process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._errors.seek(0)
        words = self._errors.read().decode(errors="replace").strip().splitlines()[-_LAST_WORDS:]
        return "\n".join([f"the process ended with {how}", *words])

    def close(self) -> None:
        """Ends the process if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._reader)
        self._errors.close()


@final
class Speaker:
    """The worker's end of the pipe."""

    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "w", encoding="utf-8")

    def say(self, event: Event) -> None:
        """Writes one event."""
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()
