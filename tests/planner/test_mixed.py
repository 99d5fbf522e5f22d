"""Plans whose stages have different degrees and run again in part, against every plan of whole stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, combinations, pairwise, product
from random import Random

import pytest

from made_up import AMPLE, devices, keeping, plain, skewed
from pipefit.cluster import Cluster
from pipefit.decisions import Decision, Run, State, What
from pipefit.devices import Host, Link
from pipefit.grids import Grid, Stage
from pipefit.places import Member, parse_place
from pipefit.planner import Means, Options, Question, plan
from pipefit.planner.driver import plan_of
from pipefit.planner.mixed import mixed, with_hosts
from pipefit.plans import Plan
from pipefit.profiles import ModelProfile
from pipefit.simulator import Simulation
from pipefit.training import Training
from slice_sizes import sized

HOW = Training(batch_size=12, microbatches=3)


def every_plan(profile: ModelProfile, cluster: Cluster) -> Iterator[Plan]:
    """All cuts and replicas of every stage, each of which runs again as a whole or not."""
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
                stages=tuple(Stage(start=a, stop=b, grid=grid) for (a, b), grid in zip(edges, grids, strict=True)),
                decisions=tuple(
                    Decision(stage=number, subject=Run(start=a, stop=b), what=What.RECOMPUTE)
                    for number, ((a, b), (_, again)) in enumerate(zip(edges, chosen, strict=True))
                    if again
                ),
            )


def peak(one: Plan) -> int:
    return max(Simulation(one).peak_bytes)


@pytest.mark.parametrize("seed", range(5))
def test_stages_run_again_where_nothing_fits_that_keeps_all(seed: int) -> None:
    """With memory between what plans of any degrees need that keep everything and that keep inputs alone: a plan is
    found if there is one, it fits, and it is nearly as fast as the fastest whose stages run again as a whole.
    """
    rng = Random(seed)
    profile = sized(rng.choice((plain, skewed))(rng, 3), 4, 2)
    ample = devices(*[1 << 40] * 3)
    kept, lean = (
        min(peak(one) for one in every_plan(profile, ample) if bool(one.decisions) is again) for again in (False, True)
    )
    budget = rng.choice((lean - 1, lean, (lean + kept) // 2))
    cluster = devices(*[budget] * 3)
    found = mixed(Question(profile=profile, cluster=cluster, training=HOW, options=Options(shard="none")))
    fit = [one for one in every_plan(profile, cluster) if peak(one) <= budget]
    assert (found is None) == (not fit)
    if found is not None:
        made = plan_of(found.question, found.split, decisions=found.decisions)
        assert peak(made) <= budget
        assert found.seconds == Simulation(made).step_seconds[-1]
        assert found.seconds <= 1.1 * min(Simulation(one).step_seconds[-1] for one in fit)


def test_a_plan_of_different_degrees_says_what_its_recomputation_frees() -> None:
    """It is planned by joint, printed with its techniques, and its prediction is the simulator's."""
    profile, how = sized(plain(Random(0), 3), 4, 2), HOW
    lean = plan(profile, devices(*[1 << 40] * 3), how, objective="peak", shard="none", recompute="always")
    assert lean.provenance
    made = plan(profile, devices(*[int(lean.provenance.value)] * 3), how, shard="none", effort=0.1)
    assert made.decisions and made.prediction and made.prediction.compactions
    assert made.prediction.peak_bytes == Simulation(made).peak_bytes


def test_hosts_update_what_replicas_divide_where_nothing_else_fits() -> None:
    """The answer is no slower than a plan by hand in which replicas divide gradients, and the host has the state."""
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
    assert mixed(replace(question, means=Means(recompute="never"))) is None
    assert with_hosts(replace(question, means=Means(host=False, recompute="never")), float("inf")) is None
    found = with_hosts(replace(question, means=Means(recompute="never")), float("inf"))
    assert found is not None
    assert found.seconds <= Simulation(by_hand).step_seconds[-1]
    made = plan_of(found.question, found.split, decisions=found.decisions)
    assert peak(made) <= budget and Simulation(made).step_seconds[-1] == found.seconds
