"""Updates on the host in parallel with the device: their duration, and no interference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from pipefit.capture import Task
from pipefit.runtime import Trainer
from pipefit.schema.actions import Action, Kind
from pipefit.schema.decisions import Decision, State, What
from pipefit.schema.devices import Host, parse_place
from pipefit.schema.plan import Plan
from pipefit.schema.trace import Trace
from pipefit.simulator import simulate
from pipefit.timing import HOST_BANDWIDTH_REACHED
from support.small_tasks import batch_of, plan_of, task_of


def task() -> Task:
    """Return three layers under AdamW."""
    return task_of(lambda: [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)], optimizer=torch.optim.AdamW)


def updated(start: int, stop: int) -> Decision:
    """Return the plan with layers of the first stage updated on the host."""
    subject = State(start=start, stop=stop, kind="optimizer")
    return Decision(stage=0, subject=subject, what=What.UPDATE, place=parse_place("host"))


def slow_host(seconds: float) -> Plan:
    """Return all layers on one device, with a host that takes this long to update the last two."""
    plan = plan_of(task(), [3], devices=2)
    costs = plan.measurement.costs[1:3]
    moved = sum(2 * (cost.trained_bytes + cost.state_bytes) + cost.gradient_bytes for cost in costs)
    return with_host(replace(plan, decisions=(updated(1, 3),)), moved / seconds / HOST_BANDWIDTH_REACHED)


def with_host(plan: Plan, memory_bandwidth: float) -> Plan:
    """Return the plan on a host with this memory bandwidth."""
    host = Host(memory_bytes=1 << 30, memory_bandwidth=memory_bandwidth)
    return replace(plan, cluster=replace(plan.cluster, hosts=(host,)))


def update_seconds(trace: Trace) -> float:
    """Return the seconds from the start of the only host update to the end of its join."""
    begin, end = (e for e in trace.devices[0].events if "STEP" in e.action and "@" in e.action)
    return end.end_seconds - begin.start_seconds


def test_an_update_on_the_host_takes_the_time_of_its_memory() -> None:
    """A host update of an emulated device takes at least the simulator's time to read and write its memory."""
    plan = slow_host(0.3)
    trainer = Trainer(task(), plan)
    trainer.step(batch_of(task(), plan))
    assert update_seconds(trainer.trace) > 0.3
    (told,) = [e for e in simulate(plan).devices[0].events if e.step == 1 and e.action == "0STEP[1:3]@host"]
    assert told.end_seconds - told.start_seconds == pytest.approx(0.3)


def test_devices_that_take_turns_do_not_wait_for_the_host() -> None:
    """Devices that take turns in one process do not wait for the host's updates, nor for copies."""
    plan = with_host(replace(plan_of(task(), [2, 1]), decisions=(updated(0, 1),)), 1.0)
    trainer = Trainer(task(), plan)
    trainer.step(batch_of(task(), plan))
    assert update_seconds(trainer.trace) < 60


def test_a_failed_step_does_not_wait_for_the_host() -> None:
    """A failed step ends at once, without waiting for an hour-long host update."""
    plan = slow_host(3600.0)
    trainer = Trainer(task(), plan)
    runner = trainer.runners[0]
    execute = runner._execute

    def failing(action: Action) -> None:
        if action.kind is Kind.STEP and action.wait:
            raise RuntimeError("it failed")
        execute(action)

    runner._execute = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="it failed"):
        trainer.step(batch_of(task(), plan))


class Growing(dict[Any, Any]):
    """A state dictionary that grows during each iteration."""

    def items(self) -> Any:
        return self._growing()

    def _growing(self) -> Iterator[tuple[Any, Any]]:
        for item in super().items():
            self[torch.zeros(1)] = {}
            yield item


def test_what_a_host_adds_to_the_state_meanwhile_is_in_nobodys_way() -> None:
    """The first host update of a layer adds state while the device looks up its layers' state, without
    interference.
    """
    plan = replace(plan_of(task(), [3], devices=2), decisions=(updated(1, 3),))
    trainer = Trainer(task(), plan)
    trainer.step(batch_of(task(), plan))
    (stage,) = trainer.stages
    assert stage.optimizer is not None
    found = stage.optimizer_state()
    assert len(found) == 3 * len(list(stage.layers[0].module.parameters()))
    stage.optimizer.state = Growing(stage.optimizer.state)  # type: ignore[assignment]
    assert [*map(id, stage.optimizer_state())] == [*map(id, found)]
