"""Plans of tasks: profiles are made on the way, for the microbatch sizes and shards that planning looks at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Unpack

from pipefit.beside import beside
from pipefit.cluster import Cluster
from pipefit.errors import InfeasibleError
from pipefit.fitting.attempts import attempt
from pipefit.planner import Answer, Asked, answered
from pipefit.planner.spaces import by_distance, sizes_of
from pipefit.plans import Plan
from pipefit.profiler.on_demand import OnDemand
from pipefit.training import MOST_SAMPLES, Training


class Proposal(NamedTuple):
    """A plan without its alternatives, and what it comes to: itself, or another one where the model does otherwise than
    its profiles say.
    """

    plan: Plan
    answer: Callable[[], Answer]

    def settled(self) -> Plan:
        """What it comes to, with its alternatives."""
        return self.answer().complete()


def sizes_asked(training: Training | None, asked: Asked) -> tuple[int, ...]:
    """The microbatch sizes that may be asked for, slices of them included."""
    batch, size, count = asked.get("batch_size"), asked.get("microbatch_size"), asked.get("microbatches")
    if training is not None:
        size = training.microbatch_size
    elif size is None:
        size = batch // count if batch and count else batch
    return sizes_of(size) if size and 0 < size <= MOST_SAMPLES else (1,)  # others are refused where all is checked


def in_order(sizes: Sequence[int], training: Training | None, asked: Asked, devices: int) -> list[int]:
    """The sizes of `sizes_asked` in the order in which they are likely to be asked for."""
    chosen = training is None and asked.get("microbatch_size") is None and asked.get("microbatches") is None
    return by_distance(sizes, sizes[-1], devices) if chosen else sorted(sizes, reverse=True)


def plan_on_the_way(
    known: OnDemand,
    cluster: Cluster,
    training: Training | None = None,
    *,
    shards: Sequence[int] = (),
    along: bool = False,
    runs_dry: bool = False,
    **asked: Unpack[Asked],
) -> Proposal:
    """A plan whose profiles, as far as it has them, come to be those of traces; layers may be divided between `shards`
    ranks, `along` positions too. It is held against traces from now on until it is settled.

    With `runs_dry` alternatives are looked for beside the dry run that follows. Other arguments are those of
    `pipefit.planner.plan`.

    Raises:
        InfeasibleError: no plan fits, by such profiles; as it is settled, too.
    """
    make = partial(answered, partial(known, tensor=shards, sequences=along), cluster, training, **asked)
    try:
        found = make()
    except InfeasibleError:
        if known.checked()():
            raise
        found = make()
    made = found.plan
    used = (made.measured(stage).microbatch_size for stage in range(len(made.stages)))
    as_traced = known.checked(used if attempt(0, made).fits else None)
    (others,) = beside(found.others, forks=runs_dry)

    return Proposal(made, lambda: Answer(made, others) if as_traced() else make())
