"""Putting a device together: from a plan and a chain to the reader of one stage's program, on a device with a meter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from pipefit.capture.chain import Chain
from pipefit.capture.shared import Shared, give_own_copies
from pipefit.capture.task import Task
from pipefit.cluster import Cluster
from pipefit.cost.memory import StageMemory
from pipefit.errors import FileError, UsageError
from pipefit.meter import MemoryMeter
from pipefit.meter.cpu import Meter
from pipefit.meter.cuda import CudaMeter
from pipefit.plans import Plan
from pipefit.program import Program
from pipefit.runtime.agreement import Agreement, LossScale
from pipefit.runtime.reader import DeviceReader
from pipefit.runtime.stage import StageRunner
from pipefit.runtime.transport import Transport


def check_model(plan: Plan, chain: Chain) -> None:
    """The plan was made for this model.

    Raises:
        FileError: its fingerprint is another one's; says what differs.
    """
    if plan.profile.fingerprint == chain.fingerprint:
        return
    ours, theirs = [layer.name for layer in chain.layers], list(plan.profile.layers)
    what = f"{len(theirs)} layers, not {len(ours)}" if len(ours) != len(theirs) else "other layers or sizes"
    raise FileError(
        f"the plan was made for another model: {plan.profile.model} with {what} "
        f"(fingerprint {plan.profile.fingerprint}, this model's is {chain.fingerprint}); "
        "profile and plan this model again"
    )


def own_shared(plan: Plan, chain: Chain, stage: int, shared: Sequence[Shared]) -> dict[int, nn.Parameter]:
    """This stage's copy of every shared parameter its layers use; the first stage that has one keeps the original."""
    place, modules = plan.stages[stage], [layer.module for layer in chain.layers]
    own = {}
    for number, (found, holders) in enumerate(zip(shared, plan.holders, strict=True)):
        if stage in holders:
            users = [user for user in found.users if place.start <= user < place.stop]
            own[number] = found.parameter if stage == holders[0] else give_own_copies(modules, found, users)
    return own


def _agreement(plan: Plan, chain: Chain, stage: int, shared: Sequence[Shared]) -> Agreement:
    """This stage's part of what all settle before an update; a shared parameter is reported by its first stage."""
    first = {place: found.places[0] for found in shared for place in found.places}
    foreign = {
        found.places[0] for found, holders in zip(shared, plan.holders, strict=True) if holders and stage != holders[0]
    }
    place = plan.stages[stage]
    names: dict[str, None] = {}
    own: dict[str, nn.Parameter] = {}
    trainable: dict[int, nn.Parameter] = {}
    for number, layer in enumerate(chain.layers):
        for local, parameter in layer.module.named_parameters(remove_duplicate=False):
            if not parameter.requires_grad:
                continue
            where = first.get((number, local), (number, local))
            name = chain.layers[where[0]].originals.get(where[1], where[1])
            names[name] = None
            if place.start <= number < place.stop:
                trainable[id(parameter)] = parameter
                if where not in foreign:
                    own[name] = parameter
    return Agreement(
        list(names),
        own,
        list(trainable.values()),
        clip_norm=plan.training.clip_norm,
        scale=LossScale() if plan.training.scales_loss else None,
    )


def assemble(
    task: Task,
    chain: Chain,
    plan: Plan,
    program: Program,
    stage: int,
    *,
    shared: Sequence[Shared],
    device: torch.device,
    transport: Transport,
    meter: MemoryMeter | None,
    clock: Callable[[], float],
    seed: int,
    on_action: Callable[[int], None] | None = None,
) -> DeviceReader:
    """The reader of `stage`'s program, its layers moved to `device`."""
    place, costs = plan.stages[stage], plan.measurement
    layers = chain.layers[place.start : place.stop]
    own = own_shared(plan, chain, stage, shared)
    for layer in layers:
        layer.module.to(device)
    memory = StageMemory(costs, place.start, place.stop)
    runner = StageRunner(
        task,
        layers,
        loss=replace(chain, layers=()).loss,  # the loss keeps no other stage's layers alive
        shared=own,
        start=place.start,
        last=memory.last,
        inputs=memory.inputs,
        outputs=memory.outputs,
        targets=memory.targets,
        microbatches=plan.training.microbatches,
        agreement=_agreement(plan, chain, stage, shared) if plan.training.agrees else None,
        copies_inputs=costs.costs[place.start].mutates_inputs,
        device=device,
        seed=seed,
    )
    return DeviceReader(
        plan, program, stage, runner, transport=transport, meter=meter, clock=clock, on_action=on_action
    )


def local_device(cluster: Cluster, number: int) -> torch.device:
    """Where this machine runs one of the cluster's devices: on its GPU of that number, or on the CPU.

    Raises:
        UsageError: it has no such GPU.
    """
    if cluster.backend != "cuda":
        return torch.device("cpu")
    if number >= torch.cuda.device_count():
        raise UsageError(
            f"{cluster.name} needs GPU {number} of this machine, which shows {torch.cuda.device_count()}: choose a "
            "cluster of fewer devices, or emulated ones"
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def meter_of(cluster: Cluster, number: int, device: torch.device) -> MemoryMeter | None:
    """Emulated devices are metered and capped, GPUs read their allocator, plain CPU workers run free."""
    if device.type == "cuda":
        return CudaMeter(device)
    if cluster.backend == "cpu":
        return None
    return Meter(number, cap_bytes=cluster.devices[number].memory_bytes, threads=torch.get_num_threads())
