"""Offloading: residuals wait in memory of the host, with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import vkjit as vj
from tests.targets import LARGE_GPU
from vkjit import checkpoint_policies as policies
from vkjit import numpy as vnp
from vkjit.api.staged import Lowered, lower
from vkjit.export.plans import from_data, to_data
from vkjit.lowering.artifact import Copy, Plan, leaves
from vkjit.lowering.target import Target
from vkjit.runtime import get_device
from vkjit.trace import trace

LAYERS, ROWS, WIDTH = 3, 8, 16
NAMED = ROWS * 4 * WIDTH * 4
"""Bytes of the named value of one layer."""

keep = policies.save_only_these_names("act")
send = policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["act"],
    offload_src="device",
    offload_dst="pinned_host",
)
send_dots = policies.offload_dot_with_no_batch_dims("device", "pinned_host")


def layer(x: Any, p: Any) -> Any:
    act = vj.checkpoint_name(vnp.tanh(x @ p[0]), "act")
    return x + vnp.sin(act) @ p[1]


def looped(policy: policies.Policy | None) -> Callable[[Any, Any], Any]:
    fn = vj.checkpoint(layer, policy=policy) if policy else layer

    def loss(x: Any, ps: Any) -> Any:
        for p in ps:
            x = fn(x, p)
        return (x * x).sum()

    return loss


def scanned(policy: policies.Policy | None) -> Callable[[Any, Any], Any]:
    fn = vj.checkpoint(layer, policy=policy) if policy else layer

    def loss(x: Any, ps: Any) -> Any:
        stacked = [vnp.stack([p[i] for p in ps]) for i in range(2)]
        x, _ = vj.lax.scan(lambda x, p: (fn(x, p), None), x, stacked)
        return (x * x).sum()

    return loss


def arguments() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    shapes = [(ROWS, WIDTH), *[(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)] * LAYERS]
    x, *ws = ((rng.standard_normal(s) * 0.3).astype(np.float32) for s in shapes)
    return x, list(zip(ws[::2], ws[1::2], strict=True))


def lowered(fn: Callable[[Any, Any], Any], target: Target) -> Lowered:
    leaves_, structure = vj.tree.flatten(arguments())

    def flat(*values: Any) -> Any:
        return vj.tree.leaves(vj.value_and_grad(fn)(*vj.tree.unflatten(structure, values)))

    return lower(trace(flat, [vj.ShapeDtypeStruct(v.shape, v.dtype).aval for v in leaves_]), target)


def copies(plan: Plan) -> list[tuple[bool, bool]]:
    """For each copy between memories, whether it reads, and writes, that of the host."""
    found = [s for s in leaves(plan.steps) if isinstance(s, Copy)]
    pairs = [
        (plan.buffers[s.source.buffer].host, plan.buffers[s.target.buffer].host) for s in found
    ]
    return [pair for pair in pairs if any(pair)]


@pytest.mark.parametrize("loop", [looped, scanned])
def test_bits_are_those_of_values_that_stay(device: str, loop: Any) -> None:
    results: list[list[bytes]] = []
    with vj.default_device(device):
        for policy in (None, send):
            step = vj.jit(vj.value_and_grad(loop(policy)))
            results.append([np.asarray(v).tobytes() for v in vj.tree.leaves(step(*arguments()))])
    assert results[0] == results[1]


def test_bytes_leave_the_device() -> None:
    kept, sent = (lowered(looped(policy), LARGE_GPU) for policy in (keep, send))
    assert kept.memory().host == 0
    assert sent.memory().host == LAYERS * NAMED
    # The value that is computed, or that was brought back, is on the device; so may the next be.
    assert kept.memory().temporaries - sent.memory().temporaries >= (LAYERS - 2) * NAMED
    saved = kept.memory().peak - sent.memory().peak
    assert saved == kept.memory().temporaries - sent.memory().temporaries
    assert sorted(copies(sent.plan)) == [(False, True)] * LAYERS + [(True, False)] * LAYERS
    assert f"{LAYERS * NAMED} bytes of the host" in sent.as_text("plan")


def test_each_turn_of_a_loop_sends_its_own() -> None:
    sent = lowered(scanned(send), LARGE_GPU)
    assert sent.memory().host == LAYERS * NAMED
    assert sorted(copies(sent.plan)) == [(False, True), (True, False)]


def test_the_cpu_copies_nothing() -> None:
    target = get_device("cpu").target
    kept, sent = (lowered(looped(policy), target) for policy in (keep, send))
    assert copies(sent.plan) == []
    assert sent.memory() == kept.memory()


def test_plans_with_memory_of_the_host_are_data() -> None:
    plan = lowered(looped(send), LARGE_GPU).plan
    assert from_data(to_data(plan)).buffers == plan.buffers


def test_products_may_wait_there() -> None:
    sent = lowered(looped(send_dots), LARGE_GPU)
    assert sent.memory().host >= LAYERS * NAMED
    assert len(copies(sent.plan)) == 2 * LAYERS


def test_lists_what_is_offloaded() -> None:
    found = vj.saved_residuals(looped(send), *arguments())
    reasons = [r.reason for r in found if r.nbytes == NAMED and not r.is_argument]
    assert reasons == [f"named 'act', in memory of the host by {send}"] * LAYERS
