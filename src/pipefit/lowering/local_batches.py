"""The rows of every microbatch that a device computes, and that it exchanges with neighbouring stages.

The replicas of a stage have the same order of actions but different rows, so a device's loads, sends and
receives name its rows, and the device at the other end if there are several. The tensor shards of a replica
have the same rows: every device gets its rows from one shard of the sending replica, and these shards serve
the receivers evenly. Gradients are reduced over devices that hold the same shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import lcm

from pipefit.errors import UsageError
from pipefit.schema.actions import SENDS, Action, Kind, Subject
from pipefit.schema.decisions import Decision, State, What
from pipefit.schema.devices import Member, Place, Share
from pipefit.schema.grids import Rows, Sharding, common_rows, rows_of
from pipefit.schema.layer_costs import LayerCost
from pipefit.schema.plan import Plan
from pipefit.texts import counted


class Slices:
    """The local batches of one device.

    Args:
        plan: the plan.
        replica: the number of the device's replica in its stages.
        shard: the number of the device's shard in this replica.
        smaller: the samples of microbatches that have fewer than the plan's, by their numbers.
    """

    def __init__(
        self, plan: Plan, replica: int = 0, shard: int = 0, *, smaller: Mapping[int | None, int] | None = None
    ) -> None:
        self._plan, self._replica, self._shard = plan, replica, shard
        self._smaller = smaller or {}
        self._grids = [stage.grid for stage in plan.stages]

    def load(self, stage: int, microbatch: int | None) -> Action:
        """Return the LOAD of a microbatch, or of the device's rows of it."""
        rows = self._own(stage, microbatch) if self._grids[stage].data > 1 else None
        return Action(Kind.LOAD, stage, microbatch, part=rows)

    def messages(self, kind: Kind, stage: int, microbatch: int | None) -> Iterator[Action]:
        """Yield the sends or receives of this kind: one for each peer device with common rows.

        If each end has one device, neither rows nor devices are named.
        """
        plain = Action(kind, stage, microbatch)
        own, there = self._grids[stage], self._grids[plain.neighbour]
        if len(own.devices) == len(there.devices) == 1:
            yield plain
            return
        for replica, rows in common_rows(
            self._own(stage, microbatch), self._samples(microbatch) // there.data
        ):
            for shard in _partners(self._shard, own.tensor, there.tensor, sends=kind in SENDS):
                peer = there.devices[replica * there.tensor + shard]
                yield plain._replace(part=rows, place=_of([peer]) if len(there.devices) > 1 else None)

    def together(self, actions: Iterable[Action]) -> Iterator[Action]:
        """Yield the actions; gradient reductions and parameter gathers name the devices that hold the same
        shard.
        """
        for action in actions:
            if action.kind in (Kind.REDUCE, Kind.UNSHARD) and self._grids[action.stage].tensor > 1:
                subject = action.subject
                stages = self._plan.summed[subject.layer] if isinstance(subject, Subject) else (action.stage,)
                same = [device for stage in stages for device in self._grids[stage].holding(self._shard)]
                yield action._replace(place=_of(same))
            else:
                yield action

    def _own(self, stage: int, microbatch: int | None) -> Rows:
        return rows_of(self._replica, self._samples(microbatch) // self._grids[stage].data)

    def _samples(self, microbatch: int | None) -> int:
        return self._smaller.get(microbatch, self._plan.training.microbatch_size)


def _partners(shard: int, own: int, there: int, *, sends: bool) -> Sequence[int]:
    """Return the shards of another replica that get their rows from shard `shard` of `own`.

    For receives, returns the shard that sends.
    """
    return range(shard, there, own) if sends else (shard % there,)


def _of(devices: Sequence[int]) -> Place:
    return Place([Share(Member.device(device), 1) for device in devices])


def check_slices(plan: Plan, last: int | None) -> None:
    """Check that stages on several devices can be simulated and run.

    Raises:
        UsageError: they cannot, or their replicas cannot divide the last microbatch or the exchanged values;
            says which, and a remedy.
    """
    if all(len(stage.devices) == 1 for stage in plan.stages):
        return
    for number, stage in enumerate(plan.stages):
        grid = stage.grid
        if grid.tensor > 1:
            _check_shards(plan, number)
        if grid.data > 1:
            _check_replicas(plan, number, last)
        if number:
            plan.division(number)


def _check_shards(plan: Plan, number: int) -> None:
    shards = plan.stages[number].grid.tensor
    where = f"stage {number} has {shards} tensor shards"
    grid = plan.stages[number].grid
    for other, stage in enumerate(plan.stages):
        if stage.devices == grid.devices and (stage.grid.data, stage.grid.tensor) != (grid.data, grid.tensor):
            raise UsageError(
                f"{where}, but stage {other} on the same devices is sharded differently: use the same grid "
                "for both, or different devices"
            )
    for shared, stages in plan.summed.items():
        mine, others = _part(plan, number, shared), [stage for stage in stages if number in stages]
        differing = next((stage for stage in others if _part(plan, stage, shared) != mine), None)
        if differing is not None:
            name, there = plan.measurement.shared[shared].name, plan.stages[differing].grid
            if there.tensor == shards:
                why, do = (
                    "which has the same number of shards but splits it differently for its local batches",
                    "the same number of replicas",
                )
            else:
                why, do = f"which has {counted(there.tensor, 'shard')}", "the same number of shards"
            raise UsageError(
                f"{where} in {counted(grid.data, 'replica')} and shares parameter {name!r} with stage "
                f"{differing} in {counted(there.data, 'replica')}, {why}: give both {do}, or put all layers "
                "that use the parameter into one stage"
            )


def _part(plan: Plan, stage: int, shared: int) -> tuple[int, str]:
    """Return a key of a stage's division of a shared parameter: equal for stages with the same parts."""
    return plan.stages[stage].grid.tensor, plan.measured(stage).shared[shared].form


def _check_replicas(plan: Plan, number: int, last: int | None) -> None:
    stage, data = plan.stages[number], plan.stages[number].grid.data
    where = f"stage {number} has {data} replicas"
    if last is not None and last % data:
        every = lcm(*(one.grid.data for one in plan.stages))
        raise UsageError(
            f"{where}, which cannot split the {counted(last, 'sample')} of the last microbatch evenly: "
            f"remove {last % every} of them, or add {-last % every}"
        )
    for layer, cost in zip(plan.profile.layers[stage.start : stage.stop], _costs(plan, number), strict=True):
        if cost.alone:
            raise UsageError(
                f"{where}, but layer {layer} {cost.alone}, with different results in each replica: put this "
                "layer into a stage on one device"
            )
    if plan.measurement.loss.alone and number + 1 == len(plan.stages):
        raise UsageError(
            f"{where}, but the loss {plan.measurement.loss.alone}, with different results in each replica: "
            "put the last stage on one device"
        )
    for shared, stages in plan.summed.items() if stage.grid.divides_gradients else ():
        if number in stages:
            raise UsageError(
                f"{where} that shard gradients, but shares parameter "
                f"{plan.measurement.shared[shared].name!r} with another stage, which needs its gradients on "
                "all replicas: shard only the optimizer state (shard='optimizer'), or put the layers that "
                "share it into one stage"
            )
    for decision in plan.decisions:
        if decision.stage == number and isinstance(decision.subject, State) and stage.grid.shard != "none":
            _check_state(decision, decision.subject, stage.grid.shard, where)


def _check_state(decision: Decision, moved: State, shard: Sharding, where: str) -> None:
    """Check that replicas divide the moved state, so that each keeps its own part from one update to the
    next.
    """
    if decision.what is What.UPDATE and shard == "optimizer":
        raise UsageError(
            f"{decision}: {where} that shard only the optimizer state, so each holds all gradients: shard "
            "gradients too (shard='gradients'), so that each replica sends only its own to the host"
        )
    if moved.kind == "gradients":
        raise UsageError(
            f"{decision}: {where} that shard {shard}, whose gradients are reduced as soon as they have been "
            "computed and cannot be offloaded: omit the decision, or let the host update the layers"
        )
    if moved.kind == "parameters" and shard != "parameters":
        raise UsageError(
            f"{decision}: {where} that shard {shard} but hold all parameters, which an update gathers on "
            "all replicas: shard parameters too (shard='parameters'), so that each replica offloads only "
            "its own"
        )


def _costs(plan: Plan, number: int) -> tuple[LayerCost, ...]:
    return plan.measured(number).costs[plan.stages[number].start : plan.stages[number].stop]
