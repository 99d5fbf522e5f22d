"""Plans that are held against a dry run before they are given out: what `certify` refuses is planned again.

A planner knows requested bytes alone. What a GPU's caching allocator reserves for them follows from a dry run of the
plan, and so does how many communicators its process has. Where that is more than the device has, its tensors get as
much less than they take (`Cluster.reserves`), and all is planned again: mostly once or twice, since the next plan is
much like the last. Where the dry run refuses what a plan moves, it is planned again with fewer means.

Costs a dry run of all layers for each plan for GPUs. For other devices, plans that neither move nor recompute anything
are not run: their peaks are the simulator's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from pipefit.allocator import AllocatorSettings
from pipefit.capture import Task
from pipefit.cluster import Cluster
from pipefit.errors import InfeasibleError, OutOfMemory, UsageError
from pipefit.fake.sizes import Chains
from pipefit.fitting.on_the_way import Proposal
from pipefit.plans import Plan
from pipefit.profiler import Progress
from pipefit.profiles import Target
from pipefit.runtime import certify
from pipefit.texts import counted
from pipefit.trace import DeviceTrace, Trace
from pipefit.units import MIB

ROUNDS = 6  # plans at most
Make = Callable[[Cluster], Proposal]
_SEGMENT = 20 * MIB  # what the allocator has from the driver at least, where it is more than 2 MiB


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
) -> Plan:
    """The plan of `make` for `cluster`, or one that leaves more of its devices, which a dry run does not refuse. What
    is proposed is run dry while it is held against traces.

    For GPUs its prediction tells what processes take (`Prediction.processes`). The model of `task` is run dry under
    `allocator`, and not traced for numbers of samples for which `chains` have a trace. `progress` hears of each dry
    run. Where one refuses what a plan moves, the next of `fewer` takes the place of `make`.

    Raises:
        InfeasibleError: the tensors of a plan fit but not its processes, or a dry run refuses what it moves, and no
            other plan was found.
    """
    asked, short, others = [cluster], list[str](), iter(fewer)
    settings = (allocator or AllocatorSettings()) if target == cluster.backend == "cuda" else None
    dry = partial(_run_dry, partial(certify, task, target=target, allocator=settings, chains=chains))
    for number in range(ROUNDS):
        try:
            within, proposal = _first(make, asked)
            if progress is not None and (settings or proposal.plan.decisions):
                progress(number, 0, f"a dry run of {counted(len(proposal.plan.workers), 'process')}")
            devices = dry(proposal.plan)
            made = proposal.settled()
            if replace(made, alternatives=()) != proposal.plan:
                devices = dry(made)
        except _Refused as refusal:
            short.append(str(refusal))
            make = _next(others, refusal)
            continue
        except InfeasibleError as error:
            if not short:
                raise
            raise InfeasibleError(f"{short[-1]}. No plan was found that does otherwise: {error}") from None
        if not any(device.lack_bytes for device in devices):
            return _told(made, devices, short)
        short.append(max(devices, key=lambda device: device.lack_bytes).shortage)
        asked = [_leaving_more(within, devices, short[-1])]
        if len(short) > 1:  # what no longer fits on one device may be next on another like it, and then on a third
            asked.insert(0, _alike(asked[0]))
    raise InfeasibleError(f"{short[-1]}. {ROUNDS} plans, each of which left more than the one before, did not fit")


class _Refused(Exception):
    """A dry run refuses a plan that moves something."""


def _run_dry(run: Callable[[Plan], Trace], plan: Plan) -> Sequence[DeviceTrace]:
    """The devices of a dry run; none of a plan whose peaks are the simulator's.

    Raises:
        _Refused: what it moves cannot be moved, or a host has no room for it.
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
    """What is asked next.

    Raises:
        InfeasibleError: there is nothing else.
    """
    for other in others:
        return other
    raise InfeasibleError(f"{refusal}. No other plan was found") from refusal.__cause__


def _first(make: Make, clusters: Sequence[Cluster]) -> tuple[Cluster, Proposal]:
    """The first of some clusters for which there is a plan, and what is proposed for it.

    Raises:
        InfeasibleError: there is none for any of them; as the last one says.
    """
    for cluster in clusters[:-1]:
        with suppress(InfeasibleError):
            return cluster, make(cluster)
    return clusters[-1], make(clusters[-1])


def _alike(cluster: Cluster) -> Cluster:
    """The cluster that leaves of all devices of a kind and size what it leaves of any of them."""
    most = dict[tuple[object, int], int]()
    for reserve, device in zip(cluster.reserves, cluster.devices, strict=True):
        most[device.kind.key, device.memory_bytes] = max(reserve, most.get((device.kind.key, device.memory_bytes), 0))
    return cluster.reserving([most[device.kind.key, device.memory_bytes] for device in cluster.devices])


def _leaving_more(cluster: Cluster, devices: Sequence[DeviceTrace], short: str) -> Cluster:
    """The cluster that leaves to tensors what they take now, less the bytes or segments that a device lacks.

    Raises:
        InfeasibleError: nothing of a device would be left.
    """
    more = list(cluster.reserves)
    for number, one in enumerate(devices):
        if one.lack_bytes:
            each = _SEGMENT if one.allocator else 1
            unused = max(more[number], one.budget_bytes - one.peak_bytes)
            more[number] = unused + -(-one.lack_bytes // each) * each
    if any(reserve >= device.memory_bytes for reserve, device in zip(more, cluster.devices, strict=True)):
        raise InfeasibleError(f"{short}. That leaves nothing to tensors")
    return cluster.reserving(more)


def _told(plan: Plan, devices: Sequence[DeviceTrace], short: Sequence[str]) -> Plan:
    """The plan with what its processes take, and why it was planned again, if it was."""
    assert plan.prediction is not None  # planners predict
    processes = tuple(device.allocator for device in devices) if any(device.allocator for device in devices) else ()
    told = replace(plan, prediction=replace(plan.prediction, processes=processes))
    if not short or plan.provenance is None:
        return told
    remark = f"Planned {counted(len(short) + 1, 'time')}: in the first plan {short[0]}."
    return replace(told, provenance=replace(plan.provenance, remarks=(*plan.provenance.remarks, remark)))
