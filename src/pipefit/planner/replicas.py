"""Plans of equal replicas of a whole pipeline: one replica is planned, and the others do the same.

If every stage has the same number of replicas, each replica of a stage exchanges messages only with one
replica of the stage before and one of the stage after. So each replica is a separate pipeline, on one device
of every group, with microbatches of the local batch's size, and any planner of single devices plans it and
its saved tensors. Replicas all-reduce their gradients at the end of a step. Their state does not move, and
they do not lend memory to each other. They divide the requested state, and each is planned as if it kept all
of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from pipefit.errors import UsageError
from pipefit.planner.hybrid.divided_state import buckets_of
from pipefit.planner.hybrid.tables import DegreeTables, together_seconds
from pipefit.planner.problem import SINGLE, Degree, Planner, PlannerResult, Question, Split
from pipefit.schema.cluster import Cluster
from pipefit.schema.devices import Link, Member, MemberKind
from pipefit.schema.grids import Grid
from pipefit.texts import counted
from pipefit.timing import Group

Groups = tuple[tuple[int, ...], ...]


def groups_of(question: Question, degree: Degree) -> Groups:
    """Return the devices of the cluster in groups of equal ones, each for a stage of this degree.

    Raises:
        UsageError: the cluster does not have enough equal devices for a stage.
    """
    size = degree.devices
    result = [
        cls_.devices[at : at + size]
        for cls_ in question.classes
        for at in range(0, len(cls_.devices) - size + 1, size)
    ]
    if not result:
        raise UsageError(
            f"cluster {question.cluster.name} does not have {size} equal devices for the replicas of a "
            "stage: use fewer replicas"
        )
    return tuple(sorted(result))


def representative(question: Question, degree: Degree) -> Question:
    """Return the question of one replica (one tensor-parallel rank) of the pipeline, without collectives.

    Raises:
        UsageError: the cluster lacks devices, or a layer can have no replicas.
    """
    groups = groups_of(question, degree)
    measured, names = question.measured(degree), [f"layer {name}" for name in question.profile.layers]
    for what, cost in zip((*names, "the loss"), (*measured.costs, measured.loss), strict=True):
        if degree.data > 1 and cost.alone:
            raise UsageError(
                f"{what} {cost.alone}, with different results in each of {degree.data} replicas: omit data, "
                "and put this stage on one device"
            )
    options = question.options
    asked = options.stages
    if asked is not None and asked > len(groups):
        raise UsageError(
            f"{counted(asked, 'stage')} of {degree.data} replicas need "
            f"{counted(asked * degree.devices, 'device')}, but cluster {question.cluster.name} has "
            f"{len(question.cluster.devices)}: use fewer stages or replicas"
        )
    one, means = question.of_one(degree), replace(options.means, peers=False, state=False, spill=False)
    return replace(
        one,
        cluster=_part(question.cluster, [devices[0] for devices in groups]),
        options=replace(one.options, **SINGLE.pins, shard=None, means=means),
    )


def expanded(question: Question, result: PlannerResult, degree: Degree) -> PlannerResult:
    """Return the result for one replica as a result for all of them."""
    groups, shard = groups_of(question, degree), question.shards[0] if degree.data > 1 else "none"
    grids = tuple(
        Grid(devices=groups[device], shard=shard, buckets=buckets_of(shard, stop - start), **degree.pins)
        for device, (start, stop) in zip(result.split.devices, pairwise(result.split.edges), strict=True)
    )
    return result._replace(split=Split(result.split.edges, tuple(grid.devices[0] for grid in grids), grids))


def in_replicas(planner: Planner) -> Planner:
    """Return a planner for stages of the requested degree, from a planner of single devices."""
    return lambda question: next(answers(question, planner))


def answers(question: Question, *planners: Planner) -> Iterator[PlannerResult]:
    """Yield the results of planners of single devices, for stages of the requested degree.

    Raises:
        UsageError: such stages are impossible, or a planner does not support the question.
    """
    degree = question.degrees[0]
    asked = question if degree.devices == 1 else representative(question, degree)
    for planner in planners:
        result = planner(asked)
        yield result if degree.devices == 1 else expanded(question, result, degree)


def seconds_together(question: Question, split: Split, degree: Degree) -> float:
    """Return the seconds of collectives on the slowest stage.

    They are all-reduces of gradients, and tensor-parallel communication in every pass.
    """
    tables, groups, result = DegreeTables(question, degree), groups_of(question, degree), [0.0]
    for (start, stop), device in zip(pairwise(split.edges), split.devices, strict=True):
        shards, replicas = (Group.of(question.cluster, group) for group in degree.groups(groups[device]))
        kind = question.cluster.devices[groups[device][0]].kind
        passes = [
            float((of.forward + of.backward)[start, stop])
            for of in map(tables.seconds, (kind,) * 2, (None, shards))
        ]
        sums = float(together_seconds(replicas.sums, np.array(tables.gradients[start, stop])))
        result.append(sums + question.training.microbatches * (passes[1] - passes[0]))
    return max(result)


def _part(cluster: Cluster, devices: Sequence[int]) -> Cluster:
    """Return some devices of a cluster, with the links between them and to their hosts."""
    numbers = {device: number for number, device in enumerate(devices)}

    def kept(link: Link) -> list[Member]:
        return [
            Member.device(numbers[member.number or 0]) if member.kind is MemberKind.DEVICE else member
            for member in link.members
            if member.kind is not MemberKind.DEVICE or member.number in numbers
        ]

    links, there = (
        [(link, tuple(kept(link))) for link in cluster.links],
        cluster.reserving(cluster.reserves).devices,
    )
    return replace(
        cluster,
        devices=tuple(there[device] for device in devices),
        links=tuple(replace(link, members=members) for link, members in links if len(members) > 1),
    )
