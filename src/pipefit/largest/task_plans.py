"""Plans of tasks: profiles are made on demand, and plans are verified by dry runs.

plan = pipefit.plan(task, pipefit.Cluster.preset("dgx1-v100"), batch_size=64)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Unpack

from pipefit.capture import Task
from pipefit.errors import InfeasibleError, OutOfMemory, UsageError
from pipefit.fake_cuda.chain import Chains
from pipefit.fake_cuda.isolation import apart
from pipefit.largest.attempts import Proposal, in_order, plan_on_the_way, sizes_asked
from pipefit.largest.growth import Demand
from pipefit.lowering import check_for_torch
from pipefit.memory import AllocatorSettings, most_receive_buffers
from pipefit.planner import ON_GRIDS, ON_RUNS, Answer, Means, PlanArguments, PlanOptions, answered, explained
from pipefit.profiler import OnDemand, Progress
from pipefit.runtime import certify
from pipefit.schema.cluster import Cluster
from pipefit.schema.fit import Attempt
from pipefit.schema.grids import Sharding, Stage
from pipefit.schema.json_io import load_cluster
from pipefit.schema.plan import Engine, Plan
from pipefit.schema.profile import ModelProfile, Target
from pipefit.schema.trace import DeviceTrace, Trace
from pipefit.schema.training import Training
from pipefit.schema.validation import check_arguments, instance
from pipefit.simulator import Simulation
from pipefit.texts import counted
from pipefit.units import MIB, format_bytes

# ---- Plans verified by a dry run: a plan that `certify` refuses is planned again
#
# A planner knows requested bytes only. The dry run shows how much a GPU's caching allocator reserves for
# them, and how many communicators the process has. If that exceeds the device, the reserve for non-tensor
# memory (`Cluster.reserves`) is increased by the lack, and it is planned again: mostly once or twice,
# since the next plan resembles the last. So plans like the last are searched first, and all others only if
# none of those fits and is about as fast. If the dry run refuses the plan's offloading, everything is
# planned again with fewer means.
#
# For devices other than GPUs, plans that neither offload nor recompute are not run: their peaks are the
# simulator's.

ROUNDS = 6  # maximum number of plans
Make = Callable[[Cluster], Proposal]
Again = Callable[..., Proposal]  # of a cluster, and `near` a plan for more memory
_SEGMENT = 20 * MIB  # size of an allocator segment above 2 MiB


def plan_reserving(
    task: Task,
    cluster: Cluster,
    make: Make,
    allocator: AllocatorSettings | None = None,
    chains: Chains | None = None,
    progress: Progress | None = None,
    *,
    target: Target = "cuda",
    fewer: Sequence[Make] = (),
    again: Again | None = None,
) -> Plan:
    """Return the plan of `make` for `cluster`, or one with larger reserves that passes its dry run.

    Plans after the first are those of `again`, or those of `make` if `again` finds none.

    Proposals are run dry while they are compared with traces. For GPUs, the prediction includes the memory of
    processes (`Prediction.processes`). The model of `task` is run dry under `allocator`, and not traced for
    numbers of samples whose traces `chains` has. `progress` reports each dry run. If a dry run refuses the
    plan's offloading, the next of `fewer` replaces `make`.

    Raises:
        InfeasibleError: the tensors of a plan fit but not its processes, or a dry run refuses its offloading,
            and no other plan was found.
    """
    asked, short, others = [cluster], list[str](), iter(fewer)
    last: Plan | None = None
    settings = (allocator or AllocatorSettings()) if target == cluster.backend == "cuda" else None
    dry = partial(
        _run_dry, partial(certify, task, target=target, allocator=settings, chains=chains, each=False)
    )
    for number in range(ROUNDS):
        try:
            like = again and last and partial(again, near=last)
            within, proposal = _first([*([like] if like else ()), make], asked)
            if progress is not None and (settings or proposal.plan.decisions):
                progress(number, 0, f"a dry run of {counted(len(proposal.plan.workers), 'process')}")
            devices = dry(proposal.plan)
            answer = proposal.answer()
            if answer.plan != proposal.plan:
                devices = dry(answer.plan)
        except _Refused as refusal:
            short.append(str(refusal))
            make, again = _next(others, refusal), None
            continue
        except InfeasibleError as error:
            if not short:
                raise
            raise InfeasibleError(f"{short[-1]}. No other plan was found: {error}") from None
        if not any(device.lack_bytes for device in devices):
            return _told(answer.complete(), devices, short)
        last = answer.plan
        short.append(max(devices, key=lambda device: device.lack_bytes).shortage)
        asked = [_leaving_more(within, last.stages, devices, short[-1])]
        if (
            len(short) > 1
        ):  # the overflow may move to another device like it in the next plan, and then to a third
            asked.insert(0, _alike(asked[0]))
    raise InfeasibleError(
        f"{short[-1]}. {ROUNDS} plans, each with a larger reserve than the one before, did not fit"
    )


class _Refused(Exception):
    """A dry run refuses a plan that offloads."""


def _run_dry(run: Callable[[Plan], Trace], plan: Plan) -> Sequence[DeviceTrace]:
    """Return the devices of a dry run; empty for a plan whose peaks are the simulator's.

    Raises:
        _Refused: the plan's offloading is impossible, or a host lacks room for it.
    """
    moves = any(decision.place is not None for decision in plan.decisions)
    if not plan.decisions and plan.cluster.backend != "cuda":
        return ()
    try:
        return run(plan).devices
    except (UsageError, OutOfMemory) as refusal:
        if moves:
            raise _Refused(f"a dry run refuses the plan: {refusal}") from refusal
        raise


def _next(others: Iterator[Make], refusal: _Refused) -> Make:
    """Return the next maker.

    Raises:
        InfeasibleError: no maker is left.
    """
    for other in others:
        return other
    raise InfeasibleError(f"{refusal}. No other plan was found") from refusal.__cause__


def _first(ways: Sequence[Make], clusters: Sequence[Cluster]) -> tuple[Cluster, Proposal]:
    """Return the first of some clusters on which the first of some ways finds a plan, and its proposal.

    Raises:
        InfeasibleError: no plan for any of them; as for the last one.
    """
    *others, (last, cluster) = product(ways, clusters)
    for make, within in others:
        with suppress(InfeasibleError):
            return within, make(within)
    return cluster, last(cluster)


def _alike(cluster: Cluster) -> Cluster:
    """Return the cluster with the largest reserve of any device on all devices of its kind and size."""
    most = dict[tuple[object, int], int]()
    for reserve, device in zip(cluster.reserves, cluster.devices, strict=True):
        most[device.kind.key, device.memory_bytes] = max(
            reserve, most.get((device.kind.key, device.memory_bytes), 0)
        )
    return cluster.reserving([most[device.kind.key, device.memory_bytes] for device in cluster.devices])


def _leaving_more(
    cluster: Cluster, stages: Sequence[Stage], devices: Sequence[DeviceTrace], short: str
) -> Cluster:
    """Return the cluster with larger reserves.

    They leave the current bytes of tensors, less the bytes or segments that a device lacks. The devices of a
    stage get equal reserves, because its replicas need equal devices.

    Raises:
        InfeasibleError: nothing of a device would be left.
    """
    more = list(cluster.reserves)
    for number, trace in enumerate(devices):
        if trace.lack_bytes:
            each = _SEGMENT if trace.allocator else 1
            unused = max(more[number], trace.budget_bytes - trace.peak_bytes)
            more[number] = unused + -(-trace.lack_bytes // each) * each
    for stage in stages:
        if any(devices[device].lack_bytes for device in stage.devices):
            most = max(more[device] for device in stage.devices)
            more = [most if number in stage.devices else reserve for number, reserve in enumerate(more)]
    if any(reserve >= device.memory_bytes for reserve, device in zip(more, cluster.devices, strict=True)):
        raise InfeasibleError(f"{short}. A sufficient reserve would leave no memory for tensors")
    return cluster.reserving(more)


def _told(plan: Plan, devices: Sequence[DeviceTrace], short: Sequence[str]) -> Plan:
    """Return the plan with the memory of its processes, and the reason why it was planned again, if so."""
    assert plan.prediction is not None  # planners predict
    processes = (
        tuple(device.allocator for device in devices) if any(device.allocator for device in devices) else ()
    )
    told = replace(plan, prediction=replace(plan.prediction, processes=processes))
    if not short:
        return told
    return _remarked(told, f"Planned {counted(len(short) + 1, 'time')}: in the first plan {short[0]}.")


# ---- The plan of a task or profile


def plan(
    model: Task | ModelProfile,
    cluster: Cluster | str,
    training: Training | None = None,
    *,
    target: Target | None = None,
    certify: bool = True,
    allocator: AllocatorSettings | None = None,
    progress: Progress | None = None,
    engine: Engine = "pipefit",
    **options: Unpack[PlanArguments],
) -> Plan:
    """Plan the training of a model on a cluster so that it fits; `planner.plan` explains the arguments.

    `model` is a task, or a profile of one; `cluster` may be a name or a file, as for `load_cluster`. `target`
    selects the kernels that a task will run; default: the cluster's. The plan of a task is verified by a dry
    run, unless `certify` is False or plans that do not fit are allowed: for GPUs with the memory that
    processes reserve under the settings of torch's `allocator`, for other devices if it offloads or
    recomputes anything. A refused plan is planned again. `progress` reports layers as they are profiled. With
    `engine="torch"`, the plan runs and fits on `torch.distributed.pipelining`, by a dry run of that engine
    for a task, and by the simulator's ledger for a profile.

    Raises:
        UsageError: an unknown name, numbers that do not fit together, or a microbatch size that was not
            profiled.
        InfeasibleError: no plan fits; says by how much, and what would.
    """
    if isinstance(cluster, str):
        cluster = load_cluster(cluster)
    instance("cluster", cluster, Cluster, 'a name such as "4x-titan-rtx" works too')
    if training is not None:
        instance("training", training, Training, "or pass batch_size and microbatches by name")
    asked = PlanOptions.named(options)
    check_arguments(plan, {"target": target, "certify": certify, "progress": progress})
    if engine == "torch":
        return _plan_for_torch(model, cluster, training, target, certify, progress, asked)
    if isinstance(model, ModelProfile):
        return answered(model, cluster, training, asked).complete()

    instance("model", model, Task, "or a ModelProfile; pipefit.Task says how a module is trained")
    kernels: Target = target or cluster.target
    return apart(
        kernels, lambda: _plan_of_task(model, cluster, training, kernels, certify, allocator, progress, asked)
    )


def _plan_for_torch(
    model: Task | ModelProfile,
    cluster: Cluster,
    training: Training | None,
    target: Target | None,
    certify: bool,
    progress: Progress | None,
    asked: PlanOptions,
) -> Plan:
    """Return the plan for torch's engine; a task is profiled once, at the size of the first plan."""
    profiles = list[ModelProfile]()

    def make(within: Cluster, options: PlanOptions) -> Plan:
        profile = model if isinstance(model, ModelProfile) else next(iter(profiles), None)
        if profile is not None:
            return answered(profile, within, training, options).complete()

        task, kernels = instance("model", model, Task, "or a ModelProfile"), target or cluster.target
        made = apart(
            kernels,
            lambda: _plan_of_task(task, within, training, kernels, False, None, progress, options),
        )
        profiles.append(made.profile)
        return made

    def dry(plan: Plan) -> list[int]:
        from pipefit.torch_engine import certify_pipeline

        trace = certify_pipeline(instance("model", model, Task), plan, target=target)
        return [device.peak_bytes for device in trace.devices]

    verified = certify and isinstance(model, Task)
    return plan_for_torch(cluster, asked, make, dry if verified else None)


def _plan_of_task(
    model: Task,
    cluster: Cluster,
    training: Training | None,
    kernels: Target,
    certify: bool,
    allocator: AllocatorSettings | None,
    progress: Progress | None,
    asked: PlanOptions,
) -> Plan:
    """Return a task's plan, with tensor-parallel ranks if none fits without; profiles are made on demand."""
    _check(model, asked)

    sizes = sizes_asked(training, asked)
    ahead = in_order(sizes, training, asked, len(cluster.devices))
    known = OnDemand(model, target=kernels, progress=progress, sizes=sizes, ahead=ahead)

    for_gpus = kernels == cluster.backend == "cuda"
    runs_dry = certify and not asked.allow_infeasible and (for_gpus or cluster.backend != "cuda")
    searches = asked.objective == "throughput" and asked.planner in (None, "joint")

    def make(
        within: Cluster,
        means: Means = asked.means,
        shards: int = asked.tensor or 1,
        along: bool = bool(asked.sequences),
        near: Plan | None = None,
    ) -> Proposal:
        options, forks = replace(asked, means=means), runs_dry and for_gpus
        return plan_on_the_way(
            known, within, training, options, shards=(shards,), along=along, runs_dry=forks, near=near
        )

    def verified(make: Callable[..., Proposal], again: Callable[..., Proposal] | None = None) -> Plan:
        if not runs_dry:
            return make(cluster).answer().complete()
        means = asked.means
        fewer = [replace(means, spill=False), replace(means, spill=False, state=False)]
        fewer.append(replace(fewer[-1], host=False, peers=False))
        tried = [partial(make, means=one) for one in dict.fromkeys(fewer) if one != means]
        return plan_reserving(
            model,
            cluster,
            make,
            allocator,
            known.chains,
            progress,
            target=kernels,
            fewer=tried,
            again=again,
        )

    try:
        return verified(make, make if searches else None)
    except InfeasibleError as error:
        open_degrees = asked.tensor is None and asked.data in (None, 1)
        if not open_degrees or (asked.planner or "joint") not in ON_GRIDS:
            raise
        refusal = error
    more = ""
    with suppress(UsageError, InfeasibleError):
        demand = Demand(cluster=cluster, options=_described(asked, training), target=kernels)

        def soon(within: Cluster, means: Means = asked.means) -> Proposal:
            """Propose the plan that is found without a search."""
            allowed = replace(demand, options=replace(demand.options, means=means))
            if (found := allowed.soon(1, known, within, divided=True).fitting) is None:
                raise refusal
            plan = explained(found.plan)
            return Proposal(plan, lambda: Answer(plan))

        look = demand.soon(1, known, divided=True)
        if look.fitting is not None:
            grid = look.fitting.plan.stages[0].grid
            divided = partial(make, shards=grid.tensor, along=grid.sequences)
            with suppress(UsageError, InfeasibleError):
                return verified(divided, divided if searches else None)
            if demand.planner == "joint":
                with suppress(UsageError, InfeasibleError):
                    return verified(soon)
        more = _on_ranks(look.best if demand.planner == "joint" else None)
        more += _in_no_plan(demand.impossible(known))
    raise InfeasibleError(f"{refusal}{more}") from None


def _on_ranks(best: Attempt | None) -> str:
    """Say what the leanest plan found on tensor-parallel ranks needs, if hosts have room for it."""
    if best is None or best.fits or best.shortage:
        return ""
    need, ranks = format_bytes(best.need_bytes), best.plan.stages[0].grid.tensor
    return f". With {counted(ranks, 'tensor-parallel rank')}, a device would need {need}"


def _in_no_plan(proof: str) -> str:
    """Say that no plan fits, for this reason; nothing without a proof."""
    return f". No plan fits this cluster: {proof}" if proof else ""


def _described(asked: PlanOptions, training: Training | None) -> PlanOptions:
    """Return the options with the numbers of a training."""
    if training is None:
        return asked
    return replace(
        asked,
        batch_size=training.batch_size,
        microbatches=training.microbatches,
        schedule=training.schedule,
        versions=training.versions,
    )


def _check(model: Task, asked: PlanOptions) -> None:
    """Check a task's other arguments, before a profile is made.

    Raises:
        UsageError: it cannot be planned as requested.
    """
    if asked.sequences and asked.tensor is None:
        raise UsageError(
            "sequence parallelism needs the number of shards for profiling: give --tensor 2 --sequences "
            "(tensor=2, sequences=True)"
        )
    if asked.planner in ON_RUNS:
        raise UsageError(
            f"the {asked.planner} planner needs measurements of training runs: profile the model with --runs "
            "incremental or --runs trimmed and plan that profile, or use the exact planner, which does not "
            "need them"
        )
    Training(  # of one sample: checks that schedule, precision, clipping and versions fit together
        batch_size=1,
        microbatches=1,
        schedule=asked.schedule or "1f1b",
        precision=model.precision or "float32",
        clip_norm=asked.clip_norm,
        versions=asked.versions,
    )


# ---- Plans that keep their budgets on `torch.distributed.pipelining`
#
# That engine holds more than pipefit's own runtime: receive buffers for all microbatches, the batch,
# outputs until their backward, and sent tensors. Planners know the own runtime's bytes, and the ledger
# those of torch's engine. If the fastest plan exceeds a budget there, a bisection finds how much memory
# must be reserved for a plan that does not.
#
# Replicas that divide gradients or parameters may need less there than in the own runtime, which assigns
# whole layers: FSDP2 divides every layer. If the own runtime has no such plan, plans for devices with more
# memory are tried.

BISECTIONS = 5  # plans of the bisection
MORE = 0.125, 0.25, 0.5, 1.0  # additional memory of a device, as parts of its own

MakeFor = Callable[[Cluster, PlanOptions], Plan]
Peaks = Callable[[Plan], Sequence[int]]


def options_for_torch(asked: PlanOptions) -> PlanOptions:
    """Return the options without techniques that torch's engine lacks, unless they are requested.

    Replicas keep all state, and layers have no tensor shards, unless that is requested too.
    """
    means = replace(asked.means, peers=False, spill=False, state=False)
    return replace(asked, means=means, tensor=asked.tensor or 1, shard=asked.shard or "none")


def plan_for_torch(cluster: Cluster, asked: PlanOptions, make: MakeFor, dry: Peaks | None = None) -> Plan:
    """Return a plan of `make` that fits on torch's engine.

    Peaks are those of the simulator's ledger; a plan that fits by the ledger is verified by `dry`, if given.
    If no plan fits, replicas divide their optimizer state, then also gradients, then parameters.

    Raises:
        UsageError: torch's engine cannot run any such plan.
        InfeasibleError: no plan was found that fits there.
    """
    try:
        return _fitting(cluster, options_for_torch(asked), make, dry)
    except InfeasibleError:
        if asked.shard is not None or asked.data == 1:
            raise
        shards: tuple[Sharding, ...] = ("optimizer", "gradients", "parameters")
        for shard in shards:
            with suppress(InfeasibleError, UsageError):  # no replicas of these sizes, for example
                return _fitting(cluster, options_for_torch(replace(asked, shard=shard)), make, dry)
        raise


def _fitting(cluster: Cluster, asked: PlanOptions, make: MakeFor, dry: Peaks | None) -> Plan:
    """Return a plan with these options that fits on torch's engine; errors are those of `plan_for_torch`."""
    trials = _Trials(cluster, asked, make, dry)
    try:
        first = trials.plan(0)
    except InfeasibleError:
        if asked.shard not in ("gradients", "parameters"):
            raise
        divided = next(filter(trials.fits, trials.with_more_memory()), None)
        if divided is None:
            raise
        return _remarked(divided, f"{_OWNERS}.")
    if trials.fits(first):
        return first
    short, low, high, best = trials.short, 0, trials.additional_bytes(first), None
    for _ in range(BISECTIONS):
        reserve = (low + high) // 2
        try:
            plan = trials.plan(reserve)
        except InfeasibleError:
            high = reserve
            continue
        if trials.fits(plan):
            best, high = plan, reserve
        else:
            low = reserve
    if best is None:
        plan = trials.plan(0, replace(trials.asked, objective="peak", planner=None))
        best = plan if trials.fits(plan) else None
    if best is None:
        raise InfeasibleError(
            f"{short}. No plan was found that fits there, of {counted(BISECTIONS + 2, 'plan')} with more and "
            "more memory reserved: plan fewer microbatches (--microbatches) or tensor-parallel ranks "
            "(--tensor), or train with pipefit's own runtime"
        )
    return _remarked(best, f"Planned again, because {short} in the plan for pipefit's own runtime.")


class _Trials:
    """Plans with different reserves, and whether they fit on torch's engine.

    `short` is the lack of the last plan that did not fit.
    """

    def __init__(self, cluster: Cluster, asked: PlanOptions, make: MakeFor, dry: Peaks | None) -> None:
        self.asked, self.short = asked, ""
        self._cluster, self._make, self._dry = cluster, make, dry

    def plan(self, reserve: int, asked: PlanOptions | None = None) -> Plan:
        """Return a plan with `reserve` more bytes reserved on every device, for a device's whole budget.

        Raises:
            UsageError: torch's engine cannot run the plan.
            InfeasibleError: no plan fits pipefit's own runtime with this reserve.
        """
        devices, reserves = self._cluster.devices, self._cluster.reserves
        more = [min(r + reserve, d.memory_bytes - 1) for r, d in zip(reserves, devices, strict=True)]
        within = self._cluster.reserving(more) if reserve else self._cluster
        plan = self._make(within, asked or self.asked)
        if asked is None and self.asked.data is None and not _runs(plan):  # stages of different degrees
            self.asked = replace(self.asked, data=1)
            plan = self._make(within, self.asked)
        return self._here(plan)

    def with_more_memory(self) -> Iterator[Plan]:
        """Yield plans for devices with more and more memory."""
        for part in MORE:
            devices = (
                replace(d, memory_bytes=int(d.memory_bytes * (1 + part))) for d in self._cluster.devices
            )
            with suppress(InfeasibleError):
                yield self._here(self._make(replace(self._cluster, devices=tuple(devices)), self.asked))

    def _here(self, plan: Plan) -> Plan:
        """Return a plan with the given cluster.

        Raises:
            UsageError: torch's engine cannot run the plan.
        """
        check_for_torch(plan)
        return replace(plan, cluster=self._cluster)

    def fits(self, plan: Plan) -> bool:
        """Return whether all devices keep their budgets; a plan that does by the ledger is run dry."""
        peaks = _peaks(plan)
        if self._dry is not None and not _lacking(self._cluster, peaks):
            peaks = self._dry(plan)
        if lacking := _lacking(self._cluster, peaks):
            self.short = _shortage(plan, peaks, lacking)
        return not lacking

    def additional_bytes(self, plan: Plan) -> int:
        """Return the most bytes that a device holds at its peak beyond pipefit's own runtime."""
        own, peaks = Simulation(plan).peak_bytes, _peaks(plan)
        return max(there - here for here, there in zip(own, peaks, strict=True))


def _peaks(plan: Plan) -> Sequence[int]:
    return Simulation(plan, engine="torch").peak_bytes


def _runs(plan: Plan) -> bool:
    """Return whether torch's engine can run a plan."""
    with suppress(UsageError):
        check_for_torch(plan)
        return True
    return False


def _lacking(cluster: Cluster, peaks: Sequence[int]) -> list[int]:
    """Return the devices whose peaks exceed their budgets."""
    return [n for n, (peak, budget) in enumerate(zip(peaks, cluster.budgets, strict=True)) if peak > budget]


def _shortage(plan: Plan, peaks: Sequence[int], lacking: Sequence[int]) -> str:
    """Return the lack of the device that is over its budget by most."""
    budgets = plan.cluster.budgets
    device = max(lacking, key=lambda n: peaks[n] - budgets[n])
    need, budget, why = peaks[device], budgets[device], most_receive_buffers(plan)
    return (
        f"on torch's engine device {device} needs {format_bytes(need)}, {format_bytes(need - budget)} over "
        f"its {format_bytes(budget)}{why and f'; {why}'}"
    )


_OWNERS = (
    "Planned for devices with more memory: pipefit's own runtime, whose replicas own whole "
    "layers, needs more than torch's engine, whose replicas divide each layer"
)


def _remarked(plan: Plan, remark: str) -> Plan:
    """Return the plan with a remark on how it was found."""
    if plan.provenance is None:
        return plan
    return replace(plan, provenance=replace(plan.provenance, remarks=(*plan.provenance.remarks, remark)))
