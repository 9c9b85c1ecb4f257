"""vkjit: a functional array compiler for Python that targets SPIR-V.

Write a function over ``vkjit.numpy`` arrays; differentiate it with ``grad``, batch it with
``vmap``, compile it with ``jit``. Names and semantics follow JAX; ``docs/differences.md`` lists
where they do not.
"""

from __future__ import annotations

from vkjit import debug, lax, nn, numpy, optim, quant, random, tree, tuning
from vkjit.api.autodiff import grad, jvp, value_and_grad
from vkjit.api.batching import vmap
from vkjit.api.check_grads import check_grads
from vkjit.api.checkpoint import checkpoint, checkpoint_name
from vkjit.api.custom import custom_jvp, custom_vjp
from vkjit.api.explain import Explanation, explain
from vkjit.api.jacobian import hessian, jacfwd, jacrev
from vkjit.api.jit import jit
from vkjit.api.memory import MemoryTimeline
from vkjit.api.misses import Miss, explain_misses
from vkjit.api.pullback import NotNeeded, Pullback, linear_transpose, linearize, vjp
from vkjit.api.ref import Ref
from vkjit.api.remat import remat
from vkjit.api.reports import memory_report
from vkjit.api.saved import print_saved, saved_residuals
from vkjit.api.staged import Lowered, MemoryReport, ShapeDtypeStruct, eval_shape, make_ir
from vkjit.api.tap import tap
from vkjit.array import Array
from vkjit.control import policies as checkpoint_policies
from vkjit.device_array import default_device, device_put
from vkjit.dtypes import enable_x64
from vkjit.lax import stop_gradient
from vkjit.ops.precision import default_matmul_precision
from vkjit.runtime import available_devices as devices
from vkjit.runtime.explain import info
from vkjit.runtime.profiling import Profile, profile

__version__ = "0.1.0"


__all__ = [
    "Array",
    "Explanation",
    "Lowered",
    "MemoryReport",
    "MemoryTimeline",
    "Miss",
    "NotNeeded",
    "Profile",
    "Pullback",
    "Ref",
    "ShapeDtypeStruct",
    "check_grads",
    "checkpoint",
    "checkpoint_name",
    "checkpoint_policies",
    "custom_jvp",
    "custom_vjp",
    "debug",
    "default_device",
    "default_matmul_precision",
    "device_put",
    "devices",
    "enable_x64",
    "eval_shape",
    "explain",
    "explain_misses",
    "grad",
    "hessian",
    "info",
    "jacfwd",
    "jacrev",
    "jit",
    "jvp",
    "lax",
    "linear_transpose",
    "linearize",
    "make_ir",
    "memory_report",
    "nn",
    "numpy",
    "optim",
    "print_saved",
    "profile",
    "quant",
    "random",
    "remat",
    "saved_residuals",
    "stop_gradient",
    "tap",
    "tree",
    "tuning",
    "value_and_grad",
    "vjp",
    "vmap",
]
