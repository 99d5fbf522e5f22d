"""The rewriting that brings parameters which replicas divide: from their owners before they are used, and away again.

Where only the owner of a layer keeps its parameters (ZeRO 3), passes are cut in buckets, and a bucket's parameters are
there around the passes through it:

    UNSHARD[0:3] WAIT_UNSHARD[0:3] UNSHARD[3:6] F0[0:3] RESHARD[0:3] WAIT_UNSHARD[3:6] F0[3:6] RESHARD[3:6] ...

They start to come as the device begins what it computes before that pass, and stay where nothing would be computed
while they are away, as at the turn from a forward to its backward. So a replica has the parameters of two buckets at
most besides its own, and with two buckets mostly those of all. (ZeRO: Rajbhandari et al., SC 2020; FSDP: Zhao et al.,
VLDB 2023.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from pipefit.actions import COMPUTE, Action, Kind
from pipefit.plans import Plan
from pipefit.schedule.copies import Timeline
from pipefit.schedule.sums import bucket_edges


def gathered(actions: Sequence[Action], plan: Plan) -> list[Action]:
    """One device's actions with the parameters of its stages brought before they are used, and freed behind it."""
    unshards = list(_unshards(actions, plan))
    if not unshards:
        return list(actions)
    timeline = Timeline(actions)
    before, behind = defaultdict[int, list[Action]](list), defaultdict[int, list[Action]](list)
    computing = [number for number, action in enumerate(actions) if action.kind in COMPUTE]
    for unshard in unshards:
        for first, last in _uses(actions, computing, unshard):
            start = computing[max(first - 1, 0)]
            before[timeline.before_waiting(start)].append(unshard)
            before[computing[first]].append(unshard.join)
            behind[computing[last]].append(unshard._replace(kind=Kind.RESHARD))
    for starts in before.values():
        starts.sort(key=lambda action: action.wait)  # a join does not hold up what starts at the same place
    return [one for number, action in enumerate(actions) for one in (*before[number], action, *behind[number])]


def _unshards(actions: Sequence[Action], plan: Plan) -> Iterator[Action]:
    """The UNSHARDs of all buckets of the stages whose parameters are divided."""
    for stage in dict.fromkeys(action.stage for action in actions):
        place = plan.stages[stage]
        if place.grid.shard == "parameters":
            cuts = [place.start, *bucket_edges(plan, stage), place.stop]
            yield from (Action(Kind.UNSHARD, stage, layers=run) for run in pairwise(cuts))


def _uses(actions: Sequence[Action], computing: Sequence[int], unshard: Action) -> list[tuple[int, int]]:
    """The first and the last of the computing actions that pass through a bucket, without gaps in which it is freed."""
    found: list[tuple[int, int]] = []
    for number, position in enumerate(computing):
        action, run = actions[position], unshard.layers
        assert run is not None
        outside = action.layers is not None and (action.layers[1] <= run[0] or run[1] <= action.layers[0])
        if action.stage != unshard.stage or outside:
            continue
        begins = found.pop()[0] if found and found[-1][1] >= number - 2 else number
        found.append((begins, number))
    return found
