"""One participant's process: reads a JSON command a line, answers a JSON line.

| command | fields | answer |
|---|---|---|
| prepare | module, case | seconds to build and of the first call |
| check | | largest relative error against float64, or null |
| time | budget, most | seconds per call, a list of samples |
| memory | | bytes resident (on a GPU: allocated) before, at the peak of two calls, predicted |
| stages | | seconds of tracing and lowering |
| rates | | on a GPU: bytes and operations a second, by dtype |
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, final

from benchmarks import memory
from benchmarks.case import Case, Check, numpy_namespace
from benchmarks.frameworks import ArrayHost, Job, make_host

# A sample lasts at least this long, so that the clock's grain does not show.
SAMPLE_SECONDS = 0.02


@final
class Worker:
    """The case in hand of one framework."""

    def __init__(self, name: str, device: str) -> None:
        self._host = make_host(name, device)
        self._is_gpu = device != "cpu"
        self._module: Any = None
        self._case: Case | None = None
        self._job: Job | None = None

    def hello(self) -> dict[str, Any]:
        return {"versions": self._host.versions()}

    def prepare(self, module: str, case: str) -> dict[str, Any]:
        self._job = None
        gc.collect()
        self._module = importlib.import_module(f"benchmarks.{module}")
        self._case = found = next(c for c in self._module.CASES if c.name == case)
        start = time.perf_counter()
        self._job = job = self._host.prepare(self._module, found)
        built = time.perf_counter()
        job.call()
        job.wait()
        return {"build_s": built - start, "first_s": time.perf_counter() - built}

    def check(self) -> dict[str, Any]:
        case, job = self._current()
        losses = []
        if case.kind == "step":
            losses = [float(job.outputs()[0])]
            for _ in range(2):
                job.call()
                job.wait()
                losses.append(float(job.outputs()[0]))
        if not case.check:
            return {"error": None, "losses": losses}
        if case.kind == "step":
            job = self._host.differentiated(self._module, case)
            job.call()
            job.wait()
        program = self._module.program(numpy_namespace(), case)
        rows = getattr(self._module, "sampled_rows", _all_rows)(case)
        judge = Check(case, program, self._module.inputs(case), rows)
        return {"error": judge.error(job.outputs()), "losses": losses}

    def time(self, budget: float, most: int) -> dict[str, Any]:
        """On the CPU each call is waited for, so that no framework overlaps independent calls.

        A GPU runs calls one after the other anyway; there only the last one of a sample is.
        """
        _, job = self._current()

        def once() -> None:
            job.call()
            job.wait()

        def sample(count: int) -> float:
            if not self._is_gpu:
                return _seconds(once, count)
            start = time.perf_counter()
            for _ in range(count):
                job.call()
            job.wait()
            return (time.perf_counter() - start) / count

        inner = max(1, min(1000, int(SAMPLE_SECONDS / max(sample(1), 1e-7))))
        samples: list[float] = []
        while len(samples) < most and (sum(samples) * inner < budget or len(samples) < 3):
            samples.append(sample(inner))
        return {"samples": samples}

    def memory(self) -> dict[str, Any]:
        _, job = self._current()
        gc.collect()
        if self._is_gpu:
            before, peak = self._host.device_memory()
            return {"before": before, "peak": peak, "predicted": job.predicted()}
        memory.trim()
        memory.reset_peak()
        before = memory.resident()
        for _ in range(2):
            job.call()
            job.wait()
        return {"before": before, "peak": memory.peak(), "predicted": job.predicted()}

    def stages(self) -> dict[str, Any]:
        case, _ = self._current()
        if not isinstance(self._host, ArrayHost):
            return {}
        return dict(self._host.stages(self._module, case))

    def rates(self) -> dict[str, Any]:
        return {"rates": self._host.rates()}

    def drop(self) -> dict[str, Any]:
        self._job = None
        gc.collect()
        return {}

    def _current(self) -> tuple[Case, Job]:
        if self._case is None or self._job is None:
            raise RuntimeError("worker: no case is prepared")
        return self._case, self._job


def _all_rows(_case: Case) -> None:
    return None


def _seconds(function: Callable[[], None], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        function()
    return (time.perf_counter() - start) / times


def _answer(action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return {"ok": True, **action()}
    except Exception as error:
        if os.environ.get("VKJIT_BENCH_TRACE"):
            raise
        return {"ok": False, "failure": f"{type(error).__name__}: {str(error).strip()[:300]}"}


def main() -> None:
    """Serves commands until the input ends."""
    protocol = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # frameworks that print do so on stderr
    name, device = sys.argv[1:3]
    held: list[Worker] = []

    def start() -> dict[str, Any]:
        held.append(Worker(name, device))
        return held[0].hello()

    def say(answer: dict[str, Any]) -> None:
        protocol.write(json.dumps(answer) + "\n")
        protocol.flush()

    hello = _answer(start)
    say(hello)
    if not hello["ok"]:
        return
    for line in sys.stdin:
        query = json.loads(line)
        command = getattr(held[0], query.pop("command"))
        say(_answer(lambda command=command, query=query: command(**query)))


if __name__ == "__main__":
    main()
