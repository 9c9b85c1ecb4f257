"""What runs without the host, made ready to be recorded: kernels, pipelines, parts and a layout."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, final

from vkjit.lowering.artifact import Copy, Launch, Plan
from vkjit.lowering.kernel.nodes import Kernel
from vkjit.lowering.target import Target
from vkjit.runtime.vulkan.layout import Layout, span_order, works
from vkjit.runtime.vulkan.loop_kernels import advance_kernel, begin_kernel, copy_kernel
from vkjit.runtime.vulkan.outline import (
    Call,
    Choice,
    Item,
    Play,
    Repeat,
    Replay,
    Script,
    Until,
    Work,
)
from vkjit.runtime.vulkan.pipeline import Pipeline, Pipelines
from vkjit.runtime.vulkan.split import Piece, split

if TYPE_CHECKING:
    from vkjit.runtime.vulkan.split import Parts


@final
class Stretch:
    """Items that run without the host in between.

    ``kernels`` are those of the works that are launches, ``parents`` the loops around loops.

    Args:
        plan: whose items they are.
        items: what runs.
        kernels: of all works of the plan that are launches.
        seconds: the limit of a submission.
    """

    def __init__(
        self, plan: Plan, items: Sequence[Item], kernels: Mapping[Work, Kernel], seconds: float
    ) -> None:
        self.plan = plan
        self.kernels = kernels
        self.layout = Layout(items, span_order(plan), kernels)
        self.parts: Parts = split(items, kernels, seconds)
        self.parents: dict[Replay, Replay | None] = {}
        self._find_parents(items, None)
        self.launches = [work for work in works(items) if work in kernels]
        self.copies = any(work not in kernels for work in works(items))
        self.pipelines: dict[tuple[Kernel, bool], Pipeline] = {}

    def _find_parents(self, items: Sequence[Item], parent: Replay | None) -> None:
        for item in items:
            if isinstance(item, Replay):
                self.parents[item] = parent
                self._find_parents(item.body, item)

    def wanted(self, target: Target) -> list[tuple[Kernel, bool]]:
        """Kernels in order, each with whether it is dispatched in slices of its grid."""
        pieces = [piece for part in self.parts.parts for piece in part if isinstance(piece, Piece)]
        pieces += [piece for segment in self.parts.segments for piece in segment.pieces]
        found = [(self.kernels[p.work], p.is_slice) for p in pieces if p.work in self.kernels]
        if self.parents:
            found += [(begin_kernel(target), False), (advance_kernel(target), False)]
        return found


def compile_all(stretches: Collection[Stretch], pipelines: Pipelines, target: Target) -> None:
    """Gives all stretches their pipelines; new ones are compiled at the same time."""
    wanted: dict[tuple[Kernel, bool], None] = {}
    for stretch in stretches:
        wanted.update(dict.fromkeys(stretch.wanted(target)))
    order = list(wanted)
    sliced = {number for number, (_, is_slice) in enumerate(order) if is_slice}
    made = pipelines.get([kernel for kernel, _ in order], sliced)
    found = dict(zip(order, made, strict=True))
    for stretch in stretches:
        stretch.pipelines = found


def kernels_of(script: Script, target: Target | None) -> dict[Work, Kernel]:
    """The kernels of the works of a script; with ``target`` copies have some, too."""
    found: dict[Work, Kernel] = {}
    for play in plays(script):
        for work in works(play.items):
            match work.step:
                case Launch(kernel):
                    found[work] = kernel
                case Copy():
                    if target is not None:
                        found[work] = copy_kernel(work.places[0], work.places[1], target)
    return found


def plays(script: Script) -> list[Play]:
    """All parts of a script that need no host."""
    found: list[Play] = []
    for node in script:
        match node:
            case Play():
                found.append(node)
            case Repeat(body):
                found += plays(body)
            case Until(first, body):
                found += [*plays(first), *plays(body)]
            case Choice(scripts):
                found += [play for script in scripts for play in plays(script)]
            case Call():
                pass
    return found
