"""The planner of MPress: its steps, on questions small enough to follow."""

from __future__ import annotations

from random import Random

import pytest

from pipefit.planner import PlanOptions, Question, mpress, plan, solved
from pipefit.planner.baselines.mpress import MpressOptions
from pipefit.planner.joint import joint
from pipefit.planner.problem import Means
from pipefit.schema.decisions import State, What
from pipefit.schema.plan import Plan
from pipefit.simulator import Simulation
from support.synthetic_models import AMPLE, devices, layer, measurement, profile, training, value, vgg_like
from support.tight_questions import Case, cluster, keeping_layer, random_case

WIDTH, KEPT = 1, 100


def chain_of(*seconds: float):
    """Build layers that keep a hundred bytes each, and take these seconds each way."""
    layers = [keeping_layer(WIDTH, KEPT, 0, each) for each in seconds]
    return profile(measurement(layers, layer((value(WIDTH), value(1)), (value(4),), seconds=0.0)))


def planned(case: Case, planner=mpress, **options: object) -> Plan:
    question = Question(
        profile=case.profile, cluster=case.cluster, training=case.training, options=PlanOptions(**options)
    )
    return solved(question, planner, name=planner.__name__)


def places(made: Plan) -> list[str]:
    return [str(d.place) for d in made.decisions if d.what is What.OFFLOAD]


def test_where_the_time_split_fits_it_is_the_plan() -> None:
    """If the time split fits, nothing is recomputed or offloaded."""
    case = Case(profile(vgg_like()), devices(*[AMPLE] * 4), training("1f1b", 8))
    made = planned(case)
    assert made.decisions == ()
    assert made.split == plan(case.profile, case.cluster, case.training, planner="time").split


def test_long_intervals_behind_a_fast_link_go_to_the_host() -> None:
    """Nothing is recomputed if copies hide, and the step is as long as with ample memory."""
    chain, how = chain_of(*[4.0] * 12), training("1f1b", 12)
    ample = planned(Case(chain, cluster([AMPLE] * 6, host_rate=1e6, peer_rate=1e6), how))
    made = planned(Case(chain, cluster([1100] * 6, host_rate=1e6, peer_rate=1e6), how))
    assert set(places(made)) == {"host"} and len(made.decisions) == len(places(made))
    assert made.prediction and ample.prediction
    assert made.prediction.step_seconds == pytest.approx(ample.prediction.step_seconds, rel=1e-2)


def test_behind_a_slow_link_the_last_blocks_are_recomputed() -> None:
    """Late blocks are recomputed first, consecutively, and no more than needed."""
    chain, how = chain_of(*[1.0] * 6), training("1f1b", 12)
    made = planned(Case(chain, cluster([560] * 3, host_rate=1e-3, peer_rate=1e-3), how))
    assert made.decisions and all(decision.what is What.RECOMPUTE for decision in made.decisions)
    first = sorted(decision.layers[0] for decision in made.decisions if decision.stage == 0)
    assert first == list(range(made.stages[0].stop - len(first), made.stages[0].stop))
    assert len(first) < made.stages[0].stop


def test_peers_take_what_would_be_recomputed_if_they_have_room() -> None:
    """Peers with fast links take tensors that slow host links would leave to recomputation; the step is
    shorter.
    """
    chain, how = chain_of(*[4.0] * 8), training("1f1b", 12)
    links = cluster([800, 800, 800, 800], host_rate=1e-3, peer_rate=1e6)
    lent = planned(Case(chain, links, how))
    kept = solved(
        Question(profile=chain, cluster=links, training=how),
        lambda question: mpress(question, MpressOptions(quantum_bytes=1 << 40)),
        name="mpress",
    )
    question = Question(profile=chain, cluster=links, training=how)
    lent = solved(question, lambda question: mpress(question, MpressOptions(quantum_bytes=1)), name="mpress")
    assert any("device" in place for place in places(lent)) and not places(kept)
    assert lent.prediction and kept.prediction
    assert lent.prediction.step_seconds < kept.prediction.step_seconds


def test_peers_alone_take_what_they_have_room_for() -> None:
    """If only peers are allowed, they take all they have room for; over fast links the step stays as long as
    with ample memory.
    """
    chain, how = chain_of(*[4.0] * 8), training("1f1b", 12)
    ample = planned(Case(chain, cluster([AMPLE] * 4, host_rate=1e6, peer_rate=1e6), how))
    question = Question(
        profile=chain,
        cluster=cluster([720] * 4, host_rate=1e6, peer_rate=1e6),
        training=how,
        options=PlanOptions(means=Means(recompute="never", host=False)),
    )
    lent = solved(question, mpress, name="mpress")
    assert lent.decisions and all(place.startswith("device") for place in places(lent))
    assert lent.prediction and ample.prediction
    assert lent.prediction.step_seconds == pytest.approx(ample.prediction.step_seconds, rel=1e-2)


def test_optimizer_state_goes_to_the_host_where_tensors_are_not_enough() -> None:
    """Layers have a hundred bytes of parameters, gradients and state each, on devices with room for two of
    the three.

    With room for one more on each device, the state of one more block stays on each.
    """
    layers = [keeping_layer(1, 1, 100, 1.0)] * 8
    chain = profile(measurement(layers, layer((value(1), value(1)), (value(4),), seconds=0.0)))
    moved = []
    for room in (1160, 1260):
        case = Case(chain, cluster([room] * 2, host_rate=1e3, peer_rate=1e3), training("1f1b", 4))
        states = [d.layers for d in planned(case).decisions if isinstance(d.subject, State)]
        moved.append(len(states))
    assert moved[0] == moved[1] + 2 > 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(10))
def test_joint_is_never_slower(seed: int) -> None:
    """joint is never slower if MPress's plan fits; MPress's peaks match a separate simulation."""
    case = random_case(Random(seed), ("1f1b", "gpipe"), layers=4)
    made = planned(case, allow_infeasible=True)
    assert made.prediction and made.prediction.peak_bytes == Simulation(made).peak_bytes
    if all(p <= b for p, b in zip(made.prediction.peak_bytes, case.cluster.budgets, strict=True)):
        better = planned(case, joint)
        assert better.prediction and better.prediction.step_seconds <= made.prediction.step_seconds * (
            1 + 1e-9
        )
