"""What can grow: a setting of the model, the microbatch, the number of devices, or the memory of each.

In the first two cases the largest value that fits is wanted, in the others the smallest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pipefit.capture import Task
from pipefit.cluster import Cluster
from pipefit.devices import Link
from pipefit.errors import UsageError
from pipefit.fits import Sense, named_value
from pipefit.places import Member, MemberKind
from pipefit.planner import PLANNERS, Means, Options, Question, solved
from pipefit.plans import Plan
from pipefit.profiler import profile
from pipefit.profiles import ModelProfile, Target
from pipefit.schedule.whole_stages import Recompute
from pipefit.training import Training

_EFFORT = 0.1  # the part of its budget that a planner which simulates has for a value
_RATE_WITHOUT_LINKS = 12e9  # bytes per second, one way: what copies over PCIe 3.0 x16 reach


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """How the model is to be trained, whatever grows.

    `microbatches` None is four for each device of the cluster, as in `plan`. The joint planner has a tenth of its
    budget for each value, and leaves gradients and parameters on the devices: wherever they moved in every pass, a
    step would take many times as long.
    """

    cluster: Cluster
    microbatch_size: int = 1
    microbatches: int | None = None
    schedule: str = "1f1b"
    recompute: Recompute = "never"
    planner: str = "joint"
    target: Target = "cpu"
    threads: int = 1

    def profile(self, task: Task, microbatch_size: int | None = None) -> ModelProfile:
        """What the layers of `task` cost, by the fake profiler."""
        size = self.microbatch_size if microbatch_size is None else microbatch_size
        return profile(task, microbatch_size=size, target=self.target, threads=self.threads)

    def plan(self, costs: ModelProfile, cluster: Cluster | None = None) -> Plan:
        """The plan, whether or not it fits."""
        if self.planner not in PLANNERS:
            raise UsageError(f"there is no planner {self.planner!r}; choose one of {', '.join(PLANNERS)}")
        microbatches = self.microbatches or 4 * len(self.cluster.devices)
        training = Training(
            batch_size=microbatches * costs.measurements[0].microbatch_size,
            microbatches=microbatches,
            schedule=self.schedule,
            precision=costs.assumptions.precision,
        )
        question = Question(
            profile=costs,
            cluster=cluster or self.cluster,
            training=training,
            options=Options(recompute=self.recompute, allow_infeasible=True, effort=_EFFORT),
            means=Means(spill=False),
        )
        return solved(question, PLANNERS[self.planner], name=self.planner)


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What grows, through which values, and what follows from each: the task, its costs, and a plan for them.

    A `UsageError` from the task or from its costs means that the model cannot have this value, and the search goes on;
    one from the plan means that no plan can be made as demanded, and ends it.
    """

    name: str
    sense: Sense
    values: range
    task: Callable[[int], Task]
    costs: Callable[[int], ModelProfile]
    plan: Callable[[ModelProfile, int], Plan]

    def named(self, value: int) -> str:
        """`layers=12`, or `memory=13.50 GiB`."""
        return f"{self.name}={named_value(self.name, value)}"


def setting(name: str, make: Callable[[int], Task], demand: Demand, values: range) -> Growth:
    """The largest value of a setting: `make(value)` describes the model."""
    return Growth(
        name=name,
        sense="largest",
        values=values,
        task=make,
        costs=lambda value: demand.profile(make(value)),
        plan=lambda costs, _: demand.plan(costs),
    )


def batch(task: Task, demand: Demand, values: range) -> Growth:
    """The largest microbatch, in samples; how many there are stays."""
    return Growth(
        name="batch",
        sense="largest",
        values=values,
        task=lambda _: task,
        costs=lambda value: demand.profile(task, value),
        plan=lambda costs, _: demand.plan(costs),
    )


def devices(task: Task, demand: Demand, values: range) -> Growth:
    """The fewest devices of the cluster's kind. More of them than the model has blocks are not tried.

    Raises:
        UsageError: the cluster has devices of different kinds or sizes, or the values begin beyond the blocks.
    """
    cluster = demand.cluster
    if len({(device.kind.name, device.memory_bytes) for device in cluster.devices}) > 1:
        raise UsageError(
            f"the devices of {cluster.name} differ in kind or memory, so that the answer would depend on which of them "
            "are used: name a cluster of equal devices"
        )
    costs = demand.profile(task)
    most = len(costs.block_names)
    numbers = range(values.start, min(values.stop, most + 1), values.step)
    if not numbers:
        raise UsageError(
            f"{costs.model} has {costs.parts}, too few for {values.start} devices: begin with {most} or fewer"
        )
    return Growth(
        name="devices",
        sense="smallest",
        values=numbers,
        task=lambda _: task,
        costs=lambda _: costs,
        plan=lambda costs, count: demand.plan(costs, with_devices(cluster, count)),
    )


def memory(task: Task, demand: Demand, values: range) -> Growth:
    """The least memory, in bytes, that every device of the cluster must have."""
    costs = demand.profile(task)
    return Growth(
        name="memory",
        sense="smallest",
        values=values,
        task=lambda _: task,
        costs=lambda _: costs,
        plan=lambda costs, nbytes: demand.plan(costs, with_memory(demand.cluster, nbytes)),
    )


def with_devices(cluster: Cluster, count: int) -> Cluster:
    """The first `count` devices; those beyond the cluster's own reach all others at the rate of its slowest link."""
    have = len(cluster.devices)
    if count == have:
        return cluster
    if cluster.backend == "emulated":
        return Cluster.emulated((count, cluster.budgets[0]))
    kept = tuple(cluster.devices[number % have] for number in range(count))
    return replace(cluster, name=f"{count} devices of {cluster.name}", devices=kept, links=_links(cluster, count))


def with_memory(cluster: Cluster, nbytes: int) -> Cluster:
    """The same cluster with `nbytes` on every device."""
    if cluster.backend == "emulated":
        return Cluster.emulated((len(cluster.devices), nbytes))
    return replace(cluster, devices=tuple(replace(one, memory_bytes=nbytes) for one in cluster.devices))


def _links(cluster: Cluster, count: int) -> tuple[Link, ...]:
    """The links among the first `count` devices and the hosts; and one for all if there are more than there were."""
    present = {*map(Member.device, range(count)), *map(Member.host, range(len(cluster.hosts)))}
    among = (
        (link, tuple(member for member in link.members if member in present or member.kind is MemberKind.DISK))
        for link in cluster.links
    )
    kept = tuple(replace(link, members=members) for link, members in among if len(members) > 1)
    if count <= len(cluster.devices):
        return kept
    rate = min((link.copy_rate for link in kept if present.issuperset(link.members)), default=_RATE_WITHOUT_LINKS)
    return (*kept, Link(members=tuple(sorted(present)), bytes_per_second=rate))
