"""Plans for GPUs that are held against what their processes take, and not only against their tensors.

A planner knows requested bytes alone. What a GPU's caching allocator reserves for them follows from a dry run of the
plan, and so does how many communicators its process has. Where that is more than the device has, its tensors get as
much less than they take (`Cluster.reserves`), and all is planned again: mostly once or twice, since the next plan is
much like the last.

Costs a dry run of all layers for each plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from pipefit.allocator import AllocatorSettings
from pipefit.capture import Task
from pipefit.cluster import Cluster
from pipefit.errors import InfeasibleError
from pipefit.fake.sizes import Chains
from pipefit.fitting.on_the_way import Proposal
from pipefit.plans import Plan
from pipefit.profiler import Progress
from pipefit.runtime import certify
from pipefit.texts import counted
from pipefit.trace import DeviceTrace
from pipefit.units import MIB

ROUNDS = 6  # plans at most
_SEGMENT = 20 * MIB  # what the allocator has from the driver at least, where it is more than 2 MiB


def plan_reserving(
    task: Task,
    cluster: Cluster,
    make: Callable[[Cluster], Proposal],
    allocator: AllocatorSettings | None = None,
    chains: Chains | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The plan of `make` for `cluster`, or one that leaves more of its devices, whose processes have room on them. What
    is proposed is run dry while it is held against traces.

    Its prediction tells what they take (`Prediction.processes`). The model of `task` is run dry under `allocator`, and
    not traced for numbers of samples for which `chains` have a trace. `progress` hears of each dry run.

    Raises:
        InfeasibleError: the tensors of a plan fit but not its processes, and no other plan was found.
    """
    asked, short = [cluster], list[str]()
    dry = partial(certify, task, target="cuda", allocator=allocator or AllocatorSettings(), chains=chains)
    for number in range(ROUNDS):
        try:
            within, proposal = _first(make, asked)
            if progress is not None:
                progress(number, 0, f"a dry run of {counted(len(proposal.plan.workers), 'process')}")
            devices, made = dry(proposal.plan).devices, proposal.settled()
        except InfeasibleError as error:
            if not short:
                raise
            raise InfeasibleError(f"{short[-1]}. No plan was found that leaves it as much: {error}") from None
        if replace(made, alternatives=()) != proposal.plan:
            devices = dry(made).devices
        if not any(device.lack_bytes for device in devices):
            return _told(made, devices, short)
        short.append(max(devices, key=lambda device: device.lack_bytes).shortage)
        asked = [_leaving_more(within, devices, short[-1])]
        if len(short) > 1:  # what no longer fits on one device may be next on another like it, and then on a third
            asked.insert(0, _alike(asked[0]))
    raise InfeasibleError(f"{short[-1]}. {ROUNDS} plans, each of which left more than the one before, did not fit")


def _first(make: Callable[[Cluster], Proposal], clusters: Sequence[Cluster]) -> tuple[Cluster, Proposal]:
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
    """The cluster that leaves to tensors what they take now, less the segments that a device's process lacks.

    Raises:
        InfeasibleError: nothing of a device would be left.
    """
    more = list(cluster.reserves)
    for number, one in enumerate(devices):
        if one.lack_bytes:
            unused = max(more[number], one.budget_bytes - one.peak_bytes)
            more[number] = unused + -(-one.lack_bytes // _SEGMENT) * _SEGMENT
    if any(reserve >= device.memory_bytes for reserve, device in zip(more, cluster.devices, strict=True)):
        raise InfeasibleError(f"{short}. That leaves nothing to tensors")
    return cluster.reserving(more)


def _told(plan: Plan, devices: Sequence[DeviceTrace], short: Sequence[str]) -> Plan:
    """The plan with what its processes take, and why it was planned again, if it was."""
    assert plan.prediction is not None  # planners predict
    told = replace(plan, prediction=replace(plan.prediction, processes=tuple(device.allocator for device in devices)))
    if not short or plan.provenance is None:
        return told
    remark = f"Planned {counted(len(short) + 1, 'time')}: in the first plan {short[0]}."
    return replace(told, provenance=replace(plan.provenance, remarks=(*plan.provenance.remarks, remark)))
