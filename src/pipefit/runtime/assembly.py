"""Putting a device together: from a plan and a chain to the reader of one stage's program."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pipefit.capture.chain import Chain
from pipefit.capture.task import Task
from pipefit.cost.memory import StageMemory
from pipefit.errors import FileError
from pipefit.plan import Plan
from pipefit.program import Program
from pipefit.runtime.reader import DeviceReader, MemoryMeter
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


def assemble(
    task: Task,
    chain: Chain,
    plan: Plan,
    program: Program,
    stage: int,
    *,
    device: torch.device,
    transport: Transport,
    meter: MemoryMeter | None,
    clock: Callable[[], float],
    seed: int,
    on_action: Callable[[int], None] | None = None,
) -> DeviceReader:
    """The reader of `stage`'s program, its layers moved to `device` in training mode."""
    place, costs = plan.stages[stage], plan.measurement
    layers = chain.layers[place.start : place.stop]
    for layer in layers:
        layer.module.to(device).train()
    memory = StageMemory(costs, place.start, place.stop)
    runner = StageRunner(
        task,
        layers,
        start=place.start,
        last=memory.last,
        inputs=memory.inputs,
        outputs=memory.outputs,
        targets=memory.targets,
        microbatches=plan.training.microbatches,
        device=device,
        seed=seed,
    )
    return DeviceReader(
        plan, program, stage, runner, transport=transport, meter=meter, clock=clock, on_action=on_action
    )
