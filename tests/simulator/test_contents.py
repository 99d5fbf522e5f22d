"""The contents of a full device, layer by layer."""

from __future__ import annotations

from random import Random

import pytest

from pipefit.schema.decisions import Decision, State, StateKind, What
from pipefit.schema.devices import parse_place
from pipefit.simulator import Simulation, simulate
from pipefit.simulator.simulation import all_contents, contents
from support.pipelines import equal_profile, make_cluster, make_plan, random_profile
from support.random_decisions import compacted


def level_before(simulation: Simulation, device: int, step: int, action: str) -> tuple[int, int, int, int]:
    """Return parameters, gradients, optimizer state and activations before an action, from the actions before
    it.
    """
    level = list(simulation._at_rest(device)[:4])
    program = simulation.program.actions[device]
    for at, position, (_, _, _, after) in simulation._changes(device, step + 1):
        if at == step and position >= list(map(str, program)).index(action):
            break
        level = [
            level[0] + after[5], level[1] + after[0], level[2] + after[1], level[3] + after[2],
        ]  # fmt: skip
    return level[0], level[1], level[2], level[3]


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(12))
def test_layers_add_up_to_what_the_device_holds(seed: int) -> None:
    """Summed over all layers, each category equals the simulator's when the peak action begins."""
    rng = Random(seed)
    schedule = rng.choice(["1f1b", "gpipe"])
    plan = make_plan(random_profile(7, seed), (3, 2, 2), schedule=schedule)
    plan = compacted(plan, rng) if seed % 2 else plan
    simulation = Simulation(plan)
    moved = {decision.stage for decision in plan.decisions if isinstance(decision.subject, State)}
    for device, traced in enumerate(simulation.trace().devices):
        found = contents(plan, device)
        assert found is not None and found.peak == traced.peak
        parameters, gradients, optimizer, activations = level_before(
            simulation, device, found.peak.step, found.peak.action
        )
        assert sum(row.activation_bytes for row in found.layers) == activations
        for row in found.layers:
            mine = [one for one in found.tensors if one.layer == row.layer]
            assert sum(one.nbytes * one.microbatches for one in mine) == row.activation_bytes
        if device not in moved:
            assert sum(row.parameter_bytes + row.copy_bytes for row in found.layers) == parameters
            assert sum(row.gradient_bytes for row in found.layers) == gradients
            assert sum(row.optimizer_bytes for row in found.layers) == optimizer


def test_equal_layers_hold_equal_bytes_of_as_many_microbatches_as_are_in_flight() -> None:
    """Stage s of P under 1F1B has P - s microbatches in flight, each with every layer's saved tensors."""
    plan = make_plan(equal_profile(8, kept_bytes=96, saves_input=False), (2, 2, 2, 2))
    for device in range(3):
        found = contents(plan, device)
        assert found is not None and found.peak.action.startswith(f"{device}B")
        assert [
            (row.activation_bytes, row.microbatches) for row in found.layers if row.layer is not None
        ] == [(96 * (4 - device), 4 - device)] * 2


def test_a_tensor_is_told_by_what_keeps_it() -> None:
    """A tensor is listed with its operation, shape and microbatches in flight; a value that no layer saves is
    handed on.
    """
    plan = make_plan(equal_profile(4, kept_bytes=96, saves_input=False), (2, 2))
    found = contents(plan, 0)
    assert found is not None
    saved = plan.measurement.costs[0].saved[0]
    kept = [one for one in found.tensors if one.layer == 0 and one.nbytes == 96]
    assert [(one.operation, one.shape, one.microbatches) for one in kept] == [
        (saved.operation, saved.shape, 2)
    ]


def test_state_that_moves_counts_as_none() -> None:
    """A layer with offloaded optimizer state has none of it in the table; the other layers have theirs."""
    state = Decision(
        stage=0,
        subject=State(start=0, stop=1, kind="optimizer"),
        what=What.OFFLOAD,
        place=parse_place("host"),
    )
    found = contents(make_plan(equal_profile(4), (2, 2), decisions=(state,)), 0)
    assert found is not None
    first, second = (row for row in found.layers if row.layer is not None)
    assert first.optimizer_bytes == 0 < second.optimizer_bytes


def test_a_device_without_a_stage_has_no_contents() -> None:
    """A device without a stage has an empty table."""
    plan = make_plan(equal_profile(4), (2, 2), cluster=make_cluster(3))
    assert contents(plan, 1) is not None
    assert contents(plan, 2) is None
    assert all_contents(plan, simulate(plan)) == [contents(plan, device) for device in range(3)]


@pytest.mark.parametrize("kind", ["gradients", "parameters", "versions"])
def test_state_that_no_first_step_moves_is_known(kind: StateKind) -> None:
    """Three stages under PipeDream, a microbatch a step: the first stage has no gradients or older weights in
    its first step.
    """
    away = Decision(
        stage=0,
        subject=State(start=1, stop=2, kind=kind),
        what=What.OFFLOAD,
        place=parse_place("host"),
        behind=0,
    )
    plan = make_plan(equal_profile(6), (2, 2, 2), microbatches=1, schedule="pipedream", decisions=(away,))
    found = contents(plan, 0)
    assert found is not None
    assert found.peak == simulate(plan).devices[0].peak
