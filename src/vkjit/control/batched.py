"""What primitives with rules of the user's own share: batches of rules, refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vkjit.control.stage import stage
from vkjit.errors import TracerError
from vkjit.ir.avals import Aval, aval
from vkjit.ir.primitive import Tangent, Value
from vkjit.ir.program import Program
from vkjit.ops.structural import broadcast, reduce_sum
from vkjit.passes.batch import batch, masks
from vkjit.trace import aval_of, trace

Flat = Callable[..., Sequence[Tangent]]


def over_batch(
    fn: Flat, args: Sequence[Value], batched: Sequence[bool]
) -> tuple[list[Tangent], list[bool]]:
    """``fn`` of one example, for a batch; operations are bound now.

    Args:
        fn: of flat values to flat values, some of which may be None.
        args: with the batch axis in front where ``batched``.
        batched: which arguments have it.

    Returns:
        results, None where ``fn`` gave None, and whether each has the batch axis in front.
    """
    given: list[bool] = []

    def dense(*examples: Value) -> list[Value]:
        outs = fn(*examples)
        given[:] = [out is not None for out in outs]
        return [out for out in outs if out is not None]

    examples = [example(aval_of(v), flag) for v, flag in zip(args, batched, strict=True)]
    traced = trace(dense, examples, "batched")
    flags = [*[False] * len(traced.captured), *batched]
    outs, spread = batch(traced.program, [*traced.captured, *args], flags)
    values, moves = iter(outs), iter(spread)
    return [next(values) if g else None for g in given], [g and next(moves) for g in given]


def example(of: Aval, batched: bool) -> Aval:  # noqa: FBT001  a flag per value
    """The aval of one example."""
    return aval(of.shape[1:], of.dtype, of.weak) if batched else of


def size_of(args: Sequence[Value], batched: Sequence[bool]) -> int:
    """Length of the batch axis, which masks have where no argument does."""
    found = [v for v, flag in zip(args, batched, strict=True) if flag]
    return aval_of([*found, *masks()][0]).shape[0]


def spread_over(value: Value, size: int) -> Value:
    """``value``, the same for every example, with a batch axis in front."""
    of = aval_of(value)
    return broadcast(value, (size, *of.shape), tuple(range(1, of.ndim + 1)))


def led(args: Sequence[Value], batched: Sequence[bool]) -> tuple[Sequence[Value], Sequence[bool]]:
    """Arguments of which one has the batch axis, if there are any, and which have it."""
    if any(batched) or not args:
        return args, batched
    first, *rest = args
    return [spread_over(first, size_of(args, batched)), *rest], [True, *batched[1:]]


def summed(value: Value) -> Value:
    """The sum over the batch axis: the cotangent of what all examples share."""
    return reduce_sum(value, (0,))


def batched_body(
    body: Program, args: Sequence[Value], batched: Sequence[bool]
) -> tuple[Program, tuple[Value, ...]]:
    """``body`` over a batch, all its results with the batch axis, and values it captures.

    The captured values are those of its first parameters.
    """
    size = size_of(args, batched)

    def whole(*values: Value) -> list[Value]:
        outs, spread = batch(body, values, batched)
        pairs = zip(outs, spread, strict=True)
        return [v if flag else spread_over(v, size) for v, flag in pairs]

    staged = stage(whole, [aval_of(v) for v in args], body.name)
    return staged.programs[0], staged.captured


def refuse_captured(what: str, tangents: Sequence[Tangent]) -> None:
    """Refuses to differentiate with respect to what a function with its own rule closes over.

    Raises:
        TracerError: one of ``tangents`` is not zero.
    """
    moving = next((t for t in tangents if t is not None), None)
    if moving is not None:
        raise TracerError(
            f"{what}: differentiated with respect to a value {aval_of(moving)} that the function "
            "closes over or that nondiff_argnums names, expected values that do not move; pass it "
            "as an argument to differentiate, or close over its stop_gradient"
        )
