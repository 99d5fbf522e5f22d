"""The cost rule of `mpress`: which technique frees the memory of one tensor for the fewest seconds.

A tensor that a forward keeps for its backward has a live interval, the time between the two. It can be

    kept          nothing is added
    recomputed    its forward runs again, and nothing else computes meanwhile: all of that time is added
    swapped       to the host, or to peers: copies run beside computing, and what exceeds the live interval is added

`mpress_choice` chooses by these numbers, as the MPress paper does: the host if the live interval hides the copies;
otherwise recomputation if it adds less than the host does; and then peers, while they have memory, if they add less
than that. It is a rule for one tensor alone. What many tensors do to each other on one link is for the simulator to
say, which `joint` asks of whole plans; for the table's tensors it decides as this rule does, or is faster.
(Zhou et al., "MPress", HPCA 2023, and its table of six tensors.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from pipefit.errors import UsageError
from pipefit.validation import check_types


class Technique(StrEnum):
    """What is done with a tensor between its forward and its backward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    HOST = "host"
    PEER = "peers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What planners may do to free memory: everything, or less where techniques are to be compared.

    Recomputed are runs of layers inside blocks, whole blocks alone, or nothing. Tensors move to the `host` or to
    `peers`, of which the `mapping` of stages to devices brings lenders near and `striping` uses several at once.
    Without `ahead`, nothing comes back or is recomputed before the backward that needs it is next. Gradients and
    parameters only move if `spill` says so, as they do in every pass, which makes steps many times longer. Optimizer
    state only moves if `state` says so.
    """

    recompute: Literal["runs", "blocks", "never"] = "runs"
    host: bool = True
    peers: bool = True
    mapping: bool = True
    striping: bool = True
    ahead: bool = True
    spill: bool = True
    state: bool = True

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def fewer(self) -> tuple[Means, ...]:
        """The means with one technique less: without recomputation, without the host, and without peers."""
        less: list[Means] = [replace(self, recompute="never")] if self.recompute != "never" else []
        less += [replace(self, host=False)] if self.host else []
        return (*less, *([replace(self, peers=False)] if self.peers else []))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCosts:
    """What the techniques cost for one tensor, in seconds; None where a technique is not to be had.

    `recompute_seconds` is the time of its second forward, `host_seconds` and `peer_seconds` those of the way out and
    back together, and `interval_seconds` how long it waits for its backward.

    Raises:
        UsageError: a negative time.
    """

    nbytes: int
    interval_seconds: float
    recompute_seconds: float | None = None
    host_seconds: float | None = None
    peer_seconds: float | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if any(seconds is not None and seconds < 0 for seconds in (self.interval_seconds, *self._seconds.values())):
            raise UsageError("a tensor's costs are times of zero or more")

    @property
    def _seconds(self) -> dict[Technique, float | None]:
        return {
            Technique.RECOMPUTE: self.recompute_seconds,
            Technique.HOST: self.host_seconds,
            Technique.PEER: self.peer_seconds,
        }

    @property
    def added_seconds(self) -> dict[Technique, float]:
        """What every technique that is to be had adds to a step."""
        found = {}
        for technique, seconds in self._seconds.items():
            if seconds is not None:
                hidden = 0.0 if technique is Technique.RECOMPUTE else self.interval_seconds
                found[technique] = max(0.0, seconds - hidden)
        return found


def mpress_choice(costs: TensorCosts) -> Technique:
    """The technique by the rule of the MPress paper, if peers have memory to spare.

    Raises:
        UsageError: no technique is to be had.
    """
    added = _some(costs)
    if added.get(Technique.HOST) == 0:
        return Technique.HOST
    first = [t for t in (Technique.RECOMPUTE, Technique.HOST) if t in added]
    without_peers = min(first, key=added.__getitem__, default=Technique.PEER)
    return Technique.PEER if added.get(Technique.PEER, float("inf")) < added[without_peers] else without_peers


def _some(costs: TensorCosts) -> dict[Technique, float]:
    """What techniques add; at least one is to be had."""
    if not costs.added_seconds:
        raise UsageError(f"{costs} leaves no technique to choose")
    return costs.added_seconds
