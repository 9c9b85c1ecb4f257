"""The CPU device: generated host code, run by the calling thread and the pool's workers."""

from __future__ import annotations

import ctypes
import functools
import struct
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import DTypeLike

from vkjit.errors import ArgumentError, DeviceError, InternalError
from vkjit.lowering.artifact import Launch, Plan, Role
from vkjit.lowering.llvm.module import EXPORTS, LIBRARY_SYMBOLS, emit
from vkjit.lowering.llvm.rows import Rows
from vkjit.runtime.cache import cache_key, open_cache
from vkjit.runtime.cpu import host as hosts
from vkjit.runtime.cpu import native
from vkjit.runtime.cpu import pool as pools
from vkjit.runtime.cpu.buffer import SMALL, CpuBuffer
from vkjit.runtime.cpu.calls import HostCalls
from vkjit.runtime.cpu.memory import MemoryPool, class_bytes, pool_limit
from vkjit.runtime.device import (
    Device,
    DeviceBuffer,
    DeviceClass,
    DeviceInfo,
    HostArray,
    Loaded,
    MemoryStats,
    StepTime,
    indices,
    taken_over,
)

if TYPE_CHECKING:
    from vkjit.runtime.cpu.orc import Jit, Library


def discover() -> list[DeviceInfo]:
    """The CPU, which every machine has."""
    description = f"{hosts.processor_name()}, {pools.thread_count()} threads"
    return [DeviceInfo("cpu", DeviceClass.CPU, description)]


def open_device(name: str) -> Device:
    """The CPU device."""
    if name != "cpu":
        raise ArgumentError(f"device: {name!r} does not exist, there is one 'cpu'")
    return CpuDevice()


@functools.cache
def _engine() -> tuple[hosts.Host, Jit]:
    """The host and its compiler, one for the process."""
    from vkjit.runtime.cpu.orc import Jit  # noqa: PLC0415  loads LLVM

    host = hosts.detect()
    return host, Jit(host)


@functools.cache
def _thread_pool() -> pools.ThreadPool:
    """The thread pool, one for the process: its workers outlive a closed device."""
    library = _build(native.native_text(), native.EXPORTS, native.SYMBOLS, {})
    return pools.ThreadPool(library, pools.thread_count())


def _build(
    text: str, exports: Sequence[str], symbols: tuple[str, ...], given: Mapping[str, int]
) -> Library:
    """Linked code of ``text``, compiled unless the cache on disk has it."""
    from vkjit.runtime.cpu import orc  # noqa: PLC0415  loads LLVM

    host, jit = _engine()
    cache = open_cache("cpu")
    key = cache_key((text, host.key, orc.PIPELINE))
    code = cache.get(key) if cache else None
    if code is None:
        code = jit.compile(text)
        if cache:
            cache.put(key, code)
    return jit.link(code, exports, {**orc.library_symbols(symbols), **given})


@final
class CpuDevice(Device):
    """The host. Runs are synchronous: when ``run`` returns, the work is done."""

    def __init__(self) -> None:
        host, _ = _engine()
        self.name = "cpu"
        self._host = host
        self._pool = _thread_pool()
        self.target = hosts.target(host, self._pool.threads)
        limit = hosts.memory_limit()
        self.memory = MemoryPool(limit, pool_limit(limit))
        self._closed = False
        self._libraries: weakref.WeakValueDictionary[str, Library] = weakref.WeakValueDictionary()

    def allocate(self, nbytes: int) -> CpuBuffer:
        """Uninitialised memory, aligned to 64 bytes."""
        return CpuBuffer.allocate(self, nbytes)

    def upload(self, array: HostArray) -> CpuBuffer:
        """A copy of a C-contiguous array."""
        if not array.flags.c_contiguous:
            raise InternalError(f"cpu: upload of {array.dtype}{list(array.shape)}, not contiguous")
        buffer = CpuBuffer.allocate(self, array.nbytes)
        # The address of an array costs a microsecond to ask for, a small copy much less.
        source = array.tobytes() if array.nbytes <= SMALL else array.ctypes.data
        ctypes.memmove(buffer.address, source, array.nbytes)
        return buffer

    def download(self, buffer: DeviceBuffer, dtype: DTypeLike, shape: tuple[int, ...]) -> HostArray:
        """A read-only view of ``buffer``."""
        return _own(buffer).as_numpy(dtype, shape)

    def load(self, plan: Plan, constants: Sequence[DeviceBuffer] = ()) -> CpuLoaded:
        """Compiles ``plan``, or takes its code from memory or disk."""
        if self._closed:
            raise DeviceError("cpu: the device is closed")
        text = emit(plan, self.target)
        library = self._libraries.get(text)
        if library is None:
            library = _build(text, EXPORTS, LIBRARY_SYMBOLS, self._pool.symbols())
            self._libraries[text] = library
        return CpuLoaded(self, plan, library, [_own(constant) for constant in constants])

    def assembly(self, plan: Plan) -> str:
        """The assembly text of ``plan``, for people."""
        _, jit = _engine()
        return jit.assembly(emit(plan, self.target))

    def synchronize(self) -> None:
        """Does nothing: runs are synchronous."""

    def memory_stats(self) -> MemoryStats:
        """Bytes in use and at most, by the size of the blocks handed out."""
        return self.memory.stats()

    def describe(self) -> str:
        """Processor, LLVM, threads, vectors and cache."""
        cache = open_cache("cpu")
        threads = f"{self._pool.threads} threads"
        if not native.can_run_threads():
            threads += " (serial: no futex on this system)"
        return "\n".join(
            (
                f"cpu: {hosts.processor_name()}, {threads}",
                f"code for {self._host.cpu}, {self._host.vector_bytes * 8}-bit vectors",
                f"llvmlite {self._host.llvm}",
                f"memory limit {self.memory.stats().limit_bytes:,} bytes",
                f"code cache {cache.folder if cache else 'off'}",
            )
        )

    def close(self) -> None:
        """Ends the worker threads and frees the memory that waits for reuse."""
        self._closed = True
        self._pool.stop()
        self.memory.trim()


_ADDRESS = attrgetter("address")
_RUN = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_PROFILE = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_void_p)


@final
class CpuLoaded(Loaded):
    """A plan linked into the process."""

    __slots__ = (
        "_arena",
        "_calls",
        "_constant_addresses",
        "_constants",
        "_device",
        "_inputs",
        "_leaf",
        "_library",
        "_memory",
        "_order",
        "_outputs",
        "_pack",
        "_plan",
        "_profile",
        "_run",
        "_taken",
    )

    def __init__(
        self, device: CpuDevice, plan: Plan, library: Library, constants: list[CpuBuffer]
    ) -> None:
        self._device = device
        self._library = library
        self._memory = device.memory
        self._constants = constants  # keeps the memory
        self._constant_addresses = [constant.address for constant in constants]
        self._plan = plan
        self._leaf: list[bool] | None = None  # whether a row is one, once times were asked for
        self._inputs = len(indices(plan, Role.INPUT))
        outputs = [plan.buffers[i] for i in indices(plan, Role.OUTPUT)]
        self._outputs = [(b.size, class_bytes(b.size), b.donated) for b in outputs]
        self._taken = taken_over(plan)
        arenas = indices(plan, Role.ARENA)
        arena_bytes = sum(plan.buffers[i].size for i in arenas)
        if len(arenas) > 1:
            raise InternalError(f"cpu: plan {plan.name} has {len(arenas)} arenas, expected one")
        self._arena = class_bytes(arena_bytes) if arenas else 0
        if len(constants) != len(indices(plan, Role.CONSTANT)):
            raise InternalError(f"cpu: plan {plan.name} was given {len(constants)} constants")
        given = [i for role in Role for i in indices(plan, role)]
        self._order = _reordering([given.index(i) for i in range(len(given))])
        self._pack: Callable[..., bytes] = struct.Struct(f"{len(given)}Q").pack
        self._calls = HostCalls.of(plan)
        run: Callable[[bytes], None] = _RUN(library.address("run"))
        self._run = self._calls.around(run) if self._calls else run
        self._profile: Callable[[bytes, int], None] = _PROFILE(library.address("profile"))

    def run(
        self, inputs: Sequence[DeviceBuffer], donated: Collection[int] = ()
    ) -> list[DeviceBuffer]:
        """Runs the plan on the calling thread and the workers; returns when it is done."""
        return self._call(inputs, donated, self._run)

    def timed(
        self, inputs: Sequence[DeviceBuffer], donated: Collection[int] = ()
    ) -> tuple[list[DeviceBuffer], list[StepTime]]:
        """As ``run``, with the time of each leaf of the plan."""
        if self._leaf is None:
            self._leaf = [row.is_leaf for row in Rows(self._plan, _function_name).rows]
        spent = np.zeros((len(self._leaf), 2), np.int64)  # nanoseconds and runs of each row
        address = spent.ctypes.data

        def measured(bases: bytes) -> None:
            self._profile(bases, address)

        begin = time.perf_counter()
        run = self._calls.around(measured) if self._calls else measured
        outputs = self._call(inputs, donated, run)
        times: list[StepTime] = []
        for is_leaf, (nanoseconds, runs) in zip(self._leaf, spent.tolist(), strict=True):
            if is_leaf:
                times.append(StepTime(begin, nanoseconds * 1e-9, runs))
                begin += nanoseconds * 1e-9
        return outputs, times

    def _call(
        self,
        inputs: Sequence[Any],
        donated: Collection[int],
        function: Callable[[bytes], None],
    ) -> list[DeviceBuffer]:
        """The path of every call: about 2 us, so it avoids calls, casts and empty loops."""
        device, memory = self._device, self._memory
        addresses: list[int] = list(map(_ADDRESS, inputs))
        if donated or self._taken or len(addresses) != self._inputs or 0 in addresses:
            self._check(inputs, donated)
        outputs: list[DeviceBuffer] = []
        for nbytes, size, source in self._outputs:
            if source is None:
                address = memory.take(size)
                outputs.append(CpuBuffer(device, nbytes, size, address))
            else:
                moved = inputs[source].moved()
                addresses[source] = address = moved.address
                outputs.append(moved)
            addresses.append(address)
        addresses += self._constant_addresses
        arena = self._arena
        if arena:
            addresses.append(memory.take(arena))
        bases = addresses if self._order is None else self._order(addresses)
        try:
            function(self._pack(*bases))
        finally:
            if arena:
                memory.give(addresses[-1], arena)
        for position in donated:
            if position not in self._taken:
                inputs[position].release()
        return outputs

    def _check(self, inputs: Sequence[CpuBuffer], donated: Collection[int]) -> None:
        """Refuses a wrong number of inputs, released inputs and incomplete donation."""
        if len(inputs) != self._inputs or not self._taken.issubset(donated):
            raise InternalError(
                f"cpu: {len(inputs)} inputs with {sorted(donated)} donated, expected "
                f"{self._inputs} with {sorted(self._taken)}"
            )
        for position, buffer in enumerate(inputs):
            if buffer.released:
                raise InternalError(f"cpu: input {position} was released before the call")
        chosen = set(donated)  # by identity and in sets: a training step donates a thousand buffers
        given_up = {id(inputs[position]) for position in chosen}
        kept = {id(buffer) for i, buffer in enumerate(inputs) if i not in chosen}
        if len(given_up) < len(chosen) or not kept.isdisjoint(given_up):
            raise InternalError("cpu: a donated buffer is given at two positions")


def _function_name(step: Launch) -> str:
    """A name that is not read."""
    del step
    return "@k"


def _own(buffer: DeviceBuffer) -> CpuBuffer:
    if not isinstance(buffer, CpuBuffer):
        raise InternalError(f"cpu: a buffer of device {buffer.device.name} was given")
    return buffer


def _reordering(positions: list[int]) -> Callable[[list[int]], Sequence[int]] | None:
    """Picks ``positions`` of a list in one call of C code; None where they change nothing."""
    return None if positions == list(range(len(positions))) else itemgetter(*positions)
