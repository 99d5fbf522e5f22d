"""Recompute settings: what a caller may ask for, and the decisions that each becomes in a plan.

never         nothing is recomputed
always        every block is recomputed by itself, for all microbatches: activation checkpointing per block
stages        every stage is recomputed as a whole, for all microbatches: it keeps only its inputs
except_last   the same for all microbatches of a step but the last, as in GPipe and torchgpipe
except_one    the same for all but the one whose backward comes first, which is the cheapest to keep
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal

from pipefit.decisions import ALL_MICROBATCHES, Decision, Microbatches, Run, What
from pipefit.errors import UsageError
from pipefit.grids import Stage
from pipefit.sharing import SharedParameter

Recompute = Literal["never", "always", "stages", "except_last", "except_one"]
RECOMPUTE: tuple[Recompute, ...] = ("never", "always", "stages", "except_last", "except_one")

_FROM_THE_LAST = frozenset({"torchgpipe"})  # schedules whose backwards begin with the last microbatch


def recomputed_microbatches(recompute: Recompute, schedule: str, microbatches: int) -> Microbatches | None:
    """The microbatches of a step that are recomputed; None if none is.

    Raises:
        UsageError: there is no such setting; says which there are.
    """
    if recompute not in RECOMPUTE:
        raise UsageError(f"recompute is one of {', '.join(RECOMPUTE)}, not {recompute!r}")
    if recompute in ("always", "stages"):
        return ALL_MICROBATCHES
    if recompute == "never" or microbatches == 1:
        return None
    first = recompute == "except_one" and schedule not in _FROM_THE_LAST
    return Microbatches(taken=microbatches - 1, every=microbatches, first=int(first))


def recompute_decisions(
    stages: Sequence[Stage],
    edges: Sequence[int],
    recompute: Recompute,
    schedule: str,
    microbatches: int,
    *,
    shared: Sequence[SharedParameter] = (),
) -> tuple[Decision, ...]:
    """The decisions that a recompute setting makes for these stages.

    Args:
        edges: the first layer of every block, and the number of layers.
        shared: parameters that layers share; blocks of a stage that share one are recomputed together.

    Raises:
        UsageError: there is no such setting.
    """
    which = recomputed_microbatches(recompute, schedule, microbatches)
    return tuple(
        Decision(
            stage=number,
            subject=run,
            what=What.RECOMPUTE,
            microbatches=which,
            why=f"recompute {recompute} was asked for",
        )
        for number, stage in enumerate(stages)
        if which is not None
        for run in _runs(stage, edges if recompute == "always" else (), shared)
    )


def _runs(stage: Stage, edges: Sequence[int], shared: Sequence[SharedParameter]) -> Iterator[Run]:
    """The runs of layers of a stage that are recomputed by themselves."""
    for start, stop in pairwise(cuts(edges, stage.start, stage.stop, shared)):
        yield Run(start=start, stop=stop)


def cuts(edges: Sequence[int], start: int, stop: int, shared: Sequence[SharedParameter]) -> list[int]:
    """The edges at which layers `start` to `stop - 1` may be run in parts, both ends included: not between layers that
    share a trained parameter, whose gradients would be added up in another order.
    """
    inside = [edge for edge in edges if start < edge < stop]
    for one in shared if inside else ():
        users = [user for user in one.users if start <= user < stop]
        if users and one.gradient_bytes:
            inside = [edge for edge in inside if not users[0] < edge <= users[-1]]
    return [start, *inside, stop]
