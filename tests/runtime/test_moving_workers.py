"""Saved tensors offloaded by worker processes: over shared memory, during computation, without leftovers
after any end.
"""

from __future__ import annotations

import multiprocessing as mp
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import pipefit
from pipefit.errors import OutOfMemory, WorkerFailed
from pipefit.runtime import Trainer, certify
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, SavedTensors, What
from pipefit.schema.devices import Host, Link, parse_place
from pipefit.schema.plan import Plan
from pipefit.schema.trace import Stream, Trace
from pipefit.simulator import simulate
from support import counted_sleep
from support.memory_samples import samples
from support.process_tree import descendants, mappings
from support.random_offloads import make_chain, make_wide
from support.small_tasks import plan_of

SLOW = 0.05  # seconds of a copy
SIGMOID = ((1, 0),)  # layer 1's output, which it saves


def moved(plan: Plan, *places: str, behind: int = 1, ahead: int = 0) -> Plan:
    """Return the plan with the sigmoid's result of stage 0 moved to the first place, the tanh's of stage 1 to
    the second.
    """
    decisions = tuple(
        Decision(
            stage=stage,
            subject=SavedTensors(tensors=tensors),
            what=What.OFFLOAD,
            place=parse_place(place),
            behind=behind,
            ahead=ahead,
        )
        for (stage, tensors), place in zip([(0, SIGMOID), (1, ((4, 0),))], places, strict=False)
    )
    return replace(plan, decisions=decisions)


def segments() -> list[str]:
    """Return the arenas that this process or its descendants have mapped."""
    family = (os.getpid(), *descendants(os.getpid()))
    return [line for process in family for line in mappings(process) if "pipefit-arena" in line]


@pytest.mark.gallery
def test_workers_move_what_one_process_moves() -> None:
    """With a peer, the host and shares of both, losses and memory samples are those of one process and of the
    dry run; a device without a worker lends too.
    """
    still = plan_of(make_chain(), [3, 3], microbatches=4, schedule="gpipe", devices=2)
    still = replace(still, cluster=Cluster.emulated((2, 1 << 20), (1, 4096)))
    plan = moved(still, "device1*2+host*1", "device0*1+device2*1")
    shared: list[list[str]] = []
    losses, trace = pipefit.train(make_chain, plan, steps=3, on_step=lambda *_: shared.append(segments()))
    assert len(shared[0]) == 4  # two arenas, each in two workers
    task = make_chain()
    alone = Trainer(task, plan)
    expected = []
    for step in range(3):
        torch.manual_seed(step)
        expected.append(alone.step(task.batch(plan.training.batch_size)))
    assert losses == expected
    assert samples(trace) == samples(alone.trace) == samples(certify(task, plan, steps=3))
    assert not segments()


@pytest.mark.parametrize("accident", ["killed", "raises"])
def test_a_worker_that_dies_leaves_no_shared_memory(accident: str) -> None:
    """Two workers that lend to each other leave no segment if one is killed or fails in the middle of a step."""
    plan = moved(plan_of(make_chain(), [3, 3], microbatches=4, schedule="gpipe"), "device1", "device0")
    with pytest.raises(WorkerFailed, match="worker 1"):
        pipefit.train(partial(make_chain, accident), plan, steps=2)
    assert mp.active_children() == []
    assert not segments()


def test_a_worker_that_copies_for_too_long_is_the_one_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that waits too long for its copy is named as hanging, in time; its waiting neighbour is not."""
    plan = moved(plan_of(make_chain(), [3, 3], microbatches=2, schedule="gpipe"), "host", "host", behind=0)
    link = Link.between("device0", "device1", "host0", bytes_per_second=1.0)
    plan = replace(plan, cluster=replace(plan.cluster, links=(link,)), decisions=plan.decisions[1:])
    counted_sleep.counted(monkeypatch, tmp_path / "asleep")
    with pytest.raises(WorkerFailed, match=r"worker 1 .* hangs at 1WAIT_OFFLOAD0\[4.0\]@host"):
        pipefit.train(partial(make_chain, "falls asleep later"), plan, steps=1, timeout_seconds=2)
    assert mp.active_children() == []


def test_a_host_without_room_is_refused_before_a_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without room is refused by the launching process, before a worker starts."""

    def never(*_: Any) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr("pipefit.runtime.launch.launch.start", never)
    plan = moved(plan_of(make_chain(), [3, 3], microbatches=4, schedule="gpipe"), "host")
    with pytest.raises(OutOfMemory, match=r"host0 has .*, but would need"):
        pipefit.train(
            make_chain, replace(plan, cluster=replace(plan.cluster, hosts=(Host(memory_bytes=100),))), steps=1
        )


@pytest.mark.parametrize("split", [pytest.param([4], marks=pytest.mark.gallery), [3, 1]])
def test_copies_take_the_time_of_their_link_beside_computing(split: list[int]) -> None:
    """Over a slow link a copy takes at least its seconds; a device idles for less of them if copies run
    during computation. The simulator, given the same link, predicts the faster plan, with one worker and with
    two.
    """
    still = plan_of(make_wide(), split, microbatches=4, schedule="gpipe")
    size = next(t for t in still.measurement.costs[1].saved if t.index == 0).nbytes
    link = Link.between("device0", "device1", "host0", bytes_per_second=size / SLOW)
    devices = still.cluster.devices * (3 - len(split))
    still = replace(still, cluster=replace(still.cluster, devices=devices[:2], links=(link,)))
    waiting, beside = (moved(still, "host", behind=behind, ahead=ahead) for behind, ahead in ((0, 0), (1, 1)))
    traces = [pipefit.train(make_wide, plan, steps=2)[1] for plan in (waiting, beside)]
    assert min(span for trace in traces for span in spans(trace)) >= SLOW
    assert waited(traces[1]) < waited(traces[0])
    assert simulate(beside).step_seconds[1] < simulate(waiting).step_seconds[1]


def spans(trace: Trace) -> list[float]:
    """Return the seconds from the start to the end of every copy of device 0."""
    copies = [e for e in trace.devices[0].events if e.stream is Stream.COPY]
    ends = {(e.step, e.action.replace("WAIT_", "")): e.end_seconds for e in copies if "WAIT" in e.action}
    return [ends[e.step, e.action] - e.start_seconds for e in copies if "WAIT" not in e.action]


def waited(trace: Trace) -> float:
    """Return the seconds that device 0 waited for copies in the second step."""
    copies = (e for e in trace.devices[0].events if e.stream is Stream.COPY and e.step == 1)
    return sum(e.end_seconds - e.start_seconds for e in copies)
