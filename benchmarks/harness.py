"""Runs a benchmark's cases over vkjit and its peers, interleaved, and records what came out.

Every participant has a process of its own, the peers in the Python given by ``--peers-python`` or
``VKJIT_PEERS_PYTHON`` (one with jax and torch; without it they are skipped, and the output says
so). A case is prepared and checked in each, then timed in rounds, one slice of one participant
after another, so that noise on the machine meets all of them. The figure to quote is the ratio.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from benchmarks import machine, report
from benchmarks.case import Case
from benchmarks.process import Process
from benchmarks.report import is_vkjit

PEERS = ("jax", "torch", "torch-compile")


@final
@dataclass(frozen=True)
class Options:
    """How to run; see `parse` for the command line."""

    device: str
    participants: tuple[str, ...]
    peers_python: str
    cases: tuple[str, ...]
    rounds: int
    budget: float
    limit: float
    memory_gib: float
    results: Path | None


@final
@dataclass
class Row:
    """What a case gave, by participant."""

    case: Case
    samples: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    first: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    errors: dict[str, float | None] = field(default_factory=dict[str, float | None])
    losses: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    memory: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    stages: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    failures: dict[str, str] = field(default_factory=dict[str, str])
    foreign: list[float] = field(default_factory=list[float])

    def wrong(self, name: str) -> bool:
        """True if the participant's result misses the case's tolerance."""
        error = self.errors.get(name)
        return error is not None and not error <= self.case.tolerance


def parse(arguments: list[str], default: tuple[str, ...]) -> Options:
    """Options from a command line; `default` are the participants of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="vkjit's device: cpu, vulkan:0, ...")
    parser.add_argument("--participants", default=",".join(default))
    parser.add_argument(
        "--peers-python",
        default=os.environ.get("VKJIT_PEERS_PYTHON", ""),
        help="the Python that has the peers (default: $VKJIT_PEERS_PYTHON)",
    )
    parser.add_argument("--cases", default="*", help="patterns of case names, with commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=0.3, help="seconds a slice")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds an answer may take")
    parser.add_argument(
        "--memory", type=float, default=14.0, help="GiB a participant may map (CPU only)"
    )
    parser.add_argument("--no-record", action="store_true", help="append nothing to results/")
    given = parser.parse_args(arguments)
    results = None if given.no_record else machine.ROOT / "benchmarks" / "results"
    return Options(
        device=given.device,
        participants=tuple(given.participants.split(",")),
        peers_python=given.peers_python,
        cases=tuple(given.cases.split(",")),
        rounds=given.rounds,
        budget=given.budget,
        limit=given.limit,
        memory_gib=given.memory if given.device == "cpu" else 0.0,
        results=results,
    )


@final
class Run:
    """One benchmark's run: the processes that are alive and the options."""

    def __init__(self, module: str, options: Options) -> None:
        self._module = module
        self._options = options
        self._processes: dict[str, Process] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="vkjit-bench-")
        self.versions: dict[str, str] = {}

    def case(self, case: Case) -> Row:
        """Prepares, checks and times one case in every participant."""
        row = Row(case)
        names = [n for n in self._present() if _takes_part(n, case) and self._prepare(row, n)]
        if not case.first:
            for _ in range(self._options.rounds):
                for name in names:
                    self._slice(row, name)
            if case.memory:
                self._memory(row, names)
        for name in names:
            self._processes[name].ask("drop")
        if case.first:
            self.close()
        return row

    def rates(self) -> machine.Rates:
        """What the GPU reaches in PyTorch, or in vkjit where that is missing."""
        name = "torch" if "torch" in self._present() else "vkjit"
        answer = self._process(name, cold=False).ask("rates")
        if not answer["ok"]:
            raise RuntimeError(f"rates of {self._options.device} in {name}: {answer['failure']}")
        self._processes.pop(name).close()  # its arrays would count in the peaks of memory
        found: dict[str, float] = answer["rates"]
        return machine.Rates(found["float32"], found.pop("bandwidth"), found)

    def close(self) -> None:
        """Ends every process of this run."""
        for process in self._processes.values():
            process.close()
        self._processes.clear()

    def finish(self) -> None:
        """Ends every process and removes what cold runs left behind."""
        self.close()
        self._folder.cleanup()

    def _present(self) -> list[str]:
        asked = self._options.participants
        return [n for n in asked if is_vkjit(n) or self._options.peers_python]

    def _process(self, name: str, *, cold: bool) -> Process:
        live = self._processes.get(name)
        if live is None or live.dead:
            python = sys.executable if is_vkjit(name) else self._options.peers_python
            caches = tempfile.mkdtemp(dir=self._folder.name) if cold else ""
            live = Process(python, (name, self._options.device), self._options.limit, caches)
            if self._options.memory_gib:
                live.cap_memory(self._options.memory_gib)
            self._processes[name] = live
            hello = live.read()
            self.versions.update(hello.get("versions", {}))
            if not hello["ok"]:
                live.dead = hello["failure"]
        return live

    def _prepare(self, row: Row, name: str) -> bool:
        """True if the participant is ready to be timed; fills in first call and error."""
        for _ in range(self._options.rounds if row.case.first else 1):
            if row.case.first and name in self._processes:
                self._processes.pop(name).close()
            request = {"module": self._module, "case": row.case.name}
            answer = self._process(name, cold=row.case.first).ask("prepare", **request)
            if not answer["ok"]:
                row.failures[name] = answer["failure"]
                return False
            row.first.setdefault(name, []).append(answer["build_s"] + answer["first_s"])
        check = self._processes[name].ask("check")
        if not check["ok"]:
            row.failures[name] = check["failure"]
            return False
        row.errors[name], row.losses[name] = check["error"], check["losses"]
        if row.case.first:
            stages = self._processes[name].ask("stages")
            row.stages[name] = {k: v for k, v in stages.items() if k.endswith("_s")}
        return True

    def _slice(self, row: Row, name: str) -> None:
        process = self._processes[name]
        busy, own, start = machine.busy_seconds(), process.seconds(), time.perf_counter()
        answer = process.ask("time", budget=self._options.budget, most=50)
        if not answer["ok"]:
            row.failures[name] = answer["failure"]
            return
        elapsed = time.perf_counter() - start
        others = machine.busy_seconds() - busy - (process.seconds() - own)
        row.foreign.append(max(0.0, others / elapsed / (os.cpu_count() or 1)))
        row.samples.setdefault(name, []).extend(answer["samples"])

    def _memory(self, row: Row, names: list[str]) -> None:
        for name in names:
            answer = self._processes[name].ask("memory")
            if answer["ok"]:
                row.memory[name] = {k: answer[k] for k in ("before", "peak", "predicted")}


def _takes_part(name: str, case: Case) -> bool:
    """Numbers and blocks are two programs only where the case has blocks."""
    return case.blocks is not None or name != "vkjit-numbers"


def chosen(cases: tuple[Case, ...], options: Options) -> list[Case]:
    """The cases that the command line names, or the quick ones for ``quick``, or all of a kind."""
    here = "cpu" if options.device == "cpu" else "gpu"
    if options.cases == ("quick",):
        return [case for case in cases if case.quick and case.on in (here, "both")]
    if options.cases == ("*",):
        return [case for case in cases if case.on in (here, "both")]
    return [c for c in cases if any(fnmatch.fnmatch(c.name, p) for p in options.cases)]


def main(
    module: str,
    cases: tuple[Case, ...],
    arguments: list[str] | None = None,
    default: tuple[str, ...] = ("vkjit", "jax", "torch"),
) -> int:
    """Runs the benchmark ``benchmarks.<module>``; 1 if vkjit failed or was wrong somewhere."""
    options = parse(sys.argv[1:] if arguments is None else arguments, default)
    if not options.peers_python:
        print("peers skipped: give --peers-python or VKJIT_PEERS_PYTHON (a Python with jax, torch)")
    run = Run(module, options)
    rates = machine.measure() if options.device == "cpu" else run.rates()
    rows: list[Row] = []
    try:
        for case in chosen(cases, options):
            rows.append(run.case(case))
            print(report.progress(rows[-1]), file=sys.stderr, flush=True)
    finally:
        run.finish()
    header: dict[str, Any] = {
        **machine.facts(),
        "benchmark": module,
        "device": options.device,
        "versions": run.versions,
        "rounds": options.rounds,
        "product_tflops": {k: round(v / 1e12, 1) for k, v in rates.products.items()},
        "gflops": round(rates.flops / 1e9, 1),
        "gbps": round(rates.bandwidth / 1e9, 1),
    }
    print(report.tables(header, rows, options.participants, rates))
    if options.results is not None:
        report.append(options.results / f"{module}.jsonl", header, rows, rates)
    failed = any(is_vkjit(name) for row in rows for name in row.failures)
    return int(
        failed or any(row.wrong(name) for row in rows for name in row.first if is_vkjit(name))
    )
