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
from typing import Any, final

import numpy as np

from benchmarks.case import ADAMW, Case, Namespace, Tree, make_step, tree_leaves, tree_map


class Job(abc.ABC):
    """A prepared case: `call` starts one run, `wait` waits for it, `outputs` reads it."""

    @abc.abstractmethod
    def call(self) -> None: ...

    @abc.abstractmethod
    def wait(self) -> None: ...

    @abc.abstractmethod
    def outputs(self) -> list[np.ndarray]: ...


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


@final
class ArrayHost(Host):
    """vkjit or JAX."""

    def __init__(self, name: str, device: str) -> None:
        if name == "jax":
            os.environ["JAX_PLATFORMS"] = "cpu" if device == "cpu" else ""
        else:
            os.environ["VKJIT_DEVICE"] = device
        self.ns = array_namespace(name)
        self._root = importlib.import_module(name)

    def versions(self) -> dict[str, str]:
        devices = [str(device) for device in self._root.devices()]
        name = self.ns.name
        return {name: str(getattr(self._root, "__version__", "")), f"{name} devices": str(devices)}

    def prepare(self, module: Any, case: Case) -> Job:
        inputs = module.inputs(case)
        program = module.program(self.ns, case)
        if case.kind != "step":
            return self._job(self._timed(program, case), inputs, None)
        function = self.ns.jit(make_step(self.ns, program), donate_argnums=(0,))
        return self._job(function, inputs[1:], ADAMW.start(inputs[0]))

    def differentiated(self, module: Any, case: Case) -> Job:
        program = module.program(self.ns, case)
        return self._job(self.ns.jit(self.ns.value_and_grad(program)), module.inputs(case), None)

    def _timed(self, program: Callable[..., Any], case: Case) -> Callable[..., Any]:
        if case.kind == "forward":
            return self.ns.jit(program)
        both = self.ns.value_and_grad(program, argnums=case.argnums)
        if case.kind == "value_and_gradient":
            return self.ns.jit(both)
        return self.ns.jit(lambda *arguments: both(*arguments)[1])

    def _job(self, function: Callable[..., Any], inputs: tuple[Tree, ...], state: Tree) -> ArrayJob:
        to_device = self.ns.np.asarray
        arguments = tuple(tree_map(to_device, tree) for tree in inputs)
        return ArrayJob(function, arguments, None if state is None else tree_map(to_device, state))

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

    def __init__(self, program: Callable[[], Any]) -> None:
        self._program = program
        self._result: Any = None

    def call(self) -> None:
        self._result = self._program()

    def wait(self) -> None:
        return

    def outputs(self) -> list[np.ndarray]:
        return [tensor.detach().float().numpy() for tensor in tree_leaves(self._result)]


@final
class TorchHost(Host):
    """PyTorch on the CPU, eager or through torch.compile."""

    def __init__(self, name: str) -> None:
        self._torch = importlib.import_module("torch")
        self._torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._compiled = name == "torch-compile"

    def versions(self) -> dict[str, str]:
        return {"torch": self._torch.__version__}

    def prepare(self, module: Any, case: Case) -> Job:
        wrap = self._torch.compile if self._compiled else _unchanged
        return TorchJob(module.torch_program(self._torch, case, module.inputs(case), wrap))

    def differentiated(self, module: Any, case: Case) -> Job:
        return TorchJob(module.torch_gradient(self._torch, case, module.inputs(case)))


def _unchanged(function: Callable[..., Any], **_options: Any) -> Callable[..., Any]:
    return function


def make_host(name: str, device: str) -> ArrayHost | TorchHost:
    """The host called `name`: vkjit, jax, torch or torch-compile."""
    if name in ("torch", "torch-compile"):
        return TorchHost(name)
    return ArrayHost(name, device)
