"""The thread pool: every task runs once, whoever asks and however often; also after a fork."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from vkjit.runtime.cpu.native import can_run_threads

pytestmark = pytest.mark.skipif(
    not can_run_threads(), reason="the pool needs Linux futexes; elsewhere all is serial"
)

# A job whose task adds 1 to each element of its range, and one that starts such jobs itself.
PROGRAM = """
import ctypes, os, sys, threading
import numpy as np
from vkjit.runtime.cpu.device import _engine, _thread_pool

_, jit = _engine()
native = _thread_pool()
TEXT = '''
declare void @vkjit_par_for(ptr, ptr, i64)
define void @count(ptr %a, i64 %i, i64 %j) {
entry:
  br label %loop
loop:
  %k = phi i64 [ %i, %entry ], [ %k.next, %loop ]
  %p = getelementptr i64, ptr %a, i64 %k
  %v = load i64, ptr %p
  %w = add i64 %v, 1
  store i64 %w, ptr %p
  %k.next = add i64 %k, 1
  %more = icmp slt i64 %k.next, %j
  br i1 %more, label %loop, label %exit
exit:
  ret void
}
define void @nested(ptr %a, i64 %i, i64 %j) {
entry:
  br label %loop
loop:
  %k = phi i64 [ %i, %entry ], [ %k.next, %loop ]
  %first = mul i64 %k, 100
  %p = getelementptr i64, ptr %a, i64 %first
  call void @vkjit_par_for(ptr @count, ptr %p, i64 100)
  %k.next = add i64 %k, 1
  %more = icmp slt i64 %k.next, %j
  br i1 %more, label %loop, label %exit
exit:
  ret void
}
'''
par_for = native._library.address("vkjit_par_for")
library = jit.link(jit.compile(TEXT), ["count", "nested"], {"vkjit_par_for": par_for})
COUNT, NESTED = library.address("count"), library.address("nested")

def job(tasks, times=1, function=COUNT):
    cells = np.zeros(max(tasks, 1) * (100 if function == NESTED else 1), np.int64)
    for _ in range(times):
        native.par_for(function, cells.ctypes.data, tasks)
    assert (cells == (times if tasks else 0)).all(), (tasks, np.unique(cells))
"""


def run_program(body: str, threads: int) -> None:
    """Runs ``body`` after ``PROGRAM`` in its own process, since the pool is one per process."""
    environment = {**os.environ, "VKJIT_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + textwrap.dedent(body)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_task_runs_once(threads: int) -> None:
    run_program(
        """
        for tasks in (0, 1, 2, 3, 7, 8, 100, 12345):
            job(tasks)
        job(8, 5000)
        """,
        threads,
    )


def test_jobs_inside_jobs_and_from_many_threads() -> None:
    run_program(
        """
        job(16, 200, NESTED)
        failures = []
        def work():
            try:
                for _ in range(50):
                    job(8, 20)
                    job(4, 2, NESTED)
            except BaseException as error:
                failures.append(error)
        threads = [threading.Thread(target=work) for _ in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert not failures, failures
        """,
        4,
    )


def test_a_forked_child_gets_its_own_workers() -> None:
    run_program(
        """
        import warnings
        warnings.simplefilter("ignore")  # forking with threads is what this test is about
        job(8, 100)
        child = os.fork()
        if child == 0:
            try:
                job(8, 1000)
                os._exit(len(os.listdir("/proc/self/task")) + 10)
            except BaseException:
                os._exit(1)
        job(8, 1000)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 13, status  # 3 threads, workers included
        """,
        3,
    )


def test_workers_start_late_sleep_and_stop() -> None:
    run_program(
        """
        import time
        def threads():
            return len(os.listdir("/proc/self/task"))
        before = threads()
        job(1, 10)
        assert threads() == before
        job(8)
        assert threads() == before + 2
        time.sleep(0.05)
        used = time.process_time()
        time.sleep(0.2)
        assert time.process_time() - used < 0.05  # asleep, not spinning
        job(8)
        for _ in range(20):
            native.stop()
            job(8, 10)
        native.stop()
        for _ in range(200):  # the last instructions of a stopped thread
            if threads() == before:
                break
            time.sleep(0.01)
        assert threads() == before
        """,
        3,
    )
