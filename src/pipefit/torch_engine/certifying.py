"""The dry run of torch's engine: each rank alone, over fake tensors, by the engine's own code."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist

from pipefit.capture import Task, left_as_found, recording
from pipefit.capture.sample import sample
from pipefit.errors import UsageError
from pipefit.fake_cuda.chain import Chains
from pipefit.fake_cuda.isolation import apart
from pipefit.fake_cuda.target import FakeTarget
from pipefit.lowering import check_for_torch
from pipefit.measure import Kernels, Meter
from pipefit.own_loop import HostTensors, counted_states
from pipefit.runtime import (
    Source,
    StageSources,
    Wanted,
    check_model,
    divided_without_peers,
    rank_without_peers,
)
from pipefit.schema.plan import Plan
from pipefit.schema.profile import Target
from pipefit.schema.trace import Category, DeviceTrace, MemorySample, Trace
from pipefit.schema.validation import instance
from pipefit.torch_engine.rank import EngineRank, Groups
from pipefit.torch_engine.training import Record, local_batches
from pipefit.torch_internals.data_parallel import shards_counted
from pipefit.torch_internals.patches import always_stepping
from pipefit.torch_internals.pipelining import alone

STEPS = 2  # the first one makes receive buffers and optimizer state


def certify_pipeline(task: Task, plan: Plan, *, target: Target | None = None) -> Trace:
    """Return the peaks of `plan` on `torch.distributed.pipelining`, exact to the byte, on every device.

    The engine's own code runs over fake tensors, one rank after the other, for two steps: in the first one it
    makes its receive buffers, and the optimizers make their state. Equal devices run once. Budgets are not
    enforced: compare `trace.peak_bytes` with the cluster's. `target` is the kind of device whose kernels are
    modeled; default: the profile's.

    Raises:
        FileError: the plan was made for another task.
        UsageError: torch's engine lacks what the plan needs, or this process has a process group.
    """
    instance("task", task, Task, "a plan is the second argument")
    check_for_torch(instance("plan", plan, Plan, "pipefit.load reads one"))
    if dist.is_initialized():
        raise UsageError(
            "a dry run of torch's engine needs a process without a process group: certify before "
            "init_process_group, or in another process"
        )
    target = target or plan.profile.assumptions.target
    kernels = Kernels(plan.profile.assumptions.threads, plan.profile.kernels) if target == "cpu" else None
    samples = apart(target, partial(_run, task, plan, target, kernels))
    if kernels is not None:
        kernels.keep()
        kernels.tell_unknown()
    devices = tuple(
        DeviceTrace(device=n, budget_bytes=device.memory_bytes, events=(), memory=samples.get(n, ()))
        for n, device in enumerate(plan.cluster.devices)
    )
    return Trace(source="dry run", steps=STEPS, devices=devices, step_seconds=(0.0,) * STEPS)


def _run(
    task: Task, plan: Plan, target: Target, kernels: Kernels | None
) -> dict[int, tuple[MemorySample, ...]]:
    """Return the samples of every used device."""
    result: dict[int, tuple[MemorySample, ...]] = {}
    chains = Chains(task)
    with (
        recording("certifying"),
        torch.random.fork_rng(devices=[]),
        left_as_found(task.loss),
        FakeTarget(target) as fake,
    ):
        for rank in plan.ranks:
            known: dict[tuple[int, int], tuple[MemorySample, ...]] = {}
            for device in plan.stages[rank[0]].devices:
                if (kind := _kind(plan, rank, device)) not in known:
                    with alone(plan.workers.index(device), len(plan.workers)):
                        known[kind] = _rank(task, plan, device, fake, chains, kernels)
                result[device] = known[kind]
    return result


def _kind(plan: Plan, stages: Sequence[int], device: int) -> tuple[int, int]:
    """Return a key that devices of a rank of the plan share if they need the same memory: shard and replica.

    Only the first replica reports gradient norms, and replicas that divide state own different layers.
    """
    grid = plan.stages[stages[0]].grid
    replica, divides = grid.replica_of(device), any(plan.stages[s].grid.shard != "none" for s in stages)
    return grid.shard_of(device), replica if divides else min(replica, int(plan.training.agrees))


def _rank(
    task: Task, plan: Plan, number: int, fake: FakeTarget, chains: Chains, kernels: Kernels | None
) -> tuple[MemorySample, ...]:
    """Return the peaks of one device in every step."""
    meter = Meter(number, kernels=kernels, place=fake.device)
    samples = plan.measured(0).microbatch_size
    like = sample(task, plan.training.microbatch_size)

    def source(wanted: Wanted) -> Source:
        chain = chains.of(wanted.samples, fake)
        if not wanted.group:
            return Source.of(chain)
        ranks = len(wanted.group)
        divided = divided_without_peers(task, chains, fake, chain, wanted.samples, ranks, wanted.sequences)
        return rank_without_peers(plan, wanted, divided)

    chain = chains.of(samples, fake)
    check_model(plan, task, chain, samples)
    rank = EngineRank(
        task,
        plan,
        StageSources(plan, Source.of(chain), samples, source),
        number,
        device=fake.device,
        groups=Groups.of(plan),
        host=HostTensors.dry(),
        peers=False,
    )
    inputs, targets = (
        [fake.fake(t) for t in tensors]
        for tensors in (chain.flatten(like[0]), chain.flatten_targets(like[1]))
    )
    microbatches, record = plan.training.microbatches, Record(meter)
    for stage in rank.stages:
        record.follow(stage)
    meter.tag(rank.held, Category.PARAMETERS)
    with _uncollected(), always_stepping(), counted_states(meter), meter, shards_counted(meter.resized):
        for step in range(STEPS):
            record.begin_step(step)
            rank.step(
                lambda: local_batches(
                    plan, rank, [inputs] * microbatches, [targets] * microbatches, fake.device
                ),
                before_update=lambda: record.begin("update", Category.OPTIMIZER),
            )
        record.end()
    return tuple(record.samples)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Collect no garbage in the body: cycles live until a collection, which no plan can rely on."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
