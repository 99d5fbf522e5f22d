"""Refusals of questions without a plan: the device, the missing bytes, and changes that really fit."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

import pytest

from pipefit.errors import InfeasibleError, UsageError
from pipefit.largest.task_plans import plan as plan_task
from pipefit.models import build
from pipefit.planner import PlanOptions, exact, uniform
from pipefit.planner import plan as planned
from pipefit.schema.cluster import Cluster
from pipefit.schema.devices import Host
from pipefit.schema.layer_costs import Span
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training
from pipefit.units import format_bytes
from support.gallery_samples import seeds
from support.microbatch_size_profiles import sized
from support.planner_calls import asked
from support.synthetic_models import alike, devices, plain, profile, training, vgg_like
from support.tight_questions import Case, cluster, random_case

AMPLE = 1 << 40


def plan(*question: object, **options: object) -> Plan:
    """Return the leanest split, unless another objective is named."""
    return planned(*question, **{"objective": "peak", **options})


def refusal(*question: object, **options: object) -> str:
    with pytest.raises(InfeasibleError) as caught:
        plan(*question, **options)
    return str(caught.value)


@pytest.mark.parametrize("nbytes", [1 << 46, 1 << 62, 1 << 70])
def test_a_size_beyond_all_devices_is_refused(nbytes: int) -> None:
    """A hand-written profile with a number that planners cannot add up is refused, with the remedy."""
    first = alike(4).kinds[0]
    with pytest.raises(
        UsageError, match=f"has {nbytes} bytes as buffer_bytes, more than any device has: profile again"
    ):
        replace(first, buffer_bytes=nbytes)
    for peak in (nbytes, -nbytes):
        with pytest.raises(UsageError, match="bytes as backward_peak, more than any device has"):
            replace(first, backward_first=(Span(peak_bytes=peak),))
    replace(first, buffer_bytes=(1 << 46) - 1)


def peaks(made: Plan) -> tuple[int, ...]:
    assert made.prediction
    return made.prediction.peak_bytes


def test_a_refusal_says_which_device_which_layers_and_how_many_bytes() -> None:
    """The refusal names the fullest device, its stage with layers by name, the missing bytes and its share of
    memory.
    """
    chain, how = profile(vgg_like()), training("1f1b", 4)
    made = plan(chain, devices(9000, 9000, 9000, 9000), how, allow_infeasible=True)
    stage = max(range(4), key=lambda s: peaks(made)[s])
    text = refusal(chain, devices(9000, 9000, 9000, 9000), how)
    first, last = made.stages[stage].start, made.stages[stage].stop - 1
    names = f"layer{first})" if first == last else f"layer{first} to layer{last})"
    assert text.startswith(f"device {stage} needs ")
    assert f"for stage {stage} ({names}" in text
    assert (
        f"over its 8.79 KiB ({-(-100 * peaks(made)[stage] // 9000)} % full); no other split fits either"
        in text
    )


def test_a_host_without_room_is_named_where_every_device_has_enough() -> None:
    """Offload beyond a host's memory is refused for the host, not for a device with room."""
    case = random_case(Random(2), ("1f1b", "gpipe"), layers=3)
    cluster = replace(case.cluster, hosts=(Host(memory_bytes=1),))
    text = refusal(case.profile, cluster, case.training, planner="mpress", objective="throughput")
    assert text.startswith(
        "host0 has 1 B, but would need 212 B for offloaded tensors, 211 B too much: 212 B of device 0"
    )


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(8))
def test_the_memory_that_would_fit_fits_and_a_byte_less_does_not(seed: int) -> None:
    """The suggested memory, taken literally, fits; a byte less does not."""
    chain, how = profile(plain(Random(seed), 9, size=50)), training("1f1b", 4)
    text = refusal(chain, devices(40, 40, 40), how)
    enough = int(re.search(r"the same devices with .* \((\d+) bytes\)", text)[1])
    asked(exact, chain, devices(enough, enough, enough), how)
    with pytest.raises(InfeasibleError):
        asked(exact, chain, devices(enough - 1, enough - 1, enough - 1), how)


@pytest.mark.sample(3)
@pytest.mark.parametrize("budget", [4500, 5000, 6000, 7000, 8000, 9000])
def test_the_number_of_devices_that_would_fit_fits_and_one_less_does_not(budget: int) -> None:
    """The suggested number of devices is found by search, up to eight times the given one."""
    chain, how = profile(alike(40, size=100)), training("gpipe", 2)
    text = refusal(chain, devices(budget, budget), how)
    count = int(re.search(r"(\d+) devices of [\d.]+ KiB", text)[1])
    asked(exact, chain, devices(*[budget] * count), how)
    with pytest.raises(InfeasibleError):
        asked(exact, chain, devices(*[budget] * (count - 1)), how)


@pytest.mark.sample(1)
@pytest.mark.parametrize("asked", [{"data": 2}, {"data": 4}, {}])
@pytest.mark.parametrize("seed", seeds(2, of=4))
def test_what_would_fit_has_the_replicas_that_are_asked_for(seed: int, asked: dict[str, int]) -> None:
    """With requested replicas the suggested memory fits, and a byte less does not; numbers of devices are
    true too.
    """
    chain, how = sized(plain(Random(seed), 5, size=50), 8, 4, 2), Training(batch_size=16, microbatches=2)
    text = refusal(chain, devices(*[90] * 4), how, **asked)
    needed = int(re.search(r"the same devices with .* each \((\d+) bytes\)", text)[1])
    assert max(peaks(plan(chain, devices(*[needed] * 4), how, **asked))) == needed
    refusal(chain, devices(*[needed - 1] * 4), how, **asked)
    if "do not help" in text:
        refusal(chain, devices(*[90] * 20), how, **asked)
    else:
        count = int(re.search(r"(\d+) devices of", text)[1])
        plan(chain, devices(*[90] * count), how, **asked)
        refusal(chain, devices(*[90] * (count - 1)), how, **asked)


def test_no_number_of_devices_helps_where_one_layer_is_too_large() -> None:
    """If one layer is too large, the refusal says so instead of naming a number of devices."""
    assert "More devices of 8.79 KiB do not help, up to 30" in refusal(
        profile(vgg_like()), devices(*[9000] * 4), training("gpipe", 4)
    )


def without_room(seed: int, part: float) -> Case:
    """Return less memory than the joint planner needs for layers that keep much."""
    case = random_case(Random(seed), ("1f1b",), layers=3)
    budgets = [max(1, round(part * budget)) for budget in case.cluster.budgets]
    return case._replace(cluster=cluster(budgets, host_rate=5.0, peer_rate=20.0))


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", seeds(2, of=4))
def test_what_would_fit_with_techniques_fits(seed: int) -> None:
    """Suggestions for `joint` use recomputation and offload: the memory suffices and is at most that of
    splits alone, and of the refused plan; so do the devices.
    """
    case = without_room(seed, 0.3)
    text = refusal(case.profile, case.cluster, case.training, objective="throughput")
    assert "; no plan was found that fits. What would fit: " in text and "no other split fits" not in text
    enough = int(re.search(r"the same devices with at most .* each \((\d+) bytes\)", text)[1])
    refused = planned(case.profile, case.cluster, case.training, allow_infeasible=True)
    assert enough <= max(peaks(refused)) + 1
    count = len(case.cluster.devices)
    larger = cluster([enough] * count, host_rate=5.0, peer_rate=20.0)
    fits = planned(case.profile, larger, case.training)
    assert max(peaks(fits)) <= enough
    alone = refusal(case.profile, case.cluster, case.training)
    assert enough <= int(re.search(r"the same devices with .* \((\d+) bytes\)", alone)[1])
    if more := re.search(r"(\d+) devices of", text):
        budgets = [case.cluster.budgets[0]] * int(more[1])
        assert planned(case.profile, cluster(budgets, host_rate=5.0, peer_rate=20.0), case.training).decisions


def test_the_memory_that_would_fit_fits_where_a_host_lacks_memory_too() -> None:
    """A refused plan whose device and host both lack memory does not fit a larger device."""
    case = without_room(0, 0.5)
    short = replace(case.cluster, hosts=(replace(case.cluster.hosts[0], memory_bytes=1),))
    text = refusal(case.profile, short, case.training, objective="throughput")
    assert text.startswith("device 0 needs 83 B ") and "; host0 has 1 B, but would need " in text
    enough = int(re.search(r"the same devices with at most .* each \((\d+) bytes\)", text)[1])
    larger = tuple(replace(device, memory_bytes=enough) for device in short.devices)
    assert max(peaks(planned(case.profile, replace(short, devices=larger), case.training))) <= enough


def test_1f1b_is_suggested_where_it_helps_and_only_there() -> None:
    """1F1B is the first suggestion exactly if its early release is enough; GPipe holds all microbatches."""
    chain = profile(alike(8, size=100))
    enough = max(peaks(plan(chain, devices(*[AMPLE] * 4), training("1f1b", 16))))
    text = refusal(chain, devices(*[enough] * 4), training("gpipe", 16))
    assert "What would fit: schedule 1f1b (the fullest device is then 100 % full)" in text
    assert "1f1b" not in refusal(chain, devices(*[enough // 4] * 4), training("gpipe", 16))


def test_smaller_microbatches_are_suggested_where_they_were_profiled() -> None:
    """If a second profile with smaller microbatches fits, its number of microbatches is suggested."""
    small, large = alike(8, size=100), replace(alike(8, size=300), microbatch_size=2)
    both = replace(profile(large), measurements=(large, small))
    enough = max(peaks(plan(only(both, small), devices(*[AMPLE] * 4), training("1f1b", 8))))
    text = refusal(both, devices(*[enough] * 4), replace(training("1f1b", 4), batch_size=8))
    assert "What would fit: 8 microbatches" in text


def only(of: ModelProfile, measurement: object) -> ModelProfile:
    return replace(of, measurements=(measurement,))


def test_unused_devices_are_suggested_before_new_ones() -> None:
    """Unused devices are suggested first, if all of them would do."""
    chain, how = profile(alike(16, size=100)), training("1f1b", 4)
    enough = max(peaks(plan(chain, devices(*[AMPLE] * 4), how)))
    assert "What would fit: a stage on every device" in refusal(chain, devices(*[enough] * 4), how, stages=2)


def test_a_baseline_that_does_not_fit_points_to_the_exact_planner() -> None:
    """A baseline's refusal points to `exact` if that fits; `allow_infeasible` returns the plan with predicted
    peaks.
    """
    chain, how = profile(vgg_like()), training("1f1b", 4)
    enough = max(peaks(plan(chain, devices(*[AMPLE] * 4), how)))
    cluster = devices(*[enough] * 4)
    assert refusal(chain, cluster, how, planner="uniform").endswith(
        "What would fit: another split; use the joint or the exact planner"
    )
    less = devices(*[enough - 1] * 4)
    assert (
        f"What would fit by the exact planner: the same devices with {format_bytes(enough)} each"
        in refusal(chain, less, how, planner="uniform", stages=4)
    )
    over = asked(uniform, chain, cluster, how, PlanOptions(allow_infeasible=True))
    assert max(peaks(over)) > enough


def test_unlike_devices_are_told_how_much_more_each_needs() -> None:
    """Unlike devices get the extra memory in per cent, and that much is enough."""
    chain, how = profile(plain(Random(3), 9, size=50)), training("1f1b", 4)
    more = float(re.search(r"([\d.]+) % more memory", refusal(chain, devices(200, 300, 200), how))[1])
    larger = [-int(-budget * (1 + more / 100) // 1) for budget in (200, 300, 200)]
    asked(exact, chain, devices(*larger), how)


def test_the_memory_that_would_fit_has_room_for_the_reserve() -> None:
    """Devices of the suggested size fit with their reserve, and a byte less does not; the refusal names the
    remaining memory.
    """
    chain, how = profile(alike(8, size=100)), training("1f1b", 4)

    def cluster(memory: int) -> Cluster:
        return devices(*[memory] * 4).reserving([memory - max(1, memory - 5000)] * 4)

    text = refusal(chain, cluster(5500), how)
    assert "over its 500 B (" in text
    assert "4.88 KiB of the device are reserved for non-tensor memory" in text
    each = int(re.search(r"each \((\d+) bytes\)", text)[1])
    plan(chain, cluster(each), how)
    refusal(chain, cluster(each - 1), how)


@pytest.mark.sample(1)
@pytest.mark.parametrize("tensor", [2, 3])
def test_more_devices_are_considered_for_requested_ranks(tensor: int) -> None:
    """With a number of tensor-parallel ranks too, a refusal names the fullest device and the memory that would fit."""
    task = build("mlp", widths=(16, 48, 16))
    with pytest.raises(
        InfeasibleError, match=r"device \d needs .*What would fit: .*the same devices with at most"
    ):
        plan_task(task, Cluster.emulated((4, 2048)), batch_size=8, tensor=tensor)


def test_the_joint_planner_says_that_freeing_memory_is_not_enough() -> None:
    """Parameters that are too large, even after all recomputation and offload, are named."""
    chain = profile(alike(4, size=100))
    text = refusal(chain, devices(*[150] * 2), training("gpipe", 4), objective="throughput")
    assert "even with recomputation and offloading; no plan was found that fits" in text
