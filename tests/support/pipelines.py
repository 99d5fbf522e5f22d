"""Synthetic pipelines for tests and benchmarks: layers, clusters, plans and programs in a few words."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from random import Random

from pipefit.lowering import lower
from pipefit.lowering.passes.recomputation import Recompute, recompute_decisions
from pipefit.schema.actions import Action, Kind, Subject
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision
from pipefit.schema.devices import Device, DeviceKind, Host, Link, MemberKind, parse_place
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.layer_costs import GradientOrigin, LayerCost, Origin, Span, Value
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.program import Program
from pipefit.schema.training import Training
from pipefit.simulator import Simulation
from support.synthetic_models import hostile, layer, measurement, profile, value, work

KIND = DeviceKind(name="synthetic", flops={"float32": 1e12}, memory_bandwidth=1e11, operation_seconds=0.0)


def make_layer(
    *,
    input_bytes: int = 8,
    output_bytes: int = 8,
    kept_bytes: int = 16,
    parameter_bytes: int = 32,
    saves_input: bool = True,
    forward_seconds: float | None = 1.0,
    backward_seconds: float | None = 2.0,
    update_seconds: float | None = 0.0,
    scratch_bytes: int = 4,
) -> LayerCost:
    """Build a layer of one input and one output. It saves its own storage as tensor 0, and its input as
    tensor 1.

    Gradients take as much as the parameters, optimizer state twice that. Every phase uses `scratch_bytes` in
    addition.
    """
    seconds = forward_seconds, backward_seconds, update_seconds
    return layer(
        (value(input_bytes),),
        (value(output_bytes),),
        storages=(output_bytes, kept_bytes),
        saved=(Origin(kind="own", index=1), Origin(kind="input"))[: 1 + saves_input],
        parameter_bytes=parameter_bytes,
        scratch_bytes=scratch_bytes,
        checkpoint_peak_bytes=output_bytes + scratch_bytes,
        first=(Span(peak_bytes=input_bytes + parameter_bytes + scratch_bytes),),
        later=(Span(peak_bytes=input_bytes + parameter_bytes + 2 * scratch_bytes),),
        state_bytes=2 * parameter_bytes,
        update=(scratch_bytes, scratch_bytes),
        works=tuple(work(taken, flops=1000, moved_bytes=1000) for taken in seconds),
    )


def make_loss(outputs: Sequence[Value], *, target_bytes: int = 4) -> LayerCost:
    """Build a loss over a model's outputs and one target; it takes zero time and saves four bytes."""
    return layer(
        (*outputs, value(target_bytes, requires_grad=False)),
        (value(4),),
        storages=(4, 4),
        saved=(Origin(kind="own", index=1),),
        parameters=(),
        checkpoint_peak_bytes=4,
        input_gradients=(
            *(GradientOrigin(kind="own", index=k) for k in range(len(outputs))),
            GradientOrigin(kind="none"),
        ),
        gradient_storages=tuple(output.nbytes for output in outputs),
        seconds=0.0,
    )


def chain_profile(
    costs: Sequence[LayerCost], *, microbatch_size: int = 1, target_bytes: int = 4
) -> ModelProfile:
    """Return the profile of these consecutive layers; equal ones share a kind."""
    loss = make_loss(costs[-1].outputs, target_bytes=target_bytes)
    return profile(measurement(costs, loss, microbatch_size=microbatch_size))


def equal_profile(layers: int, **layer: object) -> ModelProfile:
    """Return the profile of equal layers; keywords go to `make_layer`."""
    return chain_profile([make_layer(**layer)] * layers)  # type: ignore[arg-type]


def random_profile(layers: int, seed: int = 0, *, shared: int | None = None) -> ModelProfile:
    """Draw layers that alias, pass through, save and release values, with `shared` parameters, or any
    number.
    """
    return profile(hostile(Random(seed), layers, shared=shared))


def make_cluster(
    devices: int,
    *links: Link,
    bytes_per_second: float = 1e30,
    latency_seconds: float = 0.0,
    memory_bytes: int = 1 << 40,
    hosts: int = 1,
) -> Cluster:
    """Build equal devices on one host. Without `links`, a switch joins them all, by default in zero time."""
    members = (
        *(f"device{number}" for number in range(devices)),
        *(f"host{number}" for number in range(hosts)),
    )
    switch = Link.between(*members, bytes_per_second=bytes_per_second, latency_seconds=latency_seconds)
    return Cluster(
        name="synthetic",
        backend="emulated",
        devices=tuple(Device(kind=KIND, memory_bytes=memory_bytes) for _ in range(devices)),
        hosts=tuple(Host(memory_bytes=1 << 40) for _ in range(hosts)),
        links=links or (switch,),
    )


def make_plan(
    profile: ModelProfile,
    split: Sequence[int],
    *,
    microbatches: int = 4,
    schedule: str = "1f1b",
    cluster: Cluster | None = None,
    devices: int | None = None,
    recompute: Recompute = "never",
    decisions: tuple[Decision, ...] = (),
) -> Plan:
    """Build a plan: stage s holds `split[s]` layers on device s, or s modulo `devices`. Whole stages are
    recomputed according to `recompute`, in addition to `decisions`.
    """
    starts, devices = [sum(split[:number]) for number in range(len(split) + 1)], devices or len(split)
    stages = tuple(
        Stage(start=start, stop=stop, grid=Grid.of(number % devices))
        for number, (start, stop) in enumerate(itertools.pairwise(starts))
    )
    size = profile.measurements[0].microbatch_size
    return Plan(
        profile=profile,
        cluster=cluster or make_cluster(devices),
        training=Training(batch_size=size * microbatches, microbatches=microbatches, schedule=schedule),
        stages=stages,
        decisions=(
            *recompute_decisions(stages, profile.edges, recompute, schedule, microbatches),
            *decisions,
        ),
    )


def offload_all(
    plan: Plan, *, place: str = "host", tensor: int = 0, stages: Sequence[int] | None = None
) -> Program:
    """Return the plan's program in segments of one layer, each of which offloads one saved tensor and reloads
    it in time.

    `stages` are the stages that do so, by default all.
    """
    program = lower(plan)
    moving = range(len(plan.stages)) if stages is None else stages
    return Program(
        placement=program.placement,
        microbatches=program.microbatches,
        actions=tuple(
            tuple(
                moved
                for action in actions
                for moved in (
                    _moved(action, plan.stages[action.stage], place, tensor)
                    if action.stage in moving
                    else [action]
                )
            )
            for actions in program.actions
        ),
    )


def lent(simulation: Simulation) -> list[tuple[int, ...]]:
    """Return the memory lent between devices: lender, borrower, slots and bytes of a slot."""
    return [
        (arena.lender.number or 0, *arena[1:])
        for arena in simulation.arenas
        if arena.lender.kind is MemberKind.DEVICE
    ]


def _moved(action: Action, stage: Stage, place: str, tensor: int) -> Iterator[Action]:
    layers = range(stage.start, stage.stop)
    moves = {
        layer: Action(
            Kind.OFFLOAD,
            action.stage,
            action.microbatch,
            subject=Subject(layer, tensor),
            place=parse_place(place),
        )
        for layer in layers
    }
    if action.kind is Kind.FORWARD:
        for layer in layers:
            yield action._replace(layers=(layer, layer + 1))
            yield moves[layer]
            if layer > stage.start:
                yield moves[layer - 1].join
        yield moves[stage.stop - 1].join
    elif action.kind is Kind.BACKWARD:
        back = {layer: move._replace(kind=Kind.RELOAD) for layer, move in moves.items()}
        yield back[stage.stop - 1]
        for layer in reversed(layers):
            if layer > stage.start:
                yield back[layer - 1]
            yield back[layer].join
            yield action._replace(layers=(layer, layer + 1))
    else:
        yield action
