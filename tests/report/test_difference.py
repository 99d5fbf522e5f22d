"""Differences between two plans, or two traces."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path

import pytest

from pipefit.cli import main
from pipefit.report.difference import describe_difference, difference_of_plans, difference_of_traces
from pipefit.schema.decisions import Decision, Microbatches, Run, SavedTensors, State, What
from pipefit.schema.devices import parse_place
from pipefit.schema.grids import Grid, Sharding, Stage
from pipefit.schema.json_io import save
from pipefit.schema.plan import Plan
from pipefit.simulator import simulate
from pipefit.tables import plain
from pipefit.units import format_bytes
from support.pipelines import equal_profile, make_plan, random_profile
from support.replica_profiles import gridded

PROFILE = random_profile(6)
NAMES = PROFILE.layers


def recomputing(plan: Plan, start: int, stop: int, why: str = "") -> Plan:
    """Return the plan with a run of layers of its first stage recomputed."""
    return replace(
        plan,
        decisions=(Decision(stage=0, subject=Run(start=start, stop=stop), what=What.RECOMPUTE, why=why),),
    )


def test_a_plan_beside_itself_is_the_same() -> None:
    """A plan compared with itself shows the same options, layers, bytes and seconds."""
    plan = make_plan(PROFILE, (2, 4))
    found = difference_of_plans(plan, plan)
    assert (found.asked, found.changes) == ((), ())
    assert all(one.changed_bytes == 0 and not one.by_category for one in found.devices)
    assert plain(describe_difference(found)).startswith("The two are the same.")


@pytest.mark.parametrize(("first", "second"), [((2, 4), (4, 2)), ((1, 5), (2, 4)), ((3, 3), (1, 5))])
def test_layers_that_went_to_another_device_are_named(
    first: tuple[int, int], second: tuple[int, int]
) -> None:
    """The moved layers are those between the two boundaries."""
    found = difference_of_plans(make_plan(PROFILE, first), make_plan(PROFILE, second))
    (change,) = found.changes
    low, high = sorted((first[0], second[0]))
    assert (change.first, change.last) == (NAMES[low], NAMES[high - 1])
    assert (change.before, change.after) == (
        ("on device 1", "on device 0")[:: 1 if second[0] > first[0] else -1]
    )


def test_recomputed_layers_are_named_with_their_reason_and_their_price() -> None:
    """Layers recomputed only in the second plan, or only in the first, are listed; those in both are not."""
    kept = make_plan(equal_profile(6), (4, 2))
    one, two = recomputing(kept, 0, 3), recomputing(kept, 1, 4, why="it is cheap")
    changes = difference_of_plans(one, two).changes
    told = {(change.first, change.last, change.before, change.after, change.why) for change in changes}
    names = kept.profile.layers
    assert told == {
        (names[3], names[3], "", "recomputed", "it is cheap"),
        (names[0], names[0], "recomputed", "", ""),
    }
    found = difference_of_plans(kept, two)
    seconds = [simulate(plan).step_seconds[-1] for plan in (kept, two)]
    assert [found.before_seconds, found.after_seconds] == seconds
    assert f"{100 * (seconds[1] / seconds[0] - 1):.1f} % longer" in " ".join(
        plain(describe_difference(found)).split()
    )


@pytest.mark.parametrize(
    ("factor", "told"), [(1.5, "50.0 % longer"), (0.5, "50.0 % shorter"), (62.4, "62.4 times as")]
)
def test_a_step_of_many_times_the_length_is_told_in_times(factor: float, told: str) -> None:
    """Percents are for ratios below two."""
    plan = make_plan(PROFILE, (4, 2))
    found = replace(difference_of_plans(plan, plan), before_seconds=2.0, after_seconds=2 * factor)
    assert f"a step that is {told}" in " ".join(plain(describe_difference(found)).split())


def test_bytes_by_category_add_up_to_the_change_of_a_peak() -> None:
    """The sum holds for every device, for plans that differ in split and in recomputation."""
    kept = make_plan(PROFILE, (4, 2))
    for other in (make_plan(PROFILE, (2, 4)), recomputing(kept, 0, 2)):
        found = difference_of_plans(kept, other)
        peaks = [simulate(plan).peak_bytes for plan in (kept, other)]
        for one, before, after in zip(found.devices, *peaks, strict=True):
            assert one.changed_bytes == sum(one.by_category.values()) == after - before
        assert found.highest_bytes == (max(peaks[0]), max(peaks[1]))


def test_what_moves_away_is_named_by_what_it_is_and_where_it_goes() -> None:
    """Saved tensors, state and updates on a host each have specific words."""
    plan, host = make_plan(equal_profile(4), (2, 2)), parse_place("host0")
    saved = SavedTensors(tensors=((0, 0),))
    decided = [
        Decision(stage=0, subject=saved, what=What.OFFLOAD, place=host),
        Decision(stage=1, subject=State(start=2, stop=4, kind="optimizer"), what=What.OFFLOAD, place=host),
    ]
    for decision, words in zip(
        decided, ("saved tensors offloaded to host0", "optimizer state offloaded to host0"), strict=True
    ):
        (change,) = difference_of_plans(plan, replace(plan, decisions=(decision,))).changes
        assert change.after == words


def test_how_devices_share_a_stage_is_told() -> None:
    """On the same devices, other degrees, sharded state, and numbers of buckets are named."""
    plan = gridded(2, 1, 1, 1, samples=12)
    ways: dict[str, tuple[Sharding, int]] = {
        "": ("none", 1),
        " that shard gradients": ("gradients", 1),
        ", all-reducing in 3 buckets": ("none", 3),
        " that shard optimizer state, all-reducing in 2 buckets": ("optimizer", 2),
    }
    plans = {}
    for words, (shard, buckets) in ways.items():
        grid = Grid(devices=(0, 1), data=2, shard=shard, buckets=buckets)
        plans[words] = replace(plan, stages=(Stage(start=0, stop=4, grid=grid),))
    for (one, first), (two, second) in permutations(plans.items(), 2):
        (change,) = difference_of_plans(first, second).changes
        assert change.before == f"on devices 0 1 as 2 replicas{one}"
        assert change.after == f"on devices 0 1 as 2 replicas{two}"


@pytest.mark.parametrize(
    ("data", "tensor", "words"),
    [(1, 1, ""), (1, 4, "4 shards"), (4, 1, "4 replicas"), (2, 2, "2 replicas of 2 shards")],
)
def test_replicas_and_shards_of_as_many_devices_have_other_words(data: int, tensor: int, words: str) -> None:
    """Four devices may be replicas, shards, or both."""
    assert Grid(devices=tuple(range(data * tensor)), data=data, tensor=tensor).sharing == words


def test_a_share_of_the_microbatches_is_another_treatment() -> None:
    """Layers recomputed for half of the microbatches differ from layers that always are."""
    plan = recomputing(make_plan(equal_profile(6), (4, 2)), 0, 3)
    some = replace(plan.decisions[0], microbatches=Microbatches(taken=1, every=2))
    told = [str(change) for change in difference_of_plans(plan, replace(plan, decisions=(some,))).changes]
    first, last = plan.profile.layers[0], plan.profile.layers[2]
    assert told == [f"{first} .. {last}: recomputed, then recomputed for 1 of 2 microbatches"]


def test_how_far_from_its_use_a_change_happens_is_told() -> None:
    """A tensor that returns earlier, or has longer to leave, and a run that is recomputed earlier are
    named.
    """
    plan, host = make_plan(equal_profile(4), (2, 2)), parse_place("host0")
    saved = SavedTensors(tensors=((0, 0),))
    decided = Decision(stage=0, subject=saved, what=What.OFFLOAD, place=host)
    one = replace(plan, decisions=(decided,))
    moved = "saved tensors offloaded to host0"
    for changed, words in (
        ({"ahead": 2}, f"{moved}, reloaded 2 passes early"),
        ({"behind": 3}, f"{moved}, with 3 passes to finish"),
        ({"ahead": 1, "behind": 0}, f"{moved}, reloaded 1 pass early, with 0 passes to finish"),
    ):
        (change,) = difference_of_plans(one, replace(plan, decisions=(replace(decided, **changed),))).changes
        assert (change.before, change.after) == (moved, words)
    again = Decision(stage=0, subject=Run(start=0, stop=2), what=What.RECOMPUTE)
    two = [replace(plan, decisions=(replace(again, ahead=ahead),)) for ahead in (0, 1)]
    (change,) = difference_of_plans(*two).changes
    assert (change.before, change.after) == ("recomputed", "recomputed, 1 pass early")


def test_tensors_that_one_plan_alone_moves_are_named() -> None:
    """If the plans offload different tensors of a layer, they are listed by operation and bytes, equal ones
    counted.
    """
    plan, host = make_plan(PROFILE, (3, 3)), parse_place("host0")
    costs = plan.measurement.costs
    layer = next(number for number, cost in enumerate(costs[:3]) if len(cost.saved) > 1)
    offload = partial(Decision, stage=0, what=What.OFFLOAD, place=host)
    first, second = (
        replace(plan, decisions=(offload(subject=SavedTensors(tensors=tensors)),))
        for tensors in (((layer, 0),), ((layer, 0), (layer, 1)))
    )
    (change,) = difference_of_plans(first, second).changes
    size = costs[layer].saved[1].nbytes
    assert change.after == "saved tensors offloaded to host0" and not change.before
    assert len(change.tensors) == 1 and change.tensors[0].endswith(format_bytes(size))
    assert change.tensors[0] in str(change)


def test_what_was_asked_otherwise_is_told() -> None:
    """Schedule and microbatches have the words of a plan's head."""
    plan = make_plan(equal_profile(4), (2, 2))
    other = replace(plan, training=replace(plan.training, schedule="gpipe"))
    assert difference_of_plans(plan, other).asked == (f"{plan.training.schedule}, then gpipe",)


def test_traces_of_other_devices_are_told_apart() -> None:
    """A device in only one trace lacks a peak in the other; `compare` would refuse them."""
    one, two = simulate(make_plan(PROFILE, (2, 4))), simulate(make_plan(PROFILE, (2, 2, 2)))
    found = difference_of_traces(one, two)
    assert [row.before_bytes for row in found.devices] == [*one.peak_bytes, None]
    assert [row.after_bytes for row in found.devices] == [*two.peak_bytes]


def test_the_command_prints_text_or_json_and_refuses_two_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two plans or two traces give lines of at most 80 columns; a plan and a trace are refused."""
    monkeypatch.chdir(tmp_path)
    one, two = make_plan(PROFILE, (2, 4)), make_plan(PROFILE, (4, 2))
    save(one, "one.json")
    save(two, "two.json")
    save(simulate(two), "trace.json")
    assert main(["diff", "one.json", "two.json"]) == 0
    text = capsys.readouterr().out
    assert "Changes:" in text and max(map(len, text.splitlines())) <= 80
    assert main(["diff", "one.json", "two.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(
        json.dumps(difference_of_plans(one, two).as_json())
    )
    assert main(["diff", "trace.json", "trace.json"]) == 0
    capsys.readouterr()
    assert main(["diff", "one.json", "trace.json"]) == 2
    assert "one.json is a plan and trace.json is a trace" in capsys.readouterr().err
