"""Memory-saving techniques that planners may use; they use no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from random import Random

import pytest

from pipefit.planner import PLANNERS, PlanOptions, Question, solved
from pipefit.planner.filling import Filler
from pipefit.planner.mapping import mapped_stages
from pipefit.planner.problem import Means, Split
from pipefit.schema.decisions import Run, What
from pipefit.schema.devices import Link, MemberKind
from pipefit.schema.plan import Plan
from pipefit.simulator import Simulation
from support.synthetic_models import AMPLE, alike, devices, layer, measurement, profile, training, value
from support.tight_questions import (
    HOST,
    JOINED,
    KEEP,
    RECOMPUTE,
    Case,
    cluster,
    fastest,
    keeping_layer,
    random_case,
)

SCHEDULES = ("1f1b", "gpipe")
SPARE = Means(recompute="never", host=False, peers=False)


def planned(
    case: Case, means: Means, planner: str = "joint", *, allow_infeasible: bool = False, effort: float = 1.0
) -> Plan:
    options = PlanOptions(allow_infeasible=allow_infeasible, effort=effort, means=means)
    asked = Question(profile=case.profile, cluster=case.cluster, training=case.training, options=options)
    return solved(asked, PLANNERS[planner], name=planner)


def lending(case: Case) -> Case:
    """Build the question with enough memory on the last device to lend some."""
    *others, last = case.cluster.devices
    roomy = replace(last, memory_bytes=8 * last.memory_bytes)
    return case._replace(cluster=replace(case.cluster, devices=(*others, roomy)))


def used(made: Plan) -> set[str]:
    """Return the techniques of a plan, in the words of `tight`, and `peers`."""
    places = [decision.place for decision in made.decisions if decision.place is not None]
    recomputes = any(decision.what is What.RECOMPUTE for decision in made.decisions)
    moves = {HOST if member.kind is MemberKind.HOST else "peers" for place in places for member, _ in place}
    return moves | ({RECOMPUTE} if recomputes else set())


@pytest.mark.sample(4)
@pytest.mark.parametrize("planner", ["joint", "mpress"])
@pytest.mark.parametrize(
    ("means", "allowed"),
    [
        (SPARE, set()),
        (Means(host=False, peers=False), {RECOMPUTE}),
        (Means(recompute="never", peers=False), {HOST}),
        (Means(recompute="never", host=False), {"peers"}),
    ],
)
def test_nothing_else_is_used(planner: str, means: Means, allowed: set[str]) -> None:
    """Plans use only allowed techniques, even if they then do not fit; mpress, with its fixed split, uses
    each in some case.
    """
    cases = (lending(random_case(Random(seed), SCHEDULES, layers=4)) for seed in range(6))
    found = set().union(*(used(planned(case, means, planner, allow_infeasible=True)) for case in cases))
    assert found <= allowed
    assert planner == "joint" or found == allowed


@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("means", "techniques"),
    [(SPARE, (KEEP,)), (Means(host=False, peers=False), (KEEP, RECOMPUTE, JOINED))],
)
def test_what_is_allowed_is_used_as_well_as_can_be(
    seed: int, means: Means, techniques: Sequence[str]
) -> None:
    """If a plan fits, the answer is within a tenth of the fastest plan that uses no more techniques."""
    case = random_case(Random(seed), SCHEDULES)
    best = fastest(case, techniques)
    if best is not None:
        made = planned(case, means).prediction
        assert made is not None and made.step_seconds <= best * 1.1


def test_whole_blocks_are_recomputed_as_such() -> None:
    """Whole blocks of three layers are recomputed, though the second layer alone keeps much and is cheap."""
    layers = [keeping_layer(2, kept, 0, 1.0) for kept in (1, 100, 1) * 4]
    chain = profile(
        measurement(layers, layer((value(2), value(1)), (value(4),), seconds=0.5)), blocks=[3] * 4
    )
    case = Case(chain, cluster([300, 300], host_rate=1e-3, peer_rate=1e-3), training("1f1b", 4))
    lengths = {}
    for way in ("runs", "blocks"):
        made = planned(case, Means(recompute=way))
        runs = [decision.subject for decision in made.decisions if isinstance(decision.subject, Run)]
        lengths[way] = {run.stop - run.start for run in runs}
        assert way == "runs" or all(run.start % 3 == 0 for run in runs)
    assert all(length % 3 == 0 for length in lengths["blocks"]) and min(lengths["runs"]) < 3


def test_without_ahead_all_comes_back_just_in_time() -> None:
    """No decision of a plan is ahead unless that is allowed; then some are."""
    ahead = {True: set(), False: set()}
    case = random_case(Random(7), ("1f1b",), layers=4)
    for allowed, found in ahead.items():
        made = planned(case, Means(ahead=allowed), allow_infeasible=True)
        found.update(decision.ahead for decision in made.decisions)
    assert ahead[False] == {0} < ahead[True]


TECHNIQUES = [
    Means(recompute=recompute, host=host, peers=peers)
    for recompute, host, peers in product(("never", "runs"), (False, True), (False, True))
]


def allows(more: Means, fewer: Means) -> bool:
    """Return whether a question allows every technique of another."""
    pairs = (
        (more.recompute != "never", fewer.recompute != "never"),
        (more.host, fewer.host),
        (more.peers, fewer.peers),
    )
    return all(one or not other for one, other in pairs)


@pytest.mark.sample(1)
@pytest.mark.parametrize("effort", [1.0, 0.01])
@pytest.mark.parametrize(("seed", "layers"), [(0, 3), (103, 5), (118, 5), (139, 5)])
def test_what_is_allowed_besides_never_makes_a_plan_slower(seed: int, layers: int, effort: float) -> None:
    """More techniques (recomputation, the host, peers) never make a plan slower, even if the search ends
    early.
    """
    schedules = *SCHEDULES, "eager-1f1b", "pipedream", "torchgpipe", "pipedream-2bw"
    case = random_case(Random(seed), schedules, layers=layers)
    case = lending(case) if seed % 2 else case
    found = {}
    for means in TECHNIQUES:
        simulation = Simulation(planned(case, means, allow_infeasible=True, effort=effort))
        over = sum(max(0, p - b) for p, b in zip(simulation.peak_bytes, case.cluster.budgets, strict=True))
        found[means] = over, simulation.step_seconds[-1]
    for fewer, more in product(TECHNIQUES, repeat=2):
        assert not allows(more, fewer) or found[more] <= found[fewer], (fewer, more)


def test_what_cannot_fit_or_be_faster_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Impossible techniques are not searched: without recomputation this device cannot be faster, and a
    single device lacks peers.
    """
    layers = [keeping_layer(0, 100, 0, 2.0)] * 2
    chain = profile(measurement(layers, layer((value(0), value(1)), (value(4),), seconds=0.0)))
    case = Case(chain, cluster([150], host_rate=1e-3, peer_rate=1.0), training("1f1b", 4))
    searched = list[Means]()
    restricted = Filler.restricted
    monkeypatch.setattr(
        Filler, "restricted", lambda self, means: searched.append(means) or restricted(self, means)
    )
    planned(case, Means())
    assert {(means.recompute, means.host) for means in searched} == {("runs", False), ("runs", True)}


def square(rates: Sequence[tuple[int, int, float]]) -> Question:
    """Build four devices with links of these rates, and a chain of four layers."""
    links = tuple(Link.between(f"device{a}", f"device{b}", bytes_per_second=rate) for a, b, rate in rates)
    made = replace(devices(*[AMPLE] * 4), links=links)
    return Question(profile=profile(alike(4)), cluster=made, training=training("1f1b", 4))


def test_without_mapping_stages_stay_where_they_are() -> None:
    """Without mapping, stages keep their order, though another order has a faster link between borrower and
    lender.
    """
    asked = square([(0, 1, 1.0), (0, 2, 1.0), (1, 2, 1.0), (2, 3, 1.0), (1, 3, 1.0), (0, 3, 8.0)])
    split = Split((0, 1, 2, 3, 4), (0, 1, 2, 3))
    needs, spares = [80, 0, 0, 0], [0, 80, 0, 0]
    best = mapped_stages(asked, split, needs, spares)
    still = mapped_stages(asked.using(Means(mapping=False)), split, needs, spares)
    assert {best.devices[0], best.devices[1]} == {0, 3} and best.seconds == pytest.approx(10.0)
    assert still.devices == (0, 1, 2, 3) and still.seconds == pytest.approx(80.0)
    assert still.lenders_of(0).keys() == {1}


def test_without_striping_one_device_lends() -> None:
    """Without striping, only the largest lender of a striped tensor lends."""
    asked = square([(a, b, 1.0 + (b == 3)) for a in range(4) for b in range(a + 1, 4)])
    split = Split((0, 1, 2, 3, 4), (0, 1, 2, 3))
    question = asked.using(Means(mapping=False))
    striped = mapped_stages(question, split, [80, 0, 0, 0], [0, 80, 80, 80]).lenders_of(0)
    alone = mapped_stages(
        question.using(Means(mapping=False, striping=False)), split, [80, 0, 0, 0], [0, 80, 80, 80]
    ).lenders_of(0)
    assert len(striped) == 3
    assert alone == {3: striped[3]} and striped[3] == max(striped.values())
