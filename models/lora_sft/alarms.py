"""Signs that a run does not do what it seems to do. Pure functions of what was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, final

from vkjit.errors import UserError

from .evaluate import HeldOut
from .movement import Movement

FLAT_DECIMALS = 4
"""Decimals in which two losses must differ to count as different."""
SMALL_MOVE = 1e-5
"""Relative move per step below which a pull on the weights cannot matter."""
SMALL_SHARE = 0.01
"""Share of the distance over a whole run below which weight decay cannot matter."""
FLAT_SHARE = 1e-3
"""Relative change of the held-out loss below which a trained run is called flat."""


@final
class AlarmError(UserError):
    """A run was ended because its numbers cannot be true; its files say what was seen."""


@final
@dataclass(frozen=True)
class Alarm:
    """One sign.

    Args:
        kind: What it is a sign of.
        level: An error ends the run, a warning does not.
        message: What was seen and what to do.
    """

    kind: Literal[
        "did not move", "moved, loss flat", "evaluation blind", "few targets", "pull too weak",
        "decay too weak", "loss rose", "diverged", "not finite",
    ]  # fmt: skip
    level: Literal["warning", "error"]
    message: str

    @property
    def is_error(self) -> bool:
        """Whether it ends the run."""
        return self.level == "error"


def still_tensors(movement: Movement, still_steps: int) -> list[Alarm]:
    """Adapter tensors whose bytes are the initial ones after ``still_steps`` steps or more."""
    if not still_steps or movement.step < still_steps or not movement.still:
        return []
    names = ", ".join(movement.still[:3]) + (", ..." if len(movement.still) > 3 else "")
    return [Alarm("did not move", "error", (
        f"{len(movement.still)} of {len(movement.tensors)} adapter tensors did not move in "
        f"{movement.step} steps: their checksums are the initial ones ({names}); check "
        "optimizer.learning_rate, the targets, and whether anything is labelled"
    ))]  # fmt: skip


def flat_loss(what: str, moved: float, before: float, after: float, least: float) -> list[Alarm]:
    """Adapters that moved by more than ``least`` since the evaluation before, but no loss did.

    Args:
        what: Which loss it is.
        moved: Of the adapters between both evaluations, as a share of their norm.
        before: The loss at the evaluation before.
        after: The loss now.
        least: Relative change above which the adapters count as moved.
    """
    if moved <= least or abs(after - before) >= 0.5 * 10.0**-FLAT_DECIMALS:
        return []
    return [Alarm("moved, loss flat", "warning", (
        f"the adapters moved by {moved:.2g} of their norm, but the {what} loss is "
        f"the same to {FLAT_DECIMALS} decimals ({after:.{FLAT_DECIMALS}f}); check that the "
        "measured loss depends on the adapter, or raise optimizer.learning_rate"
    ))]  # fmt: skip


def blind_evaluation(movement: Movement, off: HeldOut, on: HeldOut, least: float) -> list[Alarm]:
    """An evaluation that gives the same number with the adapters on and off although they moved."""
    if movement.moved <= least or off.loss != on.loss:
        return []
    return [Alarm("evaluation blind", "error", (
        f"the held-out loss is {on.loss!r} with the adapters on and off, although they moved by "
        f"{movement.moved:.2g} of their norm; the evaluation does not see them: check lora.alpha "
        "and the targets"
    ))]  # fmt: skip


def few_targets(held_out: HeldOut, least: int) -> list[Alarm]:
    """Held-out categories with fewer than ``least`` labelled tokens."""
    few = {n: c for n, c in held_out.targets_by_category.items() if c < least}
    if not few:
        return []
    listed = ", ".join(f"{name} {count}" for name, count in sorted(few.items()))
    return [Alarm("few targets", "warning", (
        f"held-out categories with fewer than {least} labelled tokens: {listed}; their losses are "
        "uncertain: raise data.held_out_windows or data.held_out"
    ))]  # fmt: skip


def weak_decay(learning_rate: float, weight: float, steps: int) -> list[Alarm]:
    """Weight decay that cannot matter: by a step and over the whole run.

    Args:
        learning_rate: The largest of the run.
        weight: The decay: a step takes ``learning_rate * weight`` of the distance away.
        steps: Of the run.
    """
    move = learning_rate * weight
    if not weight or move >= SMALL_MOVE or move * steps >= SMALL_SHARE:
        return []
    return [Alarm("decay too weak", "warning", (
        f"optimizer.weight_decay: learning rate x decay = {learning_rate:g} x {weight:g} takes "
        f"{move:.2g} of the distance per step and {move * steps:.2g} in the run: it cannot matter; "
        f"raise it to {SMALL_MOVE / learning_rate:.2g} or more, or set it to 0"
    ))]  # fmt: skip


def outcome(movement: Movement, off: HeldOut, on: HeldOut, least: float) -> list[Alarm]:
    """What to say of a finished run's held-out loss."""
    if movement.step and len(movement.still) == len(movement.tensors):
        return [Alarm("did not move", "warning", (
            "the adapter did not move: its checksums are the initial ones; check "
            "optimizer.learning_rate, the targets and the number of steps"
        ))]  # fmt: skip
    if not math.isfinite(on.loss):
        return [Alarm("not finite", "error", (
            f"the held-out loss is {on.loss} with the adapter after {movement.step} steps, "
            f"{off.loss:.4f} without: the adapter is of no use; lower optimizer.learning_rate and "
            "begin anew"
        ))]  # fmt: skip
    change = (off.loss - on.loss) / off.loss if off.loss else 0.0
    if movement.moved > least and abs(change) < FLAT_SHARE:
        return [Alarm("moved, loss flat", "warning", (
            f"the adapter moved, but the held-out loss is flat ({100 * change:+.3f}%); train "
            "longer or raise optimizer.learning_rate"
        ))]  # fmt: skip
    if change < 0:
        return [Alarm("loss rose", "warning", (
            f"the held-out loss rose by {-100 * change:.1f}%; lower optimizer.learning_rate"
        ))]  # fmt: skip
    return []
