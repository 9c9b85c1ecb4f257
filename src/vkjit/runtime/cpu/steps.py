"""The step loop of the CPU runtime, as LLVM text: it runs the tables of a plan.

``vkjit.lowering.llvm.rows`` says what the rows mean. A turn of a loop costs one row and an addition
for each range that moves, so loops of small kernels need nothing from Python.

Kernels run in a floating-point mode of their own: rounding to nearest, no traps, subnormal operands
and results taken for zeros. Gradients of long recurrences shrink below the normal numbers, where
arithmetic is up to a hundred times slower. The mode of the calling thread is put back around calls
of the host and when the run ends, which is always by a return: callbacks raise by what they return.
Each change costs about 60 ns, so a plan that is one task keeps the mode of its caller.
"""

from __future__ import annotations

from string import Template

_READ_MXCSR = """
declare void @llvm.x86.sse.stmxcsr(ptr)
declare void @llvm.x86.sse.ldmxcsr(ptr)
define internal i64 @mode() {
  %word = alloca i32
  call void @llvm.x86.sse.stmxcsr(ptr %word)
  %mode = load i32, ptr %word
  %wide = zext i32 %mode to i64
  ret i64 %wide
}
define internal void @set_mode(i64 %wide) {
  %word = alloca i32
  %mode = trunc i64 %wide to i32
  store i32 %mode, ptr %word
  call void @llvm.x86.sse.ldmxcsr(ptr %word)
  ret void
}
"""
_READ_FPCR = """
declare i64 @llvm.aarch64.get.fpcr()
declare void @llvm.aarch64.set.fpcr(i64)
define internal i64 @mode() {
  %mode = call i64 @llvm.aarch64.get.fpcr()
  ret i64 %mode
}
define internal void @set_mode(i64 %mode) {
  call void @llvm.aarch64.set.fpcr(i64 %mode)
  ret void
}
"""
_NO_MODE = """
define internal i64 @mode() {
  ret i64 0
}
define internal void @set_mode(i64 %mode) {
  ret void
}
"""
_X86 = 0x9FC0  # FTZ (bit 15), traps masked (bits 7 to 12), DAZ (bit 6)
_AARCH64 = 1 << 24  # FZ; float16 has a bit of its own and keeps its subnormals
_MODES = {"x86_64": (_READ_MXCSR, _X86), "aarch64": (_READ_FPCR, _AARCH64)}


def text(machine: str) -> str:
    """The step loop for a processor, by the system's name of it.

    It defines ``@mode`` and ``@set_mode``, which read and write the floating-point mode of the
    thread, and ``@enter_mode``, which sets that of kernels; they do nothing on other processors.
    """
    functions, kernels = _MODES.get(machine, (_NO_MODE, 0))
    return functions + _TEXT.substitute(kernels=kernels)


_TEXT = Template(r"""
define internal void @enter_mode() {
  call void @set_mode(i64 $kernels)
  ret void
}

declare i32 @clock_gettime(i32, ptr)
declare ptr @memcpy(ptr, ptr, i64)

; One part of a large copy: table = { source, target, bytes }.
define internal void @copy_part(ptr %table, i64 %begin, i64 %end) {
  %source = load ptr, ptr %table
  %target.at = getelementptr ptr, ptr %table, i64 1
  %target = load ptr, ptr %target.at
  %size.at = getelementptr i64, ptr %table, i64 2
  %size = load i64, ptr %size.at
  %first = shl i64 %begin, 18
  %after = shl i64 %end, 18
  %last = call i64 @llvm.umin.i64(i64 %after, i64 %size)
  %bytes = sub i64 %last, %first
  %from = getelementptr i8, ptr %source, i64 %first
  %to = getelementptr i8, ptr %target, i64 %first
  %r = call ptr @memcpy(ptr %to, ptr %from, i64 %bytes)
  ret void
}

define internal i64 @now() {
  %time = alloca { i64, i64 }
  %r = call i32 @clock_gettime(i32 1, ptr %time)
  %seconds = load i64, ptr %time
  %nano.at = getelementptr i64, ptr %time, i64 1
  %nano = load i64, ptr %nano.at
  %scaled = mul i64 %seconds, 1000000000
  %sum = add i64 %scaled, %nano
  ret i64 %sum
}

; Runs rows from the first to behind the last. Adds nanoseconds and a run to the pair that %times
; has for each row, unless it is null. The time of a leaf begins where that of the one before ended.
define void @vkjit_execute(ptr %rows, i64 %count, ptr %entries, i64 %slots, ptr %cursors,
                           i64 %cursor.count, ptr %bases, ptr %times) {
entry:
  %table = alloca ptr, i64 %slots, align 16
  %at = alloca i64, i64 %cursor.count
  %frame = alloca { i64, ptr }
  %clock = alloca i64
  %rounds = alloca i64
  %asked = alloca i64
  store i64 0, ptr %rounds
  store i64 0, ptr %asked
  %mode = call i64 @mode()
  %timed = icmp ne ptr %times, null
  switch i64 %count, label %enter [
    i64 0, label %stay
    i64 1, label %one
  ]
one:
  ; Workers have the mode of kernels, so what they share must have it here, too.
  %tasks.at = getelementptr i64, ptr %rows, i64 1
  %tasks = load i64, ptr %tasks.at
  %shared = icmp ugt i64 %tasks, 1
  br i1 %shared, label %enter, label %stay
enter:
  call void @enter_mode()
  br label %stay
stay:
  %entered = phi i1 [ false, %entry ], [ false, %one ], [ true, %enter ]
  br i1 %timed, label %begin, label %row
begin:
  %start = call i64 @now()
  store i64 %start, ptr %clock
  br label %row

row:
  %i = phi i64 [ 0, %stay ], [ 0, %begin ], [ %i.next, %next ], [ %goto, %jump ]
  %more = icmp ult i64 %i, %count
  br i1 %more, label %read, label %exit
read:
  %here = getelementptr { ptr, i64, i64, i64 }, ptr %rows, i64 %i
  %function = load ptr, ptr %here
  %n.at = getelementptr i64, ptr %here, i64 1
  %n = load i64, ptr %n.at
  %first.at = getelementptr i64, ptr %here, i64 2
  %first = load i64, ptr %first.at
  %used.at = getelementptr i64, ptr %here, i64 3
  %used = load i64, ptr %used.at
  %behind = add i64 %first, %used
  br label %address

; The addresses of the ranges, into %table.
address:
  %e = phi i64 [ %first, %read ], [ %e.base, %base ], [ %e.move, %move ]
  %k = phi i64 [ 0, %read ], [ %k.next, %base ], [ %k, %move ]
  %wants = icmp ult i64 %e, %behind
  br i1 %wants, label %entry.read, label %dispatch
entry.read:
  %range = getelementptr [2 x i64], ptr %entries, i64 %e
  %what = load i64, ptr %range
  %offset.at = getelementptr i64, ptr %range, i64 1
  %offset = load i64, ptr %offset.at
  %moves = icmp slt i64 %what, 0
  br i1 %moves, label %move, label %base
base:
  %base.at = getelementptr ptr, ptr %bases, i64 %what
  %based = load ptr, ptr %base.at
  %pointer = getelementptr i8, ptr %based, i64 %offset
  %slot = getelementptr ptr, ptr %table, i64 %k
  store ptr %pointer, ptr %slot
  %k.next = add i64 %k, 1
  %e.base = add i64 %e, 1
  br label %address
move:
  %cursor = xor i64 %what, -1
  %turn.at = getelementptr i64, ptr %at, i64 %cursor
  %turn = load i64, ptr %turn.at
  %moved = mul i64 %turn, %offset
  %k.last = sub i64 %k, 1
  %last.slot = getelementptr ptr, ptr %table, i64 %k.last
  %unmoved = load ptr, ptr %last.slot
  %moved.pointer = getelementptr i8, ptr %unmoved, i64 %moved
  store ptr %moved.pointer, ptr %last.slot
  %e.move = add i64 %e, 1
  br label %address

dispatch:
  %code = ptrtoint ptr %function to i64
  %launches = icmp ugt i64 %code, 7
  br i1 %launches, label %launch, label %choose
choose:
  switch i64 %code, label %copy [
    i64 1, label %loop
    i64 2, label %end
    i64 3, label %test
    i64 4, label %skip
    i64 5, label %switch
    i64 6, label %call
    i64 7, label %again
  ]
launch:
  call void @vkjit_par_for(ptr %function, ptr %table, i64 %n)
  br label %ran
copy:
  %size.at = getelementptr i64, ptr %table, i64 2
  store i64 %n, ptr %size.at
  %padded = add i64 %n, 262143
  %parts = lshr i64 %padded, 18
  call void @vkjit_par_for(ptr @copy_part, ptr %table, i64 %parts)
  br label %ran
call:
  ; The callback is the last address.
  %arguments = sub i64 %k, 1
  %callback.at = getelementptr ptr, ptr %table, i64 %arguments
  %callback = load ptr, ptr %callback.at
  store i64 %n, ptr %frame
  %frame.table = getelementptr ptr, ptr %frame, i64 1
  store ptr %table, ptr %frame.table
  %inside = call i64 @mode()
  call void @set_mode(i64 %mode)
  %goes = call i32 %callback(ptr %frame)
  call void @set_mode(i64 %inside)
  %stops = icmp eq i32 %goes, 0
  br i1 %stops, label %exit, label %ran
ran:
  br i1 %timed, label %note, label %next
note:
  %ended = call i64 @now()
  %began = load i64, ptr %clock
  store i64 %ended, ptr %clock
  %spent = sub i64 %ended, %began
  %time.at = getelementptr [2 x i64], ptr %times, i64 %i
  %time = load i64, ptr %time.at
  %time.sum = add i64 %time, %spent
  store i64 %time.sum, ptr %time.at
  %runs.at = getelementptr i64, ptr %time.at, i64 1
  %runs = load i64, ptr %runs.at
  %runs.more = add i64 %runs, 1
  store i64 %runs.more, ptr %runs.at
  br label %next
next:
  %i.next = add i64 %i, 1
  br label %row

; Each cursor of the loop at its first value.
loop:
  %c = phi i64 [ 0, %choose ], [ %c.next, %place ]
  %placing = icmp ult i64 %c, %n
  br i1 %placing, label %place, label %next
place:
  %c.number = add i64 %first, %c
  %c.row = getelementptr [3 x i64], ptr %cursors, i64 %c.number
  %c.first = load i64, ptr %c.row
  %c.at = getelementptr i64, ptr %at, i64 %c.number
  store i64 %c.first, ptr %c.at
  %c.next = add i64 %c, 1
  br label %loop

; Each cursor one step on; %n is the row that began the loop, whose first cursor counts the turns.
end:
  %top = getelementptr { ptr, i64, i64, i64 }, ptr %rows, i64 %n
  %owned.at = getelementptr i64, ptr %top, i64 1
  %owned = load i64, ptr %owned.at
  %counter.at = getelementptr i64, ptr %top, i64 2
  %counter = load i64, ptr %counter.at
  br label %advance
advance:
  %a = phi i64 [ 0, %end ], [ %a.next, %step ]
  %advancing = icmp ult i64 %a, %owned
  br i1 %advancing, label %step, label %turned
step:
  %a.number = add i64 %counter, %a
  %a.row = getelementptr [3 x i64], ptr %cursors, i64 %a.number
  %a.step.at = getelementptr i64, ptr %a.row, i64 1
  %a.step = load i64, ptr %a.step.at
  %a.ring.at = getelementptr i64, ptr %a.row, i64 2
  %a.ring = load i64, ptr %a.ring.at
  %a.at = getelementptr i64, ptr %at, i64 %a.number
  %a.value = load i64, ptr %a.at
  %a.moved = add i64 %a.value, %a.step
  %a.over = icmp eq i64 %a.moved, %a.ring
  %a.wrapped = select i1 %a.over, i64 0, i64 %a.moved
  %a.under = icmp slt i64 %a.wrapped, 0
  %a.last = sub i64 %a.ring, 1
  %a.now = select i1 %a.under, i64 %a.last, i64 %a.wrapped
  store i64 %a.now, ptr %a.at
  %a.next = add i64 %a, 1
  br label %advance
turned:
  %turns.at = getelementptr i64, ptr %at, i64 %counter
  %turns = load i64, ptr %turns.at
  %over = icmp eq i64 %turns, 0
  %back = add i64 %n, 1
  br i1 %over, label %next, label %jump

; On to the next row if a byte of the predicate is not 0, else to row %n.
test:
  %predicate = load ptr, ptr %table
  %bytes.at = getelementptr [2 x i64], ptr %entries, i64 %behind
  %bytes = load i64, ptr %bytes.at
  br label %look
look:
  %b = phi i64 [ 0, %test ], [ %b.next, %byte ]
  %looking = icmp ult i64 %b, %bytes
  br i1 %looking, label %byte, label %skip
byte:
  %byte.at = getelementptr i8, ptr %predicate, i64 %b
  %byte.value = load i8, ptr %byte.at
  %set = icmp ne i8 %byte.value, 0
  %b.next = add i64 %b, 1
  br i1 %set, label %next, label %look
skip:
  br label %jump

; To row %n, asking the host ten times a second whether to go on; the clock is read in few rounds.
again:
  %round = load i64, ptr %rounds
  %round.next = add i64 %round, 1
  store i64 %round.next, ptr %rounds
  %low = and i64 %round.next, 255
  %looks = icmp eq i64 %low, 0
  br i1 %looks, label %late, label %jump
late:
  %present = call i64 @now()
  %before = load i64, ptr %asked
  %passed = sub i64 %present, %before
  %due = icmp sgt i64 %passed, 100000000
  br i1 %due, label %ask, label %jump
ask:
  store i64 %present, ptr %asked
  store i64 -1, ptr %frame
  %ask.callback = load ptr, ptr %table
  call void @set_mode(i64 %mode)
  %may = call i32 %ask.callback(ptr %frame)
  call void @enter_mode()
  %ends = icmp eq i32 %may, 0
  br i1 %ends, label %exit, label %jump

; To the row of one of %n branches.
switch:
  %index.at = load ptr, ptr %table
  %index = load i32, ptr %index.at
  %wide = sext i32 %index to i64
  %floor = call i64 @llvm.smax.i64(i64 %wide, i64 0)
  %highest = sub i64 %n, 1
  %branch = call i64 @llvm.smin.i64(i64 %floor, i64 %highest)
  %branch.entry = add i64 %behind, %branch
  %branch.at = getelementptr [2 x i64], ptr %entries, i64 %branch.entry
  %target = load i64, ptr %branch.at
  br label %jump
jump:
  %goto = phi i64 [ %back, %turned ], [ %n, %skip ], [ %target, %switch ], [ %n, %again ],
                  [ %n, %late ], [ %n, %ask ]
  br label %row
exit:
  br i1 %entered, label %restore, label %leave
restore:
  call void @set_mode(i64 %mode)
  br label %leave
leave:
  ret void
}
declare i64 @llvm.smax.i64(i64, i64)
declare i64 @llvm.smin.i64(i64, i64)
""")
