"""How much work one task gets, and the loop over a task's share."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import BinOp, CmpOp
from vkjit.lowering.target import Target

_TASK_COST = 1 << 16
"""Additions in a task that pay for handing it to another thread (about 10 microseconds)."""
_TASKS_PER_THREAD = 4


def task_count(items: int, cost: int, target: Target) -> int:
    """Tasks for ``items`` equal pieces that cost ``cost`` additions together.

    More tasks than threads are a multiple of the threads, so that all end at about one time.
    """
    threads = target.threads
    if threads == 1:
        return 1
    wanted = max(1, min(items, cost // _TASK_COST, threads * _TASKS_PER_THREAD))
    return wanted - wanted % threads if wanted > threads else wanted


@contextmanager
def within(b: Builder, position: Value, count: int, reach: int) -> Generator[None]:
    """Runs the block where ``position`` is below ``count``; no test when it cannot ``reach`` it."""
    if reach <= count:
        yield
        return
    with b.branch(b.compare(CmpOp.LT_U, position, b.index(count))).then():
        yield


@contextmanager
def share(b: Builder, items: int, tasks: int) -> Generator[Value]:
    """Runs the block for each item of this task; gives the item's number."""
    if tasks == 1:
        low, high = b.index(0), b.index(items)
    else:
        chunk = -(-items // tasks)
        low = b.scaled(b.workgroup_id(), chunk)
        high = b.binary(BinOp.MIN_S, b.offset(low, chunk), b.index(items))
    if items == 1:
        yield b.index(0)
        return
    with b.loop(low, high, hint="item") as loop:
        yield loop.index
