"""Looking into compiled functions: prints, calls of the host, checks, gradients, NaNs, keys.

``print``, ``callback``, ``grad_print`` and ``check`` work eagerly and inside ``jit``, ``scan``,
``cond``, ``while_loop``, ``vmap`` and derivatives, on every device. They are effects: compiled
programs wait for the host at each, and keep their order.
"""

from __future__ import annotations

from vkjit.debug.calls import callback, check, grad_print, print
from vkjit.debug.keys import key_reuse
from vkjit.debug.nans import nans

__all__ = ["callback", "check", "grad_print", "key_reuse", "nans", "print"]
