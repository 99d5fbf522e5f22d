"""Plans for GPUs, checked against their processes' memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import pipefit
from pipefit.capture import Task
from pipefit.errors import InfeasibleError, UsageError
from pipefit.largest import task_plans
from pipefit.largest.attempts import Proposal
from pipefit.largest.task_plans import plan_reserving as reserving_of_proposals
from pipefit.memory.cuda_allocator import AllocatorSettings
from pipefit.planner import Answer, Means, plan
from pipefit.report.show import text
from pipefit.runtime import certify
from pipefit.runtime.dry_run import certify as certifying
from pipefit.schema.cluster import Cluster
from pipefit.schema.devices import Device, DeviceKind, Host, Link, Overheads
from pipefit.schema.plan import Alternative, Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.trace import Trace
from support.known_profiles import profile
from support.small_tasks import task_of

MIB = 1 << 20
NOTHING = Overheads(context_bytes=0, communicator_bytes=0, cublas_workspace_bytes=0)
SOME = Overheads(context_bytes=40 * MIB, communicator_bytes=3 * MIB, cublas_workspace_bytes=5 * MIB)


def stack() -> Task:
    """Build eight equal layers of 4 MiB of parameters."""
    return task_of(
        lambda: [layer for _ in range(8) for layer in (nn.Linear(1000, 1000), nn.GELU())],
        inputs=1000,
        outputs=1000,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    )


@cache
def costs() -> ModelProfile:
    """Return the costs of the layers of `stack` on a GPU."""
    return profile(stack(), microbatch_size=500, target="cuda")


@cache
def costs_of_cores() -> ModelProfile:
    """Return the costs of the layers of `stack` on the CPU."""
    return profile(stack(), microbatch_size=20)


def counted_wrongly(by: int) -> ModelProfile:
    """Build a profile on the CPU that counts gradients of each layer some bytes too large."""
    made = costs_of_cores()
    (measured,) = made.measurements
    kinds = [
        replace(k, gradient_bytes=k.gradient_bytes + by) if k.gradient_bytes else k for k in measured.kinds
    ]
    return replace(made, measurements=(replace(measured, kinds=tuple(kinds)),))


def test_a_plan_that_a_dry_run_refuses_is_planned_again() -> None:
    """Gradients of another size than planned cannot be moved: the final plan moves none, and says why.
    Without another plan the refusal is the answer.
    """
    wrong, ample, tight = (
        counted_wrongly(by=4),
        Cluster.emulated((1, 200 * MIB)),
        Cluster.emulated((1, 44 * MIB)),
    )
    asked = {"batch_size": 40, "microbatches": 2, "effort": 0.05}

    def moves(within: Cluster) -> Proposal:
        made = replace(plan(wrong, tight, **asked), cluster=within, alternatives=())
        return Proposal(made, lambda: Answer(made))

    def spares(within: Cluster) -> Proposal:
        made = plan(wrong, within, means=Means(spill=False), **asked)
        return Proposal(made, lambda: Answer(made))

    with pytest.raises(UsageError, match="by the plan"):
        certify(stack(), moves(ample).plan)
    refused = r"a dry run refuses the plan: .* by the plan.* "
    with pytest.raises(InfeasibleError, match=refused + "No other plan was found"):
        reserving_of_proposals(stack(), ample, moves, target="cpu")
    with pytest.raises(InfeasibleError, match=refused + "No other plan was found"):
        reserving_of_proposals(stack(), tight, moves, target="cpu", fewer=[spares])
    found = reserving_of_proposals(stack(), ample, moves, target="cpu", fewer=[spares])
    assert not any(device.lack_bytes for device in certify(stack(), found).devices)
    assert found.provenance.remarks[-1].startswith(
        "Planned 2 times: in the first plan a dry run refuses the plan"
    )


def test_a_plan_whose_dry_run_needs_more_leaves_as_much_room() -> None:
    """If a profile counts too little, it is planned again with the dry run's excess reserved."""
    made, asked = (
        plan(costs_of_cores(), Cluster.emulated((1, 70 * MIB)), batch_size=40),
        list[int](),
    )
    over = made.prediction.peak_bytes[0] - 1000

    def make(within: Cluster) -> Proposal:
        asked.append(within.budgets[0])
        proposed = replace(made, cluster=within)
        return Proposal(proposed, lambda: Answer(proposed))

    assert made.decisions
    with mock.patch.object(task_plans, "ROUNDS", 2), pytest.raises(InfeasibleError, match="1000 B over its"):
        reserving_of_proposals(stack(), Cluster.emulated((1, over)), make, target="cpu")
    assert asked == [over, over - 1000]


def gpus(*memory: int, overheads: Overheads = NOTHING) -> Cluster:
    """Build GPUs with these bytes each, whose processes take only their segments by default."""
    kind = DeviceKind(name="gpu", flops={"float32": 1e13}, memory_bandwidth=1e12, overheads=overheads)
    devices = tuple(Device(kind=kind, memory_bytes=nbytes) for nbytes in memory)
    members = *(f"device{number}" for number in range(len(devices))), "host0"
    links = (Link.between(*members, bytes_per_second=1e10),)
    return Cluster(
        name="gpus", backend="cuda", devices=devices, hosts=(Host(memory_bytes=1 << 34),), links=links
    )


def planned(microbatches: int = 3, planner: str = "exact") -> Callable[[Cluster], Plan]:
    """Build plans for `stack`."""
    return partial(plan, costs(), batch_size=500 * microbatches, microbatches=microbatches, planner=planner)


def plan_reserving(task: Task, cluster: Cluster, make: Callable[[Cluster], Plan]) -> Plan:
    """Return the plan after every proposal is settled."""

    def propose(within: Cluster) -> Proposal:
        made = make(within)
        return Proposal(made, lambda: Answer(made))

    return reserving_of_proposals(task, cluster, propose)


def processes(made: Plan) -> list[int]:
    """Return each device's process memory in a dry run of the plan."""
    trace = certify(stack(), made, allocator=AllocatorSettings())
    return [device.allocator.process_bytes if device.allocator else 0 for device in trace.devices]


def test_what_fits_by_requested_bytes_alone_is_refused() -> None:
    """A device with a byte less than its process needs, but more than its tensors, is refused with the
    numbers.
    """
    make = planned(1)
    (needed,) = processes(make(gpus(1 << 32)))
    assert processes(plan_reserving(stack(), gpus(needed), make)) == [needed]
    small = gpus(needed - 1)
    assert make(small).prediction.peak_bytes[0] < needed - 1
    with pytest.raises(
        InfeasibleError, match=r"the process of device 0 needs .*, 1 B over its .* reserved for .*"
    ):
        plan_reserving(stack(), small, make)


def test_a_task_is_held_against_its_process_from_python() -> None:
    """`pipefit.plan` of a task for GPUs refuses a process without room, unless the check is off; of a profile
    it cannot.
    """
    asked = {"batch_size": 500, "microbatch_size": 500, "planner": "exact", "stages": 1}
    (needed,) = processes(pipefit.plan(stack(), gpus(1 << 32), certify=False, **asked))
    assert pipefit.plan(stack(), gpus(needed), **asked).prediction.processes[0].process_bytes == needed
    with pytest.raises(InfeasibleError, match="the process of device 0 needs"):
        pipefit.plan(stack(), gpus(needed - 1), **asked)
    for unchecked in (
        pipefit.plan(stack(), gpus(needed - 1), certify=False, **asked),
        pipefit.plan(costs(), gpus(needed - 1), **asked),
    ):
        assert not unchecked.prediction.processes


def test_where_another_plan_fits_that_one_is_found() -> None:
    """A device with room only for the tensors of the best split gets fewer layers, if others have room for
    more.
    """
    # Under 1f1b the planner makes the smaller device the last stage, whose process has room to spare
    make = partial(planned(planner="joint"), schedule="gpipe")
    peak, ample = make(gpus(1 << 32, 1 << 32)).prediction.peak_bytes[0], 1 << 30
    cluster = gpus(peak, ample)
    first = make(cluster)
    assert first.prediction.peak_bytes[0] <= peak < processes(first)[0]
    found = plan_reserving(stack(), cluster, make)
    assert found.stages != first.stages
    assert all(taken <= has for taken, has in zip(processes(found), (peak, ample), strict=True))
    assert [one.memory_bytes for one in found.cluster.devices] == [peak, ample]
    assert found.prediction.peak_bytes[0] <= found.cluster.budgets[0] < peak
    assert found.provenance.remarks[-1].startswith(
        "Planned 2 times: in the first plan the process of device 0 needs"
    )


@pytest.mark.parametrize("finds", [True, False])
def test_plans_like_the_last_come_first(finds: bool) -> None:
    """A plan that its dry run refuses is planned again near itself, and anew if that finds none."""
    make, seen = partial(planned(planner="joint"), schedule="gpipe"), list[str]()
    peak = make(gpus(1 << 32, 1 << 32)).prediction.peak_bytes[0]
    cluster = gpus(peak, 1 << 30)

    def anew(within: Cluster) -> Proposal:
        seen.append("anew")
        made = make(within)
        return Proposal(made, lambda: Answer(made))

    def again(within: Cluster, near: Plan) -> Proposal:
        seen.append("again")
        assert near.stages == make(cluster).stages
        if not finds:
            raise InfeasibleError("nothing near")
        made = make(within)
        return Proposal(made, lambda: Answer(made))

    found = reserving_of_proposals(stack(), cluster, anew, again=again)
    assert all(taken <= has for taken, has in zip(processes(found), (peak, 1 << 30), strict=True))
    assert seen == (["anew", "again"] if finds else ["anew", "again", "anew"])


def test_what_fits_at_once_is_the_planner_s_own_plan() -> None:
    """A plan that fits at once is run dry once, and reports that dry run's processes."""
    cluster = gpus(1 << 30, 1 << 30, overheads=SOME)
    make = planned()
    with mock.patch.object(task_plans, "certify", wraps=certify) as dry:
        found = plan_reserving(stack(), cluster, make)
    assert dry.call_count == 1
    assert (found.stages, found.cluster) == (make(cluster).stages, cluster)
    trace = certify(stack(), found, allocator=AllocatorSettings(), each=False)
    assert found.prediction.processes == tuple(device.allocator for device in trace.devices)
    assert "By a dry run, the process of device" in " ".join(text(found).split())


def test_the_fullest_devices_run_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a process of the fullest devices does not fit, no other device runs; else the trace is that of all."""
    monkeypatch.setattr(certifying, "_FIRST", 1)
    ample = planned()(gpus(*[1 << 32] * 3))
    every = certify(stack(), ample, allocator=AllocatorSettings())
    assert certify(stack(), ample, allocator=AllocatorSettings(), each=False).peak_bytes == every.peak_bytes
    fullest = max(range(3), key=lambda device: ample.prediction.peak_bytes[device])
    less = [1 << 32] * 3
    less[fullest] = processes(ample)[fullest] - 1
    tight = replace(ample, cluster=gpus(*less))
    found = certify(stack(), tight, allocator=AllocatorSettings(), each=False).devices
    assert [device.allocator is not None for device in found] == [n == fullest for n in range(3)]
    assert found[fullest].lack_bytes > 0 and not any(found[n].lack_bytes for n in range(3) if n != fullest)


def test_a_worker_between_two_others_takes_what_is_reserved_for_it() -> None:
    """The reserve is context, five communicators and two workspaces; end workers have less, and a lone one no
    communicators.
    """
    cluster = gpus(*[1 << 32] * 3, overheads=SOME)
    trace = certify(stack(), planned()(cluster), allocator=AllocatorSettings())
    taken = [
        device.allocator.outside_bytes + device.allocator.workspaces * device.allocator.workspace_bytes
        for device in trace.devices
        if device.allocator
    ]
    assert taken[1] == cluster.reserves[1] == 40 * MIB + 5 * 3 * MIB + 2 * 5 * MIB
    assert max(taken) == taken[1]
    assert gpus(1 << 32, overheads=SOME).reserves == (50 * MIB,)


def test_a_dry_run_is_told() -> None:
    """Progress announces the dry run after the search; for many devices it takes as long."""
    heard = list[str]()
    made = planned(1)(gpus(1 << 32))
    proposal = Proposal(made, lambda: Answer(made))
    reserving_of_proposals(
        stack(), gpus(1 << 32), lambda _: proposal, progress=lambda *told: heard.append(told[2])
    )
    assert heard == ["a dry run of 1 process"]


def test_a_planner_that_repeats_its_plan_is_asked_a_few_times() -> None:
    """A planner that repeats its plan is called a few times, and the plan refused."""
    make = planned(1)
    made = make(gpus(1 << 32))
    small = gpus(processes(made)[0] - 1)
    with (
        mock.patch.object(task_plans, "certify", wraps=certify) as dry,
        mock.patch.object(task_plans, "ROUNDS", 3),
        pytest.raises(
            InfeasibleError, match="3 plans, each with a larger reserve than the one before, did not fit"
        ),
    ):
        plan_reserving(stack(), small, lambda _: make(small))
    assert dry.call_count == 3


def test_what_moves_on_from_device_to_device_is_asked_of_all_alike() -> None:
    """If the excess moves from device to device, the third call reserves it on all of them."""
    plans, asked = [planned()(gpus(1 << 32, 1 << 32)) for _ in range(3)], list[tuple[int, ...]]()
    needed = max(processes(plans[0]))

    def make(within: Cluster) -> Plan:
        asked.append(within.reserves)
        return replace(plans[len(asked) - 1], cluster=within)

    with mock.patch.object(task_plans, "ROUNDS", 3), pytest.raises(InfeasibleError):
        plan_reserving(stack(), gpus(needed - 1, needed - 1), make)
    assert asked[0] == (0, 0) and len(set(asked[1])) == 2 and len(set(asked[2])) == 1
    assert asked[2][0] > max(asked[1])


def test_replicas_of_which_one_needs_more_get_equal_reserves() -> None:
    """If one ZeRO rank lacks memory, the next plan reserves it on all, because replicas need equal devices."""
    asked = list[tuple[int, ...]]()
    made = plan(
        profile(stack(), microbatch_size=(1, 3), target="cuda"),
        gpus(*[1 << 30] * 3),
        batch_size=3,
        microbatches=1,
        stages=1,
        data=3,
        shard="parameters",
    )

    def of_the_first(*asked: Any, **options: Any) -> Trace:
        trace = certify(*asked, **options)
        first, *others = trace.devices
        return replace(trace, devices=(first, *(replace(other, allocator=None) for other in others)))

    def make(within: Cluster) -> Plan:
        asked.append(within.reserves)
        return replace(made, cluster=within)

    small = gpus(*[max(processes(made)) - 1] * 3)
    with (
        mock.patch.object(task_plans, "ROUNDS", 2),
        mock.patch.object(task_plans, "certify", of_the_first),
        pytest.raises(InfeasibleError),
    ):
        plan_reserving(stack(), small, make)
    assert asked[0] == (0, 0, 0) and len(set(asked[1])) == 1 and min(asked[1]) > 0


def test_a_plan_is_not_found_again_where_its_tensors_had_room_to_spare() -> None:
    """The process lacks a byte while its tensors have a slack of 20 MiB: the next plan has to take less."""
    fits = planned(1)(gpus(1 << 32))
    least, asked = fits.prediction.peak_bytes[0], list[int]()

    def make(within: Cluster) -> Plan:
        asked.append(within.budgets[0])
        return replace(fits, cluster=within)

    with mock.patch.object(task_plans, "ROUNDS", 2), pytest.raises(InfeasibleError):
        plan_reserving(stack(), gpus(processes(fits)[0] - 1), make)
    assert asked[1] < least < asked[0] - 20 * MIB


def test_a_reserve_that_leaves_nothing_is_refused() -> None:
    """A process that needs its device's whole memory leaves none for tensors and is refused."""
    make = planned(1)
    with pytest.raises(InfeasibleError, match="would leave no memory for tensors"):
        plan_reserving(stack(), gpus(MIB), lambda tiny: replace(make(gpus(1 << 32)), cluster=tiny))


def test_what_is_settled_is_run_dry() -> None:
    """If a proposal changes in settling, only the resulting plan is run dry and reported."""
    make = planned()
    first, second = make(gpus(1 << 30, 1 << 30)), make(gpus(1 << 31, 1 << 31))
    proposal = Proposal(first, lambda: Answer(second))
    with mock.patch.object(task_plans, "certify", wraps=certify) as dry:
        found = reserving_of_proposals(stack(), gpus(1 << 31, 1 << 31), lambda _: proposal)
    assert [call.args[1] for call in dry.call_args_list] == [first, second]
    assert found.cluster == second.cluster


def test_only_a_plan_that_passes_its_dry_run_gets_alternatives() -> None:
    """They are searched once the processes of a plan are known to fit, and belong to the result."""
    make, asked = planned(1), list[int]()
    made = make(gpus(1 << 32))
    other = Alternative(
        what="leanest",
        schedule="1f1b",
        stages=1,
        devices=1,
        microbatches=1,
        peak_bytes=1,
        step_seconds=1.0,
        asked_by="",
    )

    def others() -> tuple[Alternative, ...]:
        asked.append(1)
        return (other,)

    small = replace(made, cluster=gpus(processes(made)[0] - 1))
    refused = Proposal(small, lambda: Answer(small, others))
    with mock.patch.object(task_plans, "ROUNDS", 2), pytest.raises(InfeasibleError, match="did not fit"):
        reserving_of_proposals(stack(), small.cluster, lambda _: refused)
    assert asked == []
    found = reserving_of_proposals(
        stack(), made.cluster, lambda _: Proposal(made, lambda: Answer(made, others))
    )
    assert found.alternatives == (other,) and asked == [1]
