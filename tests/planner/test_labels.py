"""The search of long questions, on small ones: its answer is exact, fits, and is near the best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, combinations, pairwise, product
from random import Random

import pytest

from pipefit.errors import UsageError
from pipefit.planner import arrangements, plan
from pipefit.planner.hybrid import Hybrid, Least, fastest
from pipefit.planner.hybrid import fastest_plans as fitting
from pipefit.planner.problem import Question
from pipefit.schema.layer_costs import Work
from pipefit.schema.plan import Plan
from pipefit.schema.training import Training
from pipefit.simulator import Simulation
from pipefit.timing import layer_seconds
from support.microbatch_size_profiles import sized, written
from support.synthetic_models import AMPLE, devices, layer, measurement, plain, profile, skewed, value, work
from support.tight_questions import fastest as fastest_of
from support.tight_questions import keeping_layer, random_case, uneven_case

SCHEDULES = "1f1b", "eager-1f1b", "gpipe", "torchgpipe"
SLICES = 4, 2, 1


def question(seed: int, *, schedule: str | None = None, tight: bool = False) -> Question:
    """Build up to five different layers without shared parameters, on up to five devices, some of other
    sizes.
    """
    rng = Random(seed)
    profile = sized(rng.choice((plain, skewed))(rng, rng.randrange(2, 6)), *SLICES)
    count = rng.randrange(2, 6)
    how = Training(batch_size=4 * 5, microbatches=5, schedule=schedule or rng.choice(SCHEDULES))
    budgets = [AMPLE] * count
    if tight:
        loose = plan(profile, devices(*budgets), how, data=1, planner="time", stages=1)
        assert loose.prediction
        peak = max(loose.prediction.peak_bytes)
        budgets = [int(peak * share) for share in (rng.choice((0.5, 0.7, 0.9)),) * count]
        budgets[0] = int(budgets[0] * rng.choice((1, 1, 1.3)))
    return Question(profile=profile, cluster=devices(*budgets), training=how)


def every_plan(asked: Question) -> Iterator[Plan]:
    """Enumerate all cuts and degrees on the devices in their order."""
    blocks, most, how = asked.blocks, len(asked.cluster.devices), asked.training
    for stages in range(1, min(blocks, most) + 1):
        for cuts, degrees in product(
            combinations(range(1, blocks), stages - 1), product((1, 2, 4), repeat=stages)
        ):
            if sum(degrees) <= most:
                yield written(asked.profile, asked.cluster, how, (0, *cuts, blocks), degrees)


def line(made: Plan) -> float:
    """Return the highest line of a plan's stages with layers' seconds, by the sums of all microbatches."""
    kind, how, passes = made.cluster.devices[0].kind, made.training, list[tuple[float, float, float]]()
    for number, stage in enumerate(made.stages):
        of = layer_seconds(made.profile.at(how.microbatch_size // stage.grid.data), kind, how)
        own = of[stage.start : stage.stop] + (of[-1:] if number == len(made.stages) - 1 else ())
        sums = [sum(times) for times in zip(*own, strict=True)]
        passes.append((sums[0], sums[1], sums[2]))
    count, found, whole = how.microbatches, 0.0, sum(f + b for f, b, _ in passes)
    for number, (f, b, update) in enumerate(passes):
        left = len(passes) - number
        held = {"1f1b": left, "eager-1f1b": 2 * left - 1}.get(how.schedule, count)
        held = min(held, count)
        before = sum(f + b for f, b, _ in passes[:number])
        apart = whole + (count - held) * (f + b) + (held - 1) * max(f, b)
        found = max(found, before + count * (f + b) + update, apart)
    return found


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat all questions as long."""
    monkeypatch.setattr(fitting, "LONG", 0)


def made_of(asked: Question, found: Hybrid) -> Plan:
    degrees = [one.choice.degree.data for one in found.stages]
    return written(asked.profile, asked.cluster, asked.training, found.split.edges, degrees)


@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.usefixtures("long")
def test_a_plan_takes_what_is_said_and_few_are_faster(seed: int) -> None:
    """The answer's seconds are the highest of its lines; the best of all plans is at most a tenth faster by
    them.
    """
    asked = question(seed)
    found = fastest(asked, 8, ("none",))[0]
    sums = max(len(one.choice.take.before) for one in found.stages)  # it knows all states
    assert sums
    best = min(line(made) for made in every_plan(asked))
    made = made_of(asked, found)
    assert found.value >= line(made) * (1 - 1e-9)  # sums of gradients come on top
    if all(stage.grid.data == 1 for stage in made.stages):
        assert found.value == pytest.approx(line(made), rel=1e-9)
    assert line(made) <= 1.1 * best


@pytest.mark.sample(9)
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.usefixtures("long")
def test_what_is_found_fits(seed: int) -> None:
    """If anything fits on devices of two sizes, some too small for a stage, a plan is found."""
    asked = question(seed, tight=True)
    found = fastest(asked, 8, ("none",))
    for one in found:
        edges, how = [asked.edges[block] for block in one.split.edges], asked.training
        stages = [one.split.grid(number) for number in range(len(one.stages))]
        made = written(asked.profile, asked.cluster, how, edges, [len(grid.devices) for grid in stages])
        peaks = Simulation(made).peak_bytes
        firsts = [0, *accumulate(len(grid.devices) for grid in stages)]
        for (first, _), grid in zip(pairwise(firsts), stages, strict=True):
            assert peaks[first] <= min(asked.cluster.budgets[device] for device in grid.devices)
    assert found or not any(map(fits, every_plan(asked)))


def fits(made: Plan) -> bool:
    try:
        peaks = Simulation(made).peak_bytes
    except UsageError:
        return False
    return all(peak <= budget for peak, budget in zip(peaks, made.cluster.budgets, strict=True))


def unlike(asked: Question, rng: Random) -> Question:
    """Let the seconds of a layer grow with its samples as they like: replicas are more or less efficient."""
    own: dict[object, float] = {}

    def work(one: Work, *key: object) -> Work:
        more = own.setdefault(key, rng.uniform(0.0, 3.0))
        return one if one.seconds is None else replace(one, seconds=one.seconds * (1 + more))

    measurements = tuple(
        replace(
            measured,
            layers=tuple(range(len(measured.layers))),
            kinds=tuple(
                replace(
                    cost,
                    forward=work(cost.forward, number, measured.microbatch_size, "forward"),
                    backward=work(cost.backward, number, measured.microbatch_size, "backward"),
                )
                for number, cost in enumerate(measured.costs)
            ),
        )
        for measured in asked.profile.measurements
    )
    return replace(asked, profile=replace(asked.profile, measurements=measurements))


@pytest.mark.sample(8)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(12))
def test_no_plan_takes_less_than_the_least(seed: int, schedule: str) -> None:
    """No plan of any degrees beats the bound, however efficient its replicas are, nor that of all schedules."""
    asked = question(seed, schedule=schedule)
    if seed % 2:
        asked = unlike(asked, Random(seed))
    least, every = Least.of(asked), Least.of(asked, SCHEDULES)
    most = len(asked.cluster.devices)
    assert every.seconds(most) <= least.seconds(most) * (1 + 1e-9)
    for made in every_plan(asked):
        used = sum(len(stage.devices) for stage in made.stages)
        assert least.seconds(most) <= least.seconds(used) * (1 + 1e-6)
        assert least.seconds(used) <= Simulation(made).step_seconds[-1] * (1 + 1e-9)


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(40))
def test_no_plan_beats_the_least_with_what_memory_makes_it_recompute(seed: int) -> None:
    """No plan that recomputes, or moves tensors, beats the bound on devices that cannot hold a microbatch."""
    rng = Random(seed)
    case = (uneven_case if seed % 3 == 0 else random_case)(rng, (*SCHEDULES, "pipedream"), most=2)
    tight = [round(device.memory_bytes * rng.uniform(0.5, 1.0)) for device in case.cluster.devices]
    there = tuple(
        replace(device, memory_bytes=nbytes)
        for device, nbytes in zip(case.cluster.devices, tight, strict=True)
    )
    case = case._replace(cluster=replace(case.cluster, devices=there))
    asked = Question(profile=case.profile, cluster=case.cluster, training=case.training)
    best = fastest_of(case)
    assert best is None or Least.of(asked).seconds(len(there)) <= best * (1 + 1e-9)


@pytest.mark.parametrize(("missing", "seconds"), [(0, 0.0), (8, 0.5), (16, 1.0), (20, 2.0), (28, 4.0)])
def test_the_cheapest_bytes_that_do_not_fit_are_recomputed(missing: int, seconds: float) -> None:
    """The bytes that exceed the memory are recomputed: half of the 32 at 1/16 s a byte, then half at 1/4 s."""
    layers = [keeping_layer(1, 4, 0, seconds) for seconds in (0.25, 1.0) * 4]
    last = layer((value(1, requires_grad=False),), (value(4),), seconds=0.0)
    asked = Question(
        profile=profile(measurement([*layers, layer((value(1),), (value(1),), seconds=0.0)], last)),
        cluster=devices(8 * 4 - missing),
        training=Training(batch_size=1, microbatches=1, schedule="1f1b"),
    )
    assert Least.of(asked).again == pytest.approx(seconds)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("every", [2, 6])
def test_stages_that_recompute_everything_take_no_less(schedule: str, every: int) -> None:
    """The bound with all forwards recomputed holds for equal stages that do, though their first pass does not."""
    count = 4
    asked = Question(
        profile=profile(
            measurement([keeping_layer(1, 4, 0, 1.0)] * count, layer((value(1),), (value(4),), seconds=0.0))
        ),
        cluster=devices(*[AMPLE] * count),
        training=Training(batch_size=every, microbatches=every, schedule=schedule),
    )
    edges, least = tuple(range(count + 1)), Least.of(asked)
    made = written(asked.profile, asked.cluster, asked.training, edges, [1] * count, "always")
    plain = written(asked.profile, asked.cluster, asked.training, edges, [1] * count)
    took, without = (Simulation(one).step_seconds[-1] for one in (made, plain))
    again = least.work * (1 - least.backward)
    bound = replace(least, again=again).seconds(count)
    assert least.seconds(count) <= bound <= took * (1 + 1e-9)
    assert without < took


def test_a_slow_device_may_recompute_as_fast_as_others() -> None:
    """A device with half the bandwidth is slower at backwards, not at forwards, which recomputation repeats."""
    one = replace(
        keeping_layer(1, 4, 0, 1.0), forward=work(flops=4), backward=work(moved_bytes=8), update=work()
    )
    case = uneven_case(Random(0), ("1f1b",))
    rates = [
        replace(device.kind, name=f"bandwidth {rate}", flops={"float32": 1.0}, memory_bandwidth=rate)
        for device, rate in zip(case.cluster.devices, (2.0, 1.0), strict=True)
    ]
    there = [replace(one, kind=kind) for one, kind in zip(case.cluster.devices, rates, strict=True)]
    asked = Question(
        profile=profile(measurement([one] * 4, layer((value(1),), (value(4),), seconds=0.0))),
        cluster=replace(case.cluster, devices=tuple(there)),
        training=case.training,
    )
    assert Least.of(asked).speeds.tolist() == [1.0, 1.0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("schedule", [*SCHEDULES, "pipedream"])
def test_a_block_without_backward_leaves_a_bound(schedule: str) -> None:
    """A frozen block, whose backward takes no time, divides nothing by zero."""
    one = layer((value(1),), (value(1),), seconds=1.0)
    asked = Question(
        profile=profile(
            measurement([replace(one, backward=work(0.0)), *[one] * 7], layer((value(1),), (value(4),)))
        ),
        cluster=devices(*[AMPLE] * 8),
        training=Training(batch_size=4, microbatches=4, schedule=schedule),
    )
    made = written(asked.profile, asked.cluster, asked.training, tuple(range(9)), [1] * 8)
    assert 0.0 < Least.of(asked).seconds(8) <= Simulation(made).step_seconds[-1] * (1 + 1e-9)


@pytest.mark.parametrize("schedule", [*SCHEDULES, "pipedream"])
def test_equal_work_waits_for_the_first_microbatch(schedule: str) -> None:
    """Equal layers on a device each take at least 1 / (1 - (1 - 1 / M)^G) of their work, or are always busy."""
    every, count = 6, 4
    asked = Question(
        profile=profile(
            measurement(
                [layer((value(1),), (value(1),), seconds=1.0)] * count, layer((value(1),), (value(4),))
            )
        ),
        cluster=devices(*[AMPLE] * count),
        training=Training(batch_size=every, microbatches=every, schedule=schedule),
    )
    edges, step = tuple(range(count + 1)), Least.of(asked).seconds(count)
    made = written(asked.profile, asked.cluster, asked.training, edges, [1] * count)
    took, work = Simulation(made).step_seconds[-1], Least.of(asked).work
    if schedule == "pipedream":
        assert step == pytest.approx(every * work / count)
    else:
        assert work / (1 - (1 - 1 / every) ** count) <= step * (1 + 1e-9)
        assert 0.6 * took <= step <= took
    assert Least.of(asked).seconds(1) == pytest.approx(every * work)


@pytest.mark.gallery
def test_a_plan_of_a_long_question_is_near_that_of_the_other_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """For eight different layers on four devices the plan fits, is within its bound, and hardly slower."""
    profile, on = sized(plain(Random(7), 8), *SLICES), devices(*[AMPLE] * 4)
    other = plan(profile, on, batch_size=16)
    monkeypatch.setattr(fitting, "LONG", 0)
    monkeypatch.setattr(arrangements, "_COSTLY", 0)
    made = plan(profile, on, batch_size=16)
    assert made.prediction and made.provenance and made.provenance.bound and other.prediction
    assert Simulation(made).step_seconds[-1] == made.prediction.step_seconds == made.provenance.value
    assert made.provenance.bound <= min(made.prediction.step_seconds, other.prediction.step_seconds)
    assert made.prediction.step_seconds <= 1.02 * other.prediction.step_seconds
