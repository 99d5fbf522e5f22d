"""Plans with stages of different degrees and partial recomputation, against every plan of whole stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, combinations, pairwise, product
from random import Random

import pytest

from pipefit.planner import Means, PlanOptions, Question, plan
from pipefit.planner import mixed_degrees as searching
from pipefit.planner.common_plans import CommonSearch
from pipefit.planner.evaluation import Simulated
from pipefit.planner.mixed_degrees import mixed, otherwise
from pipefit.planner.neighbours import Mixed
from pipefit.planner.problem import Split, plan_of
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, Run, State, What
from pipefit.schema.devices import Host, Link, Member, parse_place
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training
from pipefit.simulator import Simulation
from pipefit.simulator.assembled import assembled
from support.microbatch_size_profiles import sized, written
from support.synthetic_models import AMPLE, devices, hostile, keeping, plain, skewed

HOW = Training(batch_size=12, microbatches=3)
SCHEDULES = "1f1b", "eager-1f1b"


def every_plan(profile: ModelProfile, cluster: Cluster) -> Iterator[Plan]:
    """Enumerate all cuts and replicas, with every stage fully recomputed or not."""
    layers, most = len(profile.layers), len(cluster.devices)
    for count in range(1, min(layers, most) + 1):
        kinds = product(product((1, 2), (False, True)), repeat=count)
        for cuts, chosen in product(combinations(range(1, layers), count - 1), list(kinds)):
            firsts = [0, *accumulate(degree for degree, _ in chosen)]
            if firsts[-1] > most:
                continue
            edges = list(pairwise((0, *cuts, layers)))
            grids = [Grid(devices=tuple(range(a, b)), data=b - a) for a, b in pairwise(firsts)]
            yield Plan(
                profile=profile,
                cluster=cluster,
                training=HOW,
                stages=tuple(
                    Stage(start=a, stop=b, grid=grid) for (a, b), grid in zip(edges, grids, strict=True)
                ),
                decisions=tuple(
                    Decision(stage=number, subject=Run(start=a, stop=b), what=What.RECOMPUTE)
                    for number, ((a, b), (_, again)) in enumerate(zip(edges, chosen, strict=True))
                    if again
                ),
            )


def peak(one: Plan) -> int:
    return max(Simulation(one).peak_bytes)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(5))
def test_stages_run_again_where_nothing_fits_that_keeps_all(seed: int) -> None:
    """With memory between full storage and full recomputation, a plan is found if one exists, fits, and is
    nearly as fast as the fastest with fully recomputed stages.
    """
    rng = Random(seed)
    profile = sized(rng.choice((plain, skewed))(rng, 3), 4, 2)
    ample = devices(*[1 << 40] * 3)
    kept, lean = (
        min(peak(one) for one in every_plan(profile, ample) if bool(one.decisions) is again)
        for again in (False, True)
    )
    budget = rng.choice((lean - 1, lean, (lean + kept) // 2))
    cluster = devices(*[budget] * 3)
    found = mixed(Question(profile=profile, cluster=cluster, training=HOW, options=PlanOptions(shard="none")))
    fit = [one for one in every_plan(profile, cluster) if peak(one) <= budget]
    assert (found is None) == (not fit)
    if found is not None:
        made = plan_of(found.question, found.split, decisions=found.decisions)
        assert peak(made) <= budget
        assert found.seconds == Simulation(made).step_seconds[-1]
        assert found.seconds <= 1.1 * min(Simulation(one).step_seconds[-1] for one in fit)


def test_a_plan_of_different_degrees_says_what_its_recomputation_frees() -> None:
    """The plan comes from joint, is printed with its techniques, and predicts the simulator's figures."""
    profile, how = sized(skewed(Random(1), 3), 4, 2), HOW
    lean = plan(profile, devices(*[1 << 40] * 3), how, objective="peak", shard="none", recompute="always")
    assert lean.provenance
    made = plan(profile, devices(*[int(lean.provenance.value)] * 3), how, shard="none", effort=0.1)
    assert made.decisions and made.prediction and made.prediction.compactions
    assert made.prediction.peak_bytes == Simulation(made).peak_bytes


def test_large_questions_save_memory_in_plans_of_one_degree(monkeypatch: pytest.MonkeyPatch) -> None:
    """If comparing the stages of all degrees would take too long, those of each degree alone are compared."""
    costs = sized(plain(Random(3), 6), 4, 2, 1)
    ample = Question(profile=costs, cluster=devices(*[1 << 40] * 4), training=HOW, options=PlanOptions())
    kept = mixed(ample)
    assert kept is not None
    most = peak(plan_of(kept.question, kept.split, decisions=kept.decisions))
    question = replace(ample, cluster=devices(*[int(0.6 * most)] * 4))
    best = mixed(question)
    assert best is not None and (best.decisions or best.split.grid(0).shard != "none")
    found = dict[int, Mixed | None]()
    for compared in (504, 503):  # stages of the degree with the most
        monkeypatch.setattr(searching, "_CANDIDATES", compared)
        found[compared] = mixed(question, 1.5 * best.seconds)
    known = found[504]
    assert known is not None and known.seconds == best.seconds
    assert found[503] is None or found[503].seconds >= known.seconds


def test_hosts_update_what_replicas_divide_where_nothing_else_fits() -> None:
    """The answer is no slower than a plan by hand with divided gradients and state at the host."""
    heavy = [1 << 12] * 6
    profile = sized(keeping(Random(0), widths=[1 << 6] * 7, weights=heavy), 4, 2)
    bare = devices(*[AMPLE] * 2)
    links = [Link(members=(Member.device(n), Member.host(0)), bytes_per_second=1e4) for n in range(2)]
    links.append(Link(members=(Member.device(0), Member.device(1)), bytes_per_second=1e4))
    ample = replace(bare, links=tuple(links), hosts=(Host(memory_bytes=1 << 40, memory_bandwidth=1e4),))
    how = Training(batch_size=12, microbatches=3)
    grid = Grid(devices=(0, 1), data=2, shard="gradients", buckets=6)
    by_hand = Plan(
        profile=profile,
        cluster=ample,
        training=how,
        stages=(Stage(start=0, stop=6, grid=grid),),
        decisions=tuple(
            Decision(
                stage=0,
                subject=State(start=n, stop=n + 1, kind="optimizer"),
                what=What.UPDATE,
                place=parse_place("host"),
                ahead=1,
            )
            for n in range(6)
        ),
    )
    budget = peak(by_hand)
    tight = tuple(replace(one, memory_bytes=budget) for one in ample.devices)
    question = Question(profile=profile, cluster=replace(ample, devices=tight), training=how)
    assert mixed(question.using(Means(recompute="never"))) is None
    search = CommonSearch()
    assert search.fastest(question.using(Means(host=False, recompute="never")), float("inf")) is None
    found = search.fastest(question.using(Means(recompute="never")), float("inf"))
    assert found is not None
    assert found.seconds <= Simulation(by_hand).step_seconds[-1]
    made = plan_of(found.question, found.split, decisions=found.decisions)
    assert peak(made) <= budget and Simulation(made).step_seconds[-1] == found.seconds


def test_another_schedule_is_taken_where_it_is_faster_and_fits() -> None:
    """When messages take as long as computing, eager 1F1B is faster but needs more memory."""
    profile, how, ways = sized(plain(Random(1), 4), 2, 1), Training(batch_size=24, microbatches=12), SCHEDULES
    loose = devices(*[AMPLE] * 4)
    loose = replace(loose, links=tuple(replace(one, bytes_per_second=1.0) for one in loose.links))
    split = Split((0, 1, 2, 3, 4), (0, 1, 2, 3), tuple(map(Grid.of, range(4))))

    def known(on: Cluster, schedule: str, which: Split = split) -> Mixed:
        own = replace(how, schedule=schedule)
        question = Question(profile=profile, cluster=on, training=own)
        plan = written(profile, on, own, which.edges, [1] * (len(which.edges) - 1))
        return Mixed(question, which, Simulated(which, assembled(plan), own.microbatches))

    first, eager = (known(loose, schedule) for schedule in ways)
    slow = tuple(replace(one, bytes_per_second=0.5) for one in loose.links)
    slower = known(replace(loose, links=slow), ways[0])
    found, *others = otherwise([slower, first], ways)
    assert found.seconds == eager.seconds < first.seconds
    assert (found.question.training, found.peaks) == (eager.question.training, eager.peaks)
    assert all(one.simulation.fits and one.seconds < found.seconds for one in others)
    assert all(one.seconds < eager.seconds for one in otherwise([eager], ways))
    uneven = Split((0, 3, 4), (0, 1), tuple(map(Grid.of, range(2))))
    same, planned = otherwise([known(loose, ways[0], uneven)], ways)  # the other schedule has cuts of its own
    assert (same.split, planned.split == uneven) == (uneven, False)
    assert planned.seconds < same.seconds
    decisions = (Decision(stage=0, subject=Run(start=0, stop=1), what=What.RECOMPUTE),)
    recomputing, *_ = otherwise([first._replace(decisions=decisions)], ways)
    assert recomputing.decisions == decisions
    plan = plan_of(recomputing.question, split, decisions=decisions)
    assert recomputing.seconds == assembled(plan).seconds < first.seconds
    assert not [*otherwise([], ways)]
    tight = replace(
        loose,
        devices=tuple(replace(d, memory_bytes=n) for d, n in zip(loose.devices, first.peaks, strict=True)),
    )
    tightly = known(tight, ways[0])
    assert all(one.split != split and one.simulation.fits for one in otherwise([tightly], ways))


def test_where_simulations_take_long_plans_that_are_estimated_to_be_slower_are_not_simulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If simulation is slow, plans with a slower estimate are skipped; the rest is identical."""
    question = Question(
        profile=sized(plain(Random(2), 4), 4, 2, 1), cluster=devices(*[AMPLE] * 3), training=HOW
    )

    def found(
        at_most: float = float("inf"), below: float = float("inf")
    ) -> tuple[Split, float, float] | None:
        best = mixed(question, at_most, below)
        return best and (best.split, best.seconds, best.estimated)

    best = found()
    assert best is not None
    _, seconds, estimated = best
    most = 1.01 * seconds
    assert found(most, estimated) == best
    monkeypatch.setattr(searching, "_PASSES", 2)
    assert found() == found(below=estimated) == found(most, estimated * 1.01) == best
    assert found(most, estimated) is None


def test_the_only_plan_that_is_known_may_be_of_single_devices() -> None:
    """The search of other arrangements begins with those like it, which have no grids."""
    profile, bare = sized(hostile(Random(0), 7), 4, 2, 1), devices(489, 652, 693)
    links = tuple(Link(members=(Member.device(n), Member.host(0)), bytes_per_second=1e6) for n in range(3))
    cluster = replace(bare, links=links, hosts=(Host(memory_bytes=1 << 40),))
    made = plan(profile, cluster, batch_size=16, microbatches=4, schedule="pipedream-2bw")
    assert made.prediction and made.prediction.peak_bytes == Simulation(made).peak_bytes
    assert all(
        peak <= budget for peak, budget in zip(made.prediction.peak_bytes, cluster.budgets, strict=True)
    )
