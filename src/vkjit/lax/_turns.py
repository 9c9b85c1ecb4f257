"""How a staged body runs many times: in one loop, unrolled, or in chunks that are checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from vkjit.control.checkpoint import checkpointed
from vkjit.control.policies import nothing_saveable
from vkjit.control.scan import Scan
from vkjit.control.stage import Staged, stage
from vkjit.ir.avals import aval
from vkjit.ir.primitive import Value
from vkjit.lax._shape import concatenate, index_in_dim, reshape, slice_in_dim
from vkjit.numpy._shape import stack
from vkjit.trace import apply_program, aval_of, bind_outs

Flow = tuple[list[Value], list[Value]]
"""The carry after some turns, and their stacked results."""
Some = Callable[[Sequence[Value], Sequence[Value], int], Flow]
"""So many turns, from a carry and stacked slices."""


@final
class Turns:
    """A body of (captured values, carries, slices) that gives carries and slices."""

    def __init__(self, staged: Staged, carries: int, *, reverse: bool) -> None:
        self.body = staged.programs[0]
        self.captured = staged.captured
        self.carries = carries
        self.reverse = reverse

    def run(self, carry: Sequence[Value], xs: Sequence[Value], length: int, unroll: int) -> Flow:
        """A loop with ``unroll`` bodies in each turn; what is left over stands behind it."""
        if unroll == 1:
            return self._loop(carry, xs, length)
        return self._blocks(carry, xs, length, (unroll, self._inline))

    def chunked(
        self, carry: Sequence[Value], xs: Sequence[Value], length: int, sizes: tuple[int, int]
    ) -> Flow:
        """A loop over loops of ``sizes[0]`` turns; what one needs for a derivative is not kept.

        ``sizes[1]`` bodies stand in each turn of the inner loops.
        """
        chunk, unroll = sizes

        def computed_again(carry: Sequence[Value], xs: Sequence[Value], count: int) -> Flow:
            def flat(*values: Value) -> list[Value]:
                parts = values[: self.carries], values[self.carries :]
                last, ys = self.run(*parts, count, unroll)
                return [*last, *ys]

            outs = checkpointed(flat, [*carry, *xs], nothing_saveable, f"{self.body.name}.chunk")
            return list(outs[: self.carries]), list(outs[self.carries :])

        return self._blocks(carry, xs, length, (chunk, computed_again))

    def _loop(self, carry: Sequence[Value], xs: Sequence[Value], length: int) -> Flow:
        made = Scan(self.body, length, len(self.captured), self.carries, self.reverse)
        outs = bind_outs(made, *self.captured, *carry, *xs)
        return list(outs[: self.carries]), list(outs[self.carries :])

    def _inline(self, carry: Sequence[Value], xs: Sequence[Value], count: int) -> Flow:
        """Turns in place, without a loop."""
        made: list[Sequence[Value]] = []
        order = range(count)
        for turn in reversed(order) if self.reverse else order:
            slices = [index_in_dim(x, turn, 0, keepdims=False) for x in xs]
            outs = apply_program(self.body, [*self.captured, *carry, *slices])
            carry = outs[: self.carries]
            made.append(outs[self.carries :])
        if self.reverse:
            made.reverse()
        return list(carry), [stack(column) for column in zip(*made, strict=True)]

    def _blocks(
        self,
        carry: Sequence[Value],
        xs: Sequence[Value],
        length: int,
        inner: tuple[int, Some],
    ) -> Flow:
        """A loop over as many whole blocks as there are, then the turns that are left over.

        These are the highest slices, or the lowest where the loop runs from the highest.
        """
        size, turns = inner
        if length <= size:
            return turns(carry, xs, length) if length else self._loop(carry, xs, 0)
        rest = length % size
        whole = length - rest
        start = rest if self.reverse else 0
        blocks = [slice_in_dim(x, start, start + whole) for x in xs]
        carry, ys = self._outer(carry, blocks, whole // size, inner)
        if not rest:
            return carry, ys
        start = 0 if self.reverse else whole
        carry, more = turns(carry, [slice_in_dim(x, start, start + rest) for x in xs], rest)
        pairs = zip(more, ys, strict=True) if self.reverse else zip(ys, more, strict=True)
        return carry, [concatenate(pair, 0) for pair in pairs]

    def _outer(
        self, carry: Sequence[Value], xs: Sequence[Value], count: int, inner: tuple[int, Some]
    ) -> Flow:
        """A loop of ``count`` turns over blocks."""
        size, turns = inner

        def flat(*values: Value) -> list[Value]:
            last, ys = turns(values[: self.carries], values[self.carries :], size)
            return [*last, *ys]

        blocks = [reshape(x, (count, size, *aval_of(x).shape[1:])) for x in xs]
        of = [aval_of(b) for b in blocks]
        slices = [aval(a.shape[1:], a.dtype, a.weak) for a in of]
        body = stage(flat, [*map(aval_of, carry), *slices], f"{self.body.name}.{size}")
        outer = Turns(body, self.carries, reverse=self.reverse)
        last, ys = outer.run(carry, blocks, count, 1)
        return last, [reshape(y, (count * size, *aval_of(y).shape[2:])) for y in ys]
