"""The native half of the CPU runtime, as LLVM text: thread pool and scratch memory.

One job runs at a time: ``n`` tasks of one function. ``@claim`` holds ``n << 32 | next``; whoever
wants work, the caller too, claims a few tasks by compare-and-swap. ``@done`` counts finished tasks,
not threads: a worker that the system does not run costs nothing, because the others do its share.
A claim needs no epoch: the swap succeeds only on the word of the job that is current then.

A caller that finds the pool busy (another thread, or a task that starts a job itself) runs its
tasks alone. Workers start with the first job, spin briefly when idle, then sleep on a futex.
Where there is no futex (other systems, other processors) every job runs on its caller.
"""

from __future__ import annotations

import os
import sys
from string import Template

from vkjit.runtime.cpu import steps

_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
_PAUSE = {
    "x86_64": ("declare void @llvm.x86.sse2.pause()", "call void @llvm.x86.sse2.pause()"),
    "aarch64": ("declare void @llvm.aarch64.hint(i32)", "call void @llvm.aarch64.hint(i32 1)"),
}

SYMBOLS = (
    "aligned_alloc",
    "clock_gettime",
    "free",
    "memcpy",
    "pthread_create",
    "pthread_detach",
    "pthread_getspecific",
    "pthread_key_create",
    "pthread_setspecific",
    "pthread_sigmask",
    "sched_yield",
    "syscall",
)
"""What the text takes from the C library."""

EXPORTS = (
    "vkjit_execute",
    "vkjit_init",
    "vkjit_par_for",
    "vkjit_reset",
    "vkjit_scratch",
    "vkjit_stop",
)

_SPINS = 2000  # of about 40 ns: a gap between two jobs of one plan is shorter
_CALLER_SPINS = 200  # then the caller yields, in case its worker waits for this core

_TEXT = Template(r"""
@claim = internal global i64 0, align 64
@done = internal global i64 0, align 64
@task = internal global ptr null, align 64
@context = internal global ptr null
@futex = internal global i32 0, align 64
@sleepers = internal global i32 0, align 64
@busy = internal global i32 0, align 64
@threads = internal global i64 1, align 64
@started = internal global i32 0
@alive = internal global i32 0
@stopping = internal global i32 0
@key = internal global i32 0

declare i32 @pthread_create(ptr, ptr, ptr, ptr)
declare i32 @pthread_detach(i64)
declare i32 @pthread_sigmask(i32, ptr, ptr)
declare i32 @pthread_key_create(ptr, ptr)
declare ptr @pthread_getspecific(i32)
declare i32 @pthread_setspecific(i32, ptr)
declare i64 @syscall(i64, ...)
declare i32 @sched_yield()
declare ptr @aligned_alloc(i64, i64)
declare void @free(ptr)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
declare void @llvm.trap()
$declare_pause

; Threads wanted, the caller included. Once per process.
define i32 @vkjit_init(i64 %threads) {
  store i64 %threads, ptr @threads
  %r = call i32 @pthread_key_create(ptr @key, ptr @free)
  ret i32 %r
}

; After a fork the child has no workers, whatever the words say.
define void @vkjit_reset() {
  store i64 0, ptr @claim
  store i32 0, ptr @sleepers
  store i32 0, ptr @busy
  store i32 0, ptr @alive
  store i32 0, ptr @stopping
  store i32 0, ptr @started
  ret void
}

; Ends the workers; the next job starts new ones. No job may be running.
define void @vkjit_stop() {
entry:
  store atomic i32 1, ptr @stopping seq_cst, align 4
  %bump = atomicrmw add ptr @futex, i32 1 seq_cst
  %woken = call i64 (i64, ...) @syscall(i64 $futex, ptr @futex, i32 129, i32 2147483647)
  br label %wait
wait:
  %left = load atomic i32, ptr @alive acquire, align 4
  %none = icmp sle i32 %left, 0
  br i1 %none, label %exit, label %yield
yield:
  %y = call i32 @sched_yield()
  br label %wait
exit:
  store i32 0, ptr @started
  store atomic i32 0, ptr @stopping seq_cst, align 4
  ret void
}

; Memory of the running thread, kept warm between tasks, freed when the thread ends. The first 64
; bytes of the block hold its size.
define noalias nonnull align 64 ptr @vkjit_scratch(i64 %bytes) {
entry:
  %key = load i32, ptr @key
  %block = call ptr @pthread_getspecific(i32 %key)
  %absent = icmp eq ptr %block, null
  br i1 %absent, label %grow, label %look
look:
  %size = load i64, ptr %block
  %fits = icmp uge i64 %size, %bytes
  br i1 %fits, label %exit, label %grow
grow:
  call void @free(ptr %block)
  %padded = add i64 %bytes, 1048639
  %wanted = and i64 %padded, -64
  %total = add i64 %wanted, 64
  %fresh = call ptr @aligned_alloc(i64 64, i64 %total)
  %failed = icmp eq ptr %fresh, null
  br i1 %failed, label %die, label %keep
die:
  call void @llvm.trap()
  unreachable
keep:
  store i64 %wanted, ptr %fresh
  %r = call i32 @pthread_setspecific(i32 %key, ptr %fresh)
  br label %exit
exit:
  %got = phi ptr [ %block, %look ], [ %fresh, %keep ]
  %memory = getelementptr i8, ptr %got, i64 64
  ret ptr %memory
}

; Claims and runs tasks until none is left; how many it ran.
define internal i64 @work() {
entry:
  br label %next
next:
  %ran = phi i64 [ 0, %entry ], [ %ran.more, %run ], [ %ran, %try ]
  %word = load atomic i64, ptr @claim acquire, align 8
  %first = and i64 %word, 4294967295
  %count = lshr i64 %word, 32
  %more = icmp ult i64 %first, %count
  br i1 %more, label %try, label %exit
try:
  ; A share of what is left: few swaps for many tasks, single tasks at the end for balance.
  %left = sub i64 %count, %first
  %threads = load i64, ptr @threads
  %parts = shl i64 %threads, 2
  %share = udiv i64 %left, %parts
  %take = call i64 @llvm.umax.i64(i64 %share, i64 1)
  %claimed = add i64 %word, %take
  %swap = cmpxchg ptr @claim, i64 %word, i64 %claimed acq_rel acquire
  %won = extractvalue { i64, i1 } %swap, 1
  br i1 %won, label %run, label %next
run:
  %task = load ptr, ptr @task
  %context = load ptr, ptr @context
  %last = add i64 %first, %take
  call void %task(ptr %context, i64 %first, i64 %last)
  %d = atomicrmw add ptr @done, i64 %take acq_rel
  %ran.more = add i64 %ran, %take
  br label %next
exit:
  ret i64 %ran
}
declare i64 @llvm.umax.i64(i64, i64)

define internal ptr @worker(ptr %unused) {
entry:
  ; Signals are for the threads of the program.
  %mask = alloca [128 x i8], align 8
  call void @llvm.memset.p0.i64(ptr %mask, i8 -1, i64 128, i1 false)
  %blocked = call i32 @pthread_sigmask(i32 0, ptr %mask, ptr null)
  call void @enter_mode()
  br label %look
look:
  %spins = phi i64 [ 0, %entry ], [ 0, %look.worked ], [ %spins.more, %spin ], [ 0, %sleep ]
  %seen = load atomic i32, ptr @futex acquire, align 4
  %stop = load atomic i32, ptr @stopping acquire, align 4
  %stops = icmp ne i32 %stop, 0
  br i1 %stops, label %exit, label %ask
ask:
  %ran = call i64 @work()
  %worked = icmp ne i64 %ran, 0
  br i1 %worked, label %look.worked, label %idle
look.worked:
  br label %look
idle:
  %spins.more = add i64 %spins, 1
  %patient = icmp ult i64 %spins, $spins
  br i1 %patient, label %spin, label %sleep
spin:
  $pause
  br label %look
sleep:
  ; The caller bumps the futex before it looks for sleepers, so one of the two sees the other.
  %s = atomicrmw add ptr @sleepers, i32 1 seq_cst
  %w = call i64 (i64, ...) @syscall(i64 $futex, ptr @futex, i32 128, i32 %seen, ptr null)
  %a = atomicrmw sub ptr @sleepers, i32 1 seq_cst
  br label %look
exit:
  %e = atomicrmw sub ptr @alive, i32 1 seq_cst
  ret ptr null
}

define internal void @start() {
entry:
  %handle = alloca i64
  store i32 1, ptr @started
  %threads = load i64, ptr @threads
  br label %next
next:
  %i = phi i64 [ 1, %entry ], [ %i.more, %made ]
  %more = icmp ult i64 %i, %threads
  br i1 %more, label %make, label %exit
make:
  %up = atomicrmw add ptr @alive, i32 1 seq_cst
  %error = call i32 @pthread_create(ptr %handle, ptr null, ptr @worker, ptr null)
  %failed = icmp ne i32 %error, 0
  br i1 %failed, label %undo, label %made
made:
  %thread = load i64, ptr %handle
  %r = call i32 @pthread_detach(i64 %thread)
  %i.more = add i64 %i, 1
  br label %next
undo:
  ; The system allows no more threads: those there are, and the caller, do all the work.
  %down = atomicrmw sub ptr @alive, i32 1 seq_cst
  br label %exit
exit:
  ret void
}

; task(context, begin, end) over [0, count), returning when every task has finished.
define void @vkjit_par_for(ptr %task, ptr %context, i64 %count) {
entry:
  %threads = load i64, ptr @threads
  %many = icmp ugt i64 %count, 1
  %team = icmp ugt i64 %threads, 1
  %both = and i1 %many, %team
  br i1 %both, label %lock, label %small
small:
  %some = icmp ne i64 %count, 0
  br i1 %some, label %alone, label %exit
alone:
  call void %task(ptr %context, i64 0, i64 %count)
  br label %exit
lock:
  %swap = cmpxchg ptr @busy, i32 0, i32 1 acq_rel monotonic
  %locked = extractvalue { i32, i1 } %swap, 1
  br i1 %locked, label %ready, label %alone
ready:
  %started = load i32, ptr @started
  %fresh = icmp eq i32 %started, 0
  br i1 %fresh, label %begin, label %post
begin:
  call void @start()
  br label %post
post:
  store ptr %task, ptr @task
  store ptr %context, ptr @context
  store atomic i64 0, ptr @done monotonic, align 8
  %high = shl i64 %count, 32
  store atomic i64 %high, ptr @claim seq_cst, align 8
  %bump = atomicrmw add ptr @futex, i32 1 seq_cst
  %sleeping = load atomic i32, ptr @sleepers seq_cst, align 4
  %asleep = icmp sgt i32 %sleeping, 0
  br i1 %asleep, label %wake, label %join
wake:
  %others = sub i64 %count, 1
  %limit = call i64 @llvm.umin.i64(i64 %others, i64 %threads)
  %number = trunc i64 %limit to i32
  %woken = call i64 (i64, ...) @syscall(i64 $futex, ptr @futex, i32 129, i32 %number)
  br label %join
join:
  %ran = call i64 @work()
  br label %check
check:
  %tries = phi i64 [ 0, %join ], [ %tries.more, %spin ], [ %tries.more, %yield ]
  %done = load atomic i64, ptr @done acquire, align 8
  %all = icmp uge i64 %done, %count
  br i1 %all, label %unlock, label %wait
wait:
  %tries.more = add i64 %tries, 1
  %patient = icmp ult i64 %tries, $caller_spins
  br i1 %patient, label %spin, label %yield
spin:
  $pause
  br label %check
yield:
  %y = call i32 @sched_yield()
  br label %check
unlock:
  store atomic i32 0, ptr @busy release, align 4
  br label %exit
exit:
  ret void
}
declare i64 @llvm.umin.i64(i64, i64)
""")


def can_run_threads() -> bool:
    """Whether the pool works on this system: Linux on a processor whose futex call we know."""
    return sys.platform == "linux" and os.uname().machine in _FUTEX


def native_text() -> str:
    """The LLVM text of the native runtime for this processor, with its step loop."""
    machine = os.uname().machine
    declare, pause = _PAUSE.get(machine, ("", ""))
    pool = _TEXT.substitute(
        declare_pause=declare,
        pause=pause,
        futex=_FUTEX.get(machine, -1),
        spins=_SPINS,
        caller_spins=_CALLER_SPINS,
    )
    return pool + steps.text(machine)
