"""How each participant prepares and calls a case. Loaded in the participant's own process.

Frameworks are imported by name when their host is made, so that this module, like every
benchmark, needs nothing but NumPy.
"""

from __future__ import annotations

import abc
import importlib
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, final

import numpy as np

from benchmarks.case import ADAMW, Case, Namespace, Tree, make_step, tree_leaves, tree_map
from benchmarks.packed import Packed

GPU_COPY = 1 << 30
"""Bytes of the copy that tells a GPU's bandwidth."""
GPU_SQUARE = 8192


class Job(abc.ABC):
    """A prepared case: `call` starts one run, `wait` waits for it, `outputs` reads it."""

    @abc.abstractmethod
    def call(self) -> None: ...

    @abc.abstractmethod
    def wait(self) -> None: ...

    @abc.abstractmethod
    def outputs(self) -> list[np.ndarray]: ...

    def predicted(self) -> int:
        """Bytes that its plan says a call takes at most, arguments included; 0 for no plan."""
        return 0


class Host(abc.ABC):
    """A framework in this process."""

    @abc.abstractmethod
    def versions(self) -> dict[str, str]:
        """Package versions, and the device with its driver where the framework knows them."""

    @abc.abstractmethod
    def prepare(self, module: Any, case: Case) -> Job:
        """Builds the job; nothing of it has run."""

    @abc.abstractmethod
    def differentiated(self, module: Any, case: Case) -> Job:
        """For a step: value and gradient of its loss, to be checked."""

    @abc.abstractmethod
    def rates(self) -> dict[str, float]:
        """On a GPU: ``bandwidth`` in bytes and products in operations a second, by dtype."""

    @abc.abstractmethod
    def device_memory(self) -> tuple[int, int]:
        """On a GPU: bytes in use now, and at most."""


# ------------------------------------------------------------------- vkjit and JAX


def array_namespace(name: str) -> Namespace:
    """The namespace of vkjit or JAX; both have the same names."""
    root = importlib.import_module(name)
    return Namespace(
        name=name,
        np=importlib.import_module(f"{name}.numpy"),
        lax=importlib.import_module(f"{name}.lax"),
        nn=importlib.import_module(f"{name}.nn"),
        value_and_grad=root.value_and_grad,
        jit=root.jit,
        checkpoint=root.checkpoint,
    )


@final
class ArrayJob(Job):
    """A jitted function of device arrays; with a state, its first result replaces the state."""

    def __init__(
        self, function: Callable[..., Any], arguments: tuple[Tree, ...], state: Tree
    ) -> None:
        self._function = function
        self._arguments = arguments
        self._state = state
        self._result: Tree = None

    def call(self) -> None:
        if self._state is None:
            self._result = self._function(*self._arguments)
        else:
            self._state, self._result = self._function(self._state, *self._arguments)

    def wait(self) -> None:
        for leaf in tree_leaves((self._state or (), self._result)):
            leaf.block_until_ready()

    def outputs(self) -> list[np.ndarray]:
        return [np.asarray(leaf) for leaf in tree_leaves(self._result)]

    def predicted(self) -> int:
        compiled = getattr(self._function, "compile", None)  # vkjit's: done by now, so looked up
        if compiled is None:
            return 0
        state = () if self._state is None else (self._state,)
        return compiled(*state, *self._arguments).memory().peak


@final
class ArrayHost(Host):
    """vkjit or JAX; on a GPU JAX is asked for float32 products in float32, as the others are.

    vkjit has packed matrices in blocks, as ``vkjit-numbers`` in numbers, as JAX has.
    """

    def __init__(self, participant: str, device: str) -> None:
        name, _, rest = participant.partition("-")
        self._reads_blocks = name == "vkjit" and not rest
        if name == "jax":
            os.environ["JAX_PLATFORMS"] = "cpu" if device == "cpu" else "cuda"
            os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
            os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
        else:
            os.environ["VKJIT_DEVICE"] = device
        self._device = device
        self.ns = array_namespace(name)
        self._root = importlib.import_module(name)

    def versions(self) -> dict[str, str]:
        name = self.ns.name
        found = {name: str(getattr(self._root, "__version__", ""))}
        if name == "jax":
            return {**found, "jax devices": str([str(d) for d in self._root.devices()])}
        runtime = importlib.import_module("vkjit.runtime")
        described = runtime.get_device(self._device).describe()
        return {**found, "vkjit device": described.splitlines()[0]}

    def rates(self) -> dict[str, float]:
        """What vkjit's own kernels reach, where no peer is there to tell."""
        np_, jit = self.ns.np, self.ns.jit
        x = np_.asarray(np.ones(GPU_COPY // 4, np.float32))
        a = np_.asarray(np.ones((GPU_SQUARE, GPU_SQUARE), np.float32))

        def best(function: Callable[..., Any], argument: Any) -> float:
            jit(function)(argument).block_until_ready()
            return _fastest(jit(function), argument, lambda y: y.block_until_ready())

        rates = {"bandwidth": 2.0 * GPU_COPY / best(lambda x: x + 1, x)}
        for dtype in ("float32", "bfloat16"):
            square = a.astype(getattr(np_, dtype))
            rates[dtype] = 2.0 * GPU_SQUARE**3 / best(lambda a: np_.matmul(a, a), square)
        return rates

    def device_memory(self) -> tuple[int, int]:
        if self.ns.name == "jax":
            stats = self._root.devices()[0].memory_stats()
            return stats["bytes_in_use"], stats["peak_bytes_in_use"]
        stats = importlib.import_module("vkjit.runtime").get_device(self._device).memory_stats()
        return stats.live_bytes, stats.peak_bytes

    def prepare(self, module: Any, case: Case) -> Job:
        inputs = module.inputs(case)
        program = module.program(self.ns, case)
        placed = self._placed(case, inputs)
        if case.kind != "step":
            return ArrayJob(self._timed(program, case), placed, None)
        function = self.ns.jit(make_step(self.ns, program), donate_argnums=(0,))
        state = tree_map(self.ns.np.asarray, ADAMW.start(inputs[0]))
        return ArrayJob(function, placed[1:], state)

    def differentiated(self, module: Any, case: Case) -> Job:
        program = module.program(self.ns, case)
        placed = self._placed(case, module.inputs(case))
        return ArrayJob(self.ns.jit(self.ns.value_and_grad(program)), placed, None)

    def _timed(self, program: Callable[..., Any], case: Case) -> Callable[..., Any]:
        if case.kind == "forward":
            return self.ns.jit(program)
        both = self.ns.value_and_grad(program, argnums=case.argnums)
        if case.kind == "value_and_gradient":
            return self.ns.jit(both)
        return self.ns.jit(lambda *arguments: both(*arguments)[1])

    def _placed(self, case: Case, inputs: tuple[Tree, ...]) -> tuple[Tree, ...]:
        """The arguments on the device, those in `case.low` in the case's dtype."""
        to_device, dtype = self.ns.np.asarray, getattr(self.ns.np, case.dtype)

        def in_dtype(leaf: np.ndarray) -> Any:
            # On the host, so that the float32 array does not count in the device's peak.
            return to_device(leaf.astype(dtype) if leaf.dtype == np.float32 else leaf)

        def placed(leaf: np.ndarray | Packed, place: Callable[[np.ndarray], Any]) -> Any:
            if not isinstance(leaf, Packed):
                return place(leaf)
            if self._reads_blocks:
                quant = importlib.import_module("vkjit.quant")
                packed = quant.from_bytes(leaf.raw(), leaf.kind, leaf.shape)
                return quant.QuantizedArray(self._root.device_put(packed.blocks))
            numbers = place(leaf.first.numbers())
            return stacked(self.ns.np, numbers, leaf.layers)

        return tuple(
            tree_map(partial(placed, place=in_dtype if number in case.low else to_device), tree)
            for number, tree in enumerate(inputs)
        )

    def stages(self, module: Any, case: Case) -> dict[str, float]:
        """Seconds of tracing, of all passes (vkjit), and of the whole way to code."""
        program = module.program(self.ns, case)
        arguments = [tree_map(self.ns.np.asarray, tree) for tree in module.inputs(case)]
        trace = self._root.make_jaxpr if self.ns.name == "jax" else self._root.make_ir
        start = time.perf_counter()
        traced = trace(program)(*arguments)
        seconds = {"trace_s": time.perf_counter() - start}
        if self.ns.name == "vkjit":
            # No public name runs the passes alone, and they have a gate of their own.
            simplify = importlib.import_module("vkjit.passes.pipeline").simplify
            start = time.perf_counter()
            simplify(traced)
            seconds["passes_s"] = time.perf_counter() - start
        start = time.perf_counter()
        self.ns.jit(program).lower(*arguments)
        return {**seconds, "lower_s": time.perf_counter() - start}


# ------------------------------------------------------------------------- PyTorch


@final
class TorchJob(Job):
    """A PyTorch program; eager kernels on the CPU are done when they return."""

    def __init__(self, program: Callable[[], Any], wait: Callable[[], None]) -> None:
        self._program = program
        self._wait = wait
        self._result: Any = None

    def call(self) -> None:
        self._result = self._program()

    def wait(self) -> None:
        self._wait()

    def outputs(self) -> list[np.ndarray]:
        return [tensor.detach().float().cpu().numpy() for tensor in tree_leaves(self._result)]


@final
class TorchOn:
    """The torch module, whose ``from_numpy`` puts tensors on a device."""

    def __init__(self, torch: Any, device: str) -> None:
        self._torch = torch
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def from_numpy(self, array: np.ndarray | Packed) -> Any:
        """A tensor on the device, of numbers; on the CPU it shares the array's memory."""
        if not isinstance(array, Packed):
            return self._torch.from_numpy(array).to(self._device)
        numbers = self._torch.from_numpy(array.first.numbers()).to(self._device)
        return stacked(self._torch, numbers, array.layers)


@final
class TorchHost(Host):
    """PyTorch, eager, through torch.compile or under peft, on the CPU or a CUDA device."""

    def __init__(self, name: str, device: str) -> None:
        self._torch = importlib.import_module("torch")
        self._torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._compiled, self._peft = name == "torch-compile", name == "torch-peft"
        self._is_gpu = device != "cpu"
        self._on = TorchOn(self._torch, "cuda" if self._is_gpu else "cpu")

    def versions(self) -> dict[str, str]:
        found = {"torch": self._torch.__version__}
        if self._is_gpu:
            found["torch device"] = self._torch.cuda.get_device_name()
        return found

    def prepare(self, module: Any, case: Case) -> Job:
        if self._peft:
            return self._job(module.peft_program(self._on, case, module.inputs(case)))
        wrap = self._torch.compile if self._compiled else _unchanged
        return self._job(module.torch_program(self._on, case, module.inputs(case), wrap))

    def differentiated(self, module: Any, case: Case) -> Job:
        gradient = module.peft_gradient if self._peft else module.torch_gradient
        return self._job(gradient(self._on, case, module.inputs(case)))

    def rates(self) -> dict[str, float]:
        """A copy and products of large squares, by PyTorch's own kernels."""
        torch = self._torch
        source = torch.ones(GPU_COPY // 4, device="cuda")
        target = torch.empty_like(source)

        def wait(_result: Any) -> None:
            torch.cuda.synchronize()

        rates = {"bandwidth": 2.0 * GPU_COPY / _fastest(target.copy_, source, wait)}
        for dtype in ("float32", "bfloat16", "float16"):
            a = torch.randn(GPU_SQUARE, GPU_SQUARE, device="cuda").to(getattr(torch, dtype))
            rates[dtype] = 2.0 * GPU_SQUARE**3 / _fastest(lambda a: torch.matmul(a, a), a, wait)
        return rates

    def device_memory(self) -> tuple[int, int]:
        cuda = self._torch.cuda
        return cuda.memory_allocated(), cuda.max_memory_allocated()

    def _job(self, program: Callable[[], Any]) -> TorchJob:
        return TorchJob(program, self._torch.cuda.synchronize if self._is_gpu else _done)


def stacked(library: Any, matrix: Any, layers: int) -> Any:
    """What `Packed` says of its layers, on the device; the matrix itself where there are none."""
    if not layers:
        return matrix
    return library.stack([library.roll(matrix, n, 0) for n in range(layers)])


def _done() -> None:
    return


def _fastest(function: Callable[[Any], Any], argument: Any, wait: Callable[[Any], None]) -> float:
    """Seconds of a call in the best of some rounds of queued calls."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(9):
            function(argument)
        wait(function(argument))
        best = min(best, (time.perf_counter() - start) / 10)
    return best


def _unchanged(function: Callable[..., Any], **_options: Any) -> Callable[..., Any]:
    return function


def make_host(name: str, device: str) -> ArrayHost | TorchHost:
    """The host called `name`: vkjit, vkjit-numbers, jax, torch, torch-compile or torch-peft."""
    if name in ("torch", "torch-compile", "torch-peft"):
        return TorchHost(name, device)
    return ArrayHost(name, device)
