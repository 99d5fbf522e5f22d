"""Growing quantities: a setting of the model, the microbatch, the number of devices, or the memory of each.

For the first two, the largest value that fits is searched; for the others, the smallest.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.fake_cuda.chain import Chains
from pipefit.largest.attempts import (
    Look,
    Proposal,
    attempt,
    hosts_may_hold_all,
    impossible,
    leaner,
    plan_on_the_way,
    sizes_asked,
    soon_planned,
)
from pipefit.planner import (
    ON_GRIDS,
    Answer,
    Degree,
    PlanOptions,
    Question,
    check_degrees,
    check_first,
    check_planner,
    microbatch_sizes,
    training_of,
)
from pipefit.profiler import NotRepeated, OnDemand, Repeated, same_costs
from pipefit.schema.cluster import Cluster
from pipefit.schema.devices import Link, Member, MemberKind
from pipefit.schema.fit import Sense, named_value
from pipefit.schema.plan import Plan
from pipefit.schema.profile import Measurement, ModelProfile, Target
from pipefit.texts import counted
from pipefit.units import format_bytes

# ---- Profiles of a model at rising values of a setting that may say how many equal blocks it has.
#
# Every value is traced until two of them have shown different numbers of layers. Then three small neighbours
# are, and profiles of larger values are written from these (`pipefit.profiler.on_demand`), as long as that
# says what traces say.

_FIRST = 1  # of the three neighbours: a single block is both the first and the last


class Depths:
    """The profiles of the `values` of a setting, each of which `trace` makes; some are written instead.
    `trace_at` traces a value for microbatches of some sizes alone.
    """

    def __init__(
        self,
        values: range,
        trace: Callable[[int], OnDemand],
        trace_at: Callable[[int, Sequence[int]], OnDemand],
    ) -> None:
        self._values, self._trace, self._trace_at = values, trace, trace_at
        self._writes = len(values) > _FIRST + 3
        self._layers = set[int]()  # how many layers values have that were traced
        self._neighbours: tuple[OnDemand, ...] = ()

    def profiles(self, value: int) -> OnDemand | Repeated:
        """The profiles of a value, traced or written.

        Raises:
            UsageError: the model refuses the value.
        """
        place = self._values.index(value)
        self._trace_at(value, ())  # settings that the model refuses are refused
        if self._writes and place >= _FIRST + 3 and len(self._layers) > 1:
            with suppress(UsageError, NotRepeated):
                self._neighbours = self._neighbours or tuple(
                    map(self._trace, self._values[_FIRST : _FIRST + 3])
                )
                written = Repeated(self._neighbours, place - _FIRST)
                written(min(written.sizes, default=1))
                return written
            self.trace_all()
        traced = self._trace(value)
        self._layers.add(len(traced(min(traced.sizes, default=1)).layers))
        return traced

    def trace_all(self) -> None:
        """Write no profile from now on."""
        self._writes, self._neighbours = False, ()

    def as_traced(self, value: int, plan: Plan) -> tuple[Plan, Chains] | None:
        """The plan of a value with its traced profile in place of a written one, and the chains of the trace;
        None where the two profiles differ.
        """
        made = plan.profile
        sizes = sorted({measured.microbatch_size for measured in made.measurements})
        try:
            known = self._trace_at(value, sizes)
            every = [one for size in sizes for one in traced_profiles(known, size, made.measurements)]
            ways = {measured.way: measured for one in every for measured in one.measurements}
            profile = replace(
                every[0], measurements=tuple(ways[m.way] for m in made.measurements), kernels=made.kernels
            )
        except (KeyError, UsageError):
            return None
        return (replace(plan, profile=profile), known.chains) if same_costs(profile, made) else None


def traced_profiles(
    known: OnDemand, size: int, measurements: Sequence[Measurement]
) -> Iterator[ModelProfile]:
    """Yield traced profiles with all ways of these measurements for one microbatch size, from the fewest
    traces.
    """
    along = {m.tensor for m in measurements if m.microbatch_size == size and m.sequences}
    plain = {m.tensor for m in measurements if m.microbatch_size == size} - along - {1}
    if along:
        yield known(size, sorted(along), sequences=True)
    if plain or not along:
        yield known(size, sorted(plain))


_EACH = 4  # samples, or microbatches, per device
_EFFORT = 0.1  # share of its budget that a simulating planner has per value
_RATE_WITHOUT_LINKS = 12e9  # bytes per second, one way: the rate of copies over PCIe 3.0 x16


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The training and the options of its plans, whatever grows.

    The batch of a step is `batch_size` samples, or `microbatches` of `microbatch_size`, default 1. Without
    any of these, it is four samples for each device of the cluster; without `microbatches`, four microbatches
    per device. Planners that choose microbatch sizes do so only if a batch alone is given. Planners that put
    stages on several devices choose replicas, what these divide, and, if nothing fits otherwise,
    tensor-parallel shards; `data` and `tensor` fix the degrees of all stages. The joint planner has a tenth
    of its budget for each value. If it may offload gradients and parameters depends on what grows
    (`without_spill`).

    Raises:
        UsageError: no such planner or schedule, or the numbers do not fit together.
    """

    cluster: Cluster
    options: PlanOptions = PlanOptions()
    target: Target = "cpu"
    threads: int = 1

    def __post_init__(self) -> None:
        options = self.asked()
        check_planner(self.planner)
        check_first(None, self.cluster, options, microbatch_sizes(options, None, chooses=True))

    @property
    def planner(self) -> str:
        """Name of the planner."""
        return self.options.planner or "joint"

    @property
    def without_spill(self) -> Demand:
        """The demand without moving gradients and parameters in every pass, which makes steps much longer."""
        return replace(self, options=replace(self.options, means=replace(self.options.means, spill=False)))

    def check_degrees(self, devices: int) -> None:
        """Check, before a profile is made, that `devices` devices suffice for a stage.

        Raises:
            UsageError: they are too few.
        """
        check_degrees(self.options.data or 1, devices, self.options)

    def asked(self, microbatch_size: int | None = None) -> PlanOptions:
        """Return the options of a plan; `microbatch_size` replaces the demand's if given."""
        options, each = self.options, _EACH * len(self.cluster.devices)
        batch, count = options.batch_size, options.microbatches
        size = microbatch_size or options.microbatch_size
        if batch is None and size is None and count is None:
            batch = each
        elif batch is None:
            size, count = size or 1, count or each
        return replace(
            options,
            batch_size=batch,
            microbatches=count,
            microbatch_size=size,
            schedule=options.schedule or "1f1b",
            planner=self.planner,
            effort=_EFFORT,
            allow_infeasible=True,
        )

    def profiles(self, task: Task, microbatch_size: int | None = None) -> OnDemand:
        """Return the on-demand profiles of `task`, with the smallest microbatch size profiled.

        Raises:
            UsageError: the smallest size cannot be profiled.
        """
        sizes = sizes_asked(None, self.asked(microbatch_size))
        known = self.profiles_at(task, sizes)
        known(microbatch_size or self.options.microbatch_size or 1)
        return known

    def profiles_at(self, task: Task, sizes: Sequence[int]) -> OnDemand:
        """Return the on-demand profiles of `task` at these microbatch sizes, none of them profiled yet."""
        return OnDemand(task, target=self.target, threads=self.threads, sizes=sizes)

    @property
    def searches(self) -> bool:
        """True if planning takes a search that a fast plan may spare.

        That is the `joint` planner, unless stages must have replicas or shards.
        """
        return self.planner == "joint" and Degree.requested(self.options).devices == 1

    def soon(
        self,
        value: int,
        known: OnDemand | Repeated,
        cluster: Cluster | None = None,
        microbatch_size: int | None = None,
        *,
        looks: Mapping[int, Look] = MappingProxyType({}),
        every: bool = False,
        divided: bool = False,
    ) -> Look:
        """Return an attempt that fits, if found fast: with the smallest microbatches and one replica per
        stage, on one device or, with `divided`, on many tensor-parallel ranks.

        Ways that will need far too much, by `looks` at smaller values, are not tried; with `every`, all are,
        for what they need.
        """
        within, look = cluster or self.cluster, Look()
        with suppress(UsageError):  # reported when it is planned
            alone = self._alone(known, within, self.asked(microbatch_size), 1)
            for ranks in self._many_ranks(alone) if divided else (1,):
                question = (
                    alone if ranks == 1 else self._alone(known, within, self.asked(microbatch_size), ranks)
                )
                look = look.or_else(soon_planned(value, question, looks, every=every))
                if look.fitting is not None:
                    break
        return look

    def _alone(self, known: OnDemand | Repeated, within: Cluster, asked: PlanOptions, ranks: int) -> Question:
        """Return the question of plans with one replica of so many ranks per stage, divided along positions
        if possible, and the smallest microbatches.

        Raises:
            UsageError: so many ranks cannot divide the layers.
        """
        size, along = microbatch_sizes(asked, known, chooses=True)[0], ranks > 1
        try:
            costs = known(size, (ranks,), sequences=along)
        except UsageError:
            if not along:
                raise
            costs, along = known(size, (ranks,)), False
        return Question(
            profile=costs,
            cluster=within,
            training=training_of(asked, size, costs.assumptions.precision, within),
            options=PlanOptions(
                data=1,
                tensor=ranks,
                sequences=along,
                recompute=asked.recompute,
                allow_infeasible=True,
                means=asked.means,
            ),
        )

    def _many_ranks(self, alone: Question) -> Iterator[int]:
        """Yield the most tensor-parallel ranks with which all devices are used, and the most of all, unless
        parameters and gradients alone are more than these devices hold, and all state more than hosts hold.
        """
        budgets = sorted(alone.cluster.budgets, reverse=True)
        owned, gradients = alone.ranges.owned()
        least = owned[-1] + gradients[-1] - alone.ranges.state[-1]
        at_hosts = alone.means.spill and hosts_may_hold_all(alone)
        most = self.ranks(alone.cluster)[-1]
        for ranks in dict.fromkeys((math.gcd(len(budgets), most), most)):
            if ranks > 1 and (at_hosts or least <= sum(budgets[: len(budgets) // ranks * ranks])):
                yield ranks

    def ranks(self, cluster: Cluster) -> tuple[int, ...]:
        """Return the numbers of tensor-parallel ranks to try, the fewest first."""
        if self.planner not in ON_GRIDS or self.options.tensor is not None:
            return (self.options.tensor or 1,)
        return tuple(1 << n for n in range(len(cluster.devices).bit_length()))

    def plan(
        self,
        known: OnDemand | Repeated,
        cluster: Cluster | None = None,
        microbatch_size: int | None = None,
        *,
        ranks: Sequence[int] = (),
    ) -> Answer:
        """Return the plan, even if it does not fit: with the fewest shards that make it fit, of all numbers
        or of `ranks`; with sequence parallelism if possible and if it lowers what the planner minimises. The
        caller compares profiles with traces.
        """
        within, options, result = cluster or self.cluster, self.asked(microbatch_size), list[Answer]()
        make = partial(plan_on_the_way, known, within, None, options, compares=False)
        for number in ranks or self.ranks(within):
            if result and attempt(0, result[0].plan).fits:
                break
            along = self.planner in ON_GRIDS and number > 1
            with suppress(UsageError) if result else nullcontext():  # so many ranks cannot divide the layers
                divided = _divided(make, number, along=along)
                if not result or leaner(attempt(0, divided.plan), attempt(0, result[0].plan)):
                    result[:] = [divided]
        return result[0]

    def impossible(
        self,
        known: OnDemand | Repeated,
        cluster: Cluster | None = None,
        microbatch_size: int | None = None,
    ) -> str:
        """Return the proof that no plan of any planner fits; empty without one."""
        options = self.asked(microbatch_size)
        batch, count = options.batch_size, options.microbatches
        size = options.microbatch_size or (batch // count if batch and count else 1)
        with suppress(UsageError):  # a local batch cannot be profiled
            return impossible(known, cluster or self.cluster, size, options)
        return ""

    def searched(self, devices: int) -> str:
        """Describe, in sentences, which plans full searches compare on so many devices."""
        if self.planner not in ("joint", "exact"):
            return f"Tried: the plans of the {self.planner} planner. Not tried: others (--planner joint)."
        options, tried = self.options, "Tried: the whole model on a device"
        if devices > 1:
            tried = "Tried: splits" + ", replicas with ZeRO" * (options.data != 1)
            tried += ", tensor-parallel ranks" * (options.tensor != 1)
        if self.planner != "joint":
            return f"{tried}. Not tried: recomputation and offloading (--planner joint)."
        tried += ", recomputation, and offloading of tensors and optimizer state"
        less = "with a tenth of the work of pipefit plan."
        if options.means.spill:
            return f"{tried}, gradients and parameters, {less}"
        return (
            f"{tried}, {less} Not tried: offloading of gradients and parameters, which makes steps many "
            "times as long (pipefit fit without --grow)."
        )


def _divided(make: Callable[..., Proposal], ranks: int, *, along: bool) -> Answer:
    """Return the plan with `ranks` shards, which may also divide positions (`along`) if possible.

    Raises:
        UsageError: this many ranks cannot divide the layers.
    """
    if along:
        with suppress(UsageError):
            return make(shards=(ranks,), along=True).answer()
    return make(shards=(ranks,)).answer()


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A growing quantity and its values.

    Each value has a task, its profiles, a plan (of all numbers of tensor-parallel ranks, or of some), perhaps
    an attempt that is found fast and fits (with one device per stage, or also with many ranks), and perhaps a
    proof that it is `impossible`. `searches` says that a plan itself takes a search, `searched` which plans a
    search compares, and `end` why no value after the last one is tried.

    A `UsageError` from the task or from its profiles means that the model refuses this value, and the search
    continues; one from the plan means that no plan satisfies the demand, and ends the search.
    """

    name: str
    sense: Sense
    values: range
    task: Callable[[int], Task]
    profiles: Callable[[int], OnDemand | Repeated]
    plan: Callable[[OnDemand | Repeated, int, Sequence[int]], Answer]
    soon: Callable[[OnDemand | Repeated, int, Mapping[int, Look], bool], Look]
    impossible: Callable[[OnDemand | Repeated, int], str]
    searches: bool
    searched: str
    end: str = ""
    depths: Depths | None = None  # set if profiles may be derived instead of traced

    def named(self, value: int) -> str:
        """Format a value with its name: `layers=12`, or `memory=13.50 GiB`."""
        return f"{self.name}={named_value(self.name, value)}"


_LOOKS_AT_ALL = 3  # first looks, at small values, in which all fast ways are tried for what they need


def _growth(
    name: str,
    sense: Sense,
    values: range,
    cluster: Callable[[int], Cluster],
    demand: Demand,
    task: Callable[[int], Task],
    profiles: Callable[[int], OnDemand | Repeated],
    size: Callable[[int], int | None] = lambda _: None,
) -> Growth:
    """Return a quantity with a cluster and, if it sets that, a microbatch size for each value."""
    rises = sense == "largest"  # so the needs of values that were looked at predict those of the next
    return Growth(
        name=name,
        sense=sense,
        values=values,
        task=task,
        profiles=profiles,
        plan=lambda known, value, ranks: demand.plan(known, cluster(value), size(value), ranks=ranks),
        soon=lambda known, value, looks, many: demand.soon(
            value,
            known,
            cluster(value),
            size(value),
            looks=looks if rises else {},
            every=rises and len(looks) < _LOOKS_AT_ALL,
            divided=many,
        ),
        impossible=lambda known, value: demand.impossible(known, cluster(value), size(value)),
        searches=demand.searches,
        searched=demand.searched(len(cluster(values[-1]).devices)),
    )


def setting(name: str, make: Callable[[int], Task], demand: Demand, values: range) -> Growth:
    """Search the largest value of a setting; `make(value)` describes the model.

    Gradients and parameters stay on the devices.
    """
    demand = demand.without_spill
    demand.check_degrees(len(demand.cluster.devices))
    depths = Depths(
        values,
        lambda value: demand.profiles(make(value)),
        lambda value, sizes: demand.profiles_at(make(value), sizes),
    )
    result = _growth(name, "largest", values, lambda _: demand.cluster, demand, make, depths.profiles)
    return replace(result, depths=depths)


def batch(task: Task, demand: Demand, values: range) -> Growth:
    """Search the largest microbatch, in samples, with a fixed number of microbatches.

    Gradients and parameters stay on the devices.

    Raises:
        UsageError: the demand fixes the number of samples of the batch.
    """
    if demand.options.batch_size is not None:
        raise UsageError(
            "a growing batch takes its size from what fits, not from batch_size: give its number of "
            "microbatches instead"
        )
    demand = demand.without_spill
    demand.check_degrees(len(demand.cluster.devices))
    return _growth(
        "batch",
        "largest",
        values,
        lambda _: demand.cluster,
        demand,
        lambda _: task,
        lambda value: demand.profiles(task, value),
        size=lambda value: value,
    )


def devices(task: Task, demand: Demand, values: range) -> Growth:
    """Search the fewest devices of the cluster's kind, with every technique of the overview of `pipefit fit`.

    The limit is one for every block, or, if stages may have several, for every block and sample of a
    microbatch.

    Raises:
        UsageError: the cluster has devices of different kinds or sizes, or the values begin beyond this
            limit.
    """
    cluster = demand.cluster
    if not cluster.is_uniform:
        raise UsageError(
            f"the devices of {cluster.name} differ in kind or memory, so the answer would depend on the "
            "choice of devices: name a cluster of equal devices"
        )
    demand.check_degrees(values[-1])
    known = demand.profiles(task)
    costs, sizes = known(known.sizes[0]), known.sizes if demand.planner in ON_GRIDS else (1,)
    most = len(costs.block_names) * sizes[-1]
    numbers = range(values.start, min(values.stop, most + 1), values.step)
    if not numbers:
        raise UsageError(
            f"{costs.model} has {costs.parts}, too few for {values.start} devices: start with {most} or fewer"
        )
    replicas = f" and microbatches of at most {sizes[-1]} samples" if sizes[-1] > 1 else ""
    end = f"Not tried: more than {counted(most, 'device')}, because {costs.model} has {costs.parts}{replicas}"
    end += ". More can only be ranks of a layer (pipefit plan --tensor N)."
    on = partial(with_devices, cluster)
    result = _growth("devices", "smallest", numbers, on, demand, lambda _: task, lambda _: known)
    return replace(result, end=end) if most < values[-1] else result


def memory(task: Task, demand: Demand, values: range) -> Growth:
    """Search the least memory, in bytes, that every device of the cluster must have, above its reserve.

    Gradients and parameters stay on the devices.

    Raises:
        UsageError: no value is above the reserve.
    """
    demand = demand.without_spill
    demand.check_degrees(len(demand.cluster.devices))
    reserve = max(device.reserve_bytes or 0 for device in demand.cluster.devices)
    most, values = values[-1], values[bisect_right(values, reserve) :]
    if not values:
        raise UsageError(
            f"the devices of {demand.cluster.name} reserve {format_bytes(reserve)}, but the largest memory "
            f"to try is {format_bytes(most)}: try larger memories, or reserve less"
        )
    known = demand.profiles(task)
    on = partial(with_memory, demand.cluster)
    return _growth("memory", "smallest", values, on, demand, lambda _: task, lambda _: known)


def with_devices(cluster: Cluster, count: int) -> Cluster:
    """Return a cluster of the `count` devices with the most memory.

    Additional ones reach all others at the rate of its slowest link.
    """
    have = len(cluster.devices)
    if count == have:
        return cluster
    if _is_named(cluster):
        return Cluster.emulated((count, cluster.devices[0].memory_bytes))
    numbers = (*cluster.largest(count), *(number % have for number in range(have, count)))
    kept = tuple(cluster.devices[number] for number in numbers)
    return replace(
        cluster, name=f"{count} devices of {cluster.name}", devices=kept, links=_links(cluster, numbers)
    )


def with_memory(cluster: Cluster, nbytes: int) -> Cluster:
    """Return the cluster with `nbytes` on every device."""
    if _is_named(cluster):
        return Cluster.emulated((len(cluster.devices), nbytes))
    return replace(cluster, devices=tuple(replace(device, memory_bytes=nbytes) for device in cluster.devices))


def _is_named(cluster: Cluster) -> bool:
    """Return whether a cluster equals the one that a name such as `emulated:4x256MiB` means.

    Variants of such a cluster have names too.

    Emulated devices of a file have their own kind, hosts and links.
    """
    alike = len(cluster.devices), cluster.devices[0].memory_bytes
    return cluster.backend == "emulated" and cluster == Cluster.emulated(alike)


def _links(cluster: Cluster, numbers: Sequence[int]) -> tuple[Link, ...]:
    """Return the links among the devices of these numbers, renumbered, and the hosts.

    Additional devices share one link with all others.
    """
    have = len(cluster.devices)
    new = {Member.device(number): Member.device(place) for place, number in enumerate(numbers[:have])}
    among = (
        (
            link,
            tuple(
                new.get(member, member)
                for member in link.members
                if member in new or member.kind is not MemberKind.DEVICE
            ),
        )
        for link in cluster.links
    )
    kept = tuple(replace(link, members=members) for link, members in among if len(members) > 1)
    if len(numbers) <= have:
        return kept
    present = {*map(Member.device, range(len(numbers))), *map(Member.host, range(len(cluster.hosts)))}
    rate = min(
        (link.copy_rate for link in kept if present.issuperset(link.members)), default=_RATE_WITHOUT_LINKS
    )
    return (*kept, Link(members=tuple(sorted(present)), bytes_per_second=rate))
