"""The planner that may keep state at hosts: no plan by hand with state on hosts has a lower peak."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from pipefit.errors import UsageError
from pipefit.memory.arenas import shortage
from pipefit.planner import Means, PlanOptions, Question, plan
from pipefit.planner.hybrid import search
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, State, StateKind, What
from pipefit.schema.devices import Host, parse_place
from pipefit.schema.grids import Sharding
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training
from pipefit.simulator import Simulation
from support.microbatch_size_profiles import sized, written
from support.synthetic_models import AMPLE, keeping, plain
from support.synthetic_models import profile as profile_of
from support.tight_questions import cluster

HOST = parse_place("host")
HOW = Training(batch_size=12, microbatches=3)
UPDATED = (What.UPDATE, "optimizer")
STATE, GRADIENTS, PARAMETERS = ((What.OFFLOAD, kind) for kind in ("optimizer", "gradients", "parameters"))
BY_HAND: tuple[tuple[Sharding, tuple[tuple[What, StateKind], ...]], ...] = (
    ("parameters", ()),  # FSDP
    ("gradients", (UPDATED,)),  # ZeRO-Offload
    ("parameters", (UPDATED,)),
    ("parameters", (STATE, PARAMETERS)),  # ZeRO-Infinity
    ("none", (UPDATED,)),
    ("none", (STATE, PARAMETERS, GRADIENTS)),
)


def case(seed: int, *, host_bytes: int = 1 << 30) -> tuple[ModelProfile, Cluster]:
    rng = Random(seed)
    profile = sized(plain(rng, rng.randrange(2, 5), size=rng.choice((4, 30))), 4, 2, 1)
    on = cluster([AMPLE] * rng.choice((1, 2, 4)), host_rate=20.0, peer_rate=100.0)
    return profile, replace(on, hosts=(Host(memory_bytes=host_bytes, memory_bandwidth=1e3),))


def by_hand(profile: ModelProfile, on: Cluster) -> Iterator[Plan]:
    """Build even stages of one degree, on all devices, with their state at the host in every way, just in
    time or ahead.
    """
    layers, devices = len(profile.layers), len(on.devices)
    for data in (1, 2, 4):
        stages = min(layers, devices // data)
        edges = [layers * stop // stages for stop in range(stages + 1)] if stages else []
        for shard, moves in BY_HAND if stages else ():
            if (data > 1) is not (shard != "none"):
                continue
            made = written(profile, on, HOW, edges, [data] * stages, "never")
            if data > 1:
                grids = [replace(stage.grid, shard=shard, buckets=layers) for stage in made.stages]
                stages_of = tuple(
                    replace(stage, grid=grid) for stage, grid in zip(made.stages, grids, strict=True)
                )
                made = replace(made, stages=stages_of)
            for ahead in (0, 1):
                with suppress(UsageError):
                    yield replace(made, decisions=tuple(decided(made, moves, ahead)))


@pytest.mark.parametrize("seed", range(4))
def test_the_leanest_split_needs_no_exact_peaks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no second search would follow, the split is that of the leanest plan, and no program is read."""
    profile, on = case(seed)
    options = PlanOptions(data=1, tensor=1, recompute="always", allow_infeasible=True)
    question = Question(profile=profile, cluster=on, training=HOW, options=options)
    monkeypatch.setattr(search, "WORK", 0)
    leanest = search.leanest(question).split
    monkeypatch.setattr(search.Reader, "peaks", None)
    assert search.leanest_split(question) == leanest


def decided(plan: Plan, moves: tuple[tuple[What, StateKind], ...], ahead: int) -> Iterator[Decision]:
    for number, stage in enumerate(plan.stages):
        for layer in range(stage.start, stage.stop):
            for what, kind in moves:
                state = State(start=layer, stop=layer + 1, kind=kind)
                yield Decision(stage=number, subject=state, what=what, place=HOST, ahead=ahead)


def peaks(plans: Iterator[Plan]) -> list[int]:
    """Return the peaks of the plans that can run."""
    found = []
    for made in plans:
        with suppress(UsageError):
            found.append(max(Simulation(made).peak_bytes))
    return found


def moved(made: Plan) -> Iterator[Plan]:
    """Return the plan with each cut moved by one layer, and the same techniques on every layer."""
    moves = tuple(dict.fromkeys((one.what, one.subject.kind) for one in made.decisions))
    for number, (front, behind) in enumerate(pairwise(made.stages)):
        for cut in (front.stop - 1, front.stop + 1):
            if front.start < cut < behind.stop:
                stages = list(made.stages)
                stages[number : number + 2] = replace(front, stop=cut), replace(behind, start=cut)
                cutting = replace(made, stages=tuple(stages), decisions=())
                yield replace(cutting, decisions=tuple(decided(cutting, moves, 0)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_no_plan_by_hand_with_state_at_hosts_has_a_lower_peak(seed: int) -> None:
    """No plan by hand, without techniques or with a cut moved, has a lower peak; the peak is
    the simulator's.
    """
    profile, on = case(seed)
    made, kept = plan(profile, on, HOW, planner="lean"), plan(profile, on, HOW, objective="peak")
    others = peaks(by_hand(profile, on))
    assert others
    assert made.provenance and kept.provenance and made.prediction
    assert made.provenance.value <= min(others)
    assert made.provenance.value <= kept.provenance.value
    assert made.provenance.value == max(Simulation(made).peak_bytes) == max(made.prediction.peak_bytes)
    assert all(made.provenance.value <= peak for peak in peaks(moved(made)) if made.decisions)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", [0, 3, 5, 13])
def test_cuts_move_where_state_does(seed: int) -> None:
    """Cuts that balance weights do not balance activations: with all state at the host, the best of all cuts
    is chosen.
    """
    rng = Random(seed)
    count = rng.randrange(4, 7)
    widths = [rng.choice((1, 5, 40, 60)) for _ in range(count + 1)]
    of = profile_of(keeping(rng, widths=widths, weights=[rng.choice((0, 3, 80, 200)) for _ in range(count)]))
    on = cluster([AMPLE] * 2, host_rate=20.0, peer_rate=100.0)
    on = replace(on, hosts=(Host(memory_bytes=1 << 30, memory_bandwidth=1e3),))
    how = Training(batch_size=4, microbatches=4, schedule="gpipe")
    made, every = plan(of, on, how, planner="lean"), list[Plan]()
    for cut in range(1, count):
        whole = written(of, on, how, [0, cut, count], [1, 1], "never")
        every.append(replace(whole, decisions=tuple(decided(whole, (STATE, PARAMETERS, GRADIENTS), 0))))
    assert made.provenance and made.provenance.value <= min(peaks(iter(every)))


@pytest.mark.parametrize("seed", [0, 5])
def test_gradients_and_parameters_stay_without_spill(seed: int) -> None:
    """Without `spill`, hosts have optimizer state only, although a plan with more state there has a lower peak."""
    profile, on = case(seed)
    free, staying = (
        plan(profile, on, HOW, planner="lean", means=Means(spill=spill)) for spill in (True, False)
    )
    kinds = [
        {one.subject.kind for one in made.decisions if isinstance(one.subject, State)}
        for made in (free, staying)
    ]
    assert "parameters" in kinds[0]
    assert kinds[1] <= {"optimizer"}
    assert free.provenance and staying.provenance
    assert free.provenance.value < staying.provenance.value


def test_hosts_without_room_leave_everything_on_the_devices() -> None:
    """Hosts without room for state rule it out; the plan says which plans were searched."""
    profile, on = case(0, host_bytes=1)
    made, kept = plan(profile, on, HOW, planner="lean"), plan(profile, on, HOW, objective="peak")
    assert made.stages == kept.stages
    assert not made.decisions
    assert not shortage(made, Simulation(made).arenas)
    assert "with state on hosts has a lower peak" in str(made.provenance)


def test_it_is_below_the_lowest_peak_of_what_stays_where_state_is_most_of_it() -> None:
    """If most memory is state, the host is used; the plan names the set of plans it is lowest of, and claims
    no proof beyond.
    """
    profile, on = case(0)
    made, kept = plan(profile, on, HOW, planner="lean"), plan(profile, on, HOW, objective="peak")
    assert made.provenance and kept.provenance
    assert made.provenance.value < kept.provenance.value
    assert made.decisions
    assert "Proven" not in str(made.provenance)
    assert "It has the lowest peak of" in str(made.provenance)
