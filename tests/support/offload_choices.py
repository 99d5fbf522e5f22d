"""Tensors that can be offloaded, and their possible homes, for tests without torch."""

from __future__ import annotations

from contextlib import suppress
from random import Random

from pipefit.errors import UsageError
from pipefit.memory.storages import StageStorages
from pipefit.schema.actions import Subject
from pipefit.schema.decisions import Run, What
from pipefit.schema.devices import Place, parse_place
from pipefit.schema.plan import Plan


def movable(plan: Plan, stage: int) -> list[tuple[int, int]]:
    """Return the saved tensors of a stage that can be offloaded, one name for each storage that no recomputed
    layer saves.
    """
    storages, names = StageStorages.of(plan, stage), dict[int, tuple[int, int]]()
    runs = [d.subject for d in plan.decisions_of(stage, What.RECOMPUTE)]
    again = {n for run in runs if isinstance(run, Run) for n in range(run.start, run.stop)}
    place = plan.stages[stage]
    for layer in range(place.start, place.stop):
        for saved in plan.measured(stage).costs[layer].saved:
            subject = Subject(layer, saved.index)
            with suppress(UsageError):  # of a parameter, or of what autograd does not hold
                if saved.origin.kind in ("own", "input") and not again.intersection(storages.savers(subject)):
                    names.setdefault(storages.storage(subject), (layer, saved.index))
    return list(names.values())


def random_place(plan: Plan, stage: int, rng: Random) -> Place:
    """Draw the host of a stage, its disk if it has one, a device of another stage, or shares of several of
    them.
    """
    own = plan.stages[stage].devices
    disks = ["disk"] * bool(plan.cluster.hosts[plan.cluster.devices[own[0]].host].disk_bytes)
    members = ["host", *disks, *(f"device{n}" for n in range(len(plan.cluster.devices)) if n not in own)]
    chosen = rng.sample(members, rng.randint(1, min(3, len(members))))
    return parse_place("+".join(f"{member}*{rng.randint(1, 3)}" for member in chosen))
