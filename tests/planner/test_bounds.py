"""The lower bound against every plan of small questions, and its lines against simulated steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest

from pipefit.planner import Means, PlanOptions, Question, bounds
from pipefit.planner.bounds import MicrobatchSeconds, lines, position_of, step_bound
from pipefit.planner.memory_choices import Within
from pipefit.simulator import simulate
from support import random_trainings
from support.random_decisions import compacted
from support.synthetic_models import layer, measurement, profile, training, value, work
from support.tight_questions import (
    HOST,
    JOINED,
    KEEP,
    PEER,
    RECOMPUTE,
    Case,
    cluster,
    fastest,
    keeping_layer,
    random_case,
    uneven_case,
)

SCHEDULES = ("1f1b", "gpipe", "torchgpipe", "eager-1f1b")
ENDLESS = ("pipedream", "pipedream-2bw")


TECHNIQUES = [
    (Means(), (KEEP, RECOMPUTE, JOINED, HOST, PEER)),
    (Means(recompute="never"), (KEEP, HOST, PEER)),
    (Means(host=False), (KEEP, RECOMPUTE, JOINED, PEER)),
    (Means(peers=False), (KEEP, RECOMPUTE, JOINED, HOST)),
    (Means(host=False, peers=False), (KEEP, RECOMPUTE, JOINED)),
    (Means(recompute="never", peers=False), (KEEP, HOST)),
    (Means(recompute="never", host=False), (KEEP, PEER)),
    (Means(recompute="never", host=False, peers=False), (KEEP,)),
]


def bound(case: Case, means: Means | None = None) -> float:
    means = means or Means()
    return step_bound(
        Question(
            profile=case.profile,
            cluster=case.cluster,
            training=case.training,
            options=PlanOptions(means=means),
        )
    )


def never_above(seed: int, schedules: tuple[str, ...], techniques: slice = slice(1)) -> None:
    """Check the bound against the fastest plan for each choice of techniques; it is infinite only if no plan
    fits.
    """
    case = random_case(Random(seed), schedules)
    for means, allowed in TECHNIQUES[techniques]:
        best = fastest(case, allowed)
        assert best is None or bound(case, means) <= best * (1 + 1e-9), means


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(24))
def test_the_bound_is_never_above_the_best_plan(seed: int) -> None:
    """The bound never exceeds the best plan over all splits, recomputed runs and offloads to host or peer,
    just in time or ahead.
    """
    never_above(seed, SCHEDULES)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(8))
def test_it_holds_where_steps_never_end(seed: int) -> None:
    """The bound holds for PipeDream's schedules, up to the steady state."""
    never_above(seed, ENDLESS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(24, 30))
def test_it_holds_with_fewer_techniques(seed: int) -> None:
    """The bound holds for plans without recomputation, the host or peers, with only one of them, or with
    none.
    """
    never_above(seed, (*SCHEDULES, *ENDLESS), slice(1, None))


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(12))
def test_it_holds_on_devices_of_two_kinds(seed: int) -> None:
    """The bound never exceeds the best plan over all splits and both orders of two unequal devices."""
    never_above_on_two_kinds(seed)


@pytest.mark.gallery
@pytest.mark.parametrize("seed", range(12, 212))
def test_it_holds_on_devices_of_two_kinds_in_many_questions(seed: int) -> None:
    """The bound holds in 200 more questions about two unequal devices."""
    never_above_on_two_kinds(seed)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(20))
def test_it_holds_on_devices_of_three_kinds_that_keep_everything(seed: int) -> None:
    """The bound never exceeds the best split of seven layers over all orders of three unequal devices, and is
    mostly close to it.
    """
    case = uneven_case(Random(seed), ENDLESS if seed % 4 == 0 else SCHEDULES, layers=7, most=9, devices=3)
    devices = tuple(replace(device, memory_bytes=1 << 40) for device in case.cluster.devices)
    case = case._replace(cluster=replace(case.cluster, devices=devices))
    best = fastest(case, (KEEP,))
    assert best is None or 0.7 * best <= bound(case) <= best * (1 + 1e-9)
    question = Question(profile=case.profile, cluster=case.cluster, training=case.training)
    assert best is None or bounds.simple_bound(question) <= best * (1 + 1e-9)


def never_above_on_two_kinds(seed: int) -> None:
    """Check the bound against the fastest plan in both orders, with all techniques and without peers."""
    case = uneven_case(Random(seed), ENDLESS if seed % 3 == 0 else SCHEDULES)
    for means, allowed in (TECHNIQUES[0], TECHNIQUES[3], TECHNIQUES[7]):
        best = fastest(case, allowed)
        assert best is None or bound(case, means) <= best * (1 + 1e-9), means


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_slow_device_counts_with_its_own_speed(schedule: str) -> None:
    """With memory to spare, half of the devices at a third of the speed raise the bound as they must: the work
    is divided by four thirds of the speed of two fast devices, not by twice it.
    """
    costs = [
        replace(keeping_layer(1, 1, 1, 1.0), forward=work(flops=1), backward=work(flops=2)) for _ in range(60)
    ]
    chain = profile(measurement(costs, layer((value(1), value(1)), (value(4),), seconds=0.0)))
    there = cluster([1 << 40] * 2, host_rate=1.0, peer_rate=1.0)
    fast, slow = (
        replace(
            there.devices[0],
            kind=replace(
                there.devices[0].kind, name=str(rate), flops={"float32": rate}, memory_bandwidth=1e12
            ),
        )
        for rate in (3.0, 1.0)
    )
    one, other = (
        bound(Case(chain, replace(there, devices=devices), training(schedule, 40)))
        for devices in ((fast, fast), (fast, slow))
    )
    assert 1.35 < other / one < 1.65


@pytest.mark.gallery
@pytest.mark.parametrize("seed", range(400, 460))
def test_it_holds_with_fewer_techniques_in_many_questions(seed: int) -> None:
    """The bound holds with fewer techniques in 60 more questions."""
    never_above(seed, (*SCHEDULES, *ENDLESS), slice(1, None))


@pytest.mark.gallery
@pytest.mark.parametrize("seed", range(24, 324))
def test_the_bound_is_never_above_the_best_of_many_plans(seed: int) -> None:
    """The bound holds in 300 more questions, alternating synchronous and asynchronous."""
    never_above(seed, ENDLESS if seed % 3 == 0 else SCHEDULES)


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(12))
def test_what_is_left_out_of_the_tables_changes_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of all ranges of blocks give the same bound, for every choice of techniques."""
    case = random_case(Random(seed), (*SCHEDULES, *ENDLESS))
    found = [bound(case, means) for means, _ in TECHNIQUES]

    def everywhere(tables: bounds._Bound, _: object) -> list[Within]:
        count, stages = tables.count, tables.question.stages
        inner = [slice(stage, count - (stages - stage) + 1) for stage in range(1, stages)]
        return [Within(*ends) for ends in pairwise([slice(0, 1), *inner, slice(count, count + 1)])]

    monkeypatch.setattr(bounds._Bound, "_windows", everywhere)
    assert found == [bound(case, means) for means, _ in TECHNIQUES]


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(10))
def test_no_decisions_leave_a_device_with_less_than_its_largest_layer(seed: int) -> None:
    """No random decisions (recomputed runs, offloaded tensors and state) leave a device less than its largest
    layer; some come close.
    """
    rng = Random(seed)
    case = random_trainings.random_case(rng)
    plan = compacted(case.plan, rng)
    for rank, stages in enumerate(plan.ranks):
        layers = [
            layer
            for stage in map(plan.stages.__getitem__, stages)
            for layer in range(stage.start, stage.stop)
        ]
        peak = max(
            simulate(plan, steps=2).devices[plan.stages[stages[0]].device].step_peak_bytes(step)
            for step in (0, 1)
        )
        assert peak >= max(case.plan.measurement.costs[layer].least_bytes for layer in layers), rank


def test_what_a_layer_takes_at_least_is_all_that_its_passes_need() -> None:
    """The minimum memory of a layer: its weights, saved tensors and backward scratch, but not its saved
    input.
    """
    cost = keeping_layer(90, 40, 700, 1.0)
    assert cost.least_bytes == 700 + 40 + max(span.peak_bytes for span in cost.backward_first)
    forward = replace(cost, forward_peak_bytes=5000, checkpoint_peak_bytes=4000)
    assert forward.least_bytes == 700 + 4000


def test_no_plan_fits_where_a_layer_alone_takes_more() -> None:
    """If one layer exceeds the memory under every technique, the bound says so and planners
    need not search.
    """
    case = random_case(Random(3), SCHEDULES)
    least = max(cost.least_bytes for cost in case.profile.measurements[0].costs)
    budgets = [replace(device, memory_bytes=least - 1, reserve_bytes=0) for device in case.cluster.devices]
    assert bound(case._replace(cluster=replace(case.cluster, devices=tuple(budgets)))) == float("inf")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_bound_of_equal_stages_without_messages_is_the_step(schedule: str) -> None:
    """With ample memory and stages of equal time, the bound is the step: (P - 1 + M) (f + b)."""
    layers = [keeping_layer(1, 1, 0, 1.0) for _ in range(3)]
    loss = layer((value(1), value(1)), (value(4),), seconds=0.0)
    case = Case(
        profile(measurement(layers, loss)),
        cluster([1 << 30] * 3, host_rate=1e12, peer_rate=1e12),
        training(schedule, 5),
    )
    update = 1.0
    assert bound(case) == pytest.approx((3 - 1 + 5) * 2.0 + update)
    assert fastest(case, (KEEP,)) == pytest.approx((3 - 1 + 5) * 2.0 + update)


def test_a_loss_is_not_updated() -> None:
    """A loss takes half a layer's time and no update: two minibatches a step, a second each way and per
    update.
    """
    loss = layer((value(1), value(1)), (value(4),), seconds=0.5)
    chain = profile(measurement([keeping_layer(1, 1, 1, 1.0)], loss))
    case = Case(chain, cluster([1 << 30], host_rate=1.0, peer_rate=1.0), training("pipedream", 2))
    assert bound(case, Means(host=False)) == pytest.approx(2 * (2.0 + 1.0 + 1.0)) == fastest(case, (KEEP,))


def test_a_split_that_cannot_hold_its_parameters_has_no_bound() -> None:
    """The bound is infinite if parameters must stay on devices and cannot fit."""
    case = Case(
        profile(measurement([keeping_layer(1, 1, 40, 1.0)] * 4, layer((value(1), value(1)), (value(4),)))),
        cluster([90, 90], host_rate=1.0, peer_rate=1.0),
        training("1f1b", 2),
    )
    question = Question(profile=case.profile, cluster=case.cluster, training=case.training)
    assert step_bound(question.using(Means(spill=False))) == float("inf")
    assert step_bound(question) < float("inf")


def test_hosts_hold_no_more_than_their_memory() -> None:
    """Without recomputation, saved tensors that exceed the devices are at hosts, so no plan fits if hosts are
    too small for them, or for the state.
    """
    rng = Random(0)
    cases = (random_case(rng, ("1f1b",)) for _ in range(20))
    checked = 0
    for case in cases:
        small = replace(case.cluster, hosts=tuple(replace(h, memory_bytes=1) for h in case.cluster.hosts))
        means = Means(recompute="never", peers=False)
        best = fastest(case._replace(cluster=small), (KEEP, HOST))
        checked += bound(case, means) < bound(case._replace(cluster=small), means) == float("inf")
        assert best is None or bound(case._replace(cluster=small), means) <= best * (1 + 1e-9)
    assert checked


def test_what_must_be_recomputed_counts() -> None:
    """A device that holds half of its saved tensors, with negligible links, must recompute the rest."""
    case = Case(
        profile(
            measurement(
                [keeping_layer(0, 10, 0, 0.2)] * 10, layer((value(0), value(1)), (value(4),), seconds=0.0)
            )
        ),
        cluster([50], host_rate=1e-9, peer_rate=1.0),
        training("1f1b", 4),
    )
    assert bound(case) == pytest.approx(4 * (2.0 + 2.0) + 4 * 0.5 * 2.0 + 0.2, rel=1e-3)


def test_what_all_devices_lend_is_what_they_have() -> None:
    """Two stages keep 100 bytes of each microbatch, two in flight on the first device and one on the second:
    devices of 150 bytes have room for all, through any lender with a fast link.

    Devices of 60 bytes recompute 40 bytes of each of four microbatches, since tensors leave after a forward. A
    second of recomputation frees 50.
    """
    layers = [keeping_layer(0, 50, 0, 1.0)] * 4
    chain = profile(measurement(layers, layer((value(0), value(1)), (value(4),), seconds=0.0)))
    found = [
        bound(Case(chain, cluster([memory] * 2, host_rate=1e-9, peer_rate=1e3), training("1f1b", 4)))
        for memory in (150, 60)
    ]
    kept = 4 * (2.0 + 2.0) + 4.0 + 1.0  # the second stage after the first microbatch arrives, and an update
    assert found[0] == pytest.approx(kept)
    assert found[1] == pytest.approx(kept + 4 * 40 / 50, rel=1e-3)


def test_a_small_device_has_a_small_stage() -> None:
    """Of two equally fast devices, one of 60 bytes has one of four layers that keep 50 bytes each, although its
    peer has room for more of them after a forward.
    """
    layers = [keeping_layer(0, 50, 0, 1.0)] * 4
    chain = profile(measurement(layers, layer((value(0), value(1)), (value(4),), seconds=0.0)))
    means = Means(recompute="never", host=False)
    even, uneven, lent = (
        bound(
            Case(chain, cluster(budgets, host_rate=1.0, peer_rate=rate), training("pipedream-2bw", 4)), means
        )
        for budgets, rate in (((210, 210), 1e-9), ((60, 360), 1e-9), ((60, 360), 100.0))
    )
    assert even == pytest.approx(2 * (4 * 2.0 + 1.0))
    assert uneven == lent == pytest.approx(3 * (4 * 2.0 + 1.0), rel=1e-3)


def test_state_that_leaves_a_device_takes_the_time_of_its_link() -> None:
    """Three layers have 100 bytes and 100 of state each, on a device of 450 bytes: every update sends 150 bytes
    of state or gradients at 10 bytes/s while the device waits, one for each of two microbatches under
    PipeDream.
    """
    layers = [keeping_layer(0, 0, 100, 1.0)] * 3
    chain = profile(measurement(layers, layer((value(0), value(1)), (value(4),), seconds=0.0)))
    for schedule, updates in (("pipedream", 2), ("pipedream-2bw", 1)):
        case = Case(chain, cluster([450], host_rate=10.0, peer_rate=1.0), training(schedule, 2))
        expected = 2 * (3 * 2.0) + updates * 15.0
        assert bound(case, Means(spill=False)) == pytest.approx(expected, rel=1e-3)


def test_versions_of_weights_take_memory() -> None:
    """Two layers have 100 bytes and 100 of state each, on devices of 250 bytes: the first device has a second
    weight version and offloads 50 bytes of it every step, at 0.1 byte/s.
    """
    layers = [keeping_layer(0, 0, 100, 1.0)] * 2
    chain = profile(measurement(layers, layer((value(0), value(1)), (value(4),), seconds=0.0)))
    means = Means(peers=False, state=False, spill=False)
    for memory, seconds in ((300, 2 * (1.0 + 1.0 + 1.0)), (250, 50 / 0.1)):
        case = Case(chain, cluster([memory] * 2, host_rate=0.1, peer_rate=1.0), training("pipedream", 2))
        assert bound(case, means) == pytest.approx(seconds, rel=1e-3)


def test_positions_are_those_of_the_drawings() -> None:
    """Microbatches in flight, and backwards before the last forward, match the drawings for four stages and
    eight microbatches.
    """
    drawn = {"1f1b": [(4, 4), (3, 5), (2, 6), (1, 7)], "gpipe": [(8, 0)] * 4}
    for schedule, stages in drawn.items():
        found = [position_of(schedule, stage, 4, 8) for stage in range(4)]
        assert [(at.in_flight, at.before_last) for at in found] == stages
        assert [at.apart for at in found] == [schedule == "gpipe"] * 4


@pytest.mark.parametrize("seed", range(40))
def test_the_lines_are_never_above_a_step_of_any_stages(seed: int) -> None:
    """The lines never exceed a step of random stages, walked in schedule order without messages, memory or
    recomputation.
    """
    rng = Random(seed)
    schedule, stages, count = rng.choice(SCHEDULES), rng.randrange(1, 5), rng.randrange(1, 9)
    forward, backward = ([rng.random() for _ in range(stages)] for _ in range(2))
    step, whole = walked(schedule, forward, backward, count), sum(forward) + sum(backward)
    for stage in range(stages):
        before = np.array(sum(forward[:stage]) + sum(backward[:stage]))
        work = MicrobatchSeconds(np.array(forward[stage]), np.array(backward[stage]), before, whole)
        assert max(lines(position_of(schedule, stage, stages, count), work)) <= step + 1e-9


def walked(schedule: str, forward: list[float], backward: list[float], count: int) -> float:
    """Return the end of the last stage, when each computes in its order as soon as inputs are ready."""
    from pipefit.lowering import SCHEDULES as KNOWN
    from pipefit.schema.actions import Kind

    stages = len(forward)
    orders = [list(KNOWN[schedule](s, stages, 1, count)) for s in range(stages)]
    ended: dict[tuple[object, int, int], float] = {}
    now, at = [0.0] * stages, [0] * stages
    while any(at[s] < len(orders[s]) for s in range(stages)):
        for s in range(stages):
            while at[s] < len(orders[s]):
                kind, _, m = orders[s][at[s]]
                there = s - 1 if kind is Kind.FORWARD else s + 1
                needs = (kind, there, m) if 0 <= there < stages else (Kind.FORWARD, s, m)
                if kind is Kind.FORWARD and s == 0:
                    ready = 0.0
                elif needs in ended:
                    ready = ended[needs]
                else:
                    break
                now[s] = max(now[s], ready) + (forward[s] if kind is Kind.FORWARD else backward[s])
                ended[kind, s, m] = now[s]
                at[s] += 1
    return max(now)
