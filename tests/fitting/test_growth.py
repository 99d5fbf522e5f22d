"""Answers of the growth search, against plans of every value, the exhaustive planner, and independent dry
runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from pipefit.capture import Task
from pipefit.errors import InfeasibleError, UsageError
from pipefit.largest import attempts, search
from pipefit.largest.attempts import Look
from pipefit.largest.growth import (
    Demand,
    Growth,
    batch,
    devices,
    memory,
    setting,
    traced_profiles,
    with_devices,
    with_memory,
)
from pipefit.largest.overview import fit as overview
from pipefit.largest.search import find
from pipefit.lowering.passes.recomputation import RECOMPUTE
from pipefit.models import build
from pipefit.planner import Answer, PlanOptions, plan, plans
from pipefit.profiler.on_demand import OnDemand
from pipefit.runtime import certify
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import State, What
from pipefit.schema.devices import Member, MemberKind
from pipefit.schema.fit import Attempt, Fit
from pipefit.schema.trace import Trace
from pipefit.schema.training import Training
from support.every_plan import every_plan, simulated
from support.gallery_samples import sampled
from support.known_profiles import profile
from support.small_tasks import task_of

KIB = 1 << 10
ALONE: dict[str, int] = {"data": 1, "tensor": 1}  # one device for each stage
PAIR = Demand(
    cluster=Cluster.emulated((2, 40 * KIB)),
    options=PlanOptions(microbatch_size=2, microbatches=2, planner="exact", **ALONE),
)


def asking(demand: Demand, **options: object) -> Demand:
    """Return the demand with other options of its plans."""
    return replace(demand, options=replace(demand.options, **options))


def wide(width: int) -> Task:
    """Build a perceptron of five layers with hidden layers this wide; an odd width is refused."""
    if width % 2:
        raise UsageError(f"width={width} is odd: try {width + 1}")
    return task_of(
        lambda: [nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)]
    )


def deep(layers: int) -> Task:
    """Build a chain of equal layers."""
    return task_of(lambda: [nn.Linear(8, 8) for _ in range(layers)], outputs=8)


class Swell(nn.Module):
    """A layer that takes `times` the bytes of its input, without parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        return x.repeat(1, self.width).exp().view(len(x), self.width, -1).mean(1)


def swelling(width: int) -> Task:
    """Build a chain whose middle is most of its memory."""
    return task_of(lambda: [nn.Linear(8, 8), Swell(width), nn.Linear(8, 4)])


def trained(layers: int) -> Task:
    """Return the task with optimizer state."""
    return task_of(lambda: [nn.Linear(8, 8) for _ in range(layers)], outputs=8, optimizer=torch.optim.AdamW)


def check_certified(fit: Fit, growth: Growth) -> None:
    """Check that the answer fits in a dry run, and the next value does not; the search runs it if it is near."""
    assert fit.beyond is not None
    for attempt, fits in ((fit.best, True), (fit.beyond, False)):
        trace = certify(growth.task(attempt.value), attempt.plan)
        if not fits and attempt.need_bytes > 1.1 * attempt.budget_bytes:
            assert attempt.certified_bytes is None
        else:
            assert attempt.certified_bytes == trace.peak_bytes
        assert all(d.peak_bytes <= d.budget_bytes for d in trace.devices) == fits == attempt.fits


@pytest.mark.gallery
def test_the_neighbours_are_profiled_once() -> None:
    """Neighbours are tried by fast plans and by full ones, with the same profiles."""
    demand, made = (
        Demand(
            cluster=Cluster.emulated((2, 12 * KIB)),
            options=PlanOptions(microbatch_size=2, microbatches=2, **ALONE),
        ),
        [],
    )
    growth = setting("layers", trained, demand, range(1, 1000))
    fit = find(
        replace(growth, profiles=lambda value: made.append(value) or growth.profiles(value)), certify=False
    )
    assert fit.beyond is not None
    assert [made.count(attempt.value) for attempt in (fit.best, fit.beyond)] == [1, 1]


def test_progress_says_what_is_tried_and_what_fits() -> None:
    """Each value is traced and then planned; from the first that fits on, the best so far is named."""
    said = list[str]()
    find(
        setting("layers", deep, PAIR, range(1, 9)),
        certify=False,
        progress=lambda done, total, what: said.append(what),
    )
    assert said[:2] == ["tracing layers=1", "planning layers=1"]
    assert "tracing layers=2; layers=1 fits" in said
    assert all("fits" in line for line in said[said.index("tracing layers=2; layers=1 fits") :])


def test_the_largest_setting_is_that_of_trying_all() -> None:
    """Widths up to the answer have plans that fit, the next one has none; odd ones are skipped."""
    growth = setting("width", wide, PAIR, range(1, 1000))
    fit = find(growth)
    check_certified(fit, growth)
    peaks = {
        width: max(
            plan(
                profile(wide(width), microbatch_size=2),
                PAIR.cluster,
                batch_size=4,
                objective="peak",
                allow_infeasible=True,
            ).prediction.peak_bytes
        )
        for width in range(fit.best.value - 4, fit.best.value + 7, 2)
    }
    assert fit.best.value == max(width for width, peak in peaks.items() if peak <= 40 * KIB)
    assert fit.beyond is not None and fit.beyond.value == fit.best.value + 2
    assert fit.refused[1] == "width=1 is odd: try 2"
    module = wide(fit.best.value).build()
    assert fit.best.parameters == sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.gallery
def test_joint_makes_larger_models_fit_than_splits_alone() -> None:
    """`joint` is the default planner; its answer is certified with all recomputation, offload and host
    updates.
    """
    demand = Demand(
        cluster=Cluster.emulated((2, 7 * KIB)),
        options=PlanOptions(microbatch_size=2, microbatches=2, **ALONE),
    )
    ours, alone = (
        setting("layers", trained, one, range(2, 60)) for one in (demand, asking(demand, planner="exact"))
    )
    found, split = find(ours), find(alone, certify=False)
    check_certified(found, ours)
    assert found.best.value > split.best.value and found.best.plan.decisions
    assert not any(
        isinstance(d.subject, State) and d.subject.kind != "optimizer" for d in found.best.plan.decisions
    )


def test_growth_needs_no_more_devices_than_the_overview_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters and gradients are more than a device's memory: one fits with them at its host, in the overview,
    and so in growth.
    """
    for name, value in (("_SIZES", (1,)), ("_PRECISIONS", ())):
        monkeypatch.setattr(f"pipefit.largest.overview.{name}", value)
    pair = Cluster.emulated((2, 4 * KIB))
    (alone, *_) = overview(trained(12), pair, microbatches=2).reaches
    assert 4 * KIB < 8 * 12 * (8 * 8 + 8)
    assert alone.devices == 1 and alone.largest[1] is None and alone.largest[2] is not None
    demand = Demand(cluster=pair, options=PlanOptions(microbatches=2, **ALONE))
    fewest = find(devices(trained(12), demand, range(1, 9)), certify=False)
    assert fewest.best.value == 1
    moved = {d.subject.kind for d in fewest.best.plan.decisions if isinstance(d.subject, State)}
    assert moved == {"optimizer", "parameters", "gradients"}


@pytest.mark.gallery
def test_alternatives_are_those_of_the_answer_alone() -> None:
    """Alternatives are searched once, for any number of tried values, and are those of the answer's plan."""
    demand = Demand(cluster=Cluster.emulated((2, 12 * KIB)), options=PlanOptions(batch_size=4, **ALONE))
    growth = setting("layers", trained, demand, range(2, 20))
    with mock.patch.object(plans, "alternatives", wraps=plans.alternatives) as looked:
        found = find(growth, certify=False)
    assert len(found.tried) > 2 and looked.call_count == 1
    again = growth.plan(growth.profiles(found.best.value), found.best.value, ()).complete()
    assert found.best.plan.alternatives == again.alternatives != ()
    assert [one.plan.alternatives for one in found.tried if one.value != found.best.value] == [()] * (
        len(found.tried) - 1
    )


LEAN = Demand(
    cluster=Cluster.emulated((2, 7 * KIB)), options=PlanOptions(microbatch_size=2, microbatches=2, **ALONE)
)


@pytest.mark.parametrize(
    "growth",
    [
        pytest.param(setting("layers", trained, LEAN, range(2, 60)), marks=pytest.mark.gallery),
        pytest.param(
            batch(
                trained(6),
                asking(LEAN, microbatch_size=None),
                range(1, 1 << 20),
            ),
            marks=pytest.mark.gallery,
        ),
        memory(trained(6), LEAN, range(256, 1 << 20, 256)),
    ],
    ids=lambda growth: growth.name,
)
def test_plans_that_are_soon_made_spare_searches(growth: Growth) -> None:
    """Few values are searched in full. The answer is at least that of searching every value, which may end
    early; it is at or beyond the edge of the fast plans, and all fast plans fit in a dry run.
    """
    searched = list[int]()

    def counting(known: OnDemand, value: int, ranks: Sequence[int]) -> Answer:
        searched.append(value)
        return growth.plan(known, value, ranks)

    found = find(replace(growth, plan=counting), certify=False)
    few, sense = len(searched), 1 if growth.sense == "largest" else -1
    every = find(replace(growth, plan=counting, searches=False), certify=False)
    assert sense * found.best.value >= sense * every.best.value
    assert few < len(searched) - few and found.beyond and found.beyond.value in searched[:few]
    soon = [one for one in found.tried if one.value not in searched[:few]]
    assert soon and max(sense * one.value for one in soon) <= sense * found.best.value
    for one in (found.best, *soon):
        assert max(certify(growth.task(one.value), one.plan).peak_bytes) <= min(one.plan.cluster.budgets)


def test_what_is_soon_found_is_the_answer_where_a_search_finds_nothing() -> None:
    """If a search ends at its limit of work, the fast plan's value fits, and that plan is returned. Then the
    next value is not searched: it has the leanest of its fast plans.
    """
    growth, searched = setting("layers", trained, LEAN, range(2, 60)), list[int]()
    lacking = Cluster.emulated((2, 64))

    def in_vain(known: OnDemand, value: int, ranks: Sequence[int]) -> Answer:
        searched.append(value)
        return asking(LEAN, planner="exact").plan(known, lacking)

    found = find(replace(growth, plan=in_vain), certify=False)
    again = growth.soon(growth.profiles(found.best.value), found.best.value, {}, False).fitting
    assert again is not None
    assert (found.best.plan.stages, found.best.plan.decisions) == (again.plan.stages, again.plan.decisions)
    beyond = growth.soon(growth.profiles(found.best.value + 1), found.best.value + 1, {}, False)
    assert beyond.fitting is None and beyond.best is not None and found.beyond is not None
    assert found.beyond.plan.decisions == beyond.best.plan.decisions
    assert searched == [found.best.value]


def test_no_search_follows_fast_plans_whose_programs_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that compares hardly any plans is left out: the answer and the next value have fast plans, and
    dry runs confirm both. That of the last value that fits begins before the next value is tried on ranks.
    """
    growth, events = setting("layers", trained, LEAN, range(2, 60)), list[str]()

    def soon(known: OnDemand, value: int, looks: Mapping[int, Look], many: bool) -> Look:
        events.extend(["ranks"] * many)
        return growth.soon(known, value, looks, many)

    def beside(target: str, *works: Callable[[], object]) -> tuple[Callable[[], object], ...]:
        events.append("verification")
        return works

    monkeypatch.setattr(attempts, "_LONG", 0)
    monkeypatch.setattr(search, "profiled_beside", beside)
    check_certified(find(replace(growth, plan=None, soon=soon)), growth)  # type: ignore[arg-type]
    assert events == ["verification", "ranks"]


def test_ways_of_a_profile_are_traced_together() -> None:
    """One profile has a microbatch size whole and on ranks, with sequence parallelism and without."""
    asked, ways = list[object](), [(1, 1, False), (1, 8, False), (1, 8, True), (1, 4, False), (2, 1, False)]

    def known(size: int, ranks: Sequence[int], *, sequences: bool = False) -> None:
        asked.append((size, tuple(ranks), sequences))

    measured = [SimpleNamespace(microbatch_size=a, tensor=b, sequences=c) for a, b, c in ways]
    for size in (1, 2):
        list(traced_profiles(known, size, measured))  # type: ignore[arg-type]
    assert asked == [(1, (8,), True), (1, (4,), False), (2, (), False)]


@pytest.mark.gallery
def test_fast_plans_divide_layers_between_ranks_at_the_edge_of_those_that_do_not() -> None:
    """A layer that is too wide for a device fits two: a fast plan finds that, and searches start there."""
    demand = Demand(
        cluster=Cluster.emulated((2, 10 * KIB)), options=PlanOptions(microbatch_size=1, microbatches=2)
    )
    growth, searched = setting("width", wide, demand, range(4, 100, 4)), list[tuple[int, Sequence[int]]]()

    def noted(known: OnDemand, value: int, ranks: Sequence[int]) -> Answer:
        searched.append((value, ranks))
        return growth.plan(known, value, ranks)

    said = list[str]()
    found = find(replace(growth, plan=noted), progress=lambda done, total, what: said.append(what))
    check_certified(found, growth)
    lines = [re.search(r"width=(\d+) fits; no plan found for width=(\d+)", line) for line in said]
    assert all(int(line[1]) < int(line[2]) for line in lines if line)
    value, ranks = searched[0]
    profiles = growth.profiles(value)
    assert ranks == (2,) and max(stage.grid.tensor for stage in found.best.plan.stages) == 2
    assert growth.soon(profiles, value, {}, False).fitting is None
    assert growth.soon(profiles, value, {}, True).fitting is not None


def test_hosts_that_only_hold_optimizer_state_fit_more_than_hosts_that_update() -> None:
    """A host that updates a layer also needs its gradient and its parameters, 16 bytes a number or more; one
    that holds AdamW's state needs 8. So of a host with 12 bytes a number, plans that are made fast use the
    latter, and of a smaller one, for as many layers as it has room for.
    """
    numbers, roomy = 6 * (8 * 8 + 8), Cluster.emulated((2, 3900))
    for each, layers in ((12, 6), (6, 4)):
        hosts = tuple(replace(host, memory_bytes=each * numbers) for host in roomy.hosts)
        demand = replace(LEAN, cluster=replace(roomy, hosts=hosts))
        look = setting("layers", trained, demand, range(1, 60)).soon(
            demand.profiles(trained(6)), 6, {}, False
        )
        assert look.fitting is not None
        moved = [one for one in look.fitting.plan.decisions if isinstance(one.subject, State)]
        assert [one.what for one in moved] == [What.OFFLOAD] * layers


@pytest.mark.parametrize("planner", sampled(["exact", "joint"], often=["exact"]))
def test_no_plan_on_any_grid_makes_a_larger_model_fit(planner: str) -> None:
    """No choice of cuts, replicas, divided state and recomputed stages fits the next value; the certified
    answer beats one device for each stage. `joint` has more techniques.
    """
    demand = asking(PAIR, microbatch_size=4, planner=planner, data=None)
    values = range(20, 2000, 20)
    found, alone = (find(setting("width", swelling, one, values)) for one in (demand, asking(demand, data=1)))
    check_certified(found, setting("width", swelling, demand, values))
    assert found.best.value > alone.best.value
    assert found.beyond is not None
    costs, how = profile(swelling(found.beyond.value), microbatch_size=[4, 2]), found.best.plan.training
    ways = RECOMPUTE if planner == "joint" else RECOMPUTE[:1]
    every = (one for again in ways for one in simulated(every_plan(costs, PAIR.cluster, how, again)))
    assert min(max(one.peak_bytes) for one in every) > 40 * KIB


def test_the_least_memory_is_that_of_all_sizes_of_microbatches() -> None:
    """With only a batch given, the least memory is exact to the byte: a single microbatch accumulates no
    gradients.
    """
    demand = Demand(cluster=PAIR.cluster, options=PlanOptions(batch_size=4, planner="exact", tensor=1))
    found = find(memory(trained(3), demand, range(1, 1 << 20)), certify=False)
    costs = profile(trained(3), microbatch_size=[1, 2, 4])
    every = (
        max(one.peak_bytes)
        for count in (1, 2, 4)
        for one in simulated(every_plan(costs, PAIR.cluster, Training(batch_size=4, microbatches=count)))
    )
    assert found.best.value == min(every)
    assert found.best.plan.training.microbatches == 1


@pytest.mark.gallery
def test_shards_make_a_wider_model_fit() -> None:
    """Microbatches of one sample rule replicas out; without shards a device holds at least a whole layer."""
    demand = Demand(
        cluster=Cluster.emulated((2, 10 * KIB)),
        options=PlanOptions(microbatch_size=1, microbatches=2, planner="exact"),
    )
    growth = setting("width", wide, demand, range(4, 100, 4))
    found = find(growth)
    whole = find(setting("width", wide, asking(demand, tensor=1), range(4, 100, 4)), certify=False)
    check_certified(found, growth)
    assert found.best.value > whole.best.value
    assert max(stage.grid.tensor for stage in found.best.plan.stages) == 2
    assert found.beyond is not None
    costs = profile(wide(found.beyond.value), microbatch_size=1, tensor=2)
    least = plan(costs, demand.cluster, batch_size=2, objective="peak", allow_infeasible=True)
    assert least.prediction and max(least.prediction.peak_bytes) > demand.cluster.budgets[0]


@pytest.mark.gallery
def test_less_memory_is_enough_with_sequence_parallelism() -> None:
    """Sequence parallelism is tried when shards alone do not fit, with chosen or requested degree, and the
    least memory is the lowest peak of all plans with it.
    """
    task = build(
        "gpt", layers=1, hidden=16, heads=2, vocabulary=16, sequence=64, dropout=0.0, optimizer="sgd"
    )
    costs = profile(task, microbatch_size=1, tensor=2, sequences=True)
    cluster = Cluster.emulated((2, 1 << 30))
    asked = Demand(cluster=cluster, options=PlanOptions(microbatch_size=1, microbatches=2, planner="exact"))
    peaks = {
        along: max(
            plan(costs, cluster, batch_size=2, objective="peak", sequences=along).prediction.peak_bytes
        )
        for along in (False, None)
    }
    assert peaks[None] < peaks[False]
    for demand in (asked, asking(asked, tensor=2)):
        found = find(memory(task, demand, range(1, 1 << 20)), certify=False)
        assert any(stage.grid.sequences for stage in found.best.plan.stages)
        assert found.best.value == peaks[None]


def test_the_device_that_limits_may_be_any_replica() -> None:
    """Replicas that divide state hold different layers of it: an excess on the second is a refusal."""
    costs = profile(trained(3), microbatch_size=[2, 1])
    made = plan(costs, PAIR.cluster, batch_size=4, microbatch_size=2, stages=1, data=2, shard="optimizer")
    full = Attempt(value=1, plan=made, certified_bytes=(10 * KIB, 41 * KIB))
    assert (full.device, full.stage, full.over_bytes, full.fits) == (1, 0, KIB, False)


def test_the_batch_is_said_in_one_way() -> None:
    """The batch is given by samples, by microbatches, or by neither; a growing batch starts without a number
    of samples.
    """
    said: list[tuple[dict[str, int], tuple[int | None, int | None, int | None]]] = [
        ({}, (8, None, None)),
        ({"batch_size": 6}, (6, None, None)),
        ({"microbatches": 3}, (None, 1, 3)),
        ({"microbatch_size": 3}, (None, 3, 8)),
    ]
    for given, numbers in said:
        asked = Demand(cluster=PAIR.cluster, options=PlanOptions(**given)).asked()
        assert (asked.batch_size, asked.microbatch_size, asked.microbatches) == numbers
    with pytest.raises(UsageError, match="not from batch_size: give its number of microbatches"):
        batch(deep(2), Demand(cluster=PAIR.cluster, options=PlanOptions(batch_size=6)), range(1, 9))


def test_a_host_that_lacks_memory_does_not_fit() -> None:
    """The answer reports the host's shortage, though every device has room; such a plan cannot run dry."""
    roomy = Cluster.emulated((1, 1500))
    hosts = tuple(replace(host, memory_bytes=1500) for host in roomy.hosts)
    with pytest.raises(
        InfeasibleError, match=r"for layers=1: in the leanest plan tried, host0 has 1\.46 KiB"
    ):
        find(setting("layers", trained, replace(LEAN, cluster=replace(roomy, hosts=hosts)), range(1, 20)))


@pytest.mark.gallery
def test_the_largest_microbatch() -> None:
    """Samples grow, the number of microbatches is constant, and the edge is certified."""
    growth = batch(wide(16), PAIR, range(1, 1 << 20))
    fit = find(growth)
    check_certified(fit, growth)
    assert fit.beyond is not None and fit.beyond.value == fit.best.value + 1
    assert fit.best.plan.training.microbatches == 2
    assert fit.best.plan.training.microbatch_size == fit.best.value


def test_the_step_is_kept() -> None:
    """With --step 3 from 3 only multiples of 3 are tried."""
    small = replace(PAIR, cluster=Cluster.emulated((2, 8 * KIB)))
    fit = find(setting("layers", deep, small, range(3, 1000, 3)))
    assert fit.beyond is not None and fit.beyond.value == fit.best.value + 3
    assert {attempt.value % 3 for attempt in fit.tried} == {0}


def test_the_fewest_devices() -> None:
    """By the exhaustive planner no split over fewer devices fits; the training is the same for any number."""
    task, demand = (
        deep(9),
        Demand(
            cluster=Cluster.emulated((2, 4 * KIB)),
            options=PlanOptions(microbatches=2, planner="exact", **ALONE),
        ),
    )
    growth = devices(task, demand, range(1, 1000))
    fit = find(growth)
    check_certified(fit, growth)
    costs = profile(task, microbatch_size=1)
    for count in range(1, 10):
        cluster = Cluster.emulated((count, 4 * KIB))
        question = partial(plan, costs, cluster, batch_size=2, planner="exhaustive", allow_infeasible=True)
        assert (max(question().prediction.peak_bytes) <= 4 * KIB) == (count >= fit.best.value)


def test_the_least_memory() -> None:
    """The least memory is the peak of the fullest device under the best split, to the byte."""
    growth = memory(wide(16), PAIR, range(1, 1 << 40))
    fit = find(growth)
    check_certified(fit, growth)
    best = plan(
        profile(wide(16), microbatch_size=2),
        PAIR.cluster,
        batch_size=4,
        objective="peak",
        allow_infeasible=True,
    )
    assert best.prediction is not None
    assert fit.best.value == max(best.prediction.peak_bytes)


@pytest.mark.gallery
def test_recomputing_fits_more() -> None:
    """Under GPipe with many microbatches a model that recomputes can be wider."""
    found = [
        find(
            setting(
                "width",
                wide,
                Demand(
                    cluster=PAIR.cluster,
                    options=PlanOptions(
                        microbatch_size=4,
                        microbatches=8,
                        schedule="gpipe",
                        recompute=recompute,
                        planner="exact",
                        **ALONE,
                    ),
                ),
                range(2, 400, 2),
            ),
            certify=False,
        )
        for recompute in ("never", "stages")
    ]
    assert found[0].best.value < found[1].best.value
    assert [fit.best.certified_bytes for fit in found] == [None, None]


def test_where_nothing_fits_the_refusal_has_device_stage_and_bytes() -> None:
    """If the first value is too large, or the last device too few, the refusal has device,
    stage and bytes.
    """
    small = Demand(cluster=Cluster.emulated((2, 128)), options=PlanOptions(microbatches=2, planner="exact"))
    words = r"^no plan was found for width=2: in the leanest plan tried, device \d needs"
    with pytest.raises(InfeasibleError, match=words + r".* over its 128 B\. Tried: splits"):
        find(setting("width", wide, small, range(1, 100)))
    few = r"no plan was found for devices=3: .*\. Not tried: more than 3 devices, because .* has 3 layers\. More can"
    with pytest.raises(InfeasibleError, match=few):
        find(devices(deep(3), small, range(1, 100)))


@pytest.mark.parametrize(
    ("degrees", "share", "counted"), [({}, 4, 1), ({"data": 4}, 4, 2), ({"tensor": 2}, 4, 1), (ALONE, 1, 2)]
)
def test_a_proof_counts_what_a_layer_alone_needs(degrees: dict[str, int], share: int, counted: int) -> None:
    """`Swell` makes two tensors of 64 x 8 floats for a sample and saves one, which alone counts where ranks may
    divide it: twice what devices hold of that does not fit, and of a quarter of it nothing is proven.
    """
    demand = Demand(
        cluster=Cluster.emulated((4, 256 * KIB)),
        options=PlanOptions(microbatches=2, planner="exact", **degrees),
    )
    growth, most = (
        batch(swelling(64), demand, range(4, 1 << 20, 4)),
        share * 256 * KIB // (counted * 64 * 8 * 4),
    )
    proof = growth.impossible(growth.profiles(2 * most), 2 * most)
    assert proof.startswith("layer 1 needs at least ") and proof.endswith("but a device has 256.00 KiB")
    assert growth.impossible(growth.profiles(most // 4), most // 4) == ""


def test_the_end_of_the_values_is_no_failure() -> None:
    """If the last allowed value still fits it is the answer, without a next value; likewise with the first
    device.
    """
    fit = find(setting("width", wide, PAIR, range(2, 9)), certify=False)
    assert (fit.best.value, fit.beyond) == (8, None)
    fit = find(devices(wide(2), PAIR, range(1, 100)), certify=False)
    assert (fit.best.value, fit.beyond) == (1, None)


def test_mistakes_are_told_and_not_searched_around() -> None:
    """An unknown schedule, unlike devices and a model that refuses everything are usage errors."""
    with pytest.raises(UsageError, match="schedule"):
        find(
            setting(
                "width",
                wide,
                Demand(cluster=PAIR.cluster, options=PlanOptions(schedule="zigzag")),
                range(2, 100),
            )
        )
    mixed = Demand(cluster=Cluster.emulated((1, 4 * KIB), (1, 8 * KIB)))
    with pytest.raises(UsageError, match=r"devices of .* differ"):
        devices(deep(3), mixed, range(1, 100))
    with pytest.raises(UsageError, match="3 layers, too few for 7 devices: start with 6 or fewer"):
        devices(deep(3), PAIR, range(7, 100))
    with pytest.raises(UsageError, match="width=1 is odd"):
        find(setting("width", wide, PAIR, range(1, 100, 2)))


@pytest.mark.gallery
def test_a_dry_run_is_believed_before_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """If dry runs were a quarter higher than plans, the answer would be smaller and still fit
    in its dry run.
    """

    class Heavier(Trace):
        @property
        def peak_bytes(self) -> tuple[int, ...]:
            return tuple(device.peak_bytes * 5 // 4 for device in self.devices)

    def heavier(task: Task, planned: object, **others: object) -> Trace:
        trace = certify(task, planned)
        return Heavier(
            source="dry run", steps=trace.steps, devices=trace.devices, step_seconds=trace.step_seconds
        )

    growth = setting("width", wide, PAIR, range(2, 1000, 2))
    honest = find(growth, certify=False)
    monkeypatch.setattr(search, "dry_run", heavier)
    fit = find(growth)
    assert fit.best.value < honest.best.value
    assert fit.best.fits and fit.best.certified_bytes is not None
    assert fit.beyond is not None and not fit.beyond.fits and fit.beyond.value == fit.best.value + 2


def test_a_shared_parameter_counts_once() -> None:
    """A layer that is used twice has one layer's parameters."""

    def twice(width: int) -> Task:
        def layers() -> list[nn.Module]:
            shared = nn.Linear(8, 8)
            return [shared, nn.Linear(8, width), nn.Linear(width, 8), shared]

        return task_of(layers, outputs=8)

    fit = find(setting("width", twice, PAIR, range(4, 5)), certify=False)
    assert fit.best.parameters == 8 * 8 + 8 + 4 * 8 + 4 + 8 * 4 + 8


@pytest.mark.parametrize("count", [1, 4, 5])
def test_a_disk_stays_where_devices_are_added(count: int) -> None:
    """The disk keeps its link, and its rate differs from that between devices."""
    whole = Cluster.preset("4x-rtx-4090")
    some, disk = with_devices(whole, count), Member(MemberKind.DISK, 0)
    assert some.route(Member.device(0), disk)[:2] == whole.route(Member.device(0), disk)[:2]
    rates = [some.route(Member.device(0), Member.device(n)).bytes_per_second for n in range(1, count)]
    assert rates == [pytest.approx(26.1e9, rel=0.01)] * (count - 1)


WRITTEN = Cluster.parse(
    """
    name = "four slow cores"
    backend = "emulated"
    [kinds.core]
    flops = { float32 = 1e9 }
    memory_bandwidth = "1GB/s"
    [[hosts]]
    memory = "64MiB"
    [[devices]]
    count = 4
    kind = "core"
    memory = "256KiB"
    reserve = "16KiB"
    [[links]]
    members = ["device0", "device1", "device2", "device3", "host0"]
    bytes_per_second = "100MB/s"
    """
)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_emulated_devices_that_are_written_by_hand_stay_what_they_are(count: int) -> None:
    """Other numbers of devices, or other memory, keep the kind, reserve, host and rates of their file."""
    for some in (with_devices(WRITTEN, count), with_memory(WRITTEN, 1 << 20)):
        assert all(device.kind == WRITTEN.devices[0].kind for device in some.devices)
        assert {device.reserve_bytes for device in some.devices} == {16 * KIB}
        assert some.hosts == WRITTEN.hosts
        assert some.route(Member.device(0), Member(MemberKind.HOST, 0)).bytes_per_second == 100e6
    assert len(with_devices(WRITTEN, count).devices) == count
    assert with_memory(WRITTEN, 1 << 20).budgets == ((1 << 20) - 16 * KIB,) * 4


def test_the_least_memory_leaves_the_reserve_of_its_devices() -> None:
    """The least memory includes the reserve, and no smaller memory is tried; without a larger one, the
    reserve is named.
    """

    def least(reserve: int) -> int:
        demand = Demand(
            cluster=WRITTEN.reserving([reserve] * 4),
            options=PlanOptions(microbatches=2, planner="exact", **ALONE),
        )
        return find(memory(wide(16), demand, range(1, 1 << 40)), certify=False).best.value

    assert least(16 * KIB) == least(0) + 16 * KIB
    with pytest.raises(UsageError, match=r"reserve 16.00 KiB.*1.00 KiB.*larger memories"):
        memory(
            wide(16),
            Demand(cluster=WRITTEN, options=PlanOptions(planner="exact", **ALONE)),
            range(1, KIB + 1),
        )


def test_emulated_devices_that_are_named_have_a_name_however_many_they_are() -> None:
    """A plan of any number of named emulated devices can be requested again by that name."""
    assert with_devices(PAIR.cluster, 3) == Cluster.emulated((3, 40 * KIB))
    assert with_memory(PAIR.cluster, 1 << 20) == Cluster.emulated((2, 1 << 20))


@pytest.mark.parametrize("name", ["dgx1-v100", "4x-titan-rtx", "emulated"])
@pytest.mark.parametrize("count", [1, 3, 11])
def test_any_number_of_devices_is_a_cluster(name: str, count: int) -> None:
    """All devices are of the existing kind, any two are linked, and existing links stay."""
    whole = PAIR.cluster if name == "emulated" else Cluster.preset(name)
    some = with_devices(whole, count)
    assert [(device.kind, device.memory_bytes) for device in some.devices] == [
        (whole.devices[0].kind, whole.devices[0].memory_bytes)
    ] * count
    names = [Member.device(number) for number in range(count)]
    for a in names:
        for b in names:
            assert a == b or some.route(a, b).bytes_per_second > 0
    if 1 < count <= len(whole.devices):
        assert (
            some.route(Member.device(0), Member.device(1)).bytes_per_second
            == whole.route(Member.device(0), Member.device(1)).bytes_per_second
        )


def uneven(layers: int) -> Task:
    """Build a chain of equal layers with a large eighth one; the ninth shares its weights with the first."""

    def chain() -> list[nn.Module]:
        made: list[nn.Module] = [nn.Linear(8, 8) for _ in range(layers)]
        made[7:8] = [nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8)) for _ in made[7:8]]
        return made

    return task_of(chain, outputs=8)


@pytest.mark.parametrize(
    ("make", "planner"),
    [
        pytest.param(deep, "exact", marks=pytest.mark.gallery),
        (uneven, "exact"),
        pytest.param(trained, "joint", marks=pytest.mark.gallery),
    ],
)
def test_the_largest_number_of_layers_is_that_of_tracing_each(
    make: Callable[[int], Task], planner: str
) -> None:
    """Profiles by repetition do not change the answer, and its plan has the profile of a trace, also for a
    model that only seems to repeat.
    """
    demand = Demand(
        cluster=Cluster.emulated((2, 14 * KIB)),
        options=PlanOptions(microbatch_size=2, microbatches=2, planner=planner, **ALONE),
    )
    growth, traced = setting("layers", make, demand, range(1, 1000)), list[int]()
    plain = replace(growth, profiles=lambda value: demand.profiles(make(value)), depths=None)
    counted = setting("layers", lambda value: traced.append(value) or make(value), demand, range(1, 1000))
    found, every = find(counted), find(plain, certify=False)
    assert found.best.value == every.best.value > 8
    check_certified(found, growth)
    assert (
        found.best.plan.profile.fingerprint == profile(make(found.best.value), microbatch_size=2).fingerprint
    )
