"""State that planners keep at the host, and layers that they update there."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from pipefit.errors import UsageError
from pipefit.planner import Means, PlanOptions, Question, solved
from pipefit.planner.bounds import step_bound
from pipefit.planner.joint import joint
from pipefit.schema.decisions import Decision, State, What
from pipefit.schema.devices import Host, parse_place
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.simulator import Simulation
from support.synthetic_models import layer, measurement, profile, training, value
from support.tight_questions import Case, cluster, keeping_layer

HOST = parse_place("host")


def case(rng: Random, schedule: str, *, bandwidth: float | None = 1e3, budget: int = 1 << 30) -> Case:
    """Build layers of many parameters and few activations on two devices, and a host that updates at
    `bandwidth`.
    """
    layers = [keeping_layer(1, rng.randrange(1, 4), rng.randrange(10, 60), 1.0) for _ in range(5)]
    chain = profile(measurement(layers, layer((value(1), value(1)), (value(4),), seconds=0.5)))
    on = cluster([budget] * 2, host_rate=rng.choice((20.0, 100.0)), peer_rate=100.0)
    on = replace(on, hosts=(Host(memory_bytes=1 << 30, memory_bandwidth=bandwidth),))
    return Case(chain, on, training(schedule, rng.randrange(2, 5)))


def question(asked: Case, **means: object) -> Question:
    return Question(
        profile=asked.profile,
        cluster=asked.cluster,
        training=asked.training,
        options=PlanOptions(allow_infeasible=True, means=Means(**means), effort=0.2),
    )


def written(rng: Random, asked: Case) -> Plan:
    """Write a random plan: for each layer some state at the host, or its update."""
    cut = rng.randrange(1, 5)
    stages = tuple(Stage(start=a, stop=b, grid=Grid.of(n)) for n, (a, b) in enumerate(pairwise((0, cut, 5))))
    found = list[Decision]()
    for number, stage in enumerate(stages):
        for n in range(stage.start, stage.stop):
            state = State(start=n, stop=n + 1, kind="optimizer")
            match rng.choice(("keep", "update", "optimizer", "gradients", "parameters")):
                case "update":
                    found.append(Decision(stage=number, subject=state, what=What.UPDATE, place=HOST))
                case "optimizer" | "gradients" | "parameters" as kind:
                    moved = State(start=n, stop=n + 1, kind=kind)
                    found.append(
                        Decision(stage=number, subject=moved, what=What.OFFLOAD, place=HOST, ahead=1)
                    )
    return Plan(
        profile=asked.profile,
        cluster=asked.cluster,
        training=asked.training,
        stages=stages,
        decisions=tuple(found),
    )


@pytest.mark.sample(12)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "pipedream", "pipedream-2bw"])
@pytest.mark.parametrize("seed", range(12))
def test_the_bound_holds_for_plans_that_move_state_and_update_elsewhere(seed: int, schedule: str) -> None:
    """The bound holds on devices with exactly the memory of a random plan by hand."""
    rng = Random(seed)
    asked = case(rng, schedule, bandwidth=rng.choice((50.0, 1e3)))
    try:
        simulation = Simulation(written(rng, asked))
        peak = max(simulation.peak_bytes)
    except UsageError:  # unsupported by this schedule
        return
    rates = [link.bytes_per_second for link in asked.cluster.links if link.members[1].number == 0]
    on = cluster([peak] * 2, host_rate=rates[0], peer_rate=100.0)
    tight = asked._replace(cluster=replace(on, hosts=asked.cluster.hosts))
    assert step_bound(question(tight)) <= simulation.step_seconds[-1] * (1 + 1e-9)


def needed(asked: Case, part: float) -> Case:
    """Build the case on devices with a fraction of the memory of the leanest plan without techniques."""
    lean = solved(question(asked, recompute="never", host=False, peers=False), joint, name="joint").prediction
    assert lean
    budget = round(max(lean.peak_bytes) * part)
    devices = tuple(replace(device, memory_bytes=budget) for device in asked.cluster.devices)
    return asked._replace(cluster=replace(asked.cluster, devices=devices))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("schedule", "part"), [("1f1b", 0.75), ("pipedream-2bw", 0.85)])
def test_a_fast_host_updates_what_a_slow_link_would_have_to_carry(schedule: str, part: float) -> None:
    """A fast host updates layers and makes steps shorter than a slow one; all plans are within the caps."""
    asked = needed(case(Random(0), schedule), part)
    without = asked._replace(cluster=replace(asked.cluster, hosts=(Host(memory_bytes=1 << 30),)))
    ours, theirs = (solved(question(one), joint, name="joint") for one in (asked, without))
    assert ours.prediction and theirs.prediction
    assert max(ours.prediction.peak_bytes) <= asked.cluster.budgets[0]
    assert any(decision.what is What.UPDATE for decision in ours.decisions)
    assert ours.prediction.step_seconds < theirs.prediction.step_seconds


def test_gradients_and_parameters_move_where_nothing_else_is_enough() -> None:
    """Gradients and parameters are offloaded only if needed and allowed."""
    layers = [keeping_layer(1, 2, 40, 1.0) for _ in range(12)]
    chain = profile(measurement(layers, layer((value(1), value(1)), (value(4),), seconds=0.5)))
    asked = needed(case(Random(1), "1f1b")._replace(profile=chain), 0.5)
    budget = asked.cluster.budgets[0]
    free, kept = (solved(question(asked, spill=spill), joint, name="joint") for spill in (True, False))
    assert free.prediction and kept.prediction
    moved = {
        d.subject.kind for d in free.decisions if isinstance(d.subject, State) and d.what is What.OFFLOAD
    }
    assert moved & {"gradients", "parameters"}
    assert max(free.prediction.peak_bytes) <= budget < max(kept.prediction.peak_bytes)
