"""The command: options, the climb, the report. Needs nothing that devices do not need."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from vkjit.device_array import default_device
from vkjit.doctor import apart
from vkjit.doctor.advice import for_stage
from vkjit.doctor.apart import Event, Speaker, Worker
from vkjit.doctor.ladder import NAMES, STAGES, Stage, run_stage
from vkjit.doctor.report import TABLE_HEAD, Report, StageResult, Status
from vkjit.doctor.session import OVERFLOW, Session
from vkjit.errors import ArgumentError, DeviceError
from vkjit.runtime import get_device
from vkjit.runtime.device import Device
from vkjit.runtime.explain import environment, info, system

USER_FAULT = 2
"""Exit code of a wrong call."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""
_BOX, _QUICK_BOX = 20.0, 2.0
_MOST_DEATHS = 3
"""After so many stages in a row that ended the process the others are not tried."""
_DEFAULT_REPORT = Path("vkjit-doctor-report.json")
_EPILOG = """\
exit code: 0 all stages passed, 1 a stage failed, 2 the call was wrong

stages, in order:
""" + "\n".join(f"  {stage.name:<13} {stage.title}" for stage in STAGES)

Say = Callable[[str], None]


@final
@dataclass(frozen=True)
class Options:
    """What to check and how.

    ``box`` is the time of one stage in seconds (20, or 2 if ``quick``). ``plant`` names a stage
    whose results get an error of 1%, or ``overflow``, or ``all``. ``apart`` runs the stages in a
    process of their own.
    """

    device: str = "vulkan:0"
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    quick: bool = False
    box: float | None = None
    plant: str | None = None
    report: Path | None = _DEFAULT_REPORT
    apart: bool = True
    commit: str = ""

    def __post_init__(self) -> None:
        plants = (*NAMES, OVERFLOW, "all")
        for option, given, known in (
            ("--only", self.only, NAMES),
            ("--skip", self.skip, NAMES),
            ("--plant", (self.plant,) if self.plant else (), plants),
        ):
            for name in given:
                if name not in known:
                    raise ArgumentError(
                        f"doctor: {option} {name!r}, expected one of {', '.join(known)}"
                    )
        if not self.stages:
            raise ArgumentError(
                f"doctor: --only and --skip leave no stage, expected one of {', '.join(NAMES)}"
            )

    @property
    def stages(self) -> list[Stage]:
        """Those that are to run, in order."""
        wanted = self.only or NAMES
        return [s for s in STAGES if s.name in wanted and s.name not in self.skip]

    @property
    def seconds(self) -> float:
        """The time of one stage."""
        return self.box or (_QUICK_BOX if self.quick else _BOX)

    def arguments(self, stages: Sequence[Stage]) -> list[str]:
        """The command line of a worker for some of the stages."""
        found = ["--device", self.device, "--box", str(self.seconds)]
        for stage in stages:
            found += ["--only", stage.name]
        found += ["--quick"] if self.quick else []
        return found + (["--plant", self.plant] if self.plant else [])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; 0 if all stages passed, 1 if one failed, 2 for a wrong call."""
    given = _parser().parse_args(arguments)
    try:
        options = Options(
            device=given.device,
            only=_names(given.only),
            skip=_names(given.skip),
            quick=given.quick,
            box=given.box,
            plant=given.plant,
            report=None if given.no_report else given.report,
            apart=not given.in_process,
            commit=given.commit,
        )
        if given.worker is not None:
            return _work(options, Speaker(given.worker))
        report = diagnose(options, _say)
    except ArgumentError as error:
        sys.stderr.write(f"error: {str(error).splitlines()[0]}\n")
        return USER_FAULT
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0 if report.passed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vkjit doctor",
        description="Check a device against the host, stage by stage.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", default="vulkan:0", help="name that `vkjit info` lists (vulkan:0)")
    add("--quick", action="store_true", help="small cases, about a minute on a software driver")
    add("--only", action="append", default=[], help="stages, with commas or repeated")
    add("--skip", action="append", default=[], help="stages to leave out")
    add("--box", type=float, help="seconds for each stage (20, with --quick 2)")
    add("--report", type=Path, default=_DEFAULT_REPORT, help="JSON file; .md goes beside it")
    add("--no-report", action="store_true", help="write no report")
    add("--commit", default="", help="of the source tree, where there is no git to ask")
    add("--plant", help="a stage, 'overflow' or 'all': an error that must be found")
    add("--in-process", action="store_true", help="no process of its own: a crash ends it all")
    add("--worker", type=int, help=argparse.SUPPRESS)
    return parser


def _names(given: Sequence[str]) -> tuple[str, ...]:
    return tuple(name.strip() for part in given for name in part.split(",") if name.strip())


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def diagnose(options: Options, say: Say) -> Report:
    """Climbs the ladder, says each stage's result, writes the report.

    Raises:
        ArgumentError: there is no such device, or it cannot be used.
    """
    report = Report(
        device={"name": options.device, "description": [f"{options.device}: not opened"]},
        host="",
        system=_system(options),
        options={**asdict(options), "report": str(options.report or "")},
    )
    climb = _apart if options.apart else _in_process
    for event in climb(options):
        if "device" in event:
            report.device, report.host = event["device"], event["host"]
            for line in event["device"]["description"]:
                say(line)
            say(f"compared with {report.host}\n\n{TABLE_HEAD}")
        report.running = event.get("start", "")
        for result in _results(event, report, options):
            report.stages.append(result)
            say(result.line())
            figures = result.figure_lines() if result.name == "timing" else []
            for line in (*figures, *result.details()):
                say(f"     {line}")
        if options.report is not None:
            # After every event: a machine that freezes leaves a report that says where.
            with contextlib.suppress(OSError):  # said at the end
                report.write(options.report)
    _finish(report, options, say)
    return report


def _results(event: Event, report: Report, options: Options) -> list[StageResult]:
    """What an event says of stages."""
    if "stage" in event:
        return [StageResult.parse(event["stage"])]
    return _unopened(report, options, event["fatal"]) if "fatal" in event else []


def _finish(report: Report, options: Options, say: Say) -> None:
    """The verdict, and where the report lies."""
    say("")
    say("all stages passed" if report.passed else f"FAILED: {', '.join(report.failed_names)}")
    if options.report is None:
        return
    try:
        written = report.write(options.report)
    except OSError as error:
        say(f"the report could not be written: {error}; give another --report FILE")
        return
    say(f"report: {' and '.join(map(str, written))} (paste the second into a bug report)")


def _system(options: Options) -> dict[str, Any]:
    """Where and when the check ran."""
    return {
        **system(),
        "commit": options.commit or _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "environment": ", ".join(f"{k}={v}" for k, v in environment().items()) or "nothing set",
    }


def _commit() -> str:
    """The commit of the source tree; ``unknown`` for an installed package."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return "unknown"
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


# -- climbing -------------------------------------------------------------------------------------


def _host(device: Device) -> Device:
    """What results are compared with: ``cpu``, or the interpreter where that is not there."""
    if device.name != "cpu":
        try:
            return get_device("cpu")
        except (ImportError, OSError, DeviceError):
            pass
    return get_device("reference")


def _in_process(options: Options) -> Generator[Event]:
    """The events of a climb in this process."""
    try:
        device = get_device(options.device)
        session = Session(device, _host(device), quick=options.quick, plant=options.plant)
    except DeviceError as error:
        yield {"fatal": str(error)}
        return
    yield {"device": _described(device), "host": session.host.name}
    for stage in options.stages:
        yield {"start": stage.name}
        with default_device(session.host.name):
            yield {"stage": run_stage(session, stage, options.seconds).plain()}


def _described(device: Device) -> dict[str, Any]:
    known = getattr(device, "capabilities", None)
    return {
        "name": device.name,
        "description": device.describe().splitlines(),
        "target": device.target.name,
        "driver": getattr(known, "driver", ""),
        "uuid": getattr(known, "uuid", ""),
    }


def _work(options: Options, speaker: Speaker) -> int:
    """The worker: says events, and stops after a stage that lost the device."""
    try:
        for event in _in_process(options):
            speaker.say(event)
            if event.get("stage", {}).get("device_lost"):
                break
    except ArgumentError as error:
        speaker.say({"wrong": str(error)})
    speaker.say({"end": True})
    return 0


def _apart(options: Options) -> Generator[Event]:
    """The events of workers; one that dies or hangs fails the stage it was in."""
    left = list(options.stages)
    known = False
    deaths = 0
    while left:
        worker = Worker(options.arguments(left))
        try:
            for event in worker.events(options.seconds + apart.PATIENCE):
                if "wrong" in event:
                    raise ArgumentError(event["wrong"])
                if "stage" in event:
                    left.pop(0)
                    deaths = 0
                elif "gone" in event:
                    deaths += 1
                    event = {"stage": _dead(left.pop(0), event["gone"]).plain()}
                if "device" not in event or not known:
                    yield event
                known = known or "device" in event
                if "fatal" in event:
                    return
        finally:
            worker.close()
        if deaths == _MOST_DEATHS:
            yield {"fatal": f"{deaths} stages in a row ended the process"}
            return


def _dead(stage: Stage, error: str) -> StageResult:
    """The result of a stage that did not come to its end."""
    number = NAMES.index(stage.name) + 1
    result = StageResult(number, stage.name, stage.title, Status.FAILED, error=error)
    result.device_lost = True
    result.advice = for_stage(result)
    return result


def _unopened(report: Report, options: Options, error: str) -> list[StageResult]:
    """Results of the stages that are left when the climb cannot go on."""
    first, *rest = options.stages[len(report.stages) :]
    number = NAMES.index(first.name) + 1
    results = [StageResult(number, first.name, first.title, Status.FAILED, error=error)]
    results[0].advice = [f"`vkjit info` says:\n{info(brief=True)}"]
    for stage in rest:
        number = NAMES.index(stage.name) + 1
        results.append(StageResult(number, stage.name, stage.title, Status.SKIPPED))
    return results
