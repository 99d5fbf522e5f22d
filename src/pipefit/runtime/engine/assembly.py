"""Assembles the runner of a device from a plan and a chain, with the layers of its stages on the device."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace

import torch
from torch import nn

from pipefit.capture import Shared, Task, is_faking
from pipefit.fake_cuda.target import is_fake
from pipefit.measure import MemoryMeter, Stopwatch
from pipefit.memory import Layers, ReplicaShare, StageRest, StageStorages, StateMoves, state_moves
from pipefit.runtime.comm.agreement import Agreement, LossScale
from pipefit.runtime.engine.in_flight import move
from pipefit.runtime.engine.replicas import Source, Specialized, StageSources
from pipefit.runtime.engine.runner import DeviceRunner
from pipefit.runtime.engine.stage import Site, StageRunner
from pipefit.runtime.offload.moving import Mover
from pipefit.runtime.offload.states import StateMover
from pipefit.runtime.optim.updates import check_elementwise, own_parameters
from pipefit.schema.grids import Stage
from pipefit.schema.plan import Plan
from pipefit.timing import host_update_seconds


def _owned(source: Source, place: Stage, share: ReplicaShare | None) -> set[int] | None:
    """Return the ids of the parameters of layers that a ZeRO rank owns; None if nothing is sharded."""
    if share is None:
        return None
    of_layers = enumerate(own_parameters(source.chain.layers[place.start : place.stop]), start=place.start)
    return {id(parameter) for layer, own in of_layers if share.owns(layer) for parameter in own}


def _name_of(source: Source, shared: Shared) -> str:
    """Return a shared parameter's name in the model."""
    layer, local = shared.places[0]
    return source.chain.layers[layer].parameter_names[local]


def tells_norms(plan: Plan, stage: int, device: int) -> bool:
    """Return whether a device reports gradient norms of a stage: the first replica does, or all shard
    owners.
    """
    grid = plan.stages[stage].grid
    return grid.shard != "none" or not grid.replica_of(device)


def agreement_of(
    task: Task,
    plan: Plan,
    sources: StageSources,
    device: int,
    share: Callable[[int, int], ReplicaShare | None],
    absent: int = 0,
    *,
    splits: bool = False,
) -> Agreement:
    """Return a device's part of the agreement before an update.

    Each trained parameter, or tensor shard of it, is reported once: by the first device that has it, or by
    the replica that owns its layer and has its reduced gradient. `share` returns the ZeRO share of a stage on
    a device; `absent` is the number of trained parameters in layers that a dry run leaves out. With `splits`,
    replicas that divide gradients have a part of each, and all report.
    """
    grids = [stage.grid for stage in plan.stages]
    parts = [grid.data if splits and grid.divides_gradients else 1 for grid in grids]
    names, trainable = dict[str, None](), dict[int, nn.Parameter]()
    reported: dict[str, tuple[nn.Parameter, int]] = {}
    for stage in (stages := plan.stages_of(device)):
        source, place = sources.of(stage, device), plan.stages[stage]
        own = _owned(source, place, share(stage, device))
        elsewhere = {
            _name_of(source, result)
            for result, holders in zip(source.shared, plan.holders, strict=True)
            if holders and holders[0] not in stages
        }
        for number, layer in enumerate(source.chain.layers):
            for name, parameter in layer.named_parameters:
                if not parameter.requires_grad:
                    continue
                names[name] = None
                if place.start <= number < place.stop and (own is None or id(parameter) in own):
                    trainable[id(parameter)] = parameter
                    shard = place.grid.shard_of(device)
                    is_divided = source.shards is not None and source.shards.is_divided(name)
                    if (
                        name not in elsewhere
                        and tells_norms(plan, stage, device)
                        and (is_divided or not shard)
                    ):
                        part = place.grid.replica_of(device) if parts[stage] > 1 else 0
                        reported[name] = parameter, part * place.grid.tensor + shard
    return Agreement(
        list(names),
        reported,
        list(trainable.values()),
        clip_norm=plan.training.clip_norm,
        scale=LossScale() if plan.training.scales_loss else None,
        master_weights=task.master_weights,
        double=plan.training.precision == "float64",
        absent=absent,
        shards=max(grid.tensor * count for grid, count in zip(grids, parts, strict=True)),
    )


def _state_mover(
    moves: StateMoves, plan: Plan, storages: StageStorages, share: ReplicaShare | None, mover: Mover
) -> StateMover | None:
    """Return the mover of a stage's offloaded state, or of a replica's `share` of it.

    Return None if no state is offloaded.
    """
    if not moves.homes:
        return None
    rest = StageRest(storages, plan.training.microbatches, share=share)
    host = plan.cluster.devices[mover.number].host
    paced = plan.cluster.backend == "emulated" and mover.copier.beside
    return StateMover(moves, rest, mover, host, _update_seconds(moves, plan, rest, host) if paced else {})


def _update_seconds(moves: StateMoves, plan: Plan, rest: StageRest, near: int) -> dict[Layers, float]:
    """Return seconds of updates on hosts by their layers, if the host's bandwidth is known.

    `near` is the device's host.
    """
    result = {}
    for (_, layers), place in moves.updates.items():
        number = place.members[0].number
        host = plan.cluster.hosts[near if number is None else number]
        if host.memory_bandwidth is not None:
            owned = (n for n in range(*layers) if rest.share is None or rest.share.owns(n))
            start, costs = rest.storages.start, rest.storages.costs
            result[layers] = sum(host_update_seconds(costs[n - start], host) for n in owned)
    return result


def assemble(site: Site, number: int, *, device: torch.device, meter: MemoryMeter | None) -> DeviceRunner:
    """Return the runner of device `number` of the plan, with its layers moved to `device`."""
    plan, stages = site.plan, site.plan.stages_of(number)
    sources = {stage: site.sources.of(stage, number) for stage in stages}
    own = {stage: site.sources.own_shared(stage, number) for stage in stages}
    agreement = None
    if plan.training.agrees:
        agreement = agreement_of(site.task, plan, site.sources, number, site.share, site.absent)
    described = {stage: StageStorages.of(plan, stage) for stage in stages}
    mover = Mover(
        number,
        plan.cluster,
        described,
        borrowed=site.lending.borrowed_by(number),
        copier=site.lending.copier(device),
        resized=meter.resized if meter is not None else lambda storage: None,
    )
    moves = state_moves(
        site.program,
        number,
        {n: (stage_storages.start, stage_storages.stop) for n, stage_storages in described.items()},
    )
    runners = {}
    for stage, storages in described.items():
        usual, share = usual_layers(plan, sources[stage], stage), site.share(stage, number)
        put_on_device(usual, site.task, device, _absent(usual, storages.start, share))
        if storages.stop == len(plan.profile.layers) and not is_faking():
            _put_loss(site.task, device)
        runners[stage] = StageRunner(
            site,
            usual,
            storages,
            device=device,
            replica=plan.stages[stage].grid.replica_of(number),
            shared=own[stage],
            agreement=agreement,
            share=share,
            states=_state_mover(moves.of_stage(stage), plan, storages, share, mover),
        )
    stopwatch = Stopwatch(device, site.clock) if device.type == "cuda" else None
    return DeviceRunner(site, runners, number=number, mover=mover, meter=meter, stopwatch=stopwatch)


def usual_layers(plan: Plan, source: Source, stage: int) -> Specialized:
    """Return the layers of a stage, and the loss, for microbatches of the plan's size."""
    place, chain = plan.stages[stage], source.chain.measured(plan.measured(stage))
    loss = replace(chain, layers=()).loss  # without layers, so that those of other stages can be freed
    return Specialized(chain.layers[place.start : place.stop], loss, source.shards)


def _put_loss(task: Task, device: torch.device) -> None:
    """Move the tensors of a loss that is a module, such as class weights, to the device of the last stage."""
    if isinstance(task.loss, nn.Module):
        move([task.loss], device)


def _absent(usual: Specialized, start: int, share: ReplicaShare | None) -> frozenset[int]:
    """Return ids of a stage's parameters that the device does not keep between steps.

    The stage begins at layer `start`.
    """
    if share is None or not share.divides_parameters:
        return frozenset()
    of_layers = enumerate(own_parameters(usual.layers), start=start)
    return frozenset(id(parameter) for layer, own in of_layers if not share.owns(layer) for parameter in own)


def put_on_device(usual: Specialized, task: Task, device: torch.device, absent: Container[int] = ()) -> None:
    """Move the layers of a stage to `device`; `absent` parameters get none there.

    With tensor shards, also check that the task's optimizer works elementwise on them.
    """
    layers, _, shards = usual
    criterion = [] if shards is None or shards.criterion is None else [shards.criterion]
    move([*(layer.module for layer in layers), *criterion], device, absent=absent)
    if shards is not None and not any(is_fake(p) for layer in layers for p in layer.module.parameters()):
        check_elementwise(task, layers, shards.own, device)
