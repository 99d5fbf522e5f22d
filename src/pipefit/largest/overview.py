"""The overview of `pipefit fit`: what fits on how many devices, by which techniques, in which precision.

Every number is a plan's: peaks are those that `pipefit plan` predicts, compared with budgets. Microbatches
are powers of two, or of four for models of many layers, whose profiles take seconds. For one exact number,
such as the largest microbatch, use `largest.search`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

from pipefit.capture import EqualBlocks, Task
from pipefit.errors import UsageError
from pipefit.fake_cuda.chain import Chains
from pipefit.fake_cuda.fingerprint import precision_of
from pipefit.fake_cuda.isolation import apart
from pipefit.largest.attempts import attempt, impossible, soon_planned
from pipefit.largest.growth import Demand, with_devices
from pipefit.planner import (
    PLANNERS,
    Means,
    PlanOptions,
    Question,
    Simulations,
    changed_by_replicas,
    check_first,
    exact_in_time,
    solved,
    step_bound,
    with_slices,
)
from pipefit.planner.common_plans import common_plans
from pipefit.profiler import OnDemand, Progress, profiled_beside, same_costs, stretched, with_few_blocks
from pipefit.schema.cluster import Cluster
from pipefit.schema.fit import (
    HOWS,
    Attempt,
    How,
    InPrecision,
    Overview,
    Reach,
    Replicated,
    samples_per_second,
)
from pipefit.schema.json_io import load_cluster
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile, Target
from pipefit.schema.trace import Category
from pipefit.schema.training import ENDLESS, Precision, Training
from pipefit.schema.validation import check_arguments, instance
from pipefit.simulator import simulate
from pipefit.texts import counted

_COUNTS = (1, 2, 4, 8)  # devices, in addition to the cluster's number
_MANY_LAYERS = 200  # from here on, a profile takes seconds
_SIZES, _SIZES_OF_MANY = tuple(1 << n for n in range(9)), (1, 4, 16)
_PRECISIONS: tuple[Precision, ...] = ("float32", "mixed-bfloat16", "bfloat16", "master-bfloat16")
_EFFORT = 0.01  # share of its budget that the joint planner has for a plan
_MEANS: dict[How, Means] = {
    "recomputed": Means(host=False, peers=False, spill=False),
    "moved": Means(spill=False),
}


def fit(
    model: Task,
    cluster: Cluster | str,
    *,
    microbatches: int | None = None,
    schedule: str = "1f1b",
    target: Target | None = None,
    threads: int = 1,
    progress: Progress | None = None,
) -> Overview:
    """Show what fits of `model` on devices like those of `cluster`.

    If the devices differ in kind or memory, fewer of them are those with the most memory, and no more devices
    than the cluster has are compared. `cluster` may be a name or a file, as for `load_cluster`;
    `microbatches` None means four for each device. Other arguments are those of `pipefit.plan`. Print the
    result, or end a notebook's cell with it.

    Raises:
        UsageError: not a task or cluster, or a task that cannot be profiled.
    """
    instance("model", model, Task, "pipefit.Task describes how a module is trained")
    check_arguments(
        fit, {"microbatches": microbatches, "schedule": schedule, "target": target, "progress": progress}
    )
    if isinstance(cluster, str):
        cluster = load_cluster(cluster)
    instance("cluster", cluster, Cluster, 'a name such as "4x-titan-rtx" works too')
    each = 1 if microbatches is None else microbatches
    training = Training(batch_size=each, microbatches=each, schedule=schedule)
    check_first(training, cluster, PlanOptions(), (1,))
    kernels = target or cluster.target
    return apart(
        kernels, lambda: _looked_at(model, cluster, microbatches, schedule, kernels, threads, progress)
    )


def _looked_at(
    model: Task,
    cluster: Cluster,
    microbatches: int | None,
    schedule: str,
    kernels: Target,
    threads: int,
    progress: Progress | None,
) -> Overview:
    """Return the result of `fit` for the kernels of a target."""
    profiles = OnDemand(model, target=kernels, threads=threads, progress=progress, sizes=_SIZES)
    chain = profiles.chain()
    look = _Look(
        profiles,
        cluster,
        microbatches=microbatches,
        schedule=schedule,
        say=progress or _silent,
        many=len(chain.layers) > _MANY_LAYERS,
    )
    own = precision_of(model, chain)
    (others,) = profiled_beside(kernels, lambda: _others(model, own, kernels, threads))
    reaches = tuple(look.reach(count) for count in look.counts)
    result = Overview(
        cluster=cluster,
        sizes=look.seen,
        reaches=reaches,
        precisions=tuple(_in_precisions(model, own, look, others(), kernels, threads)),
        replicated=tuple(look.replicated()),
        filled={},
        loss_bytes=_loss_bytes(look.profiles(1)),
    )
    if not result.fits:
        result = replace(result, impossible=impossible(look.profiles, cluster))
    if not result.fits and not result.impossible:
        options = PlanOptions(microbatches=microbatches, microbatch_size=1, schedule=schedule)
        demand = Demand(cluster=cluster, options=options, target=kernels, threads=threads)
        result = replace(result, divided=demand.soon(1, profiles, divided=True).best)
    return replace(result, filled=_filled(result.limiting))


def _silent(done: int, total: int, what: str) -> None:
    """Ignore progress."""


@dataclass
class _Look:
    """The plans that were compared, each made once."""

    profiles: Callable[[int], ModelProfile]
    cluster: Cluster
    microbatches: int | None
    schedule: str
    say: Progress
    many: bool  # whether the model has many layers
    known: dict[tuple[int, int, How], Attempt] = field(default_factory=dict)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The possible sizes of microbatches."""
        return _SIZES_OF_MANY if self.many else _SIZES

    @cached_property
    def counts(self) -> list[int]:
        """The numbers of devices to compare; each device has at least one block."""
        most, have = len(self.profiles(1).edges) - 1, len(self.cluster.devices)
        counts = _COUNTS if self.cluster.is_uniform else [count for count in _COUNTS if count < have]
        return sorted({min(count, most) for count in {*counts, have}})

    @property
    def seen(self) -> tuple[int, ...]:
        """The sizes of microbatches that were compared."""
        return tuple(sorted({size for _, size, _ in self.known}))

    def at(self, devices: int, size: int, how: How) -> Attempt:
        """Return the plan for this number of devices and samples per microbatch."""
        key = devices, size, how
        if key not in self.known:
            self.say(
                len(self.known),
                len(self.known) + 1,
                f"{counted(devices, 'device')}, microbatches of {size}, {how}",
            )
            self.known[key] = attempt(size, self._plan(self.profiles(size), devices, how))
        return self.known[key]

    def _plan(self, costs: ModelProfile, devices: int, how: How) -> Plan:
        count = self.microbatches or 4 * devices
        question = Question(
            profile=costs,
            cluster=with_devices(self.cluster, devices),
            training=Training(
                batch_size=count * costs.measurements[0].microbatch_size,
                microbatches=count,
                schedule=self.schedule,
                precision=costs.assumptions.precision,
            ),
            options=PlanOptions(data=1, tensor=1, allow_infeasible=True, effort=_EFFORT),
        )
        if how == "kept":
            name = "exact" if exact_in_time(question) else "uniform"
            return solved(question, PLANNERS[name], name=name)
        first = question.using(_MEANS[how])
        name = "uniform" if step_bound(first) == float("inf") else "joint"  # no search makes it fit
        plan = solved(first, PLANNERS[name], name=name)
        size = question.training.microbatch_size
        if (how == "moved" and size > 1) or attempt(size, plan).fits:
            return plan
        soon = soon_planned(size, first if how == "recomputed" else question).fitting
        return plan if soon is None else soon.plan

    def reach(self, devices: int) -> Reach:
        """Return the capacity of `devices` devices; each technique begins at the largest size that fits
        without it.
        """
        largest, least = list[Attempt | None](), 0
        for how in HOWS:
            best = self._largest(devices, how, least)
            largest.append(best or (largest[-1] if largest else None))
            least = 0 if largest[-1] is None else self.sizes.index(largest[-1].value) + 1
        fitting = [one for (count, _, _), one in self.known.items() if count == devices and one.fits]
        if largest[0] is not None:  # the split of lowest peak is not the fastest
            fitting += [one for one in [self.at(devices, largest[0].value, "moved")] if one.fits]
        return Reach(
            devices=devices,
            one=self.at(devices, 1, "kept"),
            largest=tuple(largest),
            fastest=max(fitting, key=samples_per_second, default=None),
        )

    def _largest(self, devices: int, how: How, least: int) -> Attempt | None:
        """Return the largest size that fits, from index `least` on; None if none does.

        n samples need at most about n times the memory of one: smaller sizes are tried only if that size does
        not fit.
        """
        one = self.at(devices, 1, "kept")
        start = max(least, self._place(one.budget_bytes // one.need_bytes))
        result = [self.at(devices, size, how) for size in self.sizes[start : start + 1]]
        if result and not result[0].fits:
            smaller = (self.at(devices, size, how) for size in reversed(self.sizes[least:start]))
            return next((one for one in smaller if one.fits), None)
        for size in self.sizes[start + 1 :]:
            result.append(self.at(devices, size, how))
            if not result[-1].fits:
                break
        return next((one for one in reversed(result) if one.fits), None)

    def _place(self, size: int) -> int:
        """Return the index of the largest size up to `size`, 0 if there is none."""
        return max(sum(known <= size for known in self.sizes) - 1, 0)

    def replicated(self) -> Iterator[Replicated]:
        """Yield plans in which every device has the whole model and its own sample.

        Replicas divide more and more of the state; if nothing fits, hosts hold state.
        """
        question = self._of_replicas()
        if question is None:
            return
        budget, simulations, fits = min(self.cluster.budgets), Simulations(question), False
        for common_plan in sorted(common_plans(question), key=lambda one: bool(one.moves)):
            if fits and common_plan.moves:
                return
            self.say(0, 0, f"{counted(len(self.cluster.devices), 'device')}, {common_plan.way}")
            need, rate = simulations.least_bytes(common_plan.split, common_plan.recompute), None
            is_bound = not common_plan.moves and need > budget
            if not is_bound:
                with suppress(UsageError):
                    simulated = simulations.of(common_plan.split, common_plan.decisions)
                    need = max(simulated.peaks)
                    rate = question.training.batch_size / simulated.seconds if simulated.fits else None
            fits = fits or rate is not None
            yield Replicated(
                way=common_plan.way,
                recompute=common_plan.recompute == "always",
                need_bytes=int(need),
                is_bound=is_bound,
                samples_per_second=rate,
            )

    def _of_replicas(self) -> Question | None:
        """Return the question of one stage with a replica on every device; None if the model cannot have
        replicas.
        """
        devices = len(self.cluster.devices)
        if devices == 1 or (self.schedule in ENDLESS):
            return None
        with suppress(UsageError):
            if changed_by_replicas(self.profiles(devices), PlanOptions(), opens_sizes=True):
                return None
            profile = with_slices(self.profiles, devices, PlanOptions(data=devices), opens_sizes=True)(
                devices
            )
            count = self.microbatches or 4
            return Question(
                profile=profile,
                cluster=self.cluster,
                training=Training(
                    batch_size=count * devices,
                    microbatches=count,
                    schedule=self.schedule,
                    precision=profile.assumptions.precision,
                ),
                options=PlanOptions(stages=1, data=devices, tensor=1, allow_infeasible=True),
            )
        return None

    def in_precision(self, precision: Precision) -> InPrecision:
        """Return the memory of one sample with everything kept, from profiles in this precision."""
        one = self.at(1, 1, "kept")
        return InPrecision(
            precision=precision,
            state_bytes=sum(one.plan.measurement.state_bytes),
            need_bytes=one.need_bytes,
            fewest=next((count for count in self.counts if self.at(count, 1, "kept").fits), None),
        )


def _loss_bytes(profile: ModelProfile) -> int:
    """Return a lower bound of a device's bytes for the loss of one sample.

    Layers without parameters before the loss count too.
    """
    measured, start = profile.at(1), profile.edges[-2]
    costs = (cost for cost in (*measured.costs[start:], measured.loss) if not cost.parameters)
    return max(cost.least_bytes for cost in costs)


class _Others(NamedTuple):
    """Profiles of one sample in the usual precisions: of the model in other than its own or, if there are
    `shortened` lists of equal blocks, of a copy in all.
    """

    profiles: Mapping[Precision, ModelProfile]
    shortened: Sequence[EqualBlocks] = ()


def _others(task: Task, own: Precision, target: Target, threads: int) -> _Others:
    """Return profiles of a copy of the model with fewer equal blocks, or else of the model."""
    with suppress(UsageError):  # reported where the model is profiled
        few = with_few_blocks(task, target)
        if few is not None:
            as_given = OnDemand(few[0], target=target, threads=threads)(1)
            return _Others({own: as_given} | dict(_profiled(few[0], _without(own), target, threads)), few[1])
    return _Others(dict(_profiled(task, _without(own), target, threads)))


def _without(own: Precision) -> list[Precision]:
    return [precision for precision in _PRECISIONS if precision != own]


def _profiled(
    task: Task, precisions: Iterable[Precision], target: Target, threads: int
) -> Iterator[tuple[Precision, ModelProfile]]:
    """Yield profiles of one sample in the precisions that the model allows."""
    chains = dict[object, Chains]()
    for precision in precisions:
        cast = replace(task, precision=precision)
        types = cast.dtype, cast.autocast
        known = chains[types].also_for(cast) if types in chains else Chains(cast, (1,))
        chains[types] = known
        profiles = OnDemand(cast, target=target, threads=threads, chains=known)
        with suppress(UsageError):  # the model cannot be cast, or its optimizer keeps no master weights
            yield precision, profiles(1)


def _in_precisions(
    task: Task, own: Precision, look: _Look, others: _Others, target: Target, threads: int
) -> Iterator[InPrecision]:
    """Yield the model in its own and the usual precisions; it is profiled where it differs from its copy."""
    yield look.in_precision(own)
    profiles = dict(others.profiles)
    if others.shortened:
        few = dict[Precision, ModelProfile]()
        for precision, one in profiles.items():
            with suppress(UsageError):
                few[precision] = stretched(one, others.shortened)
        repeats = own in few and same_costs(few[own], look.profiles(1))
        missing = [precision for precision in _without(own) if not repeats or precision not in few]
        profiles = (few if repeats else {}) | dict(_profiled(task, missing, target, threads))
    for precision in _without(own):
        if precision in profiles:
            found = replace(look, profiles=partial(_given, profiles[precision]), say=_silent, known={})
            yield found.in_precision(precision)


def _given(profile: ModelProfile, size: int) -> ModelProfile:
    """Return the profile of one sample, the only `size` asked for."""
    assert size == 1
    return profile


def _filled(limiting: Attempt) -> dict[Category, int]:
    """Return the bytes of the limiting device at its peak, by category."""
    peak = simulate(limiting.plan).devices[limiting.device].peak
    return {} if peak is None else peak.by_category
